"""Tensor maps: what the copy engine is told about an operand."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from deepgemm_jit.runtime.driver import Driver

_CAPACITY = 4096


class BoxedTensor(NamedTuple):
    """A 3D tensor and the box that one copy moves; everything that a map encodes, so equal values mean equal maps.

    Attributes:
        address: of the first element, a multiple of 16 bytes.
        dtype: "u8" (FP8 too), "bf16" or "f32".
        dims: elements, innermost first.
        strides_bytes: of the second and third dimension, multiples of 16.
        box: elements, innermost first.
        swizzled: 128-byte swizzle in shared memory.
    """

    address: int
    dtype: Literal["u8", "bf16", "f32"]
    dims: tuple[int, int, int]
    strides_bytes: tuple[int, int]
    box: tuple[int, int, int]
    swizzled: bool


class TensorMaps:
    """A bounded memo of encoded maps, which keeps those used last: weights stay, the passing addresses of activations go.

    A map is a pure function of what it encodes (the driver only writes 128 bytes, it looks at no memory), so an entry cannot
    outlive its meaning: freed and reused memory with another shape is another key.

    Attributes:
        map_for: return the 128 bytes of the map of a tensor; raises DriverError where the driver refuses to encode it. Safe to
            call from several threads.
    """

    map_for: Callable[[BoxedTensor], bytes]

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # The memo itself and no method around it: each launch asks for each of its operands.
        self.map_for = lru_cache(maxsize=_CAPACITY)(self._encoded)

    def _encoded(self, tensor: BoxedTensor) -> bytes:
        return self._driver.encode_tiled_map(
            tensor.address, tensor.dtype, tensor.dims, tensor.strides_bytes, tensor.box, tensor.swizzled
        )

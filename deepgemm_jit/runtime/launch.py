"""Launches of the kernel families: from addresses and strides to the parameters that the device code reads.

The ``struct`` formats mirror the argument structs of ``kernels_src``; the driver copies parameters during the call, so one
buffer per thread is reused.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import NamedTuple

from deepgemm_jit.runtime.tensormap import MAP_BYTES, BoxedTensor, TensorMaps
from deepgemm_jit.spec import KernelSpec, Layout
from deepgemm_jit.spec.kernel_set import BLOCK_K, threads

_GEMM = struct.Struct("<QqqQqqQIIIII4xI4x")
_CAST = struct.Struct("<QQQqqIII4x")
_SCALE_LAYOUT = struct.Struct("<QQqqqqII")

_WARP = 32
_LANE_BYTES = 16
_CAST_ROWS = 8
"""Rows per block of the cast: one per warp."""


class Matrices(NamedTuple):
    """A stack of matrices; strides in elements."""

    address: int
    group_stride: int
    row_stride: int


class GemmCall(NamedTuple):
    """Operands and sizes of one GEMM launch; see ``dj::GemmArguments``.

    ``a_scales.row_stride`` is the distance between columns (k-blocks): A scales are M-major.
    """

    a: Matrices
    a_scales: Matrices
    b: Matrices
    b_scales: Matrices
    d: Matrices
    group_data: int
    m: int
    n: int
    k: int
    groups: int
    layout: Layout
    alignment: int


class CastCall(NamedTuple):
    """Operands and sizes of one cast; see ``dj::CastArguments``."""

    input: int
    output: int
    scales: int
    input_stride: int
    scales_stride: int
    m: int
    k: int
    power_of_two: bool
    input_element_bytes: int


class ScaleLayoutCall(NamedTuple):
    """Operands and sizes of one change of scale layout; see ``dj::ScaleLayoutArguments``."""

    input: Matrices
    output: Matrices
    """``row_stride`` is the distance between columns."""
    m: int
    k_blocks: int
    groups: int


class Launch(NamedTuple):
    """What a launch needs beside a kernel and a stream; the parameters last until this thread prepares its next launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params_pointer: int


def prepare_gemm(spec: KernelSpec, sms: int, maps: TensorMaps, call: GemmCall) -> Launch:
    """Prepare an ``fp8_gemm_1d2d`` launch: as many persistent blocks as the context has SMs, or tiles if fewer.

    Raises:
        DriverError: the driver refuses to encode a tensor map.
    """
    block_m, block_n, _ = spec.block
    k_blocks = -(-call.k // BLOCK_K)
    a_groups = call.groups if call.layout is Layout.MASKED else 1
    view = _buffer.view
    view[0:MAP_BYTES] = maps.map_for(_operand(call.a, call.k, call.m, a_groups, block_m))
    view[MAP_BYTES : 2 * MAP_BYTES] = maps.map_for(_operand(call.b, call.k, call.n, call.groups, block_n))
    view[2 * MAP_BYTES : 3 * MAP_BYTES] = maps.map_for(_scales(call.a_scales, call.m, k_blocks, a_groups, block_m))
    _GEMM.pack_into(
        view,
        3 * MAP_BYTES,
        call.b_scales.address,
        call.b_scales.group_stride,
        call.b_scales.row_stride,
        call.d.address,
        call.d.group_stride,
        call.d.row_stride,
        call.group_data,
        call.m,
        call.n,
        call.groups,
        call.layout.value,
        call.alignment,
        k_blocks,
    )
    tiles = -(-call.m // block_m) * -(-call.n // block_n) * a_groups
    return Launch((min(sms, tiles), 1, 1), (threads(spec), 1, 1), _buffer.gemm_params)


def prepare_cast(call: CastCall) -> Launch:
    """Prepare a ``per_token_cast_to_fp8`` launch: a warp per row and 512 bytes of it."""
    _CAST.pack_into(
        _buffer.view,
        0,
        call.input,
        call.output,
        call.scales,
        call.input_stride,
        call.scales_stride,
        call.m,
        call.k,
        call.power_of_two,
    )
    columns = _WARP * _LANE_BYTES // call.input_element_bytes
    grid = (-(-call.m // _CAST_ROWS), -(-call.k // columns), 1)
    return Launch(grid, (_WARP, _CAST_ROWS, 1), _buffer.params)


def prepare_scale_layout(spec: KernelSpec, call: ScaleLayoutCall) -> Launch:
    """Prepare a ``scale_layout`` launch: a block per tile of scales."""
    rows, columns = spec.block
    _SCALE_LAYOUT.pack_into(
        _buffer.view,
        0,
        call.input.address,
        call.output.address,
        call.input.group_stride,
        call.input.row_stride,
        call.output.group_stride,
        call.output.row_stride,
        call.m,
        call.k_blocks,
    )
    grid = (-(-call.m // rows), -(-call.k_blocks // columns), call.groups)
    return Launch(grid, (threads(spec), 1, 1), _buffer.params)


def _operand(matrices: Matrices, k: int, rows: int, groups: int, block: int) -> BoxedTensor:
    # A single matrix has no group stride; the map wants a valid number all the same.
    group_stride = matrices.group_stride if groups > 1 else matrices.row_stride
    return BoxedTensor(
        matrices.address, "u8", (k, rows, groups), (matrices.row_stride, group_stride), (BLOCK_K, block, 1), swizzled=True
    )


def _scales(matrices: Matrices, rows: int, k_blocks: int, groups: int, block_m: int) -> BoxedTensor:
    group_stride = matrices.group_stride if groups > 1 else matrices.row_stride
    strides = (4 * matrices.row_stride, 4 * group_stride)
    return BoxedTensor(matrices.address, "f32", (rows, k_blocks, groups), strides, (block_m, 1, 1), swizzled=False)


class _Buffer(threading.local):
    """Parameters of the launch that this thread is making, and the arrays of pointers to them."""

    def __init__(self) -> None:
        size = 3 * MAP_BYTES + _GEMM.size
        self._memory = ctypes.create_string_buffer(size + 63)
        address = ctypes.addressof(self._memory)
        offset = -address % 64  # maps are 64-byte aligned
        self.view = memoryview(self._memory).cast("B")[offset : offset + size]
        base = address + offset
        self._gemm = (ctypes.c_void_p * 4)(*(base + at * MAP_BYTES for at in range(4)))
        self._single = (ctypes.c_void_p * 1)(base)
        self.gemm_params = ctypes.addressof(self._gemm)
        self.params = ctypes.addressof(self._single)


_buffer = _Buffer()

"""Launches of the GEMM families: from addresses and strides to tensor maps, arguments and grid.

The ``struct`` formats mirror the argument structs of ``kernels_src``.
"""

from __future__ import annotations

import math
import struct
from typing import Literal, NamedTuple

from deepgemm_jit.runtime.params import Launch, lay_out
from deepgemm_jit.runtime.tensormap import BoxedTensor, TensorMaps
from deepgemm_jit.spec import BF16_GEMM, FP4_GEMM_SWAP_AB, N_MAJOR, ROW_SCALES, SWAPPED, KernelSpec, Layout
from deepgemm_jit.spec.kernel_set import BLOCK_K_BYTES, FRAGMENT, FRAGMENT_BYTES, threads

_FP8_GEMM = struct.Struct("<QqqQqqQqqQIIIII4xIII4x")
_BF16_GEMM = struct.Struct("<QqqQIIIII4xII")
_SCALE_BYTES = 4
_CLOSE_ROW_BLOCKS = 2
"""Row blocks of a group that read the same columns of B at about the same time."""
_LEAST_SHARE = 5
"""Bytes of B over those of A and D, from which it pays."""
_FEW_BYTES = 32 * 2**20
"""Of the groups that can be hit: the next forward may hit the same, and finds them in the 50 MB of L2."""
_N_MAJOR_BOX = 64
"""Columns of one box of an N-major B: 128 bytes of bf16."""


class Matrices(NamedTuple):
    """A stack of matrices; strides in elements."""

    address: int
    group_stride: int
    row_stride: int


class GemmCall(NamedTuple):
    """Operands and sizes of one GEMM launch.

    The ``row_stride`` of A scales is the distance between columns (k-blocks), as they are M-major; so it is for B scales where
    the kernel takes them per row. FP4 weights are fragments with their scales: bytes, and a row is one of 64 rows.
    """

    a: Matrices
    b: Matrices
    d: Matrices
    group_data: int
    m: int
    n: int
    k: int
    groups: int
    layout: Layout
    alignment: int
    a_scales: Matrices | None = None
    b_scales: Matrices | None = None


def prepare_gemm(
    spec: KernelSpec,
    blocks: int,
    maps: TensorMaps,
    call: GemmCall,
    split_k: int = 1,
    dependent: bool = False,
    waits_for_tokens: bool = False,
) -> Launch:
    """Prepare the launch of a GEMM: at most ``blocks`` persistent ones, or tiles if fewer.

    A cluster takes one tile at a time: those of its blocks side by side, or ``split_k`` parts of the k-blocks of one. A dependent
    launch that ``waits_for_tokens`` may read all but A and its scales before the kernels in front of it end.

    Raises:
        DriverError: the driver refuses to encode a tensor map.
    """
    block_m, block_n, block_k = spec.block
    k_blocks = -(-call.k // block_k)
    a_groups = call.groups if call.layout is Layout.MASKED else 1
    assert split_k in (1, 2, 4), "the warps of a warpgroup are shared out evenly"
    assert split_k <= k_blocks, "each block of a cluster sums some k-blocks"
    cluster = spec.cluster * split_k
    tiles = -(-call.m // block_m) * -(-call.n // (block_n * spec.cluster)) * a_groups
    clusters = min(max(blocks // cluster, 1), tiles)
    boxes = [_operand(spec, call.a, call.k, call.m, a_groups, block_m // spec.cluster)]
    if N_MAJOR in spec.flags:
        boxes.append(_n_major(call.b, call.n, call.k, call.groups, block_k))
    elif spec.family != FP4_GEMM_SWAP_AB:
        boxes.append(_operand(spec, call.b, call.k, call.n, call.groups, block_n))
    shape = (call.group_data, call.m, call.n, call.groups, call.layout.value, call.alignment)
    layout = _BF16_GEMM
    head: tuple[int, ...] = ()
    element_bytes = BLOCK_K_BYTES // block_k
    weight_bytes = element_bytes if spec.family != FP4_GEMM_SWAP_AB else FRAGMENT_BYTES / math.prod(FRAGMENT)
    tail: tuple[int, ...] = (_reads_b_once(call, block_m, element_bytes, call.n * call.k * weight_bytes),)
    if spec.family != BF16_GEMM:
        # FP4 weights and their scales are read together.
        b_scales = call.b if spec.family == FP4_GEMM_SWAP_AB else _given(call.b_scales)
        a_scales = _given(call.a_scales)
        if spec.family not in SWAPPED:
            boxes.append(_scales(a_scales, call.m, k_blocks, a_groups, block_m))
        if ROW_SCALES in spec.flags:
            boxes.append(_scales(b_scales, call.n, k_blocks, call.groups, block_n))
        layout, head, tail = _FP8_GEMM, (*a_scales, *b_scales), (*tail, waits_for_tokens)
    values = (*head, *call.d, *shape, k_blocks, *tail)
    params = lay_out(layout, values, [maps.map_for(box) for box in boxes])
    return Launch((clusters * cluster, 1, 1), (threads(spec), 1, 1), params, cluster, dependent)


def _reads_b_once(call: GemmCall, block_m: int, element_bytes: int, b_bytes: float) -> bool:
    """Return whether L2 need not keep B: it is most of what is read, and nothing reads a part of it again later.

    ``element_bytes`` are those of A, ``b_bytes`` those of one group.
    """
    rows = call.m if call.layout in (Layout.DENSE, Layout.MASKED) else -(-call.m // call.groups)  # of a group
    least = _LEAST_SHARE * rows * (call.k * element_bytes + call.n * 2)
    if rows > _CLOSE_ROW_BLOCKS * block_m or b_bytes < least:
        return False
    hit = min(call.groups, -(-call.m // call.alignment))
    return call.layout in (Layout.DENSE, Layout.MASKED) or hit * b_bytes > _FEW_BYTES


def _given(matrices: Matrices | None) -> Matrices:
    assert matrices is not None, "an FP8 GEMM has scales"
    return matrices


def _strides(matrices: Matrices, groups: int, element_bytes: int) -> tuple[int, int]:
    # A single matrix has no group stride; the map wants a valid number all the same.
    group_stride = matrices.group_stride if groups > 1 else matrices.row_stride
    return matrices.row_stride * element_bytes, group_stride * element_bytes


def _operand(spec: KernelSpec, matrices: Matrices, k: int, rows: int, groups: int, block: int) -> BoxedTensor:
    block_k = spec.block[2]
    strides = _strides(matrices, groups, BLOCK_K_BYTES // block_k)
    dtype: Literal["u8", "bf16"] = "bf16" if spec.family == BF16_GEMM else "u8"
    return BoxedTensor(matrices.address, dtype, (k, rows, groups), strides, (block_k, block, 1), swizzled=True)


def _n_major(matrices: Matrices, n: int, k: int, groups: int, block_k: int) -> BoxedTensor:
    return BoxedTensor(
        matrices.address, "bf16", (n, k, groups), _strides(matrices, groups, 2), (_N_MAJOR_BOX, block_k, 1), swizzled=True
    )


def _scales(matrices: Matrices, rows: int, k_blocks: int, groups: int, block: int) -> BoxedTensor:
    strides = _strides(matrices, groups, _SCALE_BYTES)
    return BoxedTensor(matrices.address, "f32", (rows, k_blocks, groups), strides, (block, 1, 1), swizzled=False)

"""The closed set of kernels of each arch: all that selection can return and all that a warm-up builds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec.arch import arch_named
from deepgemm_jit.spec.kernel import (
    ACTIVATE,
    BF16_GEMM,
    CAST_TO_FP8,
    COMBINE,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    GATHER,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCALE_LAYOUT,
    SWAPPED,
    TRANSPOSE,
    KernelSpec,
)
from deepgemm_jit.spec.shown import shown

BLOCK_K_BYTES = 128
"""Of K in one stage: one row of the 128-byte swizzle, and for FP8 one column of scales."""


class Tile(NamedTuple):
    """Rows and columns of D that a block computes at a time, and the blocks of a cluster that share A."""

    block_m: int
    block_n: int
    cluster: int = 1
    most_stages: int = 8
    """As many as fit otherwise."""


_BF16_TILES = (
    Tile(64, 64),
    Tile(64, 128),
    Tile(128, 128),
    Tile(128, 192),
    Tile(128, 256),
    Tile(128, 128, cluster=2),
    Tile(256, 128, cluster=2),
)
"""Whichever way B lies."""

_DEEP = 12
"""Stages of 64 x 32 and 64 x 64: few rows mean one tile per block, and more of its weights are under way from the start. (64 x 16
is chosen for other problems, where it was not timed with more than 8.)"""

# 64-row tiles keep one consumer warpgroup busy while weights stream, narrow ones so that every SM has a tile; 128-row tiles feed
# two, and 256 rows are two products per warpgroup. 192 columns cost the least shared-memory traffic per product that 128 rows
# allow, a cluster of two the least L2 traffic; BF16 needs no second set of sums, so its tile grows to 256. Where the operands are
# swapped, tokens are the columns of a product and 64 weights its rows.
GEMM_TILES: dict[tuple[str, tuple[str, ...]], tuple[Tile, ...]] = {
    (FP8_GEMM, ()): (
        Tile(64, 16),
        Tile(64, 32, most_stages=_DEEP),
        Tile(64, 64, most_stages=_DEEP),
        Tile(64, 128),
        Tile(128, 64),
        Tile(128, 128),
        Tile(128, 192),
        Tile(128, 128, cluster=2),
        Tile(256, 128, cluster=2),
    ),
    (FP8_GEMM, (ROW_SCALES,)): (Tile(64, 128), Tile(128, 128)),
    (FP8_GEMM_SWAP_AB, ()): (Tile(16, 64), Tile(32, 64)),
    (FP4_GEMM_SWAP_AB, ()): (Tile(16, 128),),
    (BF16_GEMM, ()): _BF16_TILES,
    (BF16_GEMM, (N_MAJOR,)): _BF16_TILES,
}
_FP8 = ("e4m3", "e4m3", "bf16")
GEMM_DTYPES = {
    FP8_GEMM: _FP8,
    FP8_GEMM_SWAP_AB: _FP8,
    FP4_GEMM_SWAP_AB: ("e4m3", "e2m1", "bf16"),
    BF16_GEMM: ("bf16", "bf16", "bf16"),
}
_ELEMENT_BYTES = {"e4m3": 1, "bf16": 2}

# Dtypes in and out of the kernels that have no tiles, and the elements that one step of a block takes.
STEP_KERNELS: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]] = {
    CAST_TO_FP8: ((("bf16", "e4m3"), ("f32", "e4m3")), (128,)),
    SCALE_LAYOUT: ((("f32",),), (64, 32)),
    TRANSPOSE: ((("u8",),), (64, 64)),
    ROUTE: ((("i32",),), (512,)),
    GATHER: ((("bf16", "e4m3"), ("bf16", "bf16")), (2048,)),
    ACTIVATE: ((("bf16", "e4m3"), ("bf16", "bf16")), (512,)),
    COMBINE: ((("bf16",),), (2048,)),
}

FRAGMENT = (64, 128)
"""Rows and columns of FP4 weights that lie together, in the order in which the threads of a warpgroup want them."""
FRAGMENT_BYTES = FRAGMENT[0] * FRAGMENT[1] // 2 + FRAGMENT[0] * FRAGMENT[1] // 32
"""Two weights a byte, and a byte for the power of two of a row and 32 columns."""

MAX_GROUPS = 512
"""Groups a grouped GEMM may have when their tiles are counted in shared memory."""

MAX_EXPERTS = MAX_GROUPS
"""Experts that the routing kernel counts in shared memory."""

_GROUP_TABLE_BYTES = 4 * (2 * MAX_GROUPS + 4)
_BARRIER_BYTES = 256
"""Two barriers and the B scales for each stage: two of them with at most 10 stages, one with at most 12."""


def is_gemm(spec: KernelSpec) -> bool:
    """Return whether a kernel is one of the GEMMs, which have tiles, stages and roles for their warpgroups."""
    return spec.family in GEMM_DTYPES


def threads(spec: KernelSpec) -> int:
    """Return the threads of a block: for a GEMM the producer's and one consumer warpgroup per 64 rows, at most two.

    With swapped operands the rows are those of B, and the producers are two warps: one for B, one for A and the scales.
    """
    if spec.family in SWAPPED:
        return 128 * _consumers(spec.block[1]) + 64
    if is_gemm(spec):
        return 128 * (1 + _consumers(spec.block[0]))
    return 512 if spec.family == ROUTE else 256


def blocks_per_sm(spec: KernelSpec) -> int:
    """Return the blocks of a persistent kernel that share an SM: two where weights stream, so that one fills the other's gaps."""
    return 2 if spec.family in SWAPPED else 1


def dynamic_shared_memory_bytes(spec: KernelSpec) -> int:
    """Return the dynamic shared memory that a launch of ``spec`` asks for."""
    return _gemm_shared_memory_bytes(spec.family, spec.flags, spec.block[0], spec.block[1], spec.stages) if is_gemm(spec) else 0


def _consumers(rows: int) -> int:
    return min(2, rows // 64)


def _gemm_shared_memory_bytes(family: str, flags: tuple[str, ...], block_m: int, block_n: int, stages: int) -> int:
    # As laid out in kernels_src/include/dj/kernels, where each GEMM asserts this very sum: slack to align to 1024 bytes, stages
    # of an A tile, a B tile and scales, a padded strip of 16 rows per consumer warp, barriers, tile counts of groups.
    stage = (block_m + block_n) * BLOCK_K_BYTES
    if family == FP8_GEMM_SWAP_AB:
        # Each stage has its barriers; partial sums of 64 rows per consumer, and padded strips of 8 rows x 16 columns.
        stage += block_m * 4 + 3 * 8
        exchange = _consumers(block_n) * (64 * 4 * block_m + 4 * 8 * 48) + 2 * 8
        return 1024 + stages * stage + exchange + _GROUP_TABLE_BYTES
    if family == FP4_GEMM_SWAP_AB:
        # The same without an exchange; B lies in fragments.
        stage = block_m * BLOCK_K_BYTES + block_n // FRAGMENT[0] * FRAGMENT_BYTES + block_m * 4 + 2 * 8
        return 1024 + stages * stage + _consumers(block_n) * 4 * 8 * 48 + _GROUP_TABLE_BYTES
    if family == FP8_GEMM:
        stage += block_m * 4 + (block_n * 4 if ROW_SCALES in flags else 0)
    strips = 4 * _consumers(block_m) * 16 * 2 * (min(block_n, 64) + 8)
    return 1024 + stages * stage + strips + _BARRIER_BYTES + _GROUP_TABLE_BYTES


def kernel_set(arch: str) -> tuple[KernelSpec, ...]:
    """Return every kernel of ``arch``, sorted.

    Raises:
        UnsupportedError: there are no kernels for this arch.
    """
    return _kernel_set(arch_named(arch).name)  # looked at before it is hashed


@cache
def _kernel_set(arch: str) -> tuple[KernelSpec, ...]:
    shared_memory_bytes = arch_named(arch).shared_memory_bytes
    gemms = (
        _gemm(arch, family, flags, tile, shared_memory_bytes) for (family, flags), tiles in GEMM_TILES.items() for tile in tiles
    )
    steps = (KernelSpec(family, arch, dtypes, block) for family, (variants, block) in STEP_KERNELS.items() for dtypes in variants)
    return tuple(sorted((*gemms, *steps)))


def kernels_by_name(arch: str) -> dict[str, KernelSpec]:
    """Return the kernel set of ``arch`` by name; raises as :func:`kernel_set`."""
    return {spec.name: spec for spec in kernel_set(arch)}


def require_member(spec: KernelSpec) -> None:
    """Refuse a spec that selection can never return: nothing else has a source that is known to compile and to be right.

    Raises:
        OperandError: it is no spec.
        UnsupportedError: it is in no kernel set; names the set of its arch.
    """
    if not isinstance(spec, KernelSpec):
        raise OperandError(operation="require_member", faults=[f"spec is {shown(spec)}, needed: a KernelSpec"])
    if spec not in _members(arch_named(spec.arch).name):
        raise UnsupportedError(
            given=f"kernel {shown(spec.text, 400)}",
            supported=f"the {len(kernel_set(spec.arch))} kernels of kernel_set({spec.arch!r})",
            advice=f"Ask select for the one that serves a problem; deepgemm-jit kernels --arch {spec.arch} lists them all",
        )


@cache
def _members(arch: str) -> frozenset[KernelSpec]:
    return frozenset(_kernel_set(arch))


def _gemm(arch: str, family: str, flags: tuple[str, ...], tile: Tile, shared_memory_bytes: int) -> KernelSpec:
    dtypes = GEMM_DTYPES[family]
    block = (tile.block_m, tile.block_n, BLOCK_K_BYTES // _ELEMENT_BYTES[dtypes[0]])
    shallow = KernelSpec(family, arch, dtypes, block, 1, tile.cluster, flags)
    share = stage_memory_bytes(shallow, shared_memory_bytes)
    stages = max(
        count
        for count in range(1, tile.most_stages + 1)
        if _gemm_shared_memory_bytes(family, flags, tile.block_m, tile.block_n, count) <= share
    )
    return replace(shallow, stages=stages)


def stage_memory_bytes(spec: KernelSpec, shared_memory_bytes: int) -> int:
    """Return what one of the blocks that share an SM may ask for, where a single one may ask for ``shared_memory_bytes``."""
    # CUDA C++ Programming Guide, compute capability 9.0: the SM has 1 KB more than a block may ask for, and keeps 1 KB per block.
    blocks = blocks_per_sm(spec)
    return (shared_memory_bytes + 1024) // blocks - 1024

"""The closed set of kernels of each arch: all that selection can return and all that a warm-up builds."""

from __future__ import annotations

from functools import cache

from deepgemm_jit.spec.kernel import CAST_TO_FP8, FP8_GEMM, SCALE_LAYOUT, KernelSpec
from deepgemm_jit.spec.problem import arch_named

BLOCK_K = 128
"""One k-block is one column of scales and one 128-byte swizzled row."""

_MAX_STAGES = 8

# (block_m, block_n). 64-row tiles keep one consumer warpgroup busy while weights stream, 128-row tiles feed two, and 256 rows are
# two products per warpgroup. 192 columns cost the least shared-memory and L2 traffic per product that 128 rows allow.
FP8_GEMM_TILES: tuple[tuple[int, int], ...] = (
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (128, 192),
    (256, 128),
)
CAST_DTYPES = ("bf16", "f32")
CAST_BLOCK = 128
SCALE_LAYOUT_BLOCK = (64, 32)


MAX_GROUPS = 1024
"""Groups a grouped GEMM may have when their tiles are counted in shared memory."""

_BARRIER_BYTES = 256
"""Two barriers and one B scale for each of at most 8 stages."""

_SMALL_THREADS = 256


def threads(spec: KernelSpec) -> int:
    """Return the threads of a block: for a GEMM the producer's warpgroup and one consumer warpgroup per 64 rows, at most two."""
    return 128 * (1 + _consumers(spec.block[0])) if spec.family == FP8_GEMM else _SMALL_THREADS


def dynamic_shared_memory_bytes(spec: KernelSpec) -> int:
    """Return the dynamic shared memory that a launch of ``spec`` asks for."""
    return _gemm_shared_memory_bytes(spec.block[0], spec.block[1], spec.stages) if spec.family == FP8_GEMM else 0


def _consumers(block_m: int) -> int:
    return min(2, block_m // 64)


def _gemm_shared_memory_bytes(block_m: int, block_n: int, stages: int) -> int:
    # As laid out in kernels_src/include/dj/kernels/fp8_gemm_1d2d.cuh, which asserts this very sum: slack to align to 1024 bytes,
    # stages of an A tile, a B tile and A scales, a padded strip of 16 rows per consumer warp, barriers, tile counts of groups.
    stage = (block_m + block_n) * BLOCK_K + block_m * 4
    strips = 4 * _consumers(block_m) * 16 * 2 * (min(block_n, 64) + 8)
    return 1024 + stages * stage + strips + _BARRIER_BYTES + 4 * (MAX_GROUPS + 4)


@cache
def kernel_set(arch: str) -> tuple[KernelSpec, ...]:
    """Return every kernel of ``arch``, in the order of a warm-up.

    Raises:
        UnsupportedError: there are no kernels for this arch.
    """
    known = arch_named(arch)
    gemms = tuple(_fp8_gemm(arch, known.shared_memory_bytes, *tile) for tile in FP8_GEMM_TILES)
    casts = tuple(KernelSpec(CAST_TO_FP8, arch, (dtype, "e4m3"), (CAST_BLOCK,)) for dtype in CAST_DTYPES)
    return (*gemms, *casts, KernelSpec(SCALE_LAYOUT, arch, ("f32",), SCALE_LAYOUT_BLOCK))


@cache
def kernels_by_name(arch: str) -> dict[str, KernelSpec]:
    """Return the kernel set of ``arch`` by name."""
    return {spec.name: spec for spec in kernel_set(arch)}


def _fp8_gemm(arch: str, shared_memory_bytes: int, block_m: int, block_n: int) -> KernelSpec:
    stages = max(s for s in range(1, _MAX_STAGES + 1) if _gemm_shared_memory_bytes(block_m, block_n, s) <= shared_memory_bytes)
    return KernelSpec(FP8_GEMM, arch, ("e4m3", "e4m3", "bf16"), (block_m, block_n, BLOCK_K), stages)

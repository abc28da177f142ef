"""Selection: problem and device limits to a spec. Pure, total, and the same function for warm-up and run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.kernel import CAST_TO_FP8, FP8_GEMM, KernelSpec
from deepgemm_jit.spec.kernel_set import BLOCK_K, CAST_DTYPES, FP8_GEMM_TILES, MAX_GROUPS, kernel_set
from deepgemm_jit.spec.problem import CastProblem, GemmProblem, Layout, Limits, Problem, ScaleLayoutProblem

GEMM_DTYPES = (("e4m3", "e4m3", "bf16"),)


@lru_cache(maxsize=65536)
def select(problem: Problem, limits: Limits) -> KernelSpec:
    """Return the kernel that serves ``problem`` on a device with ``limits``: always a member of ``kernel_set(limits.arch)``.

    Raises:
        UnsupportedError: no kernel serves it; the text says what would work.
    """
    kernels = kernel_set(limits.arch)
    if isinstance(problem, CastProblem):
        if problem.dtype not in CAST_DTYPES:
            raise UnsupportedError(given=f"a cast to FP8 from {problem.dtype}", supported=", ".join(CAST_DTYPES))
        return next(spec for spec in kernels if spec.family == CAST_TO_FP8 and spec.dtypes[0] == problem.dtype)
    if isinstance(problem, ScaleLayoutProblem):
        return kernels[-1]
    _refuse(problem)
    return _gemm_with(_gemm_tile(problem, limits.sms), limits)


def tiles(problem: GemmProblem, block_m: int, block_n: int) -> int:
    """Return the output tiles of a problem as selection counts them."""
    rows = -(-max(problem.m, 1) // block_m)
    columns = -(-problem.n // block_n)
    return rows * columns * (problem.groups if problem.layout is Layout.MASKED else 1)


def reachable(
    problem: GemmProblem, max_m: int, arch: str, shared_memory_bytes: int, arch_sms: Iterable[int]
) -> tuple[KernelSpec, ...]:
    """Return every spec that selection gives for ``problem`` with any m in 1..max_m on any of the SM counts, sorted.

    Complete, because selection sees M only through the rows of tiles, which are multiples of 64, and no M above the settled one:
    so it can change only at the M looked at here.
    """
    firsts = range(1, min(max_m, _SETTLED_M) + 1, 64)
    sm_counts = sorted(set(arch_sms))
    blocks = {_gemm_tile(replace(problem, m=m), sms) for m in firsts for sms in sm_counts}
    limits = Limits(arch, sm_counts[-1], shared_memory_bytes)
    return tuple(sorted(_gemm_with(block, limits) for block in blocks))


# A model of one persistent block's time on an H200, in ns: waves x (k-blocks x cost of the tile's k-block + cost of a tile).
# Fitted to bench/results/tiles.json (dense, contiguous and masked problems timed with every tile): its choice is on average 1 %
# slower than the best tile.
_K_BLOCK_NS = {(64, 64): 170, (64, 128): 280, (128, 64): 285, (128, 128): 460, (128, 192): 570, (256, 128): 825}
_TILE_NS = 1400

_SETTLED_M = 8192
"""Rows above which more rows change nothing: many waves, whose last one matters little."""


def _gemm_tile(problem: GemmProblem, sms: int) -> tuple[int, int]:
    """Return the tile that the model finds fastest, the larger one of equals."""
    settled = replace(problem, m=min(problem.m, _SETTLED_M))
    k_blocks = -(-problem.k // BLOCK_K)

    def cost_ns(tile: tuple[int, int]) -> tuple[int, int]:
        waves = -(-tiles(settled, *tile) // sms)
        return waves * (k_blocks * _K_BLOCK_NS[tile] + _TILE_NS), -tile[0] * tile[1]

    return min((tile for tile in FP8_GEMM_TILES if _fits(problem, tile[0])), key=cost_ns)


def _fits(problem: GemmProblem, block_m: int) -> bool:
    if problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS):
        return problem.alignment % block_m == 0  # a tile must not reach into the next group
    return block_m == 64 or problem.m > 64


def _gemm_with(block: tuple[int, int], limits: Limits) -> KernelSpec:
    return next(spec for spec in kernel_set(limits.arch) if spec.family == FP8_GEMM and spec.block[:2] == block)


def _refuse(problem: GemmProblem) -> None:
    if problem.dtypes not in GEMM_DTYPES:
        raise UnsupportedError(
            given="a GEMM of " + " x ".join(problem.dtypes[:2]) + " -> " + problem.dtypes[2],
            supported="; ".join(f"{a} x {b} -> {d}" for a, b, d in GEMM_DTYPES),
        )
    faults: list[str] = []
    advice: list[str] = []
    sizes: dict[str, object] = {
        "M": problem.m,
        "N": problem.n,
        "K": problem.k,
        "groups": problem.groups,
        "alignment": problem.alignment,
    }
    faults.extend(f"{name} = {value!r}" for name, value in sizes.items() if not isinstance(value, int))
    if faults:
        raise UnsupportedError(given=", ".join(faults), supported="whole numbers")
    for name, value, step in (("N", problem.n, 8), ("K", problem.k, 16)):
        if value < step or value % step:
            faults.append(f"{name} = {value}")
            lower, upper = value // step * step, (value // step + 1) * step if value >= 0 else step
            advice.append(f"nearest {name}: {f'{lower} or ' if lower > 0 else ''}{upper}")
    if problem.groups < 1 or (problem.groups > MAX_GROUPS and problem.layout is not Layout.CONTIGUOUS):
        faults.append(f"{problem.groups} groups")
        advice.append(f"1 to {MAX_GROUPS} groups, or a row index, which has no limit")
    if problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) and (problem.alignment < 64 or problem.alignment % 64):
        faults.append(f"alignment {problem.alignment}")
        advice.append("align groups to 64 or 128 rows")
    if faults:
        raise UnsupportedError(
            given=", ".join(faults),
            supported="N a multiple of 8, K a multiple of 16, group alignment a multiple of 64",
            advice="; ".join(advice),
        )

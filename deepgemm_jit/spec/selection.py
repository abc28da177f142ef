"""Selection: problem and device limits to a spec. Pure, total, and the same function for warm-up and run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.kernel import CAST_TO_FP8, FP8_GEMM, KernelSpec
from deepgemm_jit.spec.kernel_set import CAST_DTYPES, FP8_GEMM_TILES, MAX_GROUPS, kernel_set
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
    block = _gemm_tile(problem, limits)
    return next(spec for spec in kernels if spec.family == FP8_GEMM and spec.block[:2] == block)


def tiles(problem: GemmProblem, block_m: int, block_n: int) -> int:
    """Return the output tiles of a problem as selection counts them."""
    rows = -(-max(problem.m, 1) // block_m)
    columns = -(-problem.n // block_n)
    return rows * columns * (problem.groups if problem.layout is Layout.MASKED else 1)


def breakpoints(problem: GemmProblem, max_m: int, arch_sms: Iterable[int]) -> list[tuple[int, int]]:
    """Return (m, sms) pairs that reach every spec which ``problem`` with any m in 1..max_m and any SM count given can reach.

    Selection sees M only through the rows of tiles, and compares tile counts with the SM count; so it changes only where a
    row of 64 begins, and no more once the largest tile fills the device several times over.
    """
    sms = sorted(set(arch_sms))
    columns = -(-problem.n // 128) * (problem.groups if problem.layout is Layout.MASKED else 1)
    settled = 256 * (_WAVES_FOR_256 * sms[-1] // columns + 2)
    firsts = [1, *range(65, min(max_m, settled) + 1, 64)]
    return [(m, count) for m in firsts for count in sms if m <= max_m]


def reachable(
    problem: GemmProblem, max_m: int, arch: str, shared_memory_bytes: int, arch_sms: Iterable[int]
) -> tuple[KernelSpec, ...]:
    """Return every spec that selection gives for ``problem`` with any m in 1..max_m on any of the SM counts, sorted."""
    found = {
        select(replace(problem, m=m), Limits(arch, sms, shared_memory_bytes)) for m, sms in breakpoints(problem, max_m, arch_sms)
    }
    return tuple(sorted(found))


_WAVES_FOR_256 = 2


def _gemm_tile(problem: GemmProblem, limits: Limits) -> tuple[int, int]:
    _refuse(problem)
    if problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS):
        block_m = 128 if problem.alignment % 128 == 0 else 64
    else:
        block_m = 64 if problem.m <= 64 else 128
        if problem.m > 128 and problem.layout is Layout.DENSE and tiles(problem, 256, 128) >= _WAVES_FOR_256 * limits.sms:
            return (256, 128)
    widths = [block_n for rows, block_n in FP8_GEMM_TILES if rows == block_m]
    for block_n in sorted(widths, reverse=True):
        if tiles(problem, block_m, block_n) >= limits.sms:
            return (block_m, block_n)
    return (block_m, min(widths))


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

"""Selection: problem and device limits to a spec. Pure, total, and the same function for warm-up and run time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec.kernel import BF16_GEMM, FP8_GEMM, N_MAJOR, ROW_SCALES, KernelSpec
from deepgemm_jit.spec.kernel_set import (
    GEMM_DTYPES,
    GEMM_TILES,
    MAX_GROUPS,
    STEP_KERNELS,
    dynamic_shared_memory_bytes,
    is_gemm,
    kernel_set,
)
from deepgemm_jit.spec.problem import GemmProblem, Layout, Limits, Problem, StepProblem, arch_named, limits_of
from deepgemm_jit.spec.shown import shown

_SIZE_LIMIT = 2**31
"""Coordinates of the copy engine are signed 32-bit numbers."""

_K_STEPS = {FP8_GEMM: 16, BF16_GEMM: 8}
"""Elements that are 16 bytes: what the copy engine wants rows to be a multiple of."""


def select(problem: Problem, limits: Limits) -> KernelSpec:
    """Return the kernel that serves ``problem`` on a device with ``limits``: always a member of ``kernel_set(limits.arch)``.

    Raises:
        UnsupportedError: no kernel serves it; the text says what would work.
        OperandError: a problem or limits of other types than theirs.
    """
    try:
        return _select(problem, limits)
    except TypeError:  # what cannot be hashed: only a call that fails pays for looking
        _refuse_types(problem, limits)
        if isinstance(problem, GemmProblem):
            _refuse(problem)
        raise


@lru_cache(maxsize=65536)
def _select(problem: Problem, limits: Limits) -> KernelSpec:
    _refuse_types(problem, limits)
    if isinstance(problem, StepProblem):
        return _step(problem, limits.arch)
    _refuse(problem)
    if limits.sms < 1:
        raise UnsupportedError(given=f"a device of {shown(limits.sms)} SMs", supported="at least 1 SM")
    candidates = _candidates(problem, limits.arch)
    fitting = [c for c in candidates if dynamic_shared_memory_bytes(c.spec) <= limits.shared_memory_bytes]
    if not fitting:
        least = min(dynamic_shared_memory_bytes(candidate.spec) for candidate in candidates)
        given = f"a device of {shown(limits.shared_memory_bytes)} bytes of shared memory per block"
        raise UnsupportedError(given=given, supported=f"at least {least} bytes")
    return _fastest(fitting, problem.m, limits.sms)


def reachable(problem: GemmProblem, max_m: int, arch: str, arch_sms: Iterable[int]) -> tuple[KernelSpec, ...]:
    """Return every spec that selection gives for ``problem`` with any m in 1..max_m on any of the SM counts, sorted.

    Complete, because selection sees M only through the rows of tiles, which are multiples of 64, and no M above the settled one:
    so it can change only at the M looked at here.
    """
    _refuse_types(problem, limits_of(arch))
    _refuse(problem)
    candidates = _candidates(problem, arch)
    firsts = range(1, min(max_m, _SETTLED_M) + 1, 64)
    return tuple(sorted({_fastest(candidates, m, sms) for m in firsts for sms in set(arch_sms)}))


# A model of one persistent block's time on an H200, in ns: waves x (k-blocks x cost of the tile's k-block + cost of a tile).
# Fitted to bench/results/tiles.json (dense, contiguous and masked problems timed with every tile): its choice is on average 1 %
# slower than the best tile.
# The BF16 and row-scale tiles are estimates from the FP8 ones, not fitted yet.
_K_BLOCK_NS: dict[tuple[str, tuple[str, ...]], dict[tuple[int, int], int]] = {
    (FP8_GEMM, ()): {(64, 64): 170, (64, 128): 280, (128, 64): 285, (128, 128): 460, (128, 192): 570, (256, 128): 825},
    (FP8_GEMM, (ROW_SCALES,)): {(64, 128): 330, (128, 128): 560},
    (BF16_GEMM, ()): {(64, 128): 260, (128, 128): 400, (128, 256): 700},
    (BF16_GEMM, (N_MAJOR,)): {(64, 128): 260, (128, 128): 400, (128, 256): 700},
}
_TILE_NS = 1400

_SETTLED_M = 8192
"""Rows above which more rows change nothing: many waves, whose last one matters little."""


class _Candidate(NamedTuple):
    """A kernel that may serve a problem, with what its cost depends on beside M and the SM count."""

    spec: KernelSpec
    columns: int
    """Tiles per row block; of all groups where each has its own rows."""
    tile_ns: int
    needs_rows: bool
    """Too tall for the 64 rows that a smaller tile takes."""


def _family(problem: GemmProblem) -> str:
    return next(family for family, dtypes in GEMM_DTYPES.items() if dtypes == problem.dtypes)


def _candidates(problem: GemmProblem, arch: str) -> list[_Candidate]:
    family, per_group = _family(problem), problem.layout is Layout.MASKED
    aligned = problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS)
    costs = _K_BLOCK_NS[family, problem.variant]
    found = []
    for spec in kernel_set(arch):
        block_m, block_n, block_k = spec.block if is_gemm(spec) else (0, 0, 0)
        if (spec.family, spec.flags) != (family, problem.variant):
            continue
        if aligned and problem.alignment % block_m:
            continue  # a tile must not reach into the next group
        columns = -(-problem.n // block_n) * (problem.groups if per_group else 1)
        tile_ns = -(-problem.k // block_k) * costs[block_m, block_n] + _TILE_NS
        found.append(_Candidate(spec, columns, tile_ns, block_m > 64 and not aligned))
    return found


def _fastest(candidates: list[_Candidate], m: int, sms: int) -> KernelSpec:
    """Return the kernel whose tile the model finds fastest, the larger tile of equals."""
    rows = min(max(m, 1), _SETTLED_M)
    best, best_cost = None, (0, 0)
    for spec, columns, tile_ns, needs_rows in candidates:
        if needs_rows and rows <= 64:
            continue
        block_m, block_n = spec.block[0], spec.block[1]
        cost = -(-(-(-rows // block_m) * columns) // sms) * tile_ns, -block_m * block_n
        if best is None or cost < best_cost:
            best, best_cost = spec, cost
    assert best is not None, "a tile of 64 rows serves every problem"
    return best


def _step(problem: StepProblem, arch: str) -> KernelSpec:
    for spec in kernel_set(arch):
        if (spec.family, spec.dtypes) == (problem.family, problem.dtypes):
            return spec
    variants = STEP_KERNELS[problem.family][0] if problem.family in STEP_KERNELS else ()
    raise UnsupportedError(
        given=f"{problem.family} of {' -> '.join(problem.dtypes)}",
        supported=", ".join(" -> ".join(dtypes) for dtypes in variants) or "the families " + ", ".join(STEP_KERNELS),
    )


def _refuse_types(problem: object, limits: object) -> None:
    """Refuse what is no problem or no limits; the sizes of a GEMM are looked at with their ranges."""
    faults = _problem_faults(problem)
    if isinstance(limits, Limits):
        faults.extend(
            f"{name} of the limits is {shown(value)}, needed: a whole number"
            for name, value in (("sms", limits.sms), ("shared_memory_bytes", limits.shared_memory_bytes))
            if not isinstance(value, int)
        )
    else:
        faults.append(f"limits is {shown(limits)}, needed: Limits, for example those of limits_of")
    if faults:
        raise OperandError(operation="select", faults=faults)
    if isinstance(limits, Limits):
        arch_named(limits.arch)


def _problem_faults(problem: object) -> list[str]:
    # (name, value, whether it is of its type, what is needed)
    looked_at: tuple[tuple[str, object, bool, str], ...]
    if isinstance(problem, GemmProblem):
        three = _are_words(problem.dtypes) and len(problem.dtypes) == 3
        looked_at = (
            ("layout", problem.layout, isinstance(problem.layout, Layout), "a Layout"),
            ("dtypes", problem.dtypes, three, "a tuple of the names of three dtypes, of A, B and D"),
            ("variant", problem.variant, _are_words(problem.variant), "a tuple of the flags of kernels"),
        )
    elif isinstance(problem, StepProblem):
        looked_at = (
            ("family", problem.family, isinstance(problem.family, str), "the name of a family"),
            ("dtypes", problem.dtypes, _are_words(problem.dtypes), "a tuple of the names of dtypes"),
        )
    else:
        looked_at = (("problem", problem, False, "a GemmProblem or a StepProblem"),)
    return [f"{name} is {shown(value)}, needed: {needed}" for name, value, right, needed in looked_at if not right]


def _are_words(words: object) -> bool:
    return isinstance(words, tuple) and all(isinstance(word, str) for word in words)


def _refuse(problem: GemmProblem) -> None:
    if problem.dtypes not in GEMM_DTYPES.values():
        raise UnsupportedError(
            given="a GEMM of " + " x ".join(problem.dtypes[:2]) + " -> " + problem.dtypes[2],
            supported="; ".join(f"{a} x {b} -> {d}" for a, b, d in GEMM_DTYPES.values()),
        )
    family = _family(problem)
    if (family, problem.variant) not in GEMM_TILES:
        raise UnsupportedError(
            given=f"variant {','.join(problem.variant)} of {family}",
            supported="; ".join(",".join(flags) or "none" for known, flags in GEMM_TILES if known == family),
        )
    _refuse_sizes(problem, _K_STEPS[family])


def _refuse_sizes(problem: GemmProblem, k_step: int) -> None:
    faults: list[str] = []
    advice: list[str] = []
    sizes: dict[str, object] = {
        "M": problem.m,
        "N": problem.n,
        "K": problem.k,
        "groups": problem.groups,
        "alignment": problem.alignment,
    }
    faults.extend(f"{name} = {shown(value)}" for name, value in sizes.items() if not isinstance(value, int))
    if faults:
        raise UnsupportedError(given=", ".join(faults), supported="whole numbers")
    for name, size in sizes.items():
        if isinstance(size, int) and size >= _SIZE_LIMIT:
            faults.append(f"{name} = {shown(size)}")
            advice.append(f"{name} below 2^31")
    if problem.m < 0 and problem.layout is not Layout.MASKED:
        faults.append(f"M = {shown(problem.m)}")
        advice.append("M of at least 0")
    for name, value, step in (("N", problem.n, 8), ("K", problem.k, k_step)):
        if value < _SIZE_LIMIT and (value < step or value % step):
            faults.append(f"{name} = {shown(value)}")
            lower, upper = value // step * step, (value // step + 1) * step if value >= 0 else step
            advice.append(f"nearest {name}: {f'{lower} or ' if lower > 0 else ''}{upper}")
    if problem.layout is Layout.DENSE and problem.groups != 1:
        faults.append(f"{shown(problem.groups)} groups of a dense layout")
        advice.append("one group, or a grouped layout")
    if problem.groups < 1 or (problem.groups > MAX_GROUPS and problem.layout is not Layout.CONTIGUOUS):
        faults.append(f"{shown(problem.groups)} groups")
        advice.append(f"1 to {MAX_GROUPS} groups, or a row index, which has no limit")
    if problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) and (problem.alignment < 64 or problem.alignment % 64):
        faults.append(f"alignment {shown(problem.alignment)}")
        advice.append("align groups to 64 or 128 rows")
    if faults:
        raise UnsupportedError(
            given=", ".join(faults),
            supported=f"N a multiple of 8, K a multiple of {k_step}, group alignment a multiple of 64",
            advice="; ".join(advice),
        )

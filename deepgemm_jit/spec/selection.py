"""Selection: problem and device limits to a spec. Pure, total, and the same function for warm-up and run time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec.arch import arch_named
from deepgemm_jit.spec.cost import Load, Option, Work, options
from deepgemm_jit.spec.kernel import SWAPPED, KernelSpec
from deepgemm_jit.spec.kernel_set import (
    FRAGMENT,
    FRAGMENT_BYTES,
    GEMM_DTYPES,
    GEMM_TILES,
    MAX_GROUPS,
    STEP_KERNELS,
    dynamic_shared_memory_bytes,
    kernel_set,
)
from deepgemm_jit.spec.problem import GemmProblem, Layout, Limits, Overlap, Problem, StepProblem
from deepgemm_jit.spec.shown import shown

_SIZE_LIMIT = 2**31
"""Coordinates of the copy engine are signed 32-bit numbers."""

_K_STEPS = {"e4m3": 16, "bf16": 8}
"""Elements that are 16 bytes: what the copy engine wants rows to be a multiple of."""


def select(problem: Problem, limits: Limits) -> KernelSpec:
    """Return the kernel that serves ``problem`` on a device with ``limits``: always a member of ``kernel_set(limits.arch)``.

    Raises:
        UnsupportedError: no kernel serves it; the text says what would work.
        OperandError: a problem or limits of other types than theirs.
    """
    return selected(problem, limits).spec


class Selected(NamedTuple):
    """A kernel and how it is launched on a problem."""

    spec: KernelSpec
    split_k: int = 1
    """Blocks of a cluster that share the k-blocks of a tile."""


def selected(problem: Problem, limits: Limits) -> Selected:
    """Return the kernel that :func:`select` returns, with the split of K for this problem; raises as it does."""
    try:
        return _selected(problem, limits)
    except TypeError:  # what cannot be hashed: only a call that fails pays for looking
        _refuse_types(problem, limits)
        if isinstance(problem, GemmProblem):
            _refuse(problem)
        raise


@lru_cache(maxsize=65536)
def _selected(problem: Problem, limits: Limits) -> Selected:
    _refuse_types(problem, limits)
    if isinstance(problem, StepProblem):
        return Selected(_step(problem, limits.arch))
    _refuse(problem)
    if limits.sms < 1:
        raise UnsupportedError(given=f"a device of {shown(limits.sms)} SMs", supported="at least 1 SM")
    if limits.shared_memory_bytes < arch_named(limits.arch).shared_memory_bytes:
        _refuse_memory(problem, limits)
    option = fastest(looked_at(weighed(problem, limits.arch), problem.m), (limits.sms,), limits.whole, limits.overlap)[0]
    return Selected(option.spec, option.split_k)


def choices(problem: GemmProblem, limits: Limits) -> Iterator[Selected]:
    """Yield every kernel and split that selection weighs for ``problem``: each gives the right result."""
    for option, load in looked_at(weighed(problem, limits.arch), problem.m):
        if load.costs_ns((limits.sms,), limits.whole) != [math.inf]:
            yield Selected(option.spec, option.split_k)


_FEW_ROWS = 64
"""Rows up to which tokens may be the columns of a product, and above which tall tiles may be."""

MOST_FP4_ROWS = 32
"""Of a group that has any, with padding, up to which FP4 weights are worth unpacking: about where they stop to be. A forward of
32 DeepSeek-V3 experts takes 0.69 of the time with folded ones at 23 rows and 1.02 at 31.7, one of 128 Qwen3 experts 0.66 at 16
(bench/results/experts.json)."""

_ANY = -1
"""Alignment of groups into which a tile may reach: their ends are known, so that it keeps nothing of what is not its own."""

EXACT_ROWS = 8192
"""Rows up to which each count is told apart."""
ROWS_STEP = 1024
"""Above, rows count as the next multiple of it."""
MOST_ROWS = 16 * EXACT_ROWS
"""And never as more: of many waves the last one matters little."""


def counted_rows(m: int) -> int:
    """Return what M counts as; never falls as M grows."""
    rows = max(m, 1)
    return rows if rows <= EXACT_ROWS else min(-(-rows // ROWS_STEP) * ROWS_STEP, MOST_ROWS)


@cache
def _families(dtypes: tuple[str, str, str], variant: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(family for family, served in GEMM_DTYPES.items() if served == dtypes and (family, variant) in GEMM_TILES)


class Weighed(NamedTuple):
    """The options of a problem, whatever its M and SM count."""

    work: Work
    options: tuple[tuple[Option, int, int], ...]
    """Each with the fewest and most rows for which it is looked at."""


def weighed(problem: GemmProblem, arch: str) -> Weighed:
    """Return what selection weighs for ``problem``, which it does not check."""
    k_bytes = problem.k * (1 if problem.dtypes[0] == "e4m3" else 2)
    scattered = problem.layout is Layout.PREFIX_SUMS and problem.alignment % 64 != 0
    masked, dense = problem.layout is Layout.MASKED, problem.layout is Layout.DENSE
    work = Work.of(problem.n, k_bytes, problem.groups, masked=masked, scattered=scattered, dense=dense)
    if problem.dtypes[1] == "e2m1":
        work = work._replace(b_bytes=work.b_bytes * FRAGMENT_BYTES // math.prod(FRAGMENT))
    alignment = 0 if masked or dense else _ANY if scattered else problem.alignment
    found = _options(arch, problem.dtypes, problem.variant, alignment)
    return Weighed(work, tuple(each for each in found if each[0].is_worth(work.k_blocks)))


@lru_cache(maxsize=256)
def _options(
    arch: str, dtypes: tuple[str, str, str], variant: tuple[str, ...], alignment: int
) -> tuple[tuple[Option, int, int], ...]:
    """Return the options of one kind of problem; ``alignment`` is 0 where groups do not follow each other in one matrix."""
    found = []
    families = _families(dtypes, variant)
    for option in options(arch, families, variant):
        swapped = option.spec.family in SWAPPED
        # FP4 has no other tiles: wherever groups start, tokens are the columns of a product.
        if alignment == _ANY or (len(families) == 1 and swapped and alignment % option.block_m == 0):
            found.append((option, 1, MOST_ROWS))
        elif alignment:
            # A tile must not reach into the next group, whose rows it would take for its own. Where groups start at multiples of
            # 64, tokens fill the rows of a product.
            if alignment % option.block_m == 0 and swapped == (alignment % 64 != 0):
                found.append((option, 1, MOST_ROWS))
        elif swapped:
            found.append((option, 1, _FEW_ROWS))
        else:
            found.append((option, _FEW_ROWS + 1 if option.block_m > _FEW_ROWS else 1, MOST_ROWS))
    return tuple(found)


def looked_at(seen: Weighed, m: int) -> list[tuple[Option, Load]]:
    """Return the options that M allows, each with what it costs; M shows in nothing else that selection looks at."""
    rows = counted_rows(m)
    return [(option, option.load(seen.work, rows)) for option, fewest, most in seen.options if fewest <= rows <= most]


def fastest(
    found: list[tuple[Option, Load]], sms_counts: Sequence[int], whole: bool, overlap: Overlap = Overlap.NONE
) -> list[Option]:
    """Return the option that the model finds fastest on each count of SMs, all there are or not; of equals the first."""
    by_count = zip(*(load.costs_ns(sms_counts, whole, overlap) for _option, load in found), strict=True)
    return [found[costs.index(min(costs))][0] for costs in by_count]


def _step(problem: StepProblem, arch: str) -> KernelSpec:
    for spec in kernel_set(arch):
        if (spec.family, spec.dtypes) == (problem.family, problem.dtypes):
            return spec
    variants = STEP_KERNELS[problem.family][0] if problem.family in STEP_KERNELS else ()
    raise UnsupportedError(
        given=f"{problem.family} of {' -> '.join(problem.dtypes)}",
        supported=", ".join(" -> ".join(dtypes) for dtypes in variants) or "the families " + ", ".join(STEP_KERNELS),
    )


def _refuse_memory(problem: GemmProblem, limits: Limits) -> None:
    needed = max(dynamic_shared_memory_bytes(option.spec) for option, _fewest, _most in weighed(problem, limits.arch).options)
    if needed > limits.shared_memory_bytes:
        given = f"a device of {shown(limits.shared_memory_bytes)} bytes of shared memory per block"
        raise UnsupportedError(given=given, supported=f"at least {needed} bytes")


def require_kernels(problem: GemmProblem, limits: Limits) -> None:
    """Refuse a problem that no kernel serves, and what is no problem; raises as :func:`select`."""
    _refuse_types(problem, limits)
    _refuse(problem)


def _refuse_types(problem: object, limits: object) -> None:
    """Refuse what is no problem or no limits; the sizes of a GEMM are looked at with their ranges."""
    faults = _problem_faults(problem)
    if isinstance(limits, Limits):
        wanted: tuple[tuple[str, object, type, str], ...] = (
            ("sms", limits.sms, int, "a whole number"),
            ("shared_memory_bytes", limits.shared_memory_bytes, int, "a whole number"),
            ("overlap", limits.overlap, Overlap, "a member of Overlap"),
        )
        faults.extend(
            f"{name} of the limits is {shown(value)}, needed: {needed}"
            for name, value, kind, needed in wanted
            if not isinstance(value, kind)
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
    if not _families(problem.dtypes, problem.variant):
        family = next(family for family, dtypes in GEMM_DTYPES.items() if dtypes == problem.dtypes)
        raise UnsupportedError(
            given=f"variant {','.join(problem.variant)} of {family}",
            supported="; ".join(",".join(flags) or "none" for known, flags in GEMM_TILES if known == family),
        )
    _refuse_sizes(
        problem,
        _K_STEPS[problem.dtypes[0]],
        64 if set(SWAPPED).isdisjoint(_families(problem.dtypes, problem.variant)) else 16,
    )


def _refuse_sizes(problem: GemmProblem, k_step: int, row_step: int) -> None:
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
    if problem.layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) and (
        problem.alignment < row_step or problem.alignment % row_step
    ):
        faults.append(f"alignment {shown(problem.alignment)}")
        advice.append(f"align groups to {row_step} or 128 rows")
    if faults:
        raise UnsupportedError(
            given=", ".join(faults),
            supported=f"N a multiple of 8, K a multiple of {k_step}, group alignment a multiple of {row_step}",
            advice="; ".join(advice),
        )

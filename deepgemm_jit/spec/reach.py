"""What selection can give for a problem over all M and SM counts, and the proof that a set of kernels holds all of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from deepgemm_jit.spec.cost import Load, Option
from deepgemm_jit.spec.kernel import KernelSpec
from deepgemm_jit.spec.problem import GemmProblem, limits_of
from deepgemm_jit.spec.selection import (
    MOST_ROWS,
    ROWS_STEP,
    Weighed,
    counted_rows,
    fastest,
    looked_at,
    require_kernels,
    select,
    weighed,
)


class Gap(NamedTuple):
    """Where the proof fails."""

    m: int
    reason: str


def reachable(problem: GemmProblem, max_m: int, arch: str, arch_sms: Iterable[int]) -> tuple[KernelSpec, ...]:
    """Return every spec that selection gives for ``problem`` with any m in 1..max_m on any of the SM counts, sorted.

    An SM count is looked at as that of a whole device and as a limit on a larger one.
    """
    require_kernels(problem, limits_of(arch))
    return _reached(weighed(problem, arch), max_m, tuple(sorted(set(arch_sms))))


def try_gap(problem: GemmProblem, planned: Collection[KernelSpec], max_m: int, arch: str, arch_sms: Iterable[int]) -> Gap | None:
    """Return a case in which selection gives a kernel that is not planned; None proves that there is none.

    The cases are every m in 1..max_m on every SM count, as in :func:`reachable`. Selection sees M in the loads of its options and
    in nothing else, and no load falls as M grows: an interval of M at whose ends all loads are the same is one case for each SM
    count. Each is asked for, and at both ends what run time calls is called, on the largest device.
    """
    seen, sms_counts = weighed(problem, arch), tuple(sorted(set(arch_sms)))
    limits = limits_of(arch, sms_counts[-1])
    for m in itertools.chain.from_iterable(intervals(seen, max_m)):
        spec = select(replace(problem, m=m), limits)
        if spec not in planned:
            return Gap(m, f"M = {m} gets {spec.name}, which is not planned")
    return _gap(seen, frozenset(planned), max_m, sms_counts)


def intervals(seen: Weighed, max_m: int) -> list[tuple[int, int]]:
    """Return the first and last M of the intervals in which selection looks at the same: they end where a tile is full."""
    firsts = {1, *range(ROWS_STEP + 1, MOST_ROWS, seen.rows_step)}
    for option, fewest, most in seen.options:
        full = range((fewest - 1) // option.block_m * option.block_m + 1, min(most, ROWS_STEP) + 1, option.block_m)
        firsts |= {fewest, most + 1, *full}
    starts = sorted(m for m in firsts if 1 <= m <= max_m)
    return list(zip(starts, [*(m - 1 for m in starts[1:]), max_m], strict=True))


@lru_cache(maxsize=256)
def _reached(seen: Weighed, max_m: int, arch_sms: tuple[int, ...]) -> tuple[KernelSpec, ...]:
    found: set[KernelSpec] = set()
    for first, _last in intervals(seen, max_m):
        at_first = looked_at(seen, first)
        if any(option.spec not in found for option, _load in at_first):
            found |= _selected_at(at_first, arch_sms)
    return tuple(sorted(found))


@lru_cache(maxsize=256)
def _gap(seen: Weighed, planned: frozenset[KernelSpec], max_m: int, arch_sms: tuple[int, ...]) -> Gap | None:
    if all(option.spec in planned for option, _fewest, _most in seen.options):
        return None  # selection has nothing else to give
    for first, last in intervals(seen, max_m):
        at_first = looked_at(seen, first)
        fewest_rows, most_rows = (counted_rows(m, seen.rows_step) for m in (first, last))
        between = [option for option, fewest, most in seen.options if fewest <= most_rows and fewest_rows <= most]
        if at_first != looked_at(seen, last) or between != [option for option, _load in at_first]:
            return Gap(first, f"selection changes between M = {first} and {last}, where it was taken to be the same")
        missing = _selected_at(at_first, arch_sms) - planned
        if missing:
            return Gap(first, f"M = {first} to {last} may get {', '.join(sorted(spec.name for spec in missing))}, not planned")
    return None


def _selected_at(found: list[tuple[Option, Load]], arch_sms: tuple[int, ...]) -> set[KernelSpec]:
    # Whether a device is whole matters to kernels of which two blocks share an SM.
    ways = (True, False) if any(option.per_sm > 1 for option, _load in found) else (True,)
    return {option.spec for whole in ways for option in fastest(found, arch_sms, whole)}

"""What selection can give for a problem over all M and SM counts, and the proof that a set of kernels holds all of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from deepgemm_jit.spec.cost import Load, Option
from deepgemm_jit.spec.kernel import KernelSpec
from deepgemm_jit.spec.problem import GemmProblem, Overlap, limits_of
from deepgemm_jit.spec.selection import (
    EXACT_ROWS,
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

    An SM count is looked at as that of a whole device and as a limit on a larger one, and launches as overlapping in any way.
    """
    require_kernels(problem, limits_of(arch))
    found = _fewest_rows(weighed(problem, arch), tuple(sorted(set(arch_sms))))
    return tuple(sorted(spec for spec, m in found.items() if m <= max_m))


def try_gap(problem: GemmProblem, planned: Collection[KernelSpec], max_m: int, arch: str, arch_sms: Iterable[int]) -> Gap | None:
    """Return a case in which selection gives a kernel that is not planned; None proves that there is none.

    The cases are every m in 1..max_m on every SM count, as in :func:`reachable`. Selection sees M in the loads of its options and
    in nothing else, and they see it in numbers of tiles: an interval of M at whose ends all loads are the same is one case for
    each SM count. Each is looked at, and at both ends what run time calls is called, on the largest device.
    """
    seen, sms_counts = weighed(problem, arch), tuple(sorted(set(arch_sms)))
    limits = limits_of(arch, sms_counts[-1])
    for m in itertools.chain.from_iterable(intervals(seen, max_m)):
        spec = select(replace(problem, m=m), limits)
        if spec not in planned:
            return Gap(m, f"M = {m} gets {spec.name}, which is not planned")
    gap = _first_gap(seen, frozenset(planned), sms_counts)
    return gap if gap is not None and gap.m <= max_m else None


def intervals(seen: Weighed, max_m: int) -> list[tuple[int, int]]:
    """Return the first and last M of the intervals in which selection looks at the same: they end where a tile is full."""
    firsts = {1, *range(EXACT_ROWS + 1, MOST_ROWS, ROWS_STEP)}
    for option, fewest, most in seen.options:
        full = range((fewest - 1) // option.block_m * option.block_m + 1, min(most, EXACT_ROWS) + 1, option.block_m)
        firsts |= {fewest, most + 1, *full}
    starts = sorted(m for m in firsts if 1 <= m <= max_m)
    return list(zip(starts, [*(m - 1 for m in starts[1:]), max_m], strict=True))


# Over all M, so that problems that differ in their largest share the answer.
@lru_cache(maxsize=256)
def _fewest_rows(seen: Weighed, arch_sms: tuple[int, ...]) -> dict[KernelSpec, int]:
    """Return the smallest M for which selection gives each kernel that it gives at all; not to be changed."""
    found: dict[KernelSpec, int] = {}
    for first, _last in intervals(seen, MOST_ROWS):
        for spec in _selected_beside(found, looked_at(seen, first), arch_sms):
            found[spec] = first
    return found


@lru_cache(maxsize=256)
def _first_gap(seen: Weighed, planned: frozenset[KernelSpec], arch_sms: tuple[int, ...]) -> Gap | None:
    if all(option.spec in planned for option, _fewest, _most in seen.options):
        return None  # selection has nothing else to give
    for first, last in intervals(seen, MOST_ROWS):
        at_first = looked_at(seen, first)
        fewest_rows, most_rows = (counted_rows(m) for m in (first, last))
        between = [option for option, fewest, most in seen.options if fewest <= most_rows and fewest_rows <= most]
        if at_first != looked_at(seen, last) or between != [option for option, _load in at_first]:
            return Gap(first, f"selection changes between M = {first} and {last}, where it was taken to be the same")
        missing = _selected_beside(planned, at_first, arch_sms)
        if missing:
            return Gap(first, f"M = {first} to {last} may get {', '.join(sorted(spec.name for spec in missing))}, not planned")
    return None


def _selected_beside(
    known: Collection[KernelSpec], found: list[tuple[Option, Load]], arch_sms: tuple[int, ...]
) -> set[KernelSpec]:
    """Return the kernels beside the known ones that are the fastest on any of the SM counts."""
    new = [load for option, load in found if option.spec not in known]
    if not new:
        return set()
    old = [load for option, load in found if option.spec in known]
    fastest_somewhere: set[KernelSpec] = set()
    # Whether a device is whole matters to kernels of which two blocks share an SM.
    wholes = (True, False) if any(option.per_sm > 1 for option, _load in found) else (True,)
    overlaps = tuple(Overlap) if any(load.is_told_apart() for _option, load in found) else (Overlap.NONE,)
    for whole, overlap in itertools.product(wholes, overlaps):
        # No cost rises with the SMs: what the most of some counts make no faster than the fewest make a known kernel is never it.
        parts = _near(arch_sms)
        least_ns = [
            min(costs)
            for costs in zip(*(load.costs_ns([part[-1] for part in parts], whole, overlap) for load in new), strict=True)
        ]
        for load in old:
            known_ns = load.costs_ns([part[0] for part in parts], whole, overlap)
            open_ = [at for at, cost in enumerate(known_ns) if cost >= least_ns[at]]
            parts, least_ns = [parts[at] for at in open_], [least_ns[at] for at in open_]
            if not parts:
                break
        for part in parts:
            fastest_somewhere |= {option.spec for option in fastest(found, part, whole, overlap)}
    return fastest_somewhere.difference(known)


@lru_cache(maxsize=256)
def _near(arch_sms: tuple[int, ...]) -> list[list[int]]:
    """Return sorted SM counts in parts that each span a twelfth at most; not to be changed."""
    parts: list[list[int]] = []
    for sms in arch_sms:
        if parts and sms <= parts[-1][0] * 13 / 12:
            parts[-1].append(sms)
        else:
            parts.append([sms])
    return parts

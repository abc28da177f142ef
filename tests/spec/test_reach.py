"""The proof that kernels are all that selection can give: it finds each one that is taken out, and an M that asks for it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from deepgemm_jit.spec import GemmProblem, KernelSpec, Layout, Limits, Overlap, limits_of, reach, reachable, select, try_gap
from deepgemm_jit.spec.selection import looked_at, weighed

pytestmark = pytest.mark.none

ARCH = "sm_90a"
SMS = tuple(range(1, 133))
PROBLEMS = (
    GemmProblem(m=1, n=2112, k=7168),
    GemmProblem(m=1, n=32768, k=512),
    GemmProblem(m=1, n=4096, k=7168, groups=256, layout=Layout.MASKED),
    GemmProblem(m=1, n=1536, k=2048, groups=128, layout=Layout.CONTIGUOUS),
    GemmProblem(m=1, n=1536, k=2048, groups=128, layout=Layout.PREFIX_SUMS, alignment=32),
)


def limits_with(sms: int) -> list[Limits]:
    """Return all limits of so many SMs: all there are or not, with launches that overlap or not."""
    whole = limits_of(ARCH, sms)
    return [replace(whole, whole=each, overlap=overlap) for each in (True, False) for overlap in Overlap]


@pytest.mark.parametrize("max_m", [1, 64, 65, 5000, 300_000])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.layout.name}-{problem.n}-{problem.alignment}")
def test_what_is_reachable_is_proven_complete(problem: GemmProblem, max_m: int) -> None:
    assert try_gap(problem, reachable(problem, max_m, ARCH, SMS), max_m, ARCH, SMS) is None


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.layout.name}-{problem.n}-{problem.alignment}")
def test_each_kernel_that_is_taken_out_is_missed_with_an_m_that_asks_for_it(problem: GemmProblem) -> None:
    planned = reachable(problem, 16384, ARCH, SMS)
    for left_out in planned:
        gap = try_gap(problem, set(planned) - {left_out}, 16384, ARCH, SMS)
        assert gap is not None and left_out.name in gap.reason
        asked: set[KernelSpec] = set()
        for sms in SMS:
            asked |= {select(replace(problem, m=gap.m), limits) for limits in limits_with(sms)}
        assert left_out in asked


def test_no_kernels_are_never_complete() -> None:
    assert all(try_gap(problem, (), 1, ARCH, (132,)) is not None for problem in PROBLEMS)


def test_intervals_follow_each_other_and_hold_one_choice_each() -> None:
    for problem in PROBLEMS:
        found = reach.intervals(weighed(problem, ARCH), 1000)
        assert [m for first, last in found for m in range(first, last + 1)] == list(range(1, 1001))
        for first, last in found:
            assert len({select(replace(problem, m=m), limits_of(ARCH)) for m in range(first, last + 1)}) == 1


def test_an_interval_in_which_selection_changes_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(m=1, n=2112, k=7168)
    planned = reachable(problem, 512, ARCH, SMS)
    reach._first_gap.cache_clear()
    monkeypatch.setattr(reach, "intervals", lambda _seen, max_m: [(1, 128), (129, max_m)])
    gap = try_gap(problem, planned, 512, ARCH, SMS)
    reach._first_gap.cache_clear()
    assert gap is not None
    assert gap.reason == "selection changes between M = 1 and 128, where it was taken to be the same"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.layout.name}-{problem.n}-{problem.alignment}")
def test_no_option_costs_more_on_more_sms(problem: GemmProblem) -> None:
    """What is never the fastest is told by its cost on the most of some SM counts."""
    for m in (1, 16, 17, 64, 65, 300, 4096, 100_000):
        for _option, load in looked_at(weighed(problem, ARCH), m):
            for whole, overlap in itertools.product((True, False), Overlap):
                costs = load.costs_ns(SMS, whole, overlap)
                assert costs == sorted(costs, reverse=True)


def test_what_overlapping_launches_change_is_looked_at_for_each_way_to_overlap() -> None:
    split, early = GemmProblem(m=1, n=2112, k=7168), GemmProblem(m=1, n=32768, k=512)
    for problem, expected in ((split, True), (early, True), (replace(split, m=65), False), (replace(early, m=33), False)):
        loads = [load for _option, load in looked_at(weighed(problem, ARCH), problem.m)]
        assert any(load.is_told_apart() for load in loads) is expected
        differs = [
            load for load in loads if len({tuple(load.costs_ns((132,), whole=True, overlap=each)) for each in Overlap}) > 1
        ]
        assert all(load.is_told_apart() for load in differs) and bool(differs) is expected


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.layout.name}-{problem.n}-{problem.alignment}")
def test_what_is_reachable_is_what_run_time_selects_and_no_more(problem: GemmProblem) -> None:
    asked: set[KernelSpec] = set()
    for m in (m for ends in reach.intervals(weighed(problem, ARCH), 400) for m in ends):
        for sms in SMS:
            asked |= {select(replace(problem, m=m), limits) for limits in limits_with(sms)}
    assert reachable(problem, 400, ARCH, SMS) == tuple(sorted(asked))

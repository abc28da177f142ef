"""Selection: total, closed over the kernel set, and the same for a plan as for a call."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
    BF16_GEMM,
    CAST_TO_FP8,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    MAX_GROUPS,
    N_MAJOR,
    ROW_SCALES,
    SCALE_LAYOUT,
    GemmProblem,
    KernelSpec,
    Layout,
    Limits,
    Overlap,
    StepProblem,
    is_gemm,
    kernel_set,
    limits_of,
    reachable,
    select,
    selected,
)

pytestmark = pytest.mark.none

ARCH = "sm_90a"
SM_COUNTS = (16, 78, 132, 148)
GROUPED = (Layout.CONTIGUOUS, Layout.PREFIX_SUMS, Layout.MASKED)
DTYPES = {
    FP8_GEMM: ("e4m3", "e4m3", "bf16"),
    FP4_GEMM_SWAP_AB: ("e4m3", "e2m1", "bf16"),
    BF16_GEMM: ("bf16", "bf16", "bf16"),
}
VARIANTS = ((FP8_GEMM, ()), (FP8_GEMM, (ROW_SCALES,)), (FP4_GEMM_SWAP_AB, ()), (BF16_GEMM, ()), (BF16_GEMM, (N_MAJOR,)))
PROBLEMS_PER_CASE = 100_000 // (len(Layout) * len(SM_COUNTS))


def _limits(sms: int = 132) -> Limits:
    return limits_of(ARCH, sms)


def _random_problem(chance: random.Random, layout: Layout) -> GemmProblem:
    family, variant = chance.choice(VARIANTS)
    return GemmProblem(
        m=chance.choice((chance.randint(0, 256), chance.randint(0, 16384), chance.randint(0, 2**31))),
        n=8 * chance.randint(8, 4096),
        k=16 * chance.randint(1, 2048),
        groups=1 if layout is Layout.DENSE else chance.randint(1, 384),
        layout=layout,
        alignment=chance.choice((64, 128, 192, 256) if family == BF16_GEMM or variant else (16, 32, 48, 64, 128, 192, 256)),
        dtypes=DTYPES[family],
        variant=variant,
    )


def _suggested(error: UnsupportedError, name: str, given: int) -> list[int]:
    """Return the values that a refusal suggests for ``name``; the given one where it found no fault."""
    found = re.search(rf"nearest {name}: (\d+)(?: or (\d+))?", str(error))
    return [int(value) for value in found.groups() if value] if found else [given]


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("layout", Layout)
def test_any_valid_problem_gets_a_kernel_of_the_set(layout: Layout, sms: int) -> None:
    chance = random.Random(f"{layout} {sms}")
    members, limits, chosen = set(kernel_set(ARCH)), _limits(sms), set()
    for _ in range(PROBLEMS_PER_CASE):
        problem = _random_problem(chance, layout)
        spec = select(problem, limits)
        assert spec in members, problem
        assert (spec.dtypes, spec.flags) == (problem.dtypes, problem.variant)
        # Where ends are known and groups start at any multiple of 16 rows, a tile keeps nothing of a group that it reaches into.
        if layout is Layout.CONTIGUOUS or (layout is Layout.PREFIX_SUMS and problem.alignment % 64 == 0):
            assert problem.alignment % spec.block[0] == 0, f"a tile of {spec.name} spans two groups of {problem}"
        chosen.add(spec)
    assert len(chosen) > 1


def test_every_kernel_of_the_set_is_chosen_by_some_problem() -> None:
    chance = random.Random(2)
    steps = [spec for spec in kernel_set(ARCH) if not is_gemm(spec)]
    chosen: set[KernelSpec] = {select(StepProblem(spec.family, spec.dtypes), _limits()) for spec in steps}
    for _ in range(20_000):
        layout, sms = chance.choice(list(Layout)), chance.choice(SM_COUNTS)
        chosen.add(select(_random_problem(chance, layout), _limits(sms)))
    assert sorted(chosen) == sorted(kernel_set(ARCH))


@pytest.mark.parametrize(
    ("k", "n", "faults"),
    [
        (577, 7168, ("K = 577",)),
        (7168, 100, ("N = 100",)),
        (100, 100, ("K = 100", "N = 100")),
        (0, 128, ("K = 0",)),
        (128, 4, ("N = 4",)),
        (8, 0, ("K = 8", "N = 0")),
        (-16, -8, ("K = -16", "N = -8")),
        (577, -3, ("K = 577", "N = -3")),
    ],
)
@pytest.mark.parametrize("layout", Layout)
def test_a_refusal_lists_every_fault_and_what_it_suggests_passes(layout: Layout, k: int, n: int, faults: tuple[str, ...]) -> None:
    problem = GemmProblem(m=128, n=n, k=k, layout=layout)
    with pytest.raises(UnsupportedError) as refusal:
        select(problem, _limits())
    assert set(refusal.value.given.split(", ")) == set(faults)
    for better_n in _suggested(refusal.value, "N", n):
        for better_k in _suggested(refusal.value, "K", k):
            assert select(replace(problem, n=better_n, k=better_k), _limits()) in kernel_set(ARCH)


def test_random_sizes_are_served_or_refused_with_sizes_that_are_served() -> None:
    chance = random.Random(3)
    refused = 0
    for _ in range(5000):
        problem = GemmProblem(m=chance.randint(0, 9999), n=chance.randint(-64, 9999), k=chance.randint(-64, 9999))
        try:
            select(problem, _limits())
        except UnsupportedError as error:
            refused += 1
            for n in _suggested(error, "N", problem.n):
                for k in _suggested(error, "K", problem.k):
                    select(replace(problem, n=n, k=k), _limits())
        else:
            assert problem.n % 8 == problem.k % 16 == 0
    assert 0 < refused < 5000


@pytest.mark.parametrize("size", ["128", 100.5, None, (128,), [128], {}])
@pytest.mark.parametrize("field", ["m", "n", "k", "groups", "alignment"])
def test_a_size_that_is_no_whole_number_is_refused(field: str, size: Any) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(repr(size))):
        select(replace(GemmProblem(m=128, n=128, k=128), **{field: size}), _limits())


@pytest.mark.parametrize("size", [2**31, 2**63, 10**5000], ids=["2^31", "2^63", "5001 digits"])
@pytest.mark.parametrize("field", ["m", "n", "k", "groups", "alignment"])
def test_a_size_beyond_31_bits_is_refused(field: str, size: Any) -> None:
    problem = GemmProblem(m=128, n=128, k=128, groups=2, layout=Layout.CONTIGUOUS)
    with pytest.raises(UnsupportedError, match=f"{field if field in ('groups', 'alignment') else field.upper()} below 2"):
        select(replace(problem, **{field: size}), _limits())


VALID = GemmProblem(m=128, n=128, k=128)


@pytest.mark.parametrize(
    ("problem", "limits", "faults"),
    [
        (None, None, ["problem is None", "limits is None"]),
        ([], {}, ["problem is []", "limits is {}"]),
        (VALID, "sm_90a", ["limits is 'sm_90a'"]),
        (replace(VALID, dtypes=["e4m3"] * 3), _limits(), ["dtypes is ['e4m3', 'e4m3', 'e4m3']"]),  # type: ignore[arg-type]
        (replace(VALID, dtypes=None), None, ["dtypes is None", "limits is None"]),  # type: ignore[arg-type]
        (replace(VALID, layout=0, variant="row_scales"), _limits(), ["layout is 0", "variant is 'row_scales'"]),  # type: ignore[arg-type]
        (StepProblem([], ("f32",)), _limits(), ["family is []"]),  # type: ignore[arg-type]
        (StepProblem(SCALE_LAYOUT, (1,)), _limits(), ["dtypes is (1,)"]),  # type: ignore[arg-type]
        (VALID, replace(_limits(), overlap="start"), ["overlap of the limits is 'start'"]),  # type: ignore[arg-type]
        (VALID, Limits(ARCH, [1], "1"), ["sms of the limits is [1]", "shared_memory_bytes of the limits is '1'"]),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_problem_or_no_limits_is_refused_hashable_or_not(problem: Any, limits: Any, faults: list[str]) -> None:
    with pytest.raises(OperandError) as refusal:
        select(problem, limits)
    assert [fault for fault in faults if fault not in str(refusal.value)] == []
    assert len(refusal.value.faults) == len(faults)


def test_limits_of_an_arch_that_is_no_name_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        select(VALID, Limits([ARCH], 132, 1))  # type: ignore[arg-type]


def test_a_plan_of_no_problem_is_refused() -> None:
    with pytest.raises(OperandError, match="problem is None"):
        reachable(None, 128, ARCH, (132,))  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [0, -1, -5])
def test_a_hint_of_no_rows_still_gets_a_kernel(m: int) -> None:
    assert select(GemmProblem(m=m, n=4096, k=7168, groups=4, layout=Layout.MASKED), _limits()).family == FP8_GEMM_SWAP_AB


@pytest.mark.parametrize("layout", GROUPED)
@pytest.mark.parametrize("groups", [0, -1])
def test_no_groups_is_refused(layout: Layout, groups: int) -> None:
    with pytest.raises(UnsupportedError, match="groups"):
        select(GemmProblem(m=128, n=128, k=128, groups=groups, layout=layout), _limits())


@pytest.mark.parametrize("layout", [Layout.PREFIX_SUMS, Layout.MASKED])
def test_groups_end_where_their_tiles_are_counted_in_shared_memory(layout: Layout) -> None:
    problem = GemmProblem(m=128, n=128, k=128, groups=MAX_GROUPS, layout=layout)
    select(problem, _limits())
    with pytest.raises(UnsupportedError, match=f"1 to {MAX_GROUPS} groups"):
        select(replace(problem, groups=MAX_GROUPS + 1), _limits())
    select(replace(problem, groups=MAX_GROUPS + 1, layout=Layout.CONTIGUOUS), _limits())


@pytest.mark.parametrize("alignment", [0, -128, 1, 8, 40])
@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.PREFIX_SUMS])
def test_an_alignment_no_tile_divides_is_refused(layout: Layout, alignment: int) -> None:
    with pytest.raises(UnsupportedError, match="align groups to 16 or 128"):
        select(GemmProblem(m=128, n=128, k=128, groups=2, layout=layout, alignment=alignment), _limits())


@pytest.mark.parametrize("alignment", [16, 32, 48, 96])
@pytest.mark.parametrize(("family", "variant"), [(FP8_GEMM, (ROW_SCALES,)), (BF16_GEMM, ()), (BF16_GEMM, (N_MAJOR,))])
def test_groups_of_fewer_rows_than_64_need_swapped_operands(family: str, variant: tuple[str, ...], alignment: int) -> None:
    problem = GemmProblem(m=128, n=128, k=128, groups=2, layout=Layout.CONTIGUOUS, alignment=alignment)
    assert select(problem, _limits()).family == FP8_GEMM_SWAP_AB
    with pytest.raises(UnsupportedError, match="align groups to 64 or 128"):
        select(replace(problem, dtypes=DTYPES[family], variant=variant), _limits())


@pytest.mark.parametrize("dtypes", [("e5m2", "e4m3", "bf16"), ("bf16", "bf16", "f32"), ("e4m3", "e4m3", "f32")])
def test_dtypes_without_a_kernel_are_refused_with_those_that_have_one(dtypes: tuple[str, str, str]) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        select(GemmProblem(m=128, n=128, k=128, dtypes=dtypes), _limits())
    assert "e4m3 x e4m3 -> bf16" in refusal.value.supported


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("m", [1, 16, 64, 65, 100_000])
def test_fp4_weights_are_served_by_swapped_operands_whatever_the_rows(layout: Layout, m: int) -> None:
    problem = GemmProblem(m=m, n=4096, k=7168, layout=layout, dtypes=DTYPES[FP4_GEMM_SWAP_AB])
    assert select(problem, _limits()).family == FP4_GEMM_SWAP_AB


def test_the_small_kernels_are_chosen_by_what_they_read() -> None:
    bf16, f32 = (select(StepProblem(CAST_TO_FP8, (dtype, "e4m3")), _limits()) for dtype in ("bf16", "f32"))
    assert (bf16.family, bf16.dtypes[0], f32.family, f32.dtypes[0]) == (CAST_TO_FP8, "bf16", CAST_TO_FP8, "f32")
    assert select(StepProblem(SCALE_LAYOUT, ("f32",)), _limits()).family == SCALE_LAYOUT
    with pytest.raises(UnsupportedError, match="bf16 -> e4m3, f32 -> e4m3"):
        select(StepProblem(CAST_TO_FP8, ("f16", "e4m3")), _limits())
    with pytest.raises(UnsupportedError, match=CAST_TO_FP8):
        select(StepProblem("no_such_step", ("f32",)), _limits())


@pytest.mark.parametrize(
    ("family", "variant", "served"),
    [
        (FP8_GEMM, (N_MAJOR,), "none; row_scales"),
        (BF16_GEMM, (ROW_SCALES,), "none; n_major"),
        (FP8_GEMM, ("fast",), "none; row_scales"),
        (FP4_GEMM_SWAP_AB, (ROW_SCALES,), "none"),
    ],
)
def test_a_variant_without_a_kernel_is_refused_with_those_that_have_one(
    family: str, variant: tuple[str, ...], served: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"supported: {served}\\b"):
        select(GemmProblem(m=128, n=128, k=128, dtypes=DTYPES[family], variant=variant), _limits())


def test_a_dense_layout_has_one_group() -> None:
    with pytest.raises(UnsupportedError, match="2 groups of a dense layout"):
        select(GemmProblem(m=128, n=128, k=128, groups=2), _limits())


def test_an_unknown_arch_is_refused_by_selection_too() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        select(StepProblem(SCALE_LAYOUT, ("f32",)), Limits("sm_80", 108, 163 * 1024))


@pytest.mark.parametrize(
    ("layout", "groups", "n"),
    [
        *((Layout.DENSE, 1, n) for n in (64, 576, 2112, 7168, 24576)),
        *((layout, groups, n) for layout in GROUPED for groups, n in ((1, 576), (8, 1536), (128, 2048), (256, 4096))),
    ],
)
@pytest.mark.parametrize("alignment", [64, 128])
def test_a_plan_holds_all_that_any_m_on_any_device_selects(layout: Layout, groups: int, n: int, alignment: int) -> None:
    """Compares the plan's breakpoints with every single M; small SM counts are where many waves come early."""
    problem = GemmProblem(m=1, n=n, k=512, groups=groups, layout=layout, alignment=alignment)
    for sms in ((1,), (16, 78), (132, 148)):
        for max_m in (1, 63, 64, 65, 200, 3000):
            limits = [replace(_limits(count), overlap=overlap) for count in sms for overlap in Overlap]
            asked = {select(replace(problem, m=m), each) for m in range(1, max_m + 1) for each in limits}
            planned = reachable(problem, max_m, ARCH, sms)
            assert asked <= set(planned), f"max_m {max_m}, SMs {sms}"
            assert planned == tuple(sorted(asked)), f"max_m {max_m}, SMs {sms}: planned and never asked for"


def test_how_launches_overlap_tells_splits_and_kernels_of_few_rows_apart() -> None:
    def chosen(overlap: Overlap, n: int, k: int) -> tuple[str, int]:
        found = selected(GemmProblem(m=16, n=n, k=k), replace(limits_of(ARCH, 132), overlap=overlap))
        return found.spec.family, found.split_k

    # Clusters of four fill the SMs, on which those of the next launch wait.
    assert [chosen(overlap, 2112, 7168)[1] for overlap in Overlap] == [4, 2, 4]
    assert [chosen(overlap, 1024, 7168)[1] for overlap in Overlap] == [4, 4, 4]
    assert [chosen(overlap, 7168, 2048) for overlap in Overlap] == [chosen(Overlap.NONE, 7168, 2048)] * 3
    # Only kernels with swapped operands read weights before they wait.
    families = [chosen(overlap, 32768, 512)[0] for overlap in Overlap]
    assert families == [FP8_GEMM, FP8_GEMM, FP8_GEMM_SWAP_AB]


@pytest.mark.parametrize("layout", GROUPED)
def test_weights_of_groups_are_never_taken_for_constant(layout: Layout) -> None:
    told_apart = 0
    for groups, n, k, m in itertools.product((2, 6, 32), (64, 512, 2112, 32768), (512, 7168, 16384), (1, 16, 64, 128)):
        problem = GemmProblem(m, n, k, groups, layout, alignment=16 if layout is Layout.PREFIX_SUMS else 32)
        none, start, weights = (selected(problem, replace(limits_of(ARCH, 132), overlap=overlap)) for overlap in Overlap)
        assert weights == start
        told_apart += start != none
    assert told_apart or layout is Layout.PREFIX_SUMS  # whose forwards always overlap


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("n", [64, 2112, 24576])
def test_a_plan_for_any_number_of_rows_is_complete(layout: Layout, n: int) -> None:
    chance = random.Random(f"{layout} {n}")
    problem = GemmProblem(m=1, n=n, k=512, groups=1 if layout is Layout.DENSE else 8, layout=layout)
    planned = set(reachable(problem, 2**31, ARCH, SM_COUNTS))
    for _ in range(1000):
        m = chance.choice((chance.randint(1, 16384), chance.randint(1, 2**31)))
        assert select(replace(problem, m=m), _limits(chance.choice(SM_COUNTS))) in planned, m

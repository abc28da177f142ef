"""FP8 GEMMs on a GPU: right numbers against float64 in every layout, every row that must be written, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import (
    GroupedRows,
    Output,
    Scaled,
    assert_close,
    clean_rows,
    every_third_block_idle,
    group_rows,
    m_major,
    poison_rows,
    product,
    random_a,
    random_b,
    used_rows,
)

from deepgemm_jit import ops
from deepgemm_jit.spec import FP8_GEMM, FP8_GEMM_SWAP_AB, GemmProblem, Layout, Selected, kernel_set, limits_of, select

pytestmark = pytest.mark.gpu

GEMMS = [spec for spec in kernel_set("sm_90a") if spec.family in (FP8_GEMM, FP8_GEMM_SWAP_AB) and not spec.flags]
# Each kernel as it can be launched: those with swapped operands also with K split over a cluster.
CHOICES = [
    pytest.param(Selected(spec, split), id=spec.name + (f"_split{split}" if split > 1 else ""))
    for spec in GEMMS
    for split in ((1, 2, 4) if spec.family == FP8_GEMM_SWAP_AB else (1,))
]
REPEATS = 200
"""A stage that is given back too early shows in some runs only."""

DENSE_M = (1, 7, 64, 127, 128, 4096)
DENSE_N_K = ((2112, 7168), (576, 7168), (4096, 7168), (7168, 2048), (24576, 1536), (5760, 2880))
LONG = (1024, 2048, 4096)
"""Few tiles of many k-blocks: for clusters of 128-row tiles."""
SMALL_N_K = ((8, 16), (24, 48), (64, 128), (104, 144), (120, 272), (136, 400))
GROUPS_N_K = ((1, 4096, 7168), (4, 2112, 7168), (33, 576, 1056), (128, 1536, 2048), (256, 104, 144))

_SIZES = (130, 0, 1, 7, 64, 257, 0, 127, 128, 129, 33)
MAX_M = 272  # above every size, a multiple of no tile


def uneven(groups: int) -> list[int]:
    """Return sizes of groups, some of them empty."""
    return [_SIZES[group % len(_SIZES)] for group in range(groups)]


def with_m_major_scales(a: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    return a.values, m_major(a.scales)


def with_nan_after(b: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B whose scales are followed by a row of NaN in each group: a tile that hangs over N must not use it."""
    longer = torch.nn.functional.pad(b.scales, (0, 0, 0, 1), value=torch.nan)
    return b.values, longer[..., :-1, :]


def check_contiguous(rows: GroupedRows, n: int, k: int, *, prefix_sums: bool, alignment: int = 128) -> None:
    """Run with clean and with poisoned padding and check all that the contiguous layouts promise."""
    a, b = random_a(rows.total, k), random_b(len(rows.sizes), n, k)
    largest_tile = max(spec.block[0] for spec in GEMMS if alignment % spec.block[0] == 0)
    valid, tails = rows.valid(), rows.tails(largest_tile)
    group_data = rows.ends() if prefix_sums else rows.m_indices()

    def run(fill: Callable[[Scaled, torch.Tensor], Scaled]) -> Output:
        out = Output(rows.total, n)
        ops.m_grouped_fp8_gemm_nt_contiguous(
            with_m_major_scales(fill(a, valid)),
            with_nan_after(b),
            out.tensor,
            group_data,
            use_psum_layout=prefix_sums,
            alignment=alignment,
        )
        out.assert_written(must=valid, may=tails)
        return out

    out, poisoned = run(clean_rows), run(poison_rows)
    assert torch.equal(out.bits()[valid], poisoned.bits()[valid]), "valid rows depend on what padding holds"
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(a[part], b[group]), f"group {group} of {rows.sizes[group]} rows")


def check_masked(counts: Sequence[int], max_m: int, n: int, k: int, expected_m: int) -> None:
    """Run with clean and with poisoned unused rows and check all that the masked layout promises."""
    groups = len(counts)
    a, b = random_a(groups, max_m, k), random_b(groups, n, k)
    used = used_rows(counts, max_m)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")

    def run(fill: Callable[[Scaled, torch.Tensor], Scaled]) -> Output:
        out = Output(groups, max_m, n)
        ops.m_grouped_fp8_gemm_nt_masked(with_m_major_scales(fill(a, used)), with_nan_after(b), out.tensor, masked_m, expected_m)
        out.assert_written(must=used)
        return out

    out, poisoned = run(clean_rows), run(poison_rows)
    assert torch.equal(out.bits()[used], poisoned.bits()[used]), "used rows depend on what unused rows hold"
    for group, count in enumerate(counts):
        what = f"group {group} of {count} rows"
        assert_close(out.tensor[group, :count], product(a[group][:count], b[group]), what)


# --- dense


def check_dense(m: int, n: int, k: int) -> None:
    # NaN rows follow those of A: a tile that hangs over the end must not read them into a result.
    longer, b = random_a(m + 3, k), random_b(n, k)
    inside = torch.arange(m + 3, device="cuda") < m
    values, scales = with_m_major_scales(poison_rows(longer, inside))
    out = Output(m, n)
    ops.fp8_gemm_nt((values[:m], scales[:m]), with_nan_after(b), out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(longer[:m], b), f"M, N, K = {m}, {n}, {k}")


@pytest.mark.parametrize(("n", "k"), DENSE_N_K + SMALL_N_K)
@pytest.mark.parametrize("m", DENSE_M)
def test_dense_is_right(m: int, n: int, k: int) -> None:
    check_dense(m, n, k)


def test_dense_is_right_where_clusters_share_a() -> None:
    check_dense(*LONG)


# --- contiguous


@pytest.mark.parametrize("prefix_sums", [False, True], ids=["row_index", "prefix_sums"])
@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_contiguous_groups_are_right(groups: int, n: int, k: int, prefix_sums: bool) -> None:
    check_contiguous(group_rows(uneven(groups), extra_rows=128), n, k, prefix_sums=prefix_sums)


@pytest.mark.parametrize("prefix_sums", [False, True], ids=["row_index", "prefix_sums"])
@pytest.mark.parametrize("alignment", [16, 32, 64, 128, 192, 256])
@pytest.mark.parametrize("sizes", [(1, 7, 64, 127, 129), (128, 0, 0, 5, 0, 0, 0, 123), (0, 0, 300), (300, 0, 0)], ids=str)
def test_groups_start_at_any_alignment(sizes: tuple[int, ...], alignment: int, prefix_sums: bool) -> None:
    rows = group_rows(sizes, alignment, extra_rows=alignment)
    check_contiguous(rows, 264, 272, prefix_sums=prefix_sums, alignment=alignment)


@pytest.mark.parametrize("prefix_sums", [False, True], ids=["row_index", "prefix_sums"])
def test_the_last_group_needs_no_padding(prefix_sums: bool) -> None:
    check_contiguous(group_rows((100, 33, 7), ragged_end=True), 264, 272, prefix_sums=prefix_sums)


# --- masked


@pytest.mark.parametrize("expected_m", [16, 128])
@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_masked_groups_are_right(groups: int, n: int, k: int, expected_m: int) -> None:
    check_masked(uneven(groups), MAX_M, n, k, expected_m)


@pytest.mark.parametrize("expected_m", [-1, 0, 1, 129, 1 << 40])
def test_a_wrong_hint_skips_no_row(expected_m: int) -> None:
    check_masked((128, 0, 0, 5, 0, 0, MAX_M, 123), MAX_M, 576, 400, expected_m)


@pytest.mark.parametrize("max_m", [8, 16, 32])
def test_masked_groups_of_few_rows_are_right(max_m: int) -> None:
    check_masked(range(max_m + 1), max_m, 576, 272, max_m)


# --- random problems


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("seed", range(10))
def test_a_random_problem_is_right(seed: int, layout: Layout) -> None:
    draw = random.Random(f"{seed} {layout}")

    def size(largest: int, step: int) -> int:
        return step * round((largest // step) ** draw.random())  # small ones as often as large ones

    n, k = size(8192, 8), size(8192, 16)
    if layout is Layout.DENSE:
        check_dense(size(8192, 1), n, k)
        return
    groups = size(64, 1)
    largest = size(8192 // groups, 1)
    sizes = [draw.choice((0, size(largest, 1), largest)) for _ in range(groups)]
    if layout is Layout.MASKED:
        check_masked(sizes, largest, n, k, expected_m=size(2 * largest, 1))
    else:
        alignment = 16 * draw.randint(1, 16)
        rows = group_rows(sizes, alignment, extra_rows=alignment)
        check_contiguous(rows, n, k, prefix_sums=layout is Layout.PREFIX_SUMS, alignment=alignment)


# --- every kernel


def problems_of_this_file() -> list[GemmProblem]:
    dense = [GemmProblem(m, n, k) for n, k in DENSE_N_K + SMALL_N_K for m in DENSE_M] + [GemmProblem(*LONG)]
    contiguous = [
        GemmProblem(group_rows(uneven(groups), extra_rows=128).total, n, k, groups, layout)
        for groups, n, k in GROUPS_N_K
        for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS)
    ]
    masked = [GemmProblem(m, n, k, groups, Layout.MASKED) for groups, n, k in GROUPS_N_K for m in (16, 128)]
    return dense + contiguous + masked


def test_selection_reaches_every_gemm_kernel_with_these_problems() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    limits = limits_of("sm_90a")
    if sms != limits.sms:
        pytest.skip(f"the problems are chosen for {limits.sms} SMs, this GPU has {sms}")
    assert {select(problem, limits) for problem in problems_of_this_file()} == set(GEMMS)


@pytest.mark.parametrize("columns", [200, 264])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_kernel_is_right_in_every_layout(
    choice: Selected, layout: Layout, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def forced(problem: GemmProblem, _limits: object) -> Selected:
        asked.append(problem.layout)
        return choice

    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", forced)
    block_m = choice.spec.block[0]
    k, sizes = 1296, (130, 0, 1, 257, 64)  # more k-blocks than stages
    if layout is Layout.DENSE:
        check_dense(300, columns, k)
    elif layout is Layout.MASKED:
        check_masked(sizes, MAX_M, columns, k, expected_m=64)
    else:
        rows = group_rows(sizes, alignment=block_m, extra_rows=block_m)
        prefix_sums = layout is Layout.PREFIX_SUMS
        check_contiguous(rows, columns, k, prefix_sums=prefix_sums, alignment=block_m)
    assert set(asked) == {layout}


@pytest.mark.parametrize("k_blocks", [1, 2, 7])
@pytest.mark.parametrize("choice", CHOICES)
def test_every_kernel_takes_more_tiles_than_blocks(choice: Selected, k_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice.split_k > k_blocks:
        pytest.skip("each block of a cluster sums some k-blocks")
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: choice)
    check_dense(2500, 2056, 128 * k_blocks - 112)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_kernel_passes_over_rows_of_no_group(choice: Selected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: choice)
    block_m = choice.spec.block[0]
    check_contiguous(every_third_block_idle(block_m), 264, 528, prefix_sums=False, alignment=block_m)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("m", "n", "k"), [(130, 2112, 1040), (256, 4096, 2048)])
def test_every_kernel_gives_the_same_bits_on_every_run(
    choice: Selected, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: choice)
    a, b = random_a(m, k), random_b(n, k)
    first, again = Output(m, n), Output(m, n)
    ops.fp8_gemm_nt(with_m_major_scales(a), (b.values, b.scales), first.tensor)
    assert_close(first.tensor, product(a, b), f"M, N, K = {m}, {n}, {k}")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again.tensor.fill_(torch.nan)
        ops.fp8_gemm_nt(with_m_major_scales(a), (b.values, b.scales), again.tensor)
        differing += (again.tensor.view(torch.int16) != first.tensor.view(torch.int16)).sum()
    assert differing.item() == 0

"""FP8 GEMMs whose B has a scale per row and 128 columns: what experts with (1, 128) or per-tensor weight scales run on."""

from __future__ import annotations

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
    cast_rows,
    clean_rows,
    dequantize,
    group_rows,
    m_major,
    poison_rows,
    random_a,
    used_rows,
)

from deepgemm_jit.ops.launching import call_on, kernel_for, run_gemm
from deepgemm_jit.spec import FP8_GEMM, ROW_SCALES, GemmProblem, KernelSpec, Layout, Selected, kernel_set

pytestmark = pytest.mark.gpu

DTYPES = ("e4m3", "e4m3", "bf16")
GEMMS = [spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM and ROW_SCALES in spec.flags]

DENSE_M = (1, 7, 127, 128, 2048)
N_K = ((8, 16), (24, 48), (104, 144), (136, 400), (576, 7168), (2112, 1536), (5760, 2880))
GROUPS_N_K = ((1, 4096, 7168), (33, 2880, 1440), (128, 1536, 2048), (256, 104, 144))

_SIZES = (130, 0, 1, 7, 64, 257, 0, 127, 128, 129, 33)
MAX_M = 272  # above every size, a multiple of no tile


def uneven(groups: int) -> list[int]:
    """Return sizes of groups, some of them empty."""
    return [_SIZES[group % len(_SIZES)] for group in range(groups)]


def random_b(*shape: int) -> Scaled:
    """Draw (..., N, K) weights, cast per row and 128 columns; rows differ in size by a factor of up to three."""
    x = torch.randn(shape, device="cuda") * (0.025 + 0.05 * torch.rand((*shape[:-1], 1), device="cuda"))
    return Scaled(*cast_rows(x))


def product(a: Scaled, b: Scaled) -> torch.Tensor:
    return dequantize(a.values, a.scales, 1) @ dequantize(b.values, b.scales, 1).T


def multiply(
    a: Scaled, b: Scaled, out: torch.Tensor, layout: Layout, group_data: torch.Tensor | None, rows: int, alignment: int = 128
) -> None:
    """Run the GEMM as the experts forward does; padding of both scales holds NaN."""
    groups = 1 if layout is Layout.DENSE else b.values.shape[0]
    n, k = b.values.shape[-2:]
    problem = GemmProblem(rows, n, k, groups, layout, alignment, DTYPES, (ROW_SCALES,))
    with call_on(a.values) as call:
        run_gemm(
            call, kernel_for(call, problem), problem, a.values, b.values, out, group_data, (m_major(a.scales), m_major(b.scales))
        )


def check_dense(m: int, n: int, k: int) -> None:
    # NaN rows follow those of A: a tile that hangs over the end must not read them into a result.
    longer, b = random_a(m + 3, k), random_b(n, k)
    a = poison_rows(longer, torch.arange(m + 3, device="cuda") < m)[:m]
    out = Output(m, n)
    multiply(a, b, out.tensor, Layout.DENSE, None, m)
    out.assert_written()
    assert_close(out.tensor, product(a, b), f"M, N, K = {m}, {n}, {k}")


def check_contiguous(rows: GroupedRows, n: int, k: int, layout: Layout, alignment: int = 128) -> None:
    """Run with clean and with poisoned padding and check all that the contiguous layouts promise."""
    a, b = random_a(rows.total, k), random_b(len(rows.sizes), n, k)
    largest_tile = max(spec.block[0] for spec in GEMMS if alignment % spec.block[0] == 0)
    valid, tails = rows.valid(), rows.tails(largest_tile)
    group_data = rows.ends() if layout is Layout.PREFIX_SUMS else rows.m_indices()

    def run(fill: Callable[[Scaled, torch.Tensor], Scaled]) -> Output:
        out = Output(rows.total, n)
        multiply(fill(a, valid), b, out.tensor, layout, group_data, rows.total, alignment)
        out.assert_written(must=valid, may=tails)
        return out

    out, poisoned = run(clean_rows), run(poison_rows)
    assert torch.equal(out.bits()[valid], poisoned.bits()[valid]), "valid rows depend on what padding holds"
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(a[part], b[group]), f"group {group} of {rows.sizes[group]} rows")


def check_masked(counts: Sequence[int], n: int, k: int, expected_m: int) -> None:
    """Run with clean and with poisoned unused rows and check all that the masked layout promises."""
    a, b = random_a(len(counts), MAX_M, k), random_b(len(counts), n, k)
    used = used_rows(counts, MAX_M)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")

    def run(fill: Callable[[Scaled, torch.Tensor], Scaled]) -> Output:
        out = Output(len(counts), MAX_M, n)
        multiply(fill(a, used), b, out.tensor, Layout.MASKED, masked_m, expected_m)
        out.assert_written(must=used)
        return out

    out, poisoned = run(clean_rows), run(poison_rows)
    assert torch.equal(out.bits()[used], poisoned.bits()[used]), "used rows depend on what unused rows hold"
    for group, count in enumerate(counts):
        assert_close(out.tensor[group, :count], product(a[group][:count], b[group]), f"group {group} of {count} rows")


@pytest.mark.parametrize(("n", "k"), N_K)
@pytest.mark.parametrize("m", DENSE_M)
def test_dense_is_right(m: int, n: int, k: int) -> None:
    check_dense(m, n, k)


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.PREFIX_SUMS], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_contiguous_groups_are_right(groups: int, n: int, k: int, layout: Layout) -> None:
    check_contiguous(group_rows(uneven(groups), extra_rows=128), n, k, layout)


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("sizes", [(1, 7, 64, 127, 129), (128, 0, 0, 5, 0, 0, 0, 123), (0, 0, 300)], ids=str)
def test_groups_start_at_any_alignment(sizes: tuple[int, ...], alignment: int) -> None:
    check_contiguous(group_rows(sizes, alignment, extra_rows=alignment), 264, 272, Layout.PREFIX_SUMS, alignment)


@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_masked_groups_are_right(groups: int, n: int, k: int) -> None:
    check_masked(uneven(groups), n, k, expected_m=64)


@pytest.mark.parametrize("columns", [200, 264])
@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_every_kernel_is_right_in_every_layout(
    spec: KernelSpec, layout: Layout, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def forced(problem: GemmProblem, _limits: object) -> Selected:
        asked.append(problem.layout)
        return Selected(spec)

    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", forced)
    block_m, k, sizes = spec.block[0], 1296, (130, 0, 1, 257, 64)  # more k-blocks than stages
    if layout is Layout.DENSE:
        check_dense(300, columns, k)
    elif layout is Layout.MASKED:
        check_masked(sizes, columns, k, expected_m=64)
    else:
        check_contiguous(group_rows(sizes, alignment=block_m, extra_rows=block_m), columns, k, layout, block_m)
    assert set(asked) == {layout}


@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_every_kernel_takes_more_tiles_than_blocks(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: Selected(spec))
    check_dense(2500, 2056, 272)


def test_equal_scales_in_a_block_give_what_the_block_kernel_gives() -> None:
    """Per-tensor and per-block weights may take either kernel."""
    a, rows = random_a(300, 1040), random_b(264, 1040)
    blocks = rows.scales[::128].contiguous()
    b = Scaled(rows.values, blocks.repeat_interleave(128, 0)[:264])
    out, other = Output(300, 264), Output(300, 264)
    multiply(a, b, out.tensor, Layout.DENSE, None, 300)
    with call_on(a.values) as call:
        problem = GemmProblem(300, 264, 1040)
        run_gemm(call, kernel_for(call, problem), problem, a.values, b.values, other.tensor, None, (m_major(a.scales), blocks))
    assert_close(out.tensor, other.tensor.double(), "row scales against block scales")

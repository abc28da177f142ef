"""BF16 GEMMs on a GPU, B lying either way: right numbers against float64 in every layout, every row written, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import GroupedRows, Output, assert_close, every_third_block_idle, group_rows, used_rows

from deepgemm_jit import ops
from deepgemm_jit.spec import BF16_GEMM, N_MAJOR, GemmProblem, KernelSpec, Layout, Selected, kernel_set, limits_of, select

pytestmark = pytest.mark.gpu

GEMMS = [spec for spec in kernel_set("sm_90a") if spec.family == BF16_GEMM]
DTYPES = ("bf16", "bf16", "bf16")

DENSE_M = (1, 7, 64, 127, 128, 2048)
DENSE_N_K = ((2112, 7168), (576, 7168), (7168, 2048), (5760, 2880), (4096, 512), (7168, 7168))
SMALL_N_K = ((8, 8), (16, 24), (24, 40), (64, 64), (104, 72), (120, 136), (136, 200))
GROUPS_N_K = ((1, 4096, 7168), (4, 2112, 7168), (33, 576, 1048), (128, 1536, 2048), (256, 104, 72))

LARGE_GROUPS, LARGE_N_K = (4000, 4096), (4096, 520)
"""Groups so large that clusters share A."""

_SIZES = (130, 0, 1, 7, 64, 257, 0, 127, 128, 129, 33)
MAX_M = 272  # above every size, a multiple of no tile

both_ways = pytest.mark.parametrize("n_major", [False, True], ids=["nt", "nn"])
both_contiguous = pytest.mark.parametrize("prefix_sums", [False, True], ids=["row_index", "prefix_sums"])


def uneven(groups: int) -> list[int]:
    """Return sizes of groups, some of them empty."""
    return [_SIZES[group % len(_SIZES)] for group in range(groups)]


def random_a(*shape: int) -> torch.Tensor:
    """Draw (..., M, K) whose rows differ in size by a factor of up to three."""
    return (torch.randn(shape, device="cuda") * (0.5 + torch.rand((*shape[:-1], 1), device="cuda"))).bfloat16()


def random_b(*groups: int, n: int, k: int, n_major: bool) -> torch.Tensor:
    """Draw (..., N, K), or (..., K, N) when N-major."""
    return torch.randn((*groups, *((k, n) if n_major else (n, k))), device="cuda").mul_(0.05).bfloat16()


def product(a: torch.Tensor, b: torch.Tensor, n_major: bool) -> torch.Tensor:
    return a.double() @ (b.double() if n_major else b.double().T)


def filled(a: torch.Tensor, valid: torch.Tensor, value: float) -> torch.Tensor:
    """Return A with every row that is not valid filled with a value."""
    return a.masked_fill(~valid[..., None], value)


def with_gap(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """Return the same values in rows that lie ``gap`` elements apart, with NaN in between."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + gap), torch.nan)
    strided = wide[..., : tensor.shape[-1]]
    strided.copy_(tensor)
    return strided


def contiguous_gemm(n_major: bool) -> Callable[..., None]:
    return ops.m_grouped_bf16_gemm_nn_contiguous if n_major else ops.m_grouped_bf16_gemm_nt_contiguous


def check_dense(m: int, n: int, k: int, n_major: bool) -> None:
    # NaN rows follow those of A: a tile that hangs over the end must not read them into a result.
    longer = torch.nn.functional.pad(random_a(m, k), (0, 0, 0, 3), value=torch.nan)
    b = random_b(n=n, k=k, n_major=n_major)
    out = Output(m, n)
    (ops.bf16_gemm_nn if n_major else ops.bf16_gemm_nt)(longer[:m], b, out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(longer[:m], b, n_major), f"M, N, K = {m}, {n}, {k}")


def check_contiguous(rows: GroupedRows, n: int, k: int, n_major: bool, *, prefix_sums: bool, alignment: int = 128) -> None:
    """Run with clean and with poisoned padding and check all that the contiguous layouts promise."""
    a, b = random_a(rows.total, k), random_b(len(rows.sizes), n=n, k=k, n_major=n_major)
    largest_tile = max(spec.block[0] for spec in GEMMS if alignment % spec.block[0] == 0)
    valid, tails = rows.valid(), rows.tails(largest_tile)
    group_data = rows.ends() if prefix_sums else rows.m_indices()

    def run(value: float) -> Output:
        out = Output(rows.total, n)
        contiguous_gemm(n_major)(
            filled(a, valid, value), b, out.tensor, group_data, use_psum_layout=prefix_sums, alignment=alignment
        )
        out.assert_written(must=valid, may=tails)
        return out

    out, poisoned = run(0.0), run(torch.nan)
    assert torch.equal(out.bits()[valid], poisoned.bits()[valid]), "valid rows depend on what padding holds"
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(a[part], b[group], n_major), f"group {group} of {rows.sizes[group]} rows")


def check_masked(counts: Sequence[int], max_m: int, n: int, k: int, expected_m: int) -> None:
    """Run with clean and with poisoned unused rows and check all that the masked layout promises."""
    a, b = random_a(len(counts), max_m, k), random_b(len(counts), n=n, k=k, n_major=False)
    used = used_rows(counts, max_m)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")

    def run(value: float) -> Output:
        out = Output(len(counts), max_m, n)
        ops.m_grouped_bf16_gemm_nt_masked(filled(a, used, value), b, out.tensor, masked_m, expected_m)
        out.assert_written(must=used)
        return out

    out, poisoned = run(0.0), run(torch.nan)
    assert torch.equal(out.bits()[used], poisoned.bits()[used]), "used rows depend on what unused rows hold"
    for group, count in enumerate(counts):
        assert_close(out.tensor[group, :count], product(a[group, :count], b[group], False), f"group {group} of {count} rows")


# --- layouts


@both_ways
@pytest.mark.parametrize(("n", "k"), DENSE_N_K + SMALL_N_K)
@pytest.mark.parametrize("m", DENSE_M)
def test_dense_is_right(m: int, n: int, k: int, n_major: bool) -> None:
    check_dense(m, n, k, n_major)


@both_ways
@both_contiguous
@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_contiguous_groups_are_right(groups: int, n: int, k: int, prefix_sums: bool, n_major: bool) -> None:
    check_contiguous(group_rows(uneven(groups), extra_rows=128), n, k, n_major, prefix_sums=prefix_sums)


@both_ways
@both_contiguous
def test_a_few_large_groups_are_right(prefix_sums: bool, n_major: bool) -> None:
    check_contiguous(group_rows(LARGE_GROUPS, extra_rows=128), *LARGE_N_K, n_major, prefix_sums=prefix_sums)


@both_ways
@both_contiguous
@pytest.mark.parametrize("alignment", [64, 128, 192, 256])
@pytest.mark.parametrize("sizes", [(1, 7, 64, 127, 129), (128, 0, 0, 5, 0, 0, 0, 123), (0, 0, 300), (300, 0, 0)], ids=str)
def test_groups_start_at_any_alignment(sizes: tuple[int, ...], alignment: int, prefix_sums: bool, n_major: bool) -> None:
    rows = group_rows(sizes, alignment, extra_rows=alignment)
    check_contiguous(rows, 264, 200, n_major, prefix_sums=prefix_sums, alignment=alignment)


@both_ways
@both_contiguous
def test_the_last_group_needs_no_padding(prefix_sums: bool, n_major: bool) -> None:
    check_contiguous(group_rows((100, 33, 7), ragged_end=True), 264, 200, n_major, prefix_sums=prefix_sums)


@pytest.mark.parametrize("expected_m", [16, 128])
@pytest.mark.parametrize(("groups", "n", "k"), GROUPS_N_K)
def test_masked_groups_are_right(groups: int, n: int, k: int, expected_m: int) -> None:
    check_masked(uneven(groups), MAX_M, n, k, expected_m)


@pytest.mark.parametrize("expected_m", [-1, 0, 1, 129, 1 << 40])
def test_a_wrong_hint_skips_no_row(expected_m: int) -> None:
    check_masked((128, 0, 0, 5, 0, 0, MAX_M, 123), MAX_M, 576, 400, expected_m)


# --- every kernel


def layouts_of(spec: KernelSpec) -> list[Layout]:
    return [layout for layout in Layout if layout is not Layout.MASKED or N_MAJOR not in spec.flags]


def problems_of_this_file() -> list[GemmProblem]:
    variants: tuple[tuple[str, ...], ...] = ((), (N_MAJOR,))
    dense = [
        GemmProblem(m, n, k, 1, Layout.DENSE, 128, DTYPES, variant)
        for n, k in DENSE_N_K + SMALL_N_K
        for m in DENSE_M
        for variant in variants
    ]
    contiguous = [
        GemmProblem(group_rows(sizes, extra_rows=128).total, n, k, len(sizes), layout, 128, DTYPES, variant)
        for sizes, n, k in [(uneven(groups), n, k) for groups, n, k in GROUPS_N_K] + [(list(LARGE_GROUPS), *LARGE_N_K)]
        for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS)
        for variant in variants
    ]
    masked = [GemmProblem(m, n, k, groups, Layout.MASKED, 128, DTYPES) for groups, n, k in GROUPS_N_K for m in (16, 128)]
    return dense + contiguous + masked


def test_selection_reaches_every_gemm_kernel_with_these_problems() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    limits = limits_of("sm_90a")
    if sms != limits.sms:
        pytest.skip(f"the problems are chosen for {limits.sms} SMs, this GPU has {sms}")
    assert {select(problem, limits) for problem in problems_of_this_file()} == set(GEMMS)


@pytest.mark.parametrize("columns", [200, 264, 520])  # the second block of a cluster has few of them, or none
@pytest.mark.parametrize(
    ("spec", "layout"),
    [pytest.param(spec, layout, id=f"{spec.name}-{layout.name}") for spec in GEMMS for layout in layouts_of(spec)],
)
def test_every_kernel_is_right_in_every_layout(
    spec: KernelSpec, layout: Layout, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def forced(problem: GemmProblem, _limits: object) -> Selected:
        asked.append((problem.layout, problem.dtypes, problem.variant))
        return Selected(spec)

    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", forced)
    block_m, n_major = spec.block[0], N_MAJOR in spec.flags
    k, sizes = 1160, (130, 0, 1, 257, 64)  # more k-blocks than stages
    if layout is Layout.DENSE:
        check_dense(300, columns, k, n_major)
    elif layout is Layout.MASKED:
        check_masked(sizes, MAX_M, columns, k, expected_m=64)
    else:
        rows = group_rows(sizes, alignment=block_m, extra_rows=block_m)
        check_contiguous(rows, columns, k, n_major, prefix_sums=layout is Layout.PREFIX_SUMS, alignment=block_m)
    assert set(asked) == {(layout, DTYPES, spec.flags)}


@pytest.mark.parametrize("k", [8, 72, 264])  # one k-block, two, more than stages
@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_every_kernel_takes_more_tiles_than_blocks(spec: KernelSpec, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: Selected(spec))
    check_dense(3300, 2056, k, N_MAJOR in spec.flags)


@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_every_kernel_passes_over_rows_of_no_group(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepgemm_jit.ops.launching.selected", lambda _problem, _limits: Selected(spec))
    block_m = spec.block[0]
    rows = every_third_block_idle(block_m)
    check_contiguous(rows, 264, 264, N_MAJOR in spec.flags, prefix_sums=False, alignment=block_m)


# --- how they are called


class Case:
    """One call per layout and way that B lies, with operands that a test may lay out anew before it runs."""

    def __init__(self, layout: Layout, n_major: bool) -> None:
        self.layout, self.n_major = layout, n_major
        sizes, n, k = (130, 0, 1, 64, MAX_M), 264, 520
        rows = group_rows(sizes)
        lead = (len(sizes), MAX_M) if layout is Layout.MASKED else (rows.total,)
        self.a = random_a(*lead, k)
        self.b = random_b(*(() if layout is Layout.DENSE else (len(sizes),)), n=n, k=k, n_major=n_major)
        self.shape = (*lead, n)
        if layout is Layout.DENSE:
            self.group_data, self.must = None, torch.ones(lead, dtype=torch.bool, device="cuda")
        elif layout is Layout.MASKED:
            self.group_data = torch.tensor(sizes, dtype=torch.int32, device="cuda")
            self.must = used_rows(sizes, MAX_M)
        else:
            self.group_data = rows.m_indices() if layout is Layout.CONTIGUOUS else rows.ends()
            self.must = rows.valid()

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if self.layout is Layout.DENSE:
            (ops.bf16_gemm_nn if self.n_major else ops.bf16_gemm_nt)(a, b, out)
        elif self.layout is Layout.MASKED:
            ops.m_grouped_bf16_gemm_nt_masked(a, b, out, self.group_data, 64)
        else:
            psum = self.layout is Layout.PREFIX_SUMS
            contiguous_gemm(self.n_major)(a, b, out, self.group_data, use_psum_layout=psum)

    def bits(self, a: torch.Tensor | None = None, b: torch.Tensor | None = None, row_gap: int = 0) -> torch.Tensor:
        """Run, check that gaps and surroundings of the output are untouched, and return the bits of the rows that count."""
        out = Output(*self.shape, row_gap=row_gap)
        self.run(self.a if a is None else a, self.b if b is None else b, out.tensor)
        out.assert_written(must=self.must, may=~self.must if self.layout is Layout.CONTIGUOUS else None)
        return out.bits()[self.must]


every_call = pytest.mark.parametrize(
    ("layout", "n_major"),
    [
        pytest.param(layout, n_major, id=f"{layout.name}-{'nn' if n_major else 'nt'}")
        for n_major in (False, True)
        for layout in Layout
        if not (n_major and layout is Layout.MASKED)
    ],
)


@every_call
def test_strided_operands_and_repeated_calls_give_the_same_bits(layout: Layout, n_major: bool) -> None:
    case = Case(layout, n_major)
    expected = case.bits()
    assert torch.equal(case.bits(), expected)
    assert torch.equal(case.bits(with_gap(case.a, 24), with_gap(case.b, 8), row_gap=40), expected)


@pytest.mark.parametrize("n_major", [False, True], ids=["nt", "nn"])
def test_groups_of_b_may_lie_apart(n_major: bool) -> None:
    case = Case(Layout.PREFIX_SUMS, n_major)
    apart = torch.nn.functional.pad(case.b, (0, 0, 0, 5), value=torch.nan)[:, : case.b.shape[1]]
    assert torch.equal(case.bits(b=apart), case.bits())


@every_call
def test_a_call_runs_on_the_current_stream(layout: Layout, n_major: bool) -> None:
    case = Case(layout, n_major)
    expected = case.bits()
    late, out = torch.full_like(case.a, torch.nan), Output(*case.shape)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 25 ms, in which a launch on another stream would meet NaN
        late.copy_(case.a)
        case.run(late, case.b, out.tensor)
    stream.synchronize()
    assert torch.equal(out.bits()[case.must], expected)


@every_call
def test_a_graph_reads_operands_and_group_data_when_it_runs(layout: Layout, n_major: bool) -> None:
    """Captured while every group is empty."""
    case = Case(layout, n_major)
    expected = case.bits()
    data, values = None if case.group_data is None else case.group_data.clone(), case.a.clone()
    if data is not None:
        case.group_data.fill_(-1 if layout is Layout.CONTIGUOUS else 0)
    case.a.fill_(torch.nan)
    out = Output(*case.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(case.a, case.b, out.tensor)
    if data is not None:
        graph.replay()
        out.assert_untouched()
        case.group_data.copy_(data)
    case.a.copy_(values)
    graph.replay()
    assert torch.equal(out.bits()[case.must], expected)


@every_call
def test_no_rows_launch_nothing(layout: Layout, n_major: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_launch(_tensor: torch.Tensor) -> None:
        raise AssertionError("the service was asked, though there is nothing to do")

    case = Case(layout, n_major)
    out = Output(*case.shape)
    monkeypatch.setattr("deepgemm_jit.ops.gemm.call_on", refuse_to_launch)
    if layout is Layout.CONTIGUOUS:
        case.group_data = case.group_data[:0]
    empty = slice(None), slice(0, 0)
    part = empty if layout is Layout.MASKED else empty[1:]
    case.run(case.a[part], case.b, out.tensor[part])
    out.assert_untouched()


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@both_ways
def test_torch_compile_takes_a_whole_graph_with_any_m(n_major: bool) -> None:
    gemm = ops.bf16_gemm_nn if n_major else ops.bf16_gemm_nt
    b = random_b(n=264, k=520, n_major=n_major)

    def multiply(a: torch.Tensor) -> torch.Tensor:
        out = torch.empty((a.shape[0], 264), dtype=torch.bfloat16, device=a.device)
        gemm(a, b, out)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(multiply, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (77, 128, 1, 300):
        a = random_a(m, 520)
        assert torch.equal(compiled(a).view(torch.int16), multiply(a).view(torch.int16))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of torch's own checks
@every_call
def test_the_operators_are_what_torch_expects(layout: Layout, n_major: bool) -> None:
    case = Case(layout, n_major)
    out = torch.zeros(case.shape, dtype=torch.bfloat16, device="cuda")  # rows of no group are compared as well
    namespace = torch.ops.deepgemm_jit
    if layout is Layout.DENSE:
        torch.library.opcheck(namespace.bf16_gemm.default, (case.a, case.b, out, n_major))
    elif layout is Layout.MASKED:
        torch.library.opcheck(namespace.m_grouped_bf16_gemm_masked.default, (case.a, case.b, out, case.group_data, 64))
    else:
        options = (case.group_data, layout is Layout.PREFIX_SUMS, 128, n_major)
        torch.library.opcheck(namespace.m_grouped_bf16_gemm_contiguous.default, (case.a, case.b, out, *options))

"""How FP8 GEMMs are called: scale layouts, strides, empty calls, streams, graphs, torch.compile, huge and senseless operands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import (
    E4M3,
    Output,
    assert_close,
    group_rows,
    m_major,
    product,
    random_a,
    random_b,
    used_rows,
)

import deepgemm_jit
from deepgemm_jit import ops

pytestmark = pytest.mark.gpu

Pair = tuple[torch.Tensor, torch.Tensor]
LAYOUTS = ("dense", "row_index", "prefix_sums", "masked")
SIZES = (130, 0, 1, 64, 257)
MAX_M = 257
N, K = 264, 1040


class Case:
    """One call per layout, with operands that a test may lay out anew before it runs."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        rows = group_rows(SIZES)
        lead = (len(SIZES), MAX_M) if layout == "masked" else (rows.total,)
        self.a, self.b = random_a(*lead, K), random_b(*(() if layout == "dense" else (len(SIZES),)), N, K)
        self.shape = (*lead, N)
        if layout == "dense":
            self.group_data = None
            self.must = torch.ones(lead, dtype=torch.bool, device="cuda")
        elif layout == "masked":
            self.group_data = torch.tensor(SIZES, dtype=torch.int32, device="cuda")
            self.must = used_rows(SIZES, MAX_M)
        else:
            self.group_data = rows.m_indices() if layout == "row_index" else rows.ends()
            self.must = rows.valid()

    def run(self, a: Pair, b: Pair, out: torch.Tensor) -> None:
        if self.layout == "dense":
            ops.fp8_gemm_nt(a, b, out)
        elif self.layout == "masked":
            ops.m_grouped_fp8_gemm_nt_masked(a, b, out, self.group_data, 64)
        else:
            psum = self.layout == "prefix_sums"
            ops.m_grouped_fp8_gemm_nt_contiguous(a, b, out, self.group_data, use_psum_layout=psum)

    def bits(
        self,
        a: tuple[torch.Tensor, torch.Tensor] | None = None,
        b: tuple[torch.Tensor, torch.Tensor] | None = None,
        row_gap: int = 0,
    ) -> torch.Tensor:
        """Run, check that gaps and surroundings of the output are untouched, and return the bits of the rows that count."""
        out = Output(*self.shape, row_gap=row_gap)
        self.run(a or self.a.pair, b or self.b.pair, out.tensor)
        out.assert_written(must=self.must, may=~self.must if self.layout == "row_index" else None)
        return out.bits()[self.must]


def with_gap(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """Return the same values in rows that lie ``gap`` elements apart, with NaN in between."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + gap), torch.nan, device=tensor.device).to(tensor.dtype)
    strided = wide[..., : tensor.shape[-1]]
    strided.copy_(tensor)
    return strided


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_scale_layouts_give_the_same_bits(layout: str) -> None:
    case = Case(layout)
    expected = case.bits((case.a.values, m_major(case.a.scales)))
    assert torch.equal(case.bits((case.a.values, case.a.scales)), expected)
    assert torch.equal(case.bits((case.a.values, with_gap(case.a.scales, 3))), expected)
    neither = case.a.scales.new_full((*case.a.scales.shape, 2), torch.nan)[..., 0].copy_(case.a.scales)
    assert torch.equal(case.bits((case.a.values, neither)), expected)
    turned = ops.get_mn_major_tma_aligned_tensor(case.a.scales)
    assert turned.stride(-2) == 1 and torch.equal(turned, case.a.scales)
    assert torch.equal(case.bits((case.a.values, turned)), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_operands_give_the_same_bits(layout: str) -> None:
    case = Case(layout)
    a = with_gap(case.a.values, 48), case.a.scales
    b = with_gap(case.b.values, 16), with_gap(case.b.scales, 5)
    assert torch.equal(case.bits(a, b, row_gap=24), case.bits())


def test_groups_may_lie_apart() -> None:
    case = Case("masked")
    a = random_a(len(SIZES), MAX_M + 15, K)
    a.values[:, :MAX_M], a.scales[:, :MAX_M] = case.a.pair
    parts = a.values[:, :MAX_M], m_major(a.scales)[:, :MAX_M]
    assert torch.equal(case.bits(parts), case.bits())
    assert torch.equal(case.bits((parts[0], a.scales[:, :MAX_M])), case.bits())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_give_the_same_bits(layout: str) -> None:
    case = Case(layout)
    assert torch.equal(case.bits(), case.bits())


# --- nothing to do


def refuse_to_launch() -> None:
    raise AssertionError("the service was asked, though there is nothing to do")


@pytest.mark.parametrize("what", ["dense", "row_index", "prefix_sums", "masked", "no_groups", "cast"])
def test_no_rows_or_groups_launch_and_compile_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b, grouped = random_b(N, K), random_b(3, N, K)
    no_data = torch.empty(0, dtype=torch.int32, device="cuda")
    monkeypatch.setattr("deepgemm_jit.ops.launching.default_service", refuse_to_launch)
    a = (torch.empty((0, K), device="cuda", dtype=E4M3), torch.empty((0, 9), device="cuda"))
    out = Output(5, N)
    if what == "dense":
        ops.fp8_gemm_nt(a, b.pair, out.tensor[:0])
    elif what == "row_index":
        ops.m_grouped_fp8_gemm_nt_contiguous(a, grouped.pair, out.tensor[:0], no_data)
    elif what == "prefix_sums":
        ends = torch.zeros(3, dtype=torch.int32, device="cuda")
        ops.m_grouped_fp8_gemm_nt_contiguous(a, grouped.pair, out.tensor[:0], ends, use_psum_layout=True)
    elif what == "masked":
        empty = (a[0].expand(3, 0, K), a[1].expand(3, 0, 9))
        counts = torch.zeros(3, dtype=torch.int32, device="cuda")
        ops.m_grouped_fp8_gemm_nt_masked(empty, grouped.pair, out.tensor[:0].expand(3, 0, N), counts, 0)
    elif what == "no_groups":
        none = (grouped.values[:0], grouped.scales[:0])
        values = random_a(5, K)
        index = torch.full((5,), -1, dtype=torch.int32, device="cuda")
        ops.m_grouped_fp8_gemm_nt_contiguous(values.pair, none, out.tensor, index)
        ops.m_grouped_fp8_gemm_nt_contiguous(values.pair, none, out.tensor, no_data, use_psum_layout=True)
    else:
        values, scales = ops.per_token_cast_to_fp8(torch.empty((0, K), device="cuda", dtype=torch.bfloat16))
        assert (values.shape, values.dtype, scales.shape, scales.dtype) == ((0, K), E4M3, (0, 9), torch.float32)
    out.assert_untouched()


@pytest.mark.parametrize("layout", ["row_index", "prefix_sums", "masked"])
def test_groups_that_are_all_empty_write_nothing(layout: str) -> None:
    case = Case(layout)
    case.group_data.fill_(-1 if layout == "row_index" else 0)
    case.must.fill_(False)
    out = Output(*case.shape)
    case.run(case.a.pair, case.b.pair, out.tensor)
    out.assert_untouched()


# --- streams, graphs, torch.compile


def test_a_call_runs_on_the_current_stream() -> None:
    case = Case("dense")
    expected = case.bits()
    values, scales = torch.full_like(case.a.values.view(torch.uint8), 0xFF).view(E4M3), case.a.scales.clone()
    out = Output(*case.shape)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms, in which a launch on another stream would meet NaN
        values.copy_(case.a.values)
        case.run((values, scales), case.b.pair, out.tensor)
    stream.synchronize()
    assert torch.equal(out.bits()[case.must], expected)


def cast_and_multiply(x: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    a = ops.per_token_cast_to_fp8(x)
    out = torch.empty((x.shape[0], b.shape[0]), dtype=torch.bfloat16, device=x.device)
    ops.fp8_gemm_nt(a, (b, b_scales), out)
    return out


def test_a_captured_call_replays_with_new_operands_as_an_eager_one() -> None:
    b = random_b(N, K)
    x, other = (torch.randn((77, K), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = [cast_and_multiply(each, *b.pair) for each in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cast_and_multiply(x, *b.pair)
    for each, right in zip((x.clone(), other), expected, strict=True):
        x.copy_(each)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_reads_group_data_when_it_runs(layout: str) -> None:
    """Captured while every group is empty; row-major scales are laid out anew inside the graph."""
    case = Case(layout)
    expected = case.bits()
    data = None if case.group_data is None else case.group_data.clone()
    if data is not None:
        case.group_data.fill_(-1 if layout == "row_index" else 0)
    out = Output(*case.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(case.a.pair, case.b.pair, out.tensor)
    if data is not None:
        graph.replay()
        out.assert_untouched()
        case.group_data.copy_(data)
    graph.replay()
    assert torch.equal(out.bits()[case.must], expected)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_takes_a_whole_graph_with_any_m(backend: str) -> None:
    if backend == "inductor" and (find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc"))):
        pytest.skip("inductor needs triton and a C compiler")
    import torch._inductor.config

    b = random_b(N, K)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(cast_and_multiply, fullgraph=True, dynamic=True, backend=backend)
        for m in (77, 128, 1, 300):
            x = torch.randn((m, K), device="cuda", dtype=torch.bfloat16)
            assert torch.equal(compiled(x, *b.pair).view(torch.int16), cast_and_multiply(x, *b.pair).view(torch.int16))
    torch._dynamo.reset()


# --- offsets beyond 32 bits


def zeros_fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device="cuda").view(E4M3)


def test_an_output_of_more_than_two_billion_elements_is_written_to_its_end_masked() -> None:
    groups, max_m, n, k = 40, 8192, 7168, 128
    assert groups * max_m * n > 1 << 31
    a, b = random_a(groups, max_m, k), random_b(groups, n, k)
    counts = [5] + [0] * (groups - 2) + [max_m]
    out = Output(groups, max_m, n)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    ops.m_grouped_fp8_gemm_nt_masked(a.pair, b.pair, out.tensor, masked_m, max_m)
    out.assert_written(must=used_rows(counts, max_m))
    assert_close(out.tensor[0, :5], product(a[0][:5], b[0]), "first group")
    assert_close(out.tensor[-1, -300:], product(a[-1][-300:], b[-1]), "end of the last group")


@pytest.mark.parametrize("prefix_sums", [False, True], ids=["row_index", "prefix_sums"])
def test_an_output_of_more_than_two_billion_elements_is_written_to_its_end_contiguous(prefix_sums: bool) -> None:
    n, k = 7168, 128
    rows = group_rows((300, 319_000))
    assert rows.total * n > 1 << 31
    a, b = random_a(rows.total, k), random_b(2, n, k)
    out = Output(rows.total, n)
    group_data = rows.ends() if prefix_sums else rows.m_indices()
    ops.m_grouped_fp8_gemm_nt_contiguous(a.pair, b.pair, out.tensor, group_data, use_psum_layout=prefix_sums)
    out.assert_written(must=rows.valid(), may=rows.tails(128))
    end = rows.slices[-1].stop
    for part, group in ((slice(0, 300), 0), (slice(end - 300, end), 1)):
        assert_close(out.tensor[part], product(a[part], b[group]), f"group {group}")


def test_an_a_of_more_than_two_billion_elements_is_read_to_its_end() -> None:
    m, n, k = 300_032, 136, 7168
    assert m * k > 1 << 31
    values, scales, b = zeros_fp8(m, k), torch.ones((m, k // 128), device="cuda"), random_b(n, k)
    last = random_a(300, k)
    values[-300:], scales[-300:] = last.pair
    out = Output(m, n)
    ops.fp8_gemm_nt((values, scales), b.pair, out.tensor)
    out.assert_written()
    assert not out.tensor[:-300].any()
    assert_close(out.tensor[-300:], product(last, b), "last rows")


def test_a_b_of_more_than_two_billion_elements_is_read_to_its_end() -> None:
    groups, n, k = 40, 7168, 8192
    assert groups * n * k > 1 << 31
    values = zeros_fp8(groups, n, k)
    scales = torch.ones((groups, n // 128, k // 128), device="cuda")
    last = random_b(n, k)
    values[-1], scales[-1] = last.pair
    a = random_a(groups, 8, k)
    out = Output(groups, 8, n)
    masked_m = torch.full((groups,), 8, dtype=torch.int32, device="cuda")
    ops.m_grouped_fp8_gemm_nt_masked(a.pair, (values, scales), out.tensor, masked_m, 8)
    out.assert_written()
    assert not out.tensor[:-1].any()
    assert_close(out.tensor[-1], product(a[-1], last), "last group")


# --- group data that makes no sense

_SENSELESS = """
import faulthandler
import torch
from deepgemm_jit import ops
from ops.reference import Output, assert_close, group_rows, product, random_a, random_b

N, K, M, GROUPS = 264, 400, 640, 5

def on_gpu(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")

raw_index = sum(([group] * size for group, size in enumerate((5, 100, 130, 77, 1))), [])
indices = {
    "starts at no multiple": on_gpu(raw_index + [-1] * (M - len(raw_index))),
    "in any order": torch.randint(-3, GROUPS + 3, (M,), dtype=torch.int32, device="cuda"),
    "groups that are not there": torch.full((M,), 2**31 - 1, dtype=torch.int32, device="cuda"),
    "far below zero": torch.full((M,), -(2**31), dtype=torch.int32, device="cuda"),
}
numbers = {
    "raw ends": on_gpu([5, 105, 235, 312, 313]),
    "falling": on_gpu([640, 300, 100, 5, 0]),
    "back and forth": on_gpu([640, 0, 640, 0, 640]),
    "negative": on_gpu([-1, -5, 128, -(2**31), 200]),
    "beyond the end": on_gpu([641, 100_000, 2**31 - 1, 2**31 - 1, 7]),
}
a, grouped_a, b = random_a(M, K), random_a(GROUPS, M, K), random_b(GROUPS, N, K)

def contiguous(out, data, psum, alignment):
    ops.m_grouped_fp8_gemm_nt_contiguous(a.pair, b.pair, out, data, use_psum_layout=psum, alignment=alignment)

def check(name, shape, call):
    out = Output(*shape, N)
    call(out.tensor)
    torch.cuda.synchronize()
    everywhere = torch.ones(shape, dtype=torch.bool, device="cuda")
    out.assert_written(must=~everywhere, may=everywhere)
    print("ended:", name, flush=True)

def right():
    rows = group_rows((100, 0, 130, 64, 1))
    out = Output(rows.total, N)
    x = random_a(rows.total, K)
    ops.m_grouped_fp8_gemm_nt_contiguous(x.pair, b.pair, out.tensor, rows.ends(), use_psum_layout=True)
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(x[part], b[group]))

# Every kernel is loaded before the clock starts.
for alignment in (64, 128):
    contiguous(Output(M, N).tensor, on_gpu([128, 256, 384, 512, 640]), True, alignment)
for expected_m in (64, 128):
    ops.m_grouped_fp8_gemm_nt_masked(grouped_a.pair, b.pair, Output(GROUPS, M, N).tensor, on_gpu([1] * GROUPS), expected_m)
right()
torch.cuda.synchronize()
faulthandler.dump_traceback_later(30, exit=True)
for alignment in (64, 128):
    for name, data in indices.items():
        check(f"row index, {name}, {alignment}", (M,), lambda out: contiguous(out, data, False, alignment))
    for name, data in numbers.items():
        check(f"prefix sums, {name}, {alignment}", (M,), lambda out: contiguous(out, data, True, alignment))
for name, data in numbers.items():
    for expected_m in (64, 128):
        check(f"masked, {name}, {expected_m}", (GROUPS, M),
              lambda out: ops.m_grouped_fp8_gemm_nt_masked(grouped_a.pair, b.pair, out, data, expected_m))
right()
print("all ended")
"""


def test_senseless_group_data_ends_and_writes_nothing_outside() -> None:
    """In a process of its own: a hang or a fault would take this one's context with it."""
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    child = subprocess.run(
        [sys.executable, "-c", _SENSELESS], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert child.returncode == 0 and child.stdout.endswith("all ended\n"), child.stdout + child.stderr

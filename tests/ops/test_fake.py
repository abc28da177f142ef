"""Operations on tensors without memory: shapes and dtypes, no compile, no CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import deepgemm_jit
from deepgemm_jit import ops
from deepgemm_jit.runtime.steps import Gate

pytestmark = pytest.mark.none

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("m", "k", "stride"), [(0, 128, 4), (1, 16, 4), (7, 144, 8), (77, 2880, 80), (128, 7168, 128)], ids=str)
def test_the_cast_gives_values_and_m_major_scales(m: int, k: int, stride: int, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        values, scales = ops.per_token_cast_to_fp8(torch.empty((m, k), dtype=dtype))
    assert (values.shape, values.dtype, values.stride()) == ((m, k), E4M3, (k, 1))
    assert (scales.shape, scales.dtype, scales.stride()) == ((m, -(-k // 128)), F32, (1, stride))


@pytest.mark.parametrize(
    ("shape", "strides"), [((7, 9), (1, 8)), ((77, 56), (1, 80)), ((3, 7, 9), (72, 1, 8)), ((0, 9), (1, 4))], ids=str
)
def test_scales_are_laid_out_m_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with FakeTensorMode():
        turned = torch.ops.deepgemm_jit.get_mn_major_tma_aligned_tensor(torch.empty(shape))
    assert (turned.shape, turned.dtype, turned.stride()) == (shape, F32, strides)


@pytest.mark.parametrize("m", [0, 1, 77])
def test_products_return_nothing_and_keep_their_output(m: int) -> None:
    with FakeTensorMode():
        a, b = ops.per_token_cast_to_fp8(torch.empty((m, 144))), (torch.empty((264, 144), dtype=E4M3), torch.empty((3, 2)))
        out = torch.empty((m, 264), dtype=BF16)
        assert torch.ops.deepgemm_jit.fp8_gemm(*a, *b, out, False) is None

        grouped = torch.empty((4, 264, 144), dtype=E4M3), torch.empty((4, 3, 2))
        index, ends = torch.empty(m, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        contiguous = torch.ops.deepgemm_jit.m_grouped_fp8_gemm_contiguous
        assert contiguous(*a, *grouped, out, index, False, 128, False) is None
        assert contiguous(*a, *grouped, out, ends, True, 64, False) is None

        masked = torch.empty((4, m, 144), dtype=E4M3), torch.empty((4, m, 2))
        grouped_out = torch.empty((4, m, 264), dtype=BF16)
        assert torch.ops.deepgemm_jit.m_grouped_fp8_gemm_masked(*masked, *grouped, grouped_out, ends, m) is None
    assert (out.shape, grouped_out.shape) == ((m, 264), (4, m, 264))


def fake_calls(m: int) -> dict[str, tuple[object, ...]]:
    """Return arguments of every operator of this package."""
    k, n, groups, top_k, gate = 144, 264, 4, 2, Gate.SILU_GATE.value
    fp8 = torch.empty((m, k), dtype=E4M3), torch.empty((m, 2))
    stack = torch.empty((groups, n, k), dtype=E4M3), torch.empty((groups, 3, 2))
    masked = torch.empty((groups, m, k), dtype=E4M3), torch.empty((groups, m, 2))
    out, masked_out = torch.empty((m, n), dtype=BF16), torch.empty((groups, m, n), dtype=BF16)
    bf16, wide_stack = torch.empty((m, k), dtype=BF16), torch.empty((groups, n, k), dtype=BF16)
    index, counts = torch.empty(m, dtype=torch.int32), torch.empty(groups, dtype=torch.int32)
    routing = torch.empty((m, top_k), dtype=torch.int64), torch.empty((m, top_k))
    up, down = torch.empty((groups, 2 * k, k), dtype=BF16), torch.empty((groups, k, k), dtype=BF16)
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(
        bf16, *routing, down, up, None, None, False, False, False, None, gate
    )
    return {
        "fp8_gemm": (*fp8, stack[0][0], stack[1][0], out, False),
        "bf16_gemm": (bf16, wide_stack[0], out, False),
        "m_grouped_fp8_gemm_contiguous": (*fp8, *stack, out, index, False, 128, False),
        "m_grouped_bf16_gemm_contiguous": (bf16, wide_stack, out, index, False, 128, False),
        "m_grouped_fp8_gemm_masked": (*masked, *stack, masked_out, counts, 8),
        "m_grouped_bf16_gemm_masked": (torch.empty((groups, m, k), dtype=BF16), wide_stack, masked_out, counts, 8),
        "per_token_cast_to_fp8": (bf16, False),
        "get_mn_major_tma_aligned_tensor": (fp8[1],),
        "experts_up": (bf16, *routing, down, up, None, None, False, False, False, None, gate),
        "experts_down": (projected, *routing, rows, ends, down, None, None, False, False, False, None, gate, False, 7.0, 1.0),
    }


@pytest.mark.parametrize("m", [0, 1, 77])
def test_every_operator_runs_on_tensors_without_memory(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a shape-only run asked for the service")

    for module in ("launching", "prepared"):
        monkeypatch.setattr(f"deepgemm_jit.ops.{module}.default_service", refuse)
    defined = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("deepgemm_jit::")}
    with FakeTensorMode():
        calls = fake_calls(m)
        assert set(calls) == defined
        for name, arguments in calls.items():
            returned = getattr(torch.ops.deepgemm_jit, name)(*arguments)
            for part in returned if isinstance(returned, tuple) else (returned,):
                assert part is None or (isinstance(part, FakeTensor) and part.dtype in (E4M3, BF16, F32, torch.int32)), name


class CastAndMultiply(torch.nn.Module):
    def forward(self, x: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
        a = ops.per_token_cast_to_fp8(x)
        out = torch.empty((x.shape[0], b.shape[0]), dtype=BF16, device=x.device)
        ops.fp8_gemm_nt(a, (b, b_scales), out)
        return out


def test_one_graph_takes_any_number_of_rows() -> None:
    operands = torch.empty((77, 144), dtype=BF16), torch.empty((264, 144), dtype=E4M3), torch.empty((3, 2))
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    exported = torch.export.export(CastAndMultiply(), operands, dynamic_shapes=({0: rows}, None, None))
    called = [str(node.target) for node in exported.graph.nodes if "deepgemm_jit" in str(node.target)]
    assert called == ["deepgemm_jit.per_token_cast_to_fp8.default", "deepgemm_jit.fp8_gemm.default"]
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    shape = output.args[0][0].meta["val"].shape
    assert not isinstance(shape[0], int) and shape[1] == 264


_FAKE_CALLS = """
import json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

with_torch = set(sys.modules)  # newer torch brings the driver's bindings along
from deepgemm_jit import ops

with FakeTensorMode():
    a = ops.per_token_cast_to_fp8(torch.empty(77, 144))
    b = torch.empty((264, 144), dtype=torch.float8_e4m3fn), torch.empty(3, 2)
    ops.fp8_gemm_nt(a, b, torch.empty((77, 264), dtype=torch.bfloat16))
ours = sorted(name for name in set(sys.modules) - with_torch if name.startswith("cuda"))
print(json.dumps({"started": torch.cuda.is_initialized(), "nvrtc": "cuda.bindings.nvrtc" in sys.modules, "ours": ours}))
"""


def test_a_fake_call_starts_no_cuda_loads_no_compiler_and_makes_no_store(cache_dir: Path) -> None:
    paths = [str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    child = subprocess.run(
        [sys.executable, "-c", _FAKE_CALLS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == {"started": False, "nvrtc": False, "ours": []}
    assert not cache_dir.exists()


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(
    "strides",
    [
        pytest.param((9, 1), id="row_major"),
        pytest.param(
            (1, 8),
            id="m_major",
        ),
    ],
)
def test_the_scale_layout_is_traced_whole(strides: tuple[int, int]) -> None:
    torch._dynamo.reset()
    with FakeTensorMode():
        scales = torch.empty_strided((7, 9), strides, device="cuda")
        turned = torch.compile(ops.get_mn_major_tma_aligned_tensor, fullgraph=True, backend="eager")(scales)
    assert (turned.shape, turned.stride()) == ((7, 9), (1, 8))


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("layout", ["dense", "contiguous", "masked"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_products_are_traced_whole_and_as_operators(layout: str, fp8: bool) -> None:
    lead = (3,) if layout == "masked" else ()
    dtype, traced = E4M3 if fp8 else BF16, []

    def backend(graph: torch.fx.GraphModule, _example: list[torch.Tensor]) -> torch.fx.GraphModule:
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def pair(*shape: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(shape, dtype=dtype, device="cuda")
        rows = shape[-2] if shape[-2] == 77 else -(-shape[-2] // 128)
        return (values, torch.empty((*shape[:-2], rows, -(-shape[-1] // 128)), device="cuda")) if fp8 else values

    prefix, suffix = ("", "") if layout == "dense" else ("m_grouped_", f"_{layout}")
    name = f"{prefix}{'fp8' if fp8 else 'bf16'}_gemm"
    torch._dynamo.reset()
    with FakeTensorMode():
        b_lead = () if layout == "dense" else (3,)
        operands = [pair(*lead, 77, 144), pair(*b_lead, 264, 144), torch.empty((*lead, 77, 264), dtype=BF16, device="cuda")]
        if layout != "dense":
            operands.append(torch.empty(77 if layout == "contiguous" else 3, dtype=torch.int32, device="cuda"))
        if layout == "masked":
            operands.append(64)
        torch.compile(getattr(ops, f"{name}_nt{suffix}"), fullgraph=True, backend=backend)(*operands)
    assert traced == [f"deepgemm_jit.{name}{suffix}"]
    torch._dynamo.reset()

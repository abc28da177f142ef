"""DeepGEMM by name, on a CPU: which names there are, what each hands to the operations, and what is refused.

The operations are replaced by float64 products behind the real checks of their operands; with the driver's double, the real
ones are run up to the launch.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.products import Products, wide
from doubles.tensors import pretend, pretend_gpus
from ops import reference
from torch._subclasses.fake_tensor import FakeTensorMode

import deepgemm_jit
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations import deep_gemm
from deepgemm_jit.integrations.deep_gemm import absent
from deepgemm_jit.service import KernelService

pytestmark = pytest.mark.none

ROOT = Path(__file__).resolve().parents[2]
FACTS = json.loads((ROOT / "tests/data/deep_gemm_names.json").read_text())
PEER: dict[str, str | None] = {**FACTS["signatures"], **FACTS["older"]}
SERVED = sorted(set(deep_gemm.__all__) - {"__version__", "legacy", "mega", "testing", "utils"})

E4M3, BF16, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32
M, N, K, GROUPS = 48, 136, 272, 3


# --- names


def test_every_name_of_deepgemm_is_served_or_refused_with_a_reason() -> None:
    assert sorted([*SERVED, *absent.REASONS]) == sorted(PEER)


def rows_of_the_table() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs/migration.md").read_text()
    return re.findall(r"^\| `([\w.]+)` \| (yes|no) \| (.*) \|$", text, re.MULTILINE)


def test_the_table_of_the_documentation_is_the_module() -> None:
    rows = rows_of_the_table()
    assert [name for name, served, _ in rows if served == "yes"] == SERVED
    assert {name: reason for name, served, reason in rows if served == "no"} == dict(absent.REASONS)
    assert [name for name, _, reason in rows if not reason.strip()] == []
    assert sorted(name for name, _, _ in rows) == sorted(PEER), "each name once"


@pytest.mark.parametrize("name", [name for name in SERVED if PEER[name] is not None])
def test_arguments_have_deepgemms_names_order_and_defaults(name: str) -> None:
    theirs = [part.partition("=") for part in re.split(r", (?![^(]*\))", str(PEER[name])[1:-1]) if part]
    ours = list(inspect.signature(getattr(deep_gemm, name)).parameters.values())
    assert [parameter.name for parameter in ours[: len(theirs)]] == [their_name for their_name, _, _ in theirs]
    assert [repr(ours[i].default) for i, (_, given, _) in enumerate(theirs) if given] == [
        default for _, given, default in theirs if given
    ]
    # A later version's argument, or one that DeepGEMM demands and we do not, may be left out.
    assert all(parameter.default is not inspect.Parameter.empty for parameter in ours[len(theirs) :])


@pytest.mark.parametrize("name", absent.REASONS)
def test_a_name_that_is_not_served_can_be_found_and_says_why_when_it_is_called(name: str) -> None:
    module, _, function = name.rpartition(".")
    home = importlib.import_module(".".join(filter(None, (deep_gemm.__name__, module))))
    stand_in = getattr(home, function)
    with pytest.raises(UnsupportedError) as refusal:
        stand_in(1, b=2)
    what, _, instead = absent.REASONS[name].partition("; ")
    assert name in refusal.value.given and what in refusal.value.given
    assert refusal.value.advice == instead
    assert stand_in.__name__ == function


def test_a_name_that_deepgemm_does_not_have_is_missing() -> None:
    for module in ("", ".utils", ".utils.math", ".utils.layout", ".utils.dist", ".testing", ".legacy", ".mega"):
        home = importlib.import_module(deep_gemm.__name__ + module)
        with pytest.raises(
            AttributeError, match=rf"^module '{re.escape(home.__name__)}' has no attribute 'nvcc'; docs/migration\.md"
        ):
            _ = home.nvcc


_FROM_THE_TOP = """
import functools, json, sys
import deepgemm_jit.integrations.deep_gemm as deep_gemm
for name in json.load(sys.stdin):
    assert callable(functools.reduce(getattr, name.split("."), deep_gemm)), name
print(deep_gemm.__version__)
"""


def in_a_process(code: str, given: str = "", *first: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process, with ``first`` at the head of its path."""
    paths = [*map(str, first), str(Path(deepgemm_jit.__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, input=given, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_name_of_the_table_is_reached_from_the_top_with_no_other_import() -> None:
    child = in_a_process(_FROM_THE_TOP, json.dumps([name for name, _, _ in rows_of_the_table()]))
    assert (child.returncode, child.stdout.strip()) == (0, deepgemm_jit.__version__), child.stderr


_AS_DEEP_GEMM = """
import importlib.util, json
assert importlib.util.find_spec("deep_gemm") is not None  # what vLLM asks
import deep_gemm
from deep_gemm import fp8_gemm_nt, fp8_paged_mqa_logits
from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor  # what SGLang imports
from deep_gemm.utils.math import per_block_cast_to_fp8
from deep_gemm.testing import bench_kineto
import deepgemm_jit.integrations.deep_gemm as ours
assert deep_gemm is ours and fp8_gemm_nt is ours.fp8_gemm_nt
assert get_mn_major_tma_aligned_tensor is ours.get_mn_major_tma_aligned_tensor
assert per_block_cast_to_fp8 is ours.per_block_cast_to_fp8
deep_gemm.set_mk_alignment_for_contiguous_layout(64)
from deep_gemm.utils import get_mk_alignment_for_contiguous_layout
print(get_mk_alignment_for_contiguous_layout())
"""


def test_the_file_of_the_guide_makes_deep_gemm_ours_for_callers_that_cannot_be_changed(tmp_path: Path) -> None:
    guide = (ROOT / "docs/migration.md").read_text()
    (shim,) = re.findall(r"```python title=\"deep_gemm\.py\"\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "deep_gemm.py").write_text(shim)
    child = in_a_process(_AS_DEEP_GEMM, "", tmp_path)
    assert (child.returncode, child.stdout.strip()) == (0, "64"), child.stderr


# --- what reaches the operations


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    torch.manual_seed(0)
    return Products(monkeypatch)


@pytest.fixture
def alignment() -> Iterator[None]:
    """Put the alignment back that a test sets."""
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(before)


def operand(fp8: bool, *shape: int, weight: bool) -> tuple[Any, torch.Tensor]:
    """Return a random operand as callers hold it, and what it means in float64."""
    if not fp8:
        values = torch.randn(shape).to(BF16)
        return values, values.double()
    drawn = reference.random_b(*shape, device="cpu") if weight else reference.random_a(*shape, device="cpu")
    return drawn.pair, wide(*drawn.pair, 128 if weight else 1)


def as_view(operand: Any, *, copied: bool) -> Any:
    """Return an operand with its last two dimensions exchanged: a view of the same memory, or lying so itself."""
    if isinstance(operand, tuple):
        return tuple(as_view(part, copied=copied) for part in operand)
    turned = operand.transpose(-1, -2)
    return turned.contiguous() if copied else turned


def is_close(out: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(out.double(), exact, rtol=2.0**-8, atol=2.0**-9 * float(exact.abs().max()))


FORMS = ("nt", "nn", "tn", "tt")


@pytest.mark.parametrize("copied", [False, True], ids=["b_k_major", "b_n_major"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["fp8_gemm", "fp8_fp4_gemm", "bf16_gemm"])
def test_dense_products_read_operands_as_they_lie(products: Products, name: str, form: str, copied: bool) -> None:
    fp8 = name != "bf16_gemm"
    (a, exact_a), (b, exact_b) = operand(fp8, M, K, weight=False), operand(fp8, N, K, weight=True)
    if form[1] == "n":
        b = as_view(b, copied=copied)
    elif copied:
        b = as_view(as_view(b, copied=True), copied=False)  # (N, K) whose memory is (K, N)
    if form[0] == "t":
        a = as_view(a, copied=False)
    out = torch.full((M, N), torch.nan, dtype=BF16)
    getattr(deep_gemm, f"{name}_{form}")(a, b, out)
    assert products.called == [f"{'fp8' if fp8 else 'bf16'}_gemm_{'nn' if copied else 'nt'}"]
    assert is_close(out, exact_a @ exact_b.T)


@pytest.mark.parametrize("form", ["nt", "tn"])
@pytest.mark.parametrize("name", ["fp8_gemm", "bf16_gemm"])
def test_an_a_whose_columns_are_contiguous_is_refused_and_its_copy_is_served(products: Products, name: str, form: str) -> None:
    fp8 = name == "fp8_gemm"
    (a, exact_a), (b, exact_b) = operand(fp8, M, K, weight=False), operand(fp8, N, K, weight=True)
    columns = as_view(a, copied=True)  # (K, M), lying so
    if form == "nt":
        columns = as_view(columns, copied=False)
    else:
        b = as_view(b, copied=False)
    out = torch.empty((M, N), dtype=BF16)
    multiply = getattr(deep_gemm, f"{name}_{form}")
    with pytest.raises(UnsupportedError, match="M-major"):
        multiply(columns, b, out)
    assert products.called == []
    copied = columns if form == "nt" else as_view(columns, copied=False)
    rows = (copied[0].contiguous(), copied[1]) if fp8 else copied.contiguous()
    multiply(rows if form == "nt" else as_view(rows, copied=False), b, out)
    assert is_close(out, exact_a @ exact_b.T)


@pytest.mark.parametrize("psum", [False, True], ids=["row_index", "prefix_sums"])
@pytest.mark.parametrize("form", ["nt", "nn"])
@pytest.mark.parametrize("name", ["m_grouped_fp8_gemm", "m_grouped_fp8_fp4_gemm", "m_grouped_bf16_gemm"])
def test_grouped_products_take_the_alignment_that_was_set(
    products: Products, alignment: None, name: str, form: str, psum: bool
) -> None:
    fp8 = name != "m_grouped_bf16_gemm"
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    rows = reference.group_rows((5, 0, 70), alignment=64)
    (a, exact_a), (b, exact_b) = operand(fp8, rows.total, K, weight=False), operand(fp8, GROUPS, N, K, weight=True)
    layout = rows.ends("cpu") if psum else rows.m_indices("cpu")
    out = torch.full((rows.total, N), torch.nan, dtype=BF16)
    multiply = getattr(deep_gemm, f"{name}_{form}_contiguous")
    multiply(a, b if form == "nt" else as_view(b, copied=True), out, layout, use_psum_layout=psum)
    assert products.called == [f"m_grouped_{'fp8' if fp8 else 'bf16'}_gemm_{form}_contiguous"]
    assert products.options == [{"use_psum_layout": psum, "alignment": 64}]
    for group, part in enumerate(rows.slices):
        assert part.start == part.stop or is_close(out[part], exact_a[part] @ exact_b[group].T)


@pytest.mark.parametrize(
    "name",
    [
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
        "m_grouped_bf16_gemm_nt_masked",
        "bf16_m_grouped_gemm_nt_masked",
    ],
)
def test_masked_products_of_every_name(products: Products, name: str) -> None:
    fp8 = "fp8" in name
    (a, exact_a), (b, exact_b) = operand(fp8, GROUPS, M, K, weight=False), operand(fp8, GROUPS, N, K, weight=True)
    counts = (3, 0, M)
    out = torch.full((GROUPS, M, N), torch.nan, dtype=BF16)
    getattr(deep_gemm, name)(a, b, out, masked_m=torch.tensor(counts, dtype=I32), expected_m=17)
    assert products.called == [f"m_grouped_{'fp8' if fp8 else 'bf16'}_gemm_nt_masked"]
    assert products.options == [{"expected_m": 17}]
    for group, count in enumerate(counts):
        assert count == 0 or is_close(out[group, :count], (exact_a[group] @ exact_b[group].T)[:count])
        assert out[group, count:].isnan().all()


def test_names_and_arguments_of_deepgemm_1(products: Products) -> None:
    (lhs, exact_lhs), (rhs, exact_rhs) = operand(True, M, K, weight=False), operand(True, N, K, weight=True)
    lhs = (lhs[0], reference.m_major(lhs[1]))  # what get_col_major_tma_aligned_tensor gave
    out = torch.empty((M, N), dtype=BF16)
    deep_gemm.gemm_fp8_fp8_bf16_nt(lhs, rhs, out=out)
    assert is_close(out, exact_lhs @ exact_rhs.T)
    stack = tuple(part[None] for part in rhs)
    out.fill_(torch.nan)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs, stack, out, m_indices=torch.zeros(M, dtype=I32))
    assert is_close(out, exact_lhs @ exact_rhs.T)


def test_what_means_nothing_here_is_taken(products: Products) -> None:
    (a, exact_a), (b, exact_b) = operand(True, M, K, weight=False), operand(True, N, K, weight=True)
    out = torch.empty((M, N), dtype=BF16)
    deep_gemm.fp8_gemm_nt(list(a), list(b), out, None, (1, 128, 128), None, None, "mnk", True)
    assert is_close(out, exact_a @ exact_b.T)
    deep_gemm.fp8_gemm_nt(a, b, out, recipe_a=(1, 128), recipe_b=[128, 128], disable_ue8m0_cast=False)
    layout, stack = torch.zeros(M, dtype=I32), tuple(part[None] for part in b)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, stack, out, layout, ensure_zero_padding=False, compiled_dims="")
    assert products.called == ["fp8_gemm_nt", "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"]


# --- refusals


def packed(pair: Any) -> Any:
    return pair[0], torch.zeros(pair[1].shape, dtype=torch.int32)


def fp4(pair: Any) -> Any:
    return pair[0].view(torch.int8), pair[1]


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "accumulation": (lambda o: {"c": o["d"]}, r"c, to be added.*d\.add_\(c\)"),
    "float32 output": (lambda o: {"d": o["d"].float()}, "output of torch.float32.*bfloat16"),
    "scales of B per row": (lambda o: {"recipe": (1, 1, 128)}, r"recipe=\(1, 1, 128\); supported: recipe=\(1, 128, 128\)"),
    "scales of 32 columns": (lambda o: {"recipe_a": (1, 32), "recipe_b": (1, 32)}, r"recipe_a=\(1, 32\)"),
    "packed scales of A": (lambda o: {"a": packed(o["a"])}, "scales of a packed as UE8M0.*Blackwell"),
    "packed scales of B": (lambda o: {"b": packed(o["b"])}, "scales of b packed as UE8M0.*Blackwell"),
    "FP4 weights": (lambda o: {"b": fp4(o["b"])}, r"FP4 values in b.*prepare_experts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_our_kernels_cannot_do_is_refused_with_what_to_do_instead(products: Products, what: str) -> None:
    given: dict[str, Any] = {"a": operand(True, M, K, weight=False)[0], "b": operand(True, N, K, weight=True)[0]}
    given["d"] = torch.empty((M, N), dtype=BF16)
    change, text = REFUSED[what]
    with pytest.raises(UnsupportedError, match=text):
        deep_gemm.fp8_gemm_nt(**(given | change(given)))
    assert products.called == []


@pytest.mark.parametrize("name", [name for name in SERVED if "gemm" in name])
def test_every_product_refuses_a_float32_output(products: Products, name: str) -> None:
    stacked = "m_grouped" in name
    fp8 = "fp8" in name
    masked = name.endswith("masked")
    a, b = operand(fp8, *((GROUPS,) if masked else ()), M, K, weight=False)[0], operand(fp8, N, K, weight=True)[0]
    out = torch.empty((*((GROUPS,) if masked else ()), M, N))
    groups = (torch.zeros(GROUPS if masked else M, dtype=I32),) if stacked else ()
    with pytest.raises(UnsupportedError, match=f"{'m_grouped' if stacked else 'gemm'}.*torch.float32"):
        getattr(deep_gemm, name)(a, b, out, *groups, *((8,) if masked else ()))
    assert products.called == []


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_operand_meets_the_checks_of_the_operation(form: str) -> None:
    with pytest.raises(OperandError, match="a must be a pair"):
        getattr(deep_gemm, f"fp8_gemm_{form}")(None, 5, None)
    with pytest.raises(OperandError, match="must be a tensor"):
        getattr(deep_gemm, f"bf16_gemm_{form}")("a", torch.empty(3), None)


# --- up to the launch, with the driver's double


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    double = DriverDouble()
    double.push_context(double.retain_primary(0))
    service = KernelService(builder=InstantBuilder(), driver=double)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    pretend_gpus(monkeypatch)
    return double


def launch_all(m: int = 4096) -> list[str]:
    """Call every form that needs no view of its operands once; return the names."""

    def on_gpu(operand: Any) -> Any:
        return tuple(map(on_gpu, operand)) if isinstance(operand, tuple) else pretend(operand)

    def pair(*shape: int, rows: int) -> Any:
        scales = torch.empty((*shape[:-2], shape[-1] // 128, -(-shape[-2] // rows)))
        return torch.empty(shape, dtype=E4M3), scales.mT if rows == 1 else scales.mT.contiguous()

    n, k = 256, 512
    a, b, d = pair(m, k, rows=1), pair(n, k, rows=128), torch.empty((m, n), dtype=BF16)
    stack, masked_a = pair(GROUPS, n, k, rows=128), pair(GROUPS, m, k, rows=1)
    index, counts = torch.zeros(m, dtype=I32), torch.zeros(GROUPS, dtype=I32)
    masked_d = torch.empty((GROUPS, m, n), dtype=BF16)
    wide_a, wide_b, wide_stack = (torch.empty(shape, dtype=BF16) for shape in ((m, k), (n, k), (GROUPS, n, k)))
    calls: dict[str, tuple[Any, ...]] = {
        "fp8_gemm_nt": (a, b, d),
        "bf16_gemm_nt": (wide_a, wide_b, d),
        "m_grouped_fp8_gemm_nt_contiguous": (a, stack, d, index),
        "m_grouped_bf16_gemm_nt_contiguous": (wide_a, wide_stack, d, index),
        "m_grouped_fp8_gemm_nt_masked": (masked_a, stack, masked_d, counts, m),
        "m_grouped_bf16_gemm_nt_masked": (torch.empty((GROUPS, m, k), dtype=BF16), wide_stack, masked_d, counts, m),
    }
    for name, operands in calls.items():
        getattr(deep_gemm, name)(*(on_gpu(part) if isinstance(part, (tuple, torch.Tensor)) else part for part in operands))
    return list(calls)


def test_each_call_launches_one_kernel(driver: DriverDouble) -> None:
    assert len(launch_all()) == len(driver.launches)


def test_the_sm_count_bounds_the_grids_and_a_caller_can_put_it_back(
    driver: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    before = deep_gemm.get_num_sms()
    assert before == driver.sms
    deep_gemm.set_num_sms(20)
    assert deep_gemm.get_num_sms() == 20
    launch_all()
    assert {launch.grid[0] <= 20 for launch in driver.launches} == {True}
    deep_gemm.set_num_sms(before)
    driver.launches.clear()
    launch_all()
    assert max(launch.grid[0] for launch in driver.launches) > 20


def test_dependent_launch_is_what_was_set(driver: DriverDouble) -> None:
    assert deep_gemm.get_pdl() is False
    launch_all()
    deep_gemm.set_pdl(True)
    assert deep_gemm.get_pdl() is True
    launch_all()
    half = len(driver.launches) // 2
    assert [launch.dependent for launch in driver.launches] == [False] * half + [True] * half


@pytest.mark.parametrize("recipe", [5, "ab", (1, 128.0, 128), (1, None, 128)])
def test_a_recipe_that_is_no_numbers_is_refused(recipe: Any) -> None:
    with pytest.raises(OperandError, match="fp8_gemm_nt.*recipe must be a (tuple of whole numbers|whole number)"):
        deep_gemm.fp8_gemm_nt(None, None, torch.empty(0), recipe=recipe)


@pytest.mark.parametrize("enabled", ["no", 1, 0, None])
def test_dependent_launch_is_on_or_off_and_nothing_between(enabled: Any) -> None:
    before = deep_gemm.get_pdl()
    with pytest.raises(OperandError, match="set_pdl.*must be True or False"):
        deep_gemm.set_pdl(enabled)
    assert deep_gemm.get_pdl() is before


def test_the_tensor_cores_are_used_in_full() -> None:
    assert deep_gemm.get_tc_util() == 100
    deep_gemm.set_tc_util(100)
    with pytest.raises(UnsupportedError, match=r"set_tc_util\(80\).*set_num_sms"):
        deep_gemm.set_tc_util(80)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(("form", "operator"), [("nt", "fp8_gemm"), ("nn", "fp8_gemm"), ("tt", "fp8_gemm")])
def test_products_are_traced_whole_and_as_operators(form: str, operator: str) -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _example: list[torch.Tensor]) -> torch.fx.GraphModule:
        traced.extend(str(node.target) for node in graph.graph.nodes if "deepgemm_jit" in str(node.target))
        return graph

    torch._dynamo.reset()
    with FakeTensorMode():
        a = torch.empty((77, 256), dtype=E4M3, device="cuda"), torch.empty((77, 2), device="cuda")
        b = torch.empty((256, 256), dtype=E4M3, device="cuda"), torch.empty((2, 2), device="cuda")
        out = torch.empty((77, 256), dtype=BF16, device="cuda")
        if form == "tt":
            a = as_view(a, copied=False)
        torch.compile(getattr(deep_gemm, f"fp8_gemm_{form}"), fullgraph=True, backend=backend)(a, b, out)
    assert traced == [f"deepgemm_jit.{operator}"]
    torch._dynamo.reset()


# --- casts


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (1, 16), (200, 300), (0, 128)])
def test_the_cast_per_block_is_the_reference(n: int, k: int, ue8m0: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn((n, k)) * 5).to(dtype)
    values, scales = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=ue8m0)
    assert (values.shape, values.dtype, values.is_contiguous()) == ((n, k), E4M3, True)
    assert (scales.shape, scales.dtype) == ((-(-n // 128), -(-k // 128)), torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = x[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].float()
            scale = reference.scales_for(block.abs().amax()[None], ue8m0)[0]
            assert scales[i, j] == scale
            wanted = (block / scale).to(E4M3)
            assert torch.equal(
                values[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].view(torch.uint8), wanted.view(torch.uint8)
            )


HARD: dict[str, float] = {
    "zero": 0.0,
    "minus zero": -0.0,
    "tiny": 1e-38,
    "subnormal": 1e-40,
    "largest bfloat16": 3.3895313892515355e38,
}


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("what", HARD)
def test_a_hard_block_gets_a_scale_that_is_finite_and_positive_and_its_values_come_back(what: str, ue8m0: bool) -> None:
    x = torch.full((128, 128), HARD[what])
    values, scales = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=ue8m0)
    scale = float(scales[0, 0])
    assert 0 < scale < float("inf")
    assert not ue8m0 or scale.hex().startswith("0x1.0000000000000p")
    # In float64: the largest bfloat16 rounds up to 2^128, which is no float32.
    assert torch.allclose(values.double() * scale, x.double(), rtol=2.0**-4, atol=scale * 2.0**-9)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_nan_or_infinity_is_nan_and_no_other_block_is(poison: float, ue8m0: bool) -> None:
    x = torch.ones((256, 128))
    x[3, 7] = poison
    values, scales = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=ue8m0)
    back = values.float() * scales.repeat_interleave(128, 0)
    assert back[3, 7].isnan()
    assert not scales[0, 0].isfinite()
    assert torch.allclose(back[128:], x[128:], rtol=2.0**-4)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("dims", "shape"), [((0,), (3,)), ((0, 2), (3, 5)), ((-1,), (5,)), ((0, 1, 2), (3, 4, 5)), ((), ())], ids=str
)
def test_the_cast_over_chosen_dimensions(dims: tuple[int, ...], shape: tuple[int, ...], ue8m0: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5)
    values, scales = deep_gemm.per_custom_dims_cast_to_fp8(x, dims, ue8m0)
    kept = {dim % 3 for dim in dims}
    grid = scales.reshape([size if dim in kept else 1 for dim, size in enumerate(x.shape)])
    assert (values.shape, tuple(scales.shape)) == (x.shape, shape)
    assert torch.allclose(values.float() * grid, x, rtol=2.0**-4, atol=float(scales.max()) * 2.0**-9)


def test_casts_for_other_kernels_than_ours_are_refused() -> None:
    x = torch.ones(4, 128)
    for call in (
        lambda: deep_gemm.per_token_cast_to_fp8(x, True, gran_k=32),
        lambda: deep_gemm.per_block_cast_to_fp8(x, True, gran_k=32),
    ):
        with pytest.raises(UnsupportedError, match="gran_k=32; supported: gran_k=128"):
            call()
    with pytest.raises(UnsupportedError, match="use_packed_ue8m0.*Blackwell"):
        deep_gemm.per_token_cast_to_fp8(x, True, use_packed_ue8m0=True)
    with pytest.raises(OperandError, match="2 dimensions"):
        deep_gemm.per_block_cast_to_fp8(x[0])


@pytest.mark.parametrize(
    ("dims", "shape", "text"),
    [
        ((5,), (3, 4), r"dimension 5, and x of shape \(3, 4\) has 2"),
        ((-3,), (3, 4), r"dimension -3"),
        ((0,), (), r"x of shape \(\) has 0"),
        (0, (3, 4), "dims must be a tuple of whole numbers, not 0"),
        ((0.5,), (3, 4), "each number of dims must be a whole number, not 0.5"),
    ],
)
def test_dimensions_that_there_are_not_are_refused(dims: Any, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(OperandError, match=text):
        deep_gemm.per_custom_dims_cast_to_fp8(torch.ones(shape), dims)


@pytest.mark.parametrize(
    "call",
    [
        lambda: deep_gemm.per_token_cast_to_fp8(None),
        lambda: deep_gemm.per_block_cast_to_fp8(None),
        lambda: deep_gemm.per_custom_dims_cast_to_fp8(None, (0,)),
        lambda: deep_gemm.transform_sf_into_required_layout(None, 77, 300, (1, 128)),
        lambda: deep_gemm.get_mn_major_tma_aligned_tensor(None),
    ],
)
def test_what_is_no_tensor_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(OperandError, match="must be a tensor, not NoneType"):
        call()


def test_the_cast_per_token_is_the_operation() -> None:
    with FakeTensorMode():
        values, scales = deep_gemm.per_token_cast_to_fp8(torch.empty((77, 256)), use_ue8m0=True, gran_k=128)
    assert (values.shape, values.dtype) == ((77, 256), E4M3)
    assert (scales.shape, scales.stride()) == ((77, 2), (1, 80))


# --- layouts


def test_sizes_and_alignments(alignment: None) -> None:
    assert (deep_gemm.ceil_div(129, 128), deep_gemm.align(129, 128)) == (2, 256)
    assert [deep_gemm.get_tma_aligned_size(5, size) for size in (1, 2, 4, 16)] == [16, 8, 8, 5]
    with pytest.raises(OperandError, match="element_size = 3"):
        deep_gemm.get_tma_aligned_size(5, 3)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.get_k_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout() == 128
    narrow = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(20)
    deep_gemm.set_mk_alignment_for_contiguous_layout(narrow)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.utils.get_mk_alignment_for_contiguous_layout() == 32


@pytest.mark.parametrize("rows", [0, -16, 8, 100, 1.5, None])
def test_an_alignment_that_no_tile_divides_is_refused(rows: Any) -> None:
    with pytest.raises(OperandError, match="set_mk_alignment"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(rows)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


def test_scales_are_brought_into_the_layout_of_the_gemms_without_a_change() -> None:
    torch.manual_seed(0)
    per_row = torch.empty_strided((77, 3), (1, 80), device="meta")
    assert deep_gemm.transform_sf_into_required_layout(per_row, 77, 300, (1, 128, 128), is_sfa=True) is per_row
    per_block = torch.rand(2, 3, 3)
    for recipe in ({"recipe": (1, 128, 128), "is_sfa": False}, {"recipe": (128, 128)}):
        given = {"sf": per_block, "mn": 264, "k": 300, "num_groups": 2, **recipe}
        assert deep_gemm.transform_sf_into_required_layout(**given, disable_ue8m0_cast=True) is per_block
    turned = deep_gemm.transform_sf_into_required_layout(per_block.mT, 264, 300, (128, 128), 2)
    assert torch.equal(turned, per_block.mT) and turned.is_contiguous()
    with FakeTensorMode():
        laid_out = deep_gemm.transform_sf_into_required_layout(torch.empty(77, 3), 77, 300, (1, 128))
    assert laid_out.stride() == (1, 80)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"recipe": (1, 1, 32)}, UnsupportedError, "scales per 1 x 32; supported: scales per 1 x 128"),
        ({"recipe": (1, 128)}, OperandError, "two must go without"),
        ({"is_sfa": None}, OperandError, "three numbers need is_sfa"),
        ({"sf": torch.zeros(77, 1, dtype=torch.int32)}, UnsupportedError, "packed as UE8M0"),
        ({"sf": torch.zeros(77, 4)}, OperandError, r"of shape \(77, 3\), not torch.float32 of \(77, 4\)"),
        ({"sf": torch.zeros(77, 3, dtype=BF16)}, OperandError, "must be torch.float32"),
        ({"recipe": 5}, OperandError, "recipe must be a tuple of whole numbers, not 5"),
        ({"mn": None}, OperandError, "mn must be a whole number, not None"),
        ({"num_groups": 2.0}, OperandError, "num_groups must be a whole number"),
        ({"num_groups": 2}, OperandError, r"of shape \(2, 77, 3\)"),
    ],
)
def test_scales_that_no_gemm_reads_are_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"sf": torch.zeros(77, 3), "mn": 77, "k": 300, "recipe": (1, 128, 128), "is_sfa": True}
    with pytest.raises(error, match=text):
        deep_gemm.transform_sf_into_required_layout(**(given | change))

"""transformers' own ``deepgemm`` option on our module: the way it finds the module, and its forwards on float64 products."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from doubles.products import Products
from integrations import peers
from integrations.test_bf16_experts import bf16_module
from ops.reference import cast_rows
from torch import nn
from transformers.integrations import deepgemm as theirs
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations import hub_kernels
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

import deepgemm_jit
from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError
from deepgemm_jit.integrations import deep_gemm

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

BF16 = torch.bfloat16
FOLDER = Path(deep_gemm.__file__).parent


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """Put our module where transformers keeps the kernels it has loaded; its gate asks for a Hopper GPU and nvcc, and is open."""
    monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "deep-gemm", deep_gemm)
    monkeypatch.setattr(theirs, "_DEEPGEMM", None)
    for module in (theirs, fp8):
        monkeypatch.setattr(module, "is_deepgemm_loadable", lambda raise_error=False: True)
        monkeypatch.setattr(module, "is_sm100", lambda: False)
    monkeypatch.setattr(ops, "per_token_cast_to_fp8", cast_rows)
    torch.manual_seed(0)
    return Products(monkeypatch)


def test_every_kernel_that_transformers_asks_for_is_ours(products: Products) -> None:
    bundle = theirs.load_deepgemm_kernel()
    assert bundle.fp8_fp4_matmul is deep_gemm.fp8_gemm_nt
    assert bundle.grouped_fp8_fp4_matmul_nt is deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    assert bundle.grouped_fp8_fp4_matmul_nn is deep_gemm.m_grouped_fp8_gemm_nn_contiguous
    assert bundle.grouped_bf16_matmul_nt is deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    assert bundle.grouped_bf16_matmul_nn is deep_gemm.m_grouped_bf16_gemm_nn_contiguous
    assert bundle.per_token_cast_to_fp8 is deep_gemm.per_token_cast_to_fp8
    assert bundle.m_alignment == deep_gemm.get_mk_alignment_for_contiguous_layout()
    assert callable(bundle.fp8_fp4_mega_moe)


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_fp8_experts_forward_of_transformers_runs_on_our_grouped_products(products: Products, tokens: int) -> None:
    module = peers.fp8_experts()
    call = peers.random_call(module, tokens)
    with torch.no_grad():
        out = fp8.ALL_FP8_EXPERTS_FUNCTIONS["deepgemm"](module, *call)
    assert products.called == ["m_grouped_fp8_gemm_nt_contiguous"] * 2
    exact = peers.float64_experts(module, *call, rounded=True)
    # transformers rounds the gate and each expert's share to bfloat16 more often, which moves some FP8 values by a step.
    assert (out.double() - exact).norm() < 2.0**-5 * exact.norm()


def test_ue8m0_experts_are_refused_as_transformers_spreads_their_scales_over_rows(products: Products) -> None:
    module = peers.fp8_experts(scale_fmt="ue8m0")
    with torch.no_grad(), pytest.raises(OperandError, match=r"b_scale must have shape \(G, ceil\(N / 128\), ceil\(K / 128\)\)"):
        fp8.ALL_FP8_EXPERTS_FUNCTIONS["deepgemm"](module, *peers.random_call(module, 4))


@pytest.mark.parametrize("transposed", [False, True], ids=["nt", "nn"])
def test_the_bf16_experts_forward_of_transformers_runs_on_our_grouped_products(products: Products, transposed: bool) -> None:
    module = bf16_module(is_transposed=transposed)
    hidden, index, weights = peers.random_call(module, 40)
    with torch.no_grad():
        out = ALL_EXPERTS_FUNCTIONS["deepgemm"](module, hidden, index, weights)
    assert products.called == [f"m_grouped_bf16_gemm_{'nn' if transposed else 'nt'}_contiguous"] * 2
    exact = torch.zeros(hidden.shape, dtype=torch.float64)
    first, second = (w.double() if transposed else w.mT.double() for w in (module.gate_up_proj, module.down_proj))
    for expert in range(module.num_experts):
        rows, place = torch.where(index == expert)
        gate, up = (hidden[rows].double() @ first[expert]).chunk(2, -1)
        exact.index_add_(0, rows, (nn.functional.silu(gate) * up) @ second[expert] * weights[rows, place, None].double())
    assert (out.double() - exact).norm() < 2.0**-6 * exact.norm()


def test_the_fp8_linear_of_transformers_runs_on_our_dense_product(products: Products) -> None:
    linear = fp8.FP8Linear(256, 384, block_size=(128, 128))
    peers.fill(linear)
    x = torch.randn((2, 5, 256), dtype=BF16)
    with torch.no_grad():
        out = linear(x)
    assert products.called == ["fp8_gemm_nt"]
    weight = peers.dequantized(linear.weight, linear.weight_scale_inv, (128, 128), torch.float64)
    exact = peers.quantized(x, None, dynamic=True) @ weight.T
    assert (out.double() - exact).norm() < 2.0**-8 * exact.norm()


_BY_KERNELS = """
import json
from transformers.integrations import deepgemm, hub_kernels

module = hub_kernels.lazy_load_kernel("deep-gemm")
deepgemm.is_deepgemm_loadable = lambda raise_error=False: True  # asks for a GPU and nvcc
bundle = deepgemm.load_deepgemm_kernel()
from deepgemm_jit.integrations import deep_gemm
print(json.dumps([module.__file__, bundle.fp8_fp4_matmul is deep_gemm.fp8_gemm_nt, bundle.m_alignment]))
"""


def test_the_override_of_the_kernels_package_leads_transformers_to_our_folder() -> None:
    if not importlib.import_module("transformers").utils.is_kernels_available():
        pytest.skip(f"needs the package kernels, from {KERNELS_MIN_VERSION} on and before {KERNELS_MAX_VERSION}")
    paths = [str(Path(deepgemm_jit.__file__).parents[1]), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LOCAL_KERNELS": f"kernels-community/deep-gemm={FOLDER}",
        "HF_HUB_OFFLINE": "1",
    }
    child = subprocess.run(
        [sys.executable, "-c", _BY_KERNELS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout.splitlines()[-1]) == [str(FOLDER / "__init__.py"), True, 128]


def test_the_folder_says_what_the_kernels_package_reads() -> None:
    metadata = json.loads((FOLDER / "metadata.json").read_text())
    assert (metadata["name"], metadata["python-depends"]) == ("deep-gemm", [])
    assert metadata["id"].isidentifier() and metadata["version"] == hub_kernels._HUB_KERNEL_MAPPING["deep-gemm"]["version"]

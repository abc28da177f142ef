"""What has no kernel is refused before a weight is touched, and the implementation that is named runs it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.ops.weights import Experts

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

BF16 = torch.bfloat16


REFUSED = [(64, 128), (128, 64), (64, 64), (32, 32)]


@pytest.mark.parametrize("block", REFUSED, ids=str)
@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_a_block_without_kernel_is_refused_and_the_implementation_named_runs_it(
    block: tuple[int, int], activations: str, registered: None, calls: list[Experts], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = peers.fp8_experts(block, activations)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    call = peers.random_call(module, 5)
    module.config._experts_implementation = integration.NAME
    with pytest.raises(NotImplementedError) as refusal, torch.no_grad():
        module(*call)
    assert isinstance(refusal.value, UnsupportedError)
    assert str(block) in str(refusal.value) and calls == []
    assert all(torch.equal(p.view(torch.uint8), before[name].view(torch.uint8)) for name, p in module.named_parameters())

    suggested = "eager" if activations == "static" else "grouped_mm"
    assert f'experts_implementation="{suggested}"' in refusal.value.advice
    monkeypatch.setattr(fp8, "load_finegrained_fp8_kernel", peers.grouped_kernel_double)
    with torch.no_grad(), peers.eager_peer():
        module.config._experts_implementation = suggested
        result = module(*call)
    assert result.isfinite().all() and result.any()


@pytest.mark.parametrize("other", ["batched_mm", "grouped_mm", "deepgemm"])
def test_with_static_activations_transformers_has_nothing_but_eager(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import deepgemm

    for module, loader in ((fp8, "load_finegrained_fp8_kernel"), (deepgemm, "load_deepgemm_kernel")):
        monkeypatch.setattr(module, loader, peers.grouped_kernel_double)
    monkeypatch.setattr(deepgemm, "is_sm100", lambda: False)
    module = peers.fp8_experts(scheme="static")
    module.config._experts_implementation = other
    with pytest.raises(NotImplementedError, match="static"):
        module(*peers.random_call(module, 3))


def test_fp4_scales_too_far_apart_are_refused_with_an_implementation(registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts(scale_fmt="ue8m0", fp4=True)
    module.config._experts_implementation = integration.NAME
    module.gate_up_proj.data[3].fill_(0x22)
    scale = module.gate_up_proj_scale_inv.data.view(torch.uint8)
    scale[3, 0, 0], scale[3, 0, 1] = 100, 115
    with (
        pytest.raises(UnsupportedError, match=r"expert 3.*experts_implementation=\"grouped_mm\" runs it") as refusal,
        torch.no_grad(),
    ):
        module(*peers.random_call(module, 3))
    assert isinstance(refusal.value.__cause__, UnsupportedError) and calls == []


def test_weights_that_were_dequantized_are_refused(registered: None) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.to(BF16), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"bfloat16.*eager"), torch.no_grad():
        module(*peers.random_call(module, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_hidden_states_that_are_not_bf16_are_a_value_error(dtype: torch.dtype, registered: None) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    hidden, index, weights = peers.random_call(module, 3)
    with pytest.raises(ValueError, match=str(dtype)) as refusal, torch.no_grad():
        module(hidden.to(dtype), index, weights)
    assert isinstance(refusal.value, OperandError)


def test_hidden_states_on_another_device_than_the_weights_are_a_runtime_error(registered: None) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    call = (tensor.to("meta") for tensor in peers.random_call(module, 3))
    with pytest.raises(RuntimeError, match=r"on meta|meta.*cpu|cpu.*meta") as refusal, torch.no_grad():
        module(*call)
    error = refusal.value
    assert isinstance(error, ContextMismatchError)
    assert error.belongs_to == "cpu" and "meta" in error.used_in


@pytest.mark.parametrize(("position", "name"), [(0, "hidden states"), (2, "top-k weights")])
def test_inputs_that_require_grad_are_refused_while_gradients_are_recorded(
    position: int, name: str, registered: None, calls: list[Experts]
) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    call = list(peers.random_call(module, 3))
    call[position].requires_grad_()
    with pytest.raises(OperandError, match=f"{name} require grad.*no_grad"):
        module(*call)
    with torch.no_grad():
        module(*call)
    assert len(calls) == 1

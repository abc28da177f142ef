"""Weights are prepared once, again when they changed, and go with their module."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.experts import prepared_experts
from deepgemm_jit.ops.weights import Experts

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

BF16 = torch.bfloat16


def prepared_once(module: nn.Module, calls: list[Experts]) -> Experts:
    with torch.no_grad():
        for _ in range(2):
            module(*peers.random_call(module, 3))
    assert calls[-1].down.weight is calls[-2].down.weight and calls[-1].down.scale is calls[-2].down.scale
    return calls[-1]


@pytest.fixture
def module(registered: None) -> nn.Module:
    made = peers.fp8_experts(fp4=True)
    made.config._experts_implementation = integration.NAME
    return made


def test_weights_are_prepared_once_and_their_bytes_are_told(module: nn.Module, calls: list[Experts]) -> None:
    added_bytes = integration.prepare(module)
    kept = prepared_once(module, calls)
    made = (kept.gate_up.weight, kept.gate_up.scale, kept.down.weight, kept.down.scale)
    assert added_bytes == sum(tensor.nbytes for tensor in made) > 0
    assert integration.prepare(module) == added_bytes
    assert prepared_once(module, calls).down.weight is kept.down.weight


def _load(module: nn.Module) -> None:
    other = peers.fp8_experts(fp4=True)
    module.load_state_dict(other.state_dict())


def _load_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.down_proj.copy_(peers.fp8_experts(fp4=True).down_proj)


def _replace(module: nn.Module) -> None:
    module.down_proj = nn.Parameter(module.down_proj.clone(), requires_grad=False)


def _move(module: nn.Module) -> None:
    module.down_proj.data = module.down_proj.data.clone()


@pytest.mark.parametrize("change", [_load, _load_in_place, _replace, _move])
def test_weights_that_were_loaded_or_moved_are_prepared_again(change: Any, module: nn.Module, calls: list[Experts]) -> None:
    before = prepared_once(module, calls)
    change(module)
    after = prepared_once(module, calls)
    assert after.down.weight is before.down.weight  # where a captured graph reads it
    table = peers.dequantized(module.down_proj, module.down_proj_scale_inv, None, torch.float64)
    assert torch.equal(peers.dequantized(after.down.weight, after.down.scale, (128, 128), torch.float64), table)


def test_what_was_prepared_goes_with_the_module(module: nn.Module, calls: list[Experts]) -> None:
    for made in (module, peers.fp8_experts(base=peers.Softcapped)):  # the second one's gate is bound to it
        made.config._experts_implementation = integration.NAME
        prepared_once(made, calls)
    kept = [weakref.ref(prepared_experts(m).down.weight) for m in (module, made)]
    calls.clear()
    gc.disable()
    try:
        del made
        assert kept[1]() is None
    finally:
        gc.enable()


def test_what_was_prepared_is_no_part_of_the_state_nor_of_a_copy(module: nn.Module, calls: list[Experts]) -> None:
    names = set(module.state_dict())
    kept = prepared_once(module, calls)
    assert set(module.state_dict()) == names
    twin = copy.deepcopy(module)
    assert prepared_once(twin, calls).down.weight is not kept.down.weight
    model = peers.fp8_model("qwen3_moe")
    model.set_experts_implementation(integration.NAME)
    integration.prepare(model)
    assert len(pickle.dumps(model.model.layers[0].mlp.experts._deepgemm_jit_prepared)) < 100


def test_prepare_does_all_of_a_model_that_runs_with_us_and_nothing_else(registered: None, calls: list[Experts]) -> None:
    model = peers.fp8_model("deepseek_v3")
    assert integration.prepare(model) == 0
    assert not any(hasattr(module, "_deepgemm_jit_prepared") for module in model.modules())
    model.set_experts_implementation(integration.NAME)
    integration.accelerate_linears(model)
    integration.prepare(model)
    prepared = {name for name, module in model.named_modules() if hasattr(module, "_deepgemm_jit_prepared")}
    assert prepared == {n for n, m in model.named_modules() if isinstance(m, (fp8.FP8Linear, fp8.FP8Experts))}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtensor_weights_are_taken_local(mesh: Any, registered: None, calls: list[Experts]) -> None:
    from torch.distributed.tensor import DTensor, Shard

    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    call = peers.random_call(module, 5)
    with torch.no_grad():
        expected = module(*call)
        for name, parameter in list(module.named_parameters()):
            spread = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(spread, requires_grad=False))
        assert torch.equal(module(*call), expected)
    assert isinstance(module.down_proj, DTensor)
    assert type(calls[-1].down.weight) is torch.Tensor
    assert calls[-1].down.weight.data_ptr() == module.down_proj.to_local().data_ptr()

"""Weights are prepared once, again when they changed, and go with their module."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations import experts, prepared
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.experts import prepared_experts
from deepgemm_jit.integrations.prepared import Prepared, forget
from deepgemm_jit.ops import fp4
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
    added_bytes = integration.prepare(module, decode="fp4")
    kept = prepared_once(module, calls)
    made = [part for each in (kept.gate_up, kept.down) for part in (each.weight, each.scale, each.fragments)]
    assert kept.decodes_fp4
    assert added_bytes == sum(tensor.nbytes for tensor in made if tensor is not None) > 0
    assert integration.prepare(module) == added_bytes
    assert prepared_once(module, calls).down.weight is kept.down.weight


def test_a_first_forward_keeps_no_fragments_and_a_later_preparation_adds_them(module: nn.Module, calls: list[Experts]) -> None:
    lazily = prepared_once(module, calls)
    assert not lazily.decodes_fp4
    less = integration.prepare(module)
    more = integration.prepare(module, decode="fp4")
    kept = prepared_once(module, calls)
    assert kept.decodes_fp4 and kept.down.weight is lazily.down.weight
    assert more - less == sum(each.fragments.nbytes for each in (kept.gate_up, kept.down))


@pytest.mark.parametrize("decode", ["fp5", None, ["fp4"]])
def test_another_word_is_refused_and_nothing_is_prepared(decode: Any, module: nn.Module) -> None:
    with pytest.raises(OperandError, match="must be 'auto', 'fp4' or 'fp8'"):
        integration.prepare(module, decode=decode)
    assert prepared.try_kept(module) is None


@pytest.mark.parametrize(("more_bytes", "keeps"), [(0, True), (1, False)])
def test_a_model_keeps_fragments_where_all_of_them_leave_a_quarter_of_the_gpu(
    more_bytes: int, keeps: bool, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, fragments = experts.bytes_to_prepare(module)
    experts.prepare(module, fragments=True)
    kept = prepared.try_kept(module)
    assert folded == kept.gate_up.weight.nbytes + kept.down.weight.nbytes
    assert fragments == kept.gate_up.fragments.nbytes + kept.down.fragments.nbytes

    gpus = [torch.device("cuda", 0), torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    layers = [SimpleNamespace(down_proj=SimpleNamespace(device=device)) for device in gpus]
    monkeypatch.setattr(experts, "bytes_to_prepare", lambda _layer: (folded, fragments))
    free = {gpus[0]: 2 * (folded + fragments) + 256 - more_bytes, gpus[2]: 0}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 1024))
    assert integration._with_room(layers) == ({gpus[0]} if keeps else set())


@pytest.mark.parametrize(
    ("first", "decode", "keeps"),
    [(None, "auto", True), (None, "fp8", False), ("fp8", "auto", False), ("fp4", "auto", True), ("fp4", "fp8", True)],
)
def test_auto_decides_on_what_was_never_prepared(
    first: Any, decode: Any, keeps: bool, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_with_room", lambda modules: {each.down_proj.device for each in modules})
    if first is not None:
        integration.prepare(module, decode=first)
    integration.prepare(module, decode=decode)
    assert (prepared.try_kept(module).down.fragments is not None) is keeps


def test_auto_decides_anew_on_what_was_moved(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_with_room", lambda modules: {each.down_proj.device for each in modules})
    integration.prepare(module, decode="fp8")
    monkeypatch.setattr(Prepared, "is_elsewhere", lambda *_: True)
    integration.prepare(module)
    assert prepared.try_kept(module).down.fragments is not None


def test_weights_on_no_device_are_refused_whatever_is_to_be_kept(module: nn.Module) -> None:
    module.to("meta")
    with pytest.raises(OperandError):
        integration.prepare(module, decode="fp4")


def test_scales_that_fragments_cannot_hold_are_folded_or_refused(module: nn.Module) -> None:
    def load_large_scales() -> None:
        with torch.no_grad():
            module.down_proj_scale_inv.fill_(2.0 ** (fp4.MAX_FRAGMENT_EXPONENT + 1))

    integration.prepare(module, decode="fp4")
    load_large_scales()
    with pytest.raises(UnsupportedError, match="where fragments are kept"):
        integration.prepare(module)
    prepared.forget(module)
    integration.prepare(module, decode="fp4")
    assert prepared.try_kept(module).down.fragments is None


def _load(module: nn.Module) -> None:
    other = peers.fp8_experts(fp4=True)
    module.load_state_dict(other.state_dict())


def _load_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.down_proj.copy_(peers.fp8_experts(fp4=True).down_proj)


def test_fragments_that_a_graph_may_read_are_made_anew_in_any_case(module: nn.Module) -> None:
    integration.prepare(module, decode="fp4")
    before = prepared.try_kept(module).down.fragments
    _load_in_place(module)
    integration.prepare(module)
    kept = prepared.try_kept(module).down.fragments
    assert kept is before
    assert torch.equal(kept, fp4.pack_fragments(module.down_proj, module.down_proj_scale_inv))
    prepared.forget(module)
    integration.prepare(module)
    assert prepared.try_kept(module).down.fragments is None


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


# --- memory


def _to_meta(module: nn.Module) -> None:
    module.to("meta")


def _offload(module: nn.Module) -> None:
    """Put empty parameters in their place, as accelerate does."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


@pytest.mark.parametrize("offload", [_to_meta, _offload])
@pytest.mark.parametrize("case", [{}, {"fp4": True}, {"scheme": "static", "block": None}], ids=str)
def test_nothing_on_the_old_device_is_held_when_parameters_go(case: dict[str, Any], offload: Any, registered: None) -> None:
    module = peers.fp8_experts(**case)
    module.config._experts_implementation = integration.NAME
    integration.prepare(module)
    made = weakref.ref(module._deepgemm_jit_prepared)
    held = [weakref.ref(p) for p in (prepared_experts(module).gate_up.weight, prepared_experts(module).down.weight)]
    gc.disable()
    try:
        offload(module)
        assert made() is None and not [tensor for tensor in held if tensor() is not None]
    finally:
        gc.enable()


def test_weights_that_come_back_from_offload_are_prepared_again(module: nn.Module, calls: list[Experts]) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    call = peers.random_call(module, 3)
    with torch.no_grad():
        before = module(*call)
        _offload(module)
        for name, value in state.items():
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
        assert torch.equal(module(*call), before)


def test_what_serves_as_it_lies_is_not_kept(registered: None) -> None:
    module = peers.fp8_experts()
    assert experts.prepare(module) == 0
    weight, replaced = weakref.ref(module.down_proj), nn.Parameter(module.down_proj.detach().clone(), requires_grad=False)
    gc.disable()
    try:
        module.down_proj = replaced
        assert weight() is None
    finally:
        gc.enable()
    assert prepared_experts(module).down.weight.data_ptr() == replaced.data_ptr()


@pytest.mark.parametrize("k_major", [True, False])
def test_transposed_weights_are_copied_unless_they_lie_k_major(k_major: bool, registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    call = peers.random_call(module, 5)
    with torch.no_grad():
        expected = module(*call)
        module.is_transposed = True
        for name in ("gate_up_proj", "down_proj"):
            turned = getattr(module, name).detach().transpose(1, 2)
            setattr(module, name, nn.Parameter(turned if k_major else turned.contiguous(), requires_grad=False))
        assert torch.equal(module(*call), expected)
    assert integration.prepare(module) == (0 if k_major else module.gate_up_proj.nbytes + module.down_proj.nbytes)
    assert (calls[-1].down.weight.data_ptr() == module.down_proj.data_ptr()) is k_major


# --- what is made again


def test_what_was_made_in_inference_mode_can_be_overwritten_outside_of_it(module: nn.Module) -> None:
    with torch.inference_mode():
        experts.prepare(module)
    weight = prepared_experts(module).down.weight
    assert not weight.is_inference()
    with torch.no_grad():
        module.down_proj.zero_()
    assert prepared_experts(module).down.weight is weight and not weight.view(torch.uint8).any()


def test_settings_changed_after_the_first_forward_are_seen(registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts()
    module.config._experts_implementation = integration.NAME
    call = peers.random_call(module, 3)
    with torch.no_grad():
        module(*call)
        module.limit = module.swiglu_limit = 0.5
        module(*call)
        module.swiglu_alpha = 1.7
        module(*call)
        module.act_fn = nn.GELU()
        module(*call)
        module.block_size = (64, 64)
        with pytest.raises(UnsupportedError, match="64"):
            module(*call)
    assert [made.activation[:3] for made in calls] == [
        ("silu", None, None),
        ("silu", 0.5, None),
        ("silu", 0.5, 1.7),
        ("callback", None, None),
    ]


@pytest.mark.parametrize("which", ["scale_inv", "activation_scale"])
def test_scales_in_bf16_are_read_exactly(which: str, registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts(scheme="static")
    module.config._experts_implementation = integration.NAME
    names = [name for name, _ in module.named_parameters() if name.endswith(which)]
    for name in names:
        setattr(module, name, nn.Parameter(getattr(module, name).to(BF16).float(), requires_grad=False))
    call = peers.random_call(module, 5)
    with torch.no_grad():
        expected = module(*call)
        for name in names:
            setattr(module, name, nn.Parameter(getattr(module, name).to(BF16), requires_grad=False))
        assert torch.equal(module(*call), expected)
    assert integration.prepare(module) == sum(4 * getattr(module, name).numel() for name in names)


# --- threads


def test_threads_prepare_a_module_once(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    theirs, start = ops.prepare_experts, threading.Barrier(4)

    def counted(*given: Any, **how: Any) -> Experts:
        made.append(1)
        return theirs(*given, **how)

    monkeypatch.setattr(ops, "prepare_experts", counted)

    def first_forward(_: int) -> int:
        start.wait()
        return prepared_experts(module).down.weight.data_ptr()

    with ThreadPoolExecutor(4) as pool:
        addresses = set(pool.map(first_forward, range(4)))
    assert len(made) == len(addresses) == 1


def test_what_is_dropped_while_it_is_prepared_is_returned_all_the_same(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_of = Prepared.is_of

    def and_dropped(self: Prepared, module: Any) -> bool:
        found = is_of(self, module)
        forget(module)  # as another thread's `restore` may, between any two steps
        return found

    experts.prepare(module)
    monkeypatch.setattr(Prepared, "is_of", and_dropped)
    assert experts.prepare(module) > 0
    assert not hasattr(module, "_deepgemm_jit_prepared")

"""deepgemm_jit in transformers, on a CPU: names, schemes, refusals, preparation.

The operations stand on dequantized weights in float64 here, so that what transformers' module becomes on its way to them shows
in numbers; everything else is the real thing.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers import Qwen3MoeForCausalLM
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.integrations import experts as forwards
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.gates import activation_of, gate_seen
from deepgemm_jit.integrations.prepared import value_of
from deepgemm_jit.ops.weights import Activation, Experts

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

INTERFACES = (fp8.ALL_FP8_EXPERTS_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def registered() -> Any:
    integration.register()
    yield
    for interface in INTERFACES:
        type(interface)._global_mapping.pop(integration.NAME, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Experts]:
    """Run `ops.fp8_experts` on dequantized weights; return what it was given."""
    given: list[Experts] = []

    def fp8_experts(hidden: Any, index: Any, weights: Any, experts: Experts) -> torch.Tensor:
        given.append(experts)
        return experts_on_floats(hidden, index, weights, experts)

    monkeypatch.setattr(ops, "fp8_experts", fp8_experts, raising=False)
    return given


def experts_on_floats(hidden: Any, index: Any, weights: Any, experts: Experts) -> torch.Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(experts.count):
        rows, place = torch.where(index == expert)
        x: Any = hidden[rows]
        for projection in (experts.gate_up, experts.down):
            static = None if projection.activation_scale is None else projection.activation_scale[expert]
            block = (128, 128) if projection.scale_kind == "block" else (1, 128)
            wide = peers.dequantized(projection.weight[expert], projection.scale[expert], block, torch.float64)
            x = (peers.quantized(x, static, dynamic=False) @ wide.T).to(BF16)
            if projection is experts.gate_up:
                x = activated(x, experts)
        out.index_add_(0, rows, x.double() * weights[rows, place, None].double())
    return out.to(hidden.dtype)


def activated(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    kind, limit, alpha, callback = experts.activation
    if kind == "callback":
        return callback(x)
    if not experts.gated:
        return nn.functional.silu(x)
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate) if alpha is not None else nn.functional.silu(gate) * up


class Softcapped(fp8.FP8Experts):
    """A class with a gate of its own."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate / 2) * 2 * up


# --- names


def test_registering_makes_the_name_known_for_fp8_and_bf16(registered: None) -> None:
    assert [interface[integration.NAME] for interface in INTERFACES] == [
        forwards.fp8_experts_forward,
        forwards.bf16_experts_forward,
    ]
    assert all(integration.NAME in type(interface)() for interface in INTERFACES)  # also in one made later


def test_registering_twice_is_registering_once(registered: None) -> None:
    before = [dict(interface) for interface in INTERFACES]
    integration.register()
    assert [dict(interface) for interface in INTERFACES] == before


@pytest.mark.parametrize("taken", [0, 1], ids=["fp8", "bf16"])
def test_a_name_that_someone_else_took_is_refused_and_nothing_changes(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def somebody_elses(*_: Any) -> None: ...

    monkeypatch.setitem(INTERFACES[taken]._local_mapping, integration.NAME, somebody_elses)
    with pytest.raises(OperandError, match=r"somebody_elses under 'deepgemm_jit'"):
        integration.register()
    assert INTERFACES[taken][integration.NAME] is somebody_elses
    assert integration.NAME not in INTERFACES[1 - taken]


def test_transformers_refuses_the_name_before_and_takes_it_after() -> None:
    model = Qwen3MoeForCausalLM(peers.qwen3_moe_config(num_hidden_layers=1))
    with pytest.raises(ValueError, match="not supported"):
        model.set_experts_implementation(integration.NAME)
    try:
        integration.register()
        model.set_experts_implementation(integration.NAME)
        assert model.config._experts_implementation == integration.NAME
    finally:
        for interface in INTERFACES:
            type(interface)._global_mapping.pop(integration.NAME, None)


def test_from_pretrained_takes_the_name(registered: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3MoeForCausalLM(peers.qwen3_moe_config(num_hidden_layers=1)).to(BF16).save_pretrained(tmp_path)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=BF16, experts_implementation=integration.NAME)
    given: list[dict[str, Any]] = []

    def bf16_experts(hidden: Any, index: Any, weights: Any, gate_up: Any, down: Any, **how: Any) -> torch.Tensor:
        given.append(how | {"shapes": (tuple(gate_up.shape), tuple(down.shape))})
        return torch.zeros_like(hidden)

    monkeypatch.setattr(ops, "bf16_experts", bf16_experts, raising=False)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert given == [
        {
            "gated": True,
            "transposed": False,
            "interleaved": False,
            "activation": Activation("silu"),
            "shapes": ((8, 256, 256), (8, 256, 128)),
        }
    ]


# --- schemes

SCHEMES: dict[str, dict[str, Any]] = {
    "block_128_128": {},
    "block_128_128_ragged": {"hidden_size": 320, "moe_intermediate_size": 192},
    "block_1_128": {"block": (1, 128)},
    "per_tensor": {"block": None},
    "per_tensor_ragged": {"block": None, "moe_intermediate_size": 80},
    "ue8m0": {"scale_fmt": "ue8m0"},
    "fp4_ue8m0": {"scale_fmt": "ue8m0", "fp4": True},
    "fp4_float": {"fp4": True},
    "no_gate": {"has_gate": False},
    "limit": {"swiglu_limit": 0.4},
    "limit_and_alpha": {"swiglu_limit": 0.4, "swiglu_alpha": 1.7},
    "gelu": {"hidden_act": "gelu"},
    "no_gate_relu2": {"has_gate": False, "hidden_act": "relu2"},
    "gate_of_its_own": {"base": Softcapped},
}


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_becomes_the_same_forward(scheme: str, activations: str, registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts(scheme=activations, **SCHEMES[scheme])
    call = peers.random_call(module, 9)
    with torch.no_grad():
        with peers.eager_peer():
            theirs = module(*call)
        module.config._experts_implementation = integration.NAME
        ours = module(*call)
    assert len(calls) == 1
    assert theirs.std() > 0.02
    # Sums in another order, and with static activations now and then a neighbouring FP8 value.
    assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < (2e-2 if activations == "static" else 8e-3)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("block_128_128", "silu"),
        ("limit_and_alpha", "silu"),
        ("no_gate", "silu"),
        ("gelu", "callback"),
        ("no_gate_relu2", "callback"),
    ],
)
def test_only_what_is_no_silu_goes_through_a_callback(scheme: str, kind: str, registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts(**SCHEMES[scheme])
    module.config._experts_implementation = integration.NAME
    with torch.no_grad():
        module(*peers.random_call(module, 3))
    assert calls[0].activation.kind == kind


def test_scales_as_bytes_are_read_as_ue8m0(registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts(scale_fmt="ue8m0")
    module.config._experts_implementation = integration.NAME
    call = peers.random_call(module, 5)
    with torch.no_grad():
        expected = module(*call)
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            setattr(module, name, nn.Parameter(getattr(module, name).view(torch.uint8), requires_grad=False))
        assert torch.equal(module(*call), expected)


def test_a_model_on_several_gpus_is_not_held_back(registered: None, calls: list[Experts]) -> None:
    module = peers.fp8_experts()
    module._deepgemm_disabled = True
    module.config._experts_implementation = integration.NAME
    with torch.no_grad():
        module(*peers.random_call(module, 3))
    assert len(calls) == 1


@pytest.mark.parametrize("kind", peers.MODELS)
@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_whole_models_give_the_tokens_of_the_eager_peer(
    kind: str, activations: str, registered: None, calls: list[Experts]
) -> None:
    model, prompt = peers.fp8_model(kind, scheme=activations), peers.random_prompts(count=24)
    with peers.eager_peer():  # the linears stay transformers'
        theirs, decided = peers.decided_tokens(model, prompt)
        assert calls == []
        model.set_experts_implementation(integration.NAME)
        ours = peers.greedy(model, prompt)
    assert len(calls) == 2 * 4
    assert torch.equal(ours[decided], theirs[decided])


# --- gates


def test_transformers_own_gates_are_recognised() -> None:
    from transformers.integrations.moe import _default_apply_gate

    seen = gate_seen(fp8.FP8Experts._apply_gate)
    assert seen is not None and seen.reads_limit and seen.reads_alpha
    assert gate_seen(_default_apply_gate) == (False, False, frozenset())


@pytest.mark.parametrize("attribute", ["gate_softcap", "something_new"])
def test_an_attribute_of_a_newer_gate_makes_it_a_callback(attribute: str) -> None:
    def newer(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        cap = getattr(self, attribute)
        return self.act_fn(gate) * up if cap is None else torch.tanh(gate / cap) * up

    class Module(nn.Module):
        has_gate, act_fn, _apply_gate = True, nn.SiLU(), newer

    module = Module()
    setattr(module, attribute, None)
    assert activation_of(module, (newer,)) == Activation("silu")
    setattr(module, attribute, 5.0)
    assert activation_of(module, (newer,)) is None
    assert activation_of(module, ()) is None


def test_a_gate_that_computes_something_else_is_not_recognised() -> None:
    def other(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    assert gate_seen(other) is None
    assert gate_seen(Softcapped._apply_gate) is None


def test_a_limit_that_the_gate_does_not_share_is_left_to_the_gate() -> None:
    module = peers.fp8_experts(swiglu_limit=0.5)
    known = (fp8.FP8Experts._apply_gate,)
    assert activation_of(module, known) == Activation("silu", limit=0.5)
    module.limit = 0.25
    assert activation_of(module, known) is None


# --- refusals

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


def bf16_module(dtype: torch.dtype = BF16, **layout: Any) -> nn.Module:
    class Plain(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.hidden_dim, self.act_fn = 8, 256, nn.SiLU()
            up = (8, 256, 256) if layout.get("has_gate", True) else (8, 128, 256)
            name = "gate_up_proj" if layout.get("has_gate", True) else "up_proj"
            turned = layout.get("is_transposed", False)
            for which, shape in ((name, up), ("down_proj", (8, 256, 128))):
                weight = torch.randn((shape[0], shape[2], shape[1]) if turned else shape, dtype=dtype) * 0.05
                setattr(self, which, nn.Parameter(weight, requires_grad=False))
                if layout.get("has_bias"):
                    setattr(self, f"{which}_bias", nn.Parameter(torch.randn(shape[:2], dtype=dtype), requires_grad=False))

        def forward(self, *_: Any) -> torch.Tensor:
            raise AssertionError("eager was not asked for")

    config = peers.qwen3_moe_config()
    config._experts_implementation = integration.NAME
    return use_experts_implementation(Plain, **layout)(config)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"is_transposed": True},
        {"is_concatenated": False},
        {"has_gate": False},
        {"is_transposed": True, "is_concatenated": False},
    ],
    ids=str,
)
def test_a_bf16_layout_reaches_the_operation(layout: dict[str, bool], registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ops, "bf16_experts", lambda *operands, **how: given.append((operands, how)), raising=False)
    module = bf16_module(**layout)
    with torch.no_grad():
        module(*peers.random_call(module, 3))
    ((_, _, _, up, down), how) = given[0]
    gated = layout.get("has_gate", True)
    assert how == {
        "gated": gated,
        "transposed": layout.get("is_transposed", False),
        "interleaved": gated and not layout.get("is_concatenated", True),
        "activation": Activation("silu"),
    }
    assert up.data_ptr() == (module.gate_up_proj if gated else module.up_proj).data_ptr()
    assert down.data_ptr() == module.down_proj.data_ptr()


@pytest.mark.parametrize(
    ("layout", "dtype", "said"),
    [({"has_bias": True}, BF16, "biases"), ({}, torch.float32, "float32 weights"), ({}, torch.float16, "float16 weights")],
    ids=["biases", "float32", "float16"],
)
def test_a_bf16_module_without_kernel_is_refused_and_the_implementation_named_runs_it(
    layout: dict[str, bool], dtype: torch.dtype, said: str, registered: None
) -> None:
    module = bf16_module(dtype, **layout)
    call = peers.random_call(module, 3)
    with pytest.raises(UnsupportedError, match=said) as refusal, torch.no_grad():
        module(*call)
    assert 'experts_implementation="grouped_mm"' in refusal.value.advice
    module.config._experts_implementation = "grouped_mm"
    hidden, index, weights = call
    with torch.no_grad():
        assert module(hidden.to(dtype), index, weights.to(dtype)).any()


def test_a_norm_after_the_experts_is_refused(registered: None) -> None:
    module = bf16_module()
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedError, match="norm"), torch.no_grad():
        module(*peers.random_call(module, 3))


def test_bf16_weights_that_require_grad_are_refused_while_gradients_are_recorded(registered: None) -> None:
    module = bf16_module()
    module.down_proj.requires_grad_()
    with pytest.raises(OperandError, match="weights require grad.*no_grad"):
        module(*peers.random_call(module, 3))


# --- preparation


def prepared_once(module: nn.Module, calls: list[Experts]) -> Experts:
    with torch.no_grad():
        for _ in range(2):
            module(*peers.random_call(module, 3))
    assert calls[-1].down is calls[-2].down
    return calls[-1]


@pytest.fixture
def module(registered: None) -> nn.Module:
    made = peers.fp8_experts(fp4=True)
    made.config._experts_implementation = integration.NAME
    return made


def test_weights_are_prepared_once_and_their_bytes_are_told(module: nn.Module, calls: list[Experts]) -> None:
    added_bytes = integration.prepare(module)
    kept = prepared_once(module, calls)
    assert added_bytes == kept.added_bytes > 0
    assert integration.prepare(module) == added_bytes
    assert prepared_once(module, calls).down is kept.down


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
    assert after.down is not before.down
    table = peers.dequantized(module.down_proj, module.down_proj_scale_inv, None, torch.float64)
    assert torch.equal(peers.dequantized(after.down.weight, after.down.scale, (128, 128), torch.float64), table)


def test_what_was_prepared_goes_with_the_module(module: nn.Module, calls: list[Experts]) -> None:
    for made in (module, peers.fp8_experts(base=Softcapped)):  # the second one's gate is bound to it
        made.config._experts_implementation = integration.NAME
        prepared_once(made, calls)
    kept = [weakref.ref(value_of(m).experts.down.weight) for m in (module, made)]
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
    assert prepared_once(twin, calls).down is not kept.down
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

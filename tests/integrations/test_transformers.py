"""deepgemm_jit in transformers, on a CPU: names, schemes, gates.

The operations stand on dequantized weights in float64 here, so that what transformers' module becomes on its way to them shows
in numbers; everything else is the real thing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers import Qwen3MoeForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError
from deepgemm_jit.integrations import experts as forwards
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.gates import activation_of, gate_seen, is_silu
from deepgemm_jit.ops.weights import Activation, Experts

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

INTERFACES = (fp8.ALL_FP8_EXPERTS_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
BF16 = torch.bfloat16


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
    "gate_of_its_own": {"base": peers.Softcapped},
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
    assert gate_seen(peers.Softcapped._apply_gate) is None


def test_a_limit_that_the_gate_does_not_share_is_left_to_the_gate() -> None:
    module = peers.fp8_experts(swiglu_limit=0.5)
    known = (fp8.FP8Experts._apply_gate,)
    assert activation_of(module, known) == Activation("silu", limit=0.5)
    module.limit = 0.25
    assert activation_of(module, known) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gates_are_recognised_under_any_default_dtype_and_device(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    gate_seen.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            seen = gate_seen(fp8.FP8Experts._apply_gate)
    finally:
        torch.set_default_dtype(before)
        gate_seen.cache_clear()
    assert seen is not None and seen.reads_limit and seen.reads_alpha


def test_silu_is_told_by_its_class_and_not_by_the_name_of_one() -> None:
    class SiLU(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(x)

    class Scaled(nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert not is_silu(SiLU()) and not is_silu(Scaled())
    assert is_silu(nn.SiLU()) and is_silu(ACT2FN["silu"]) and is_silu(nn.functional.silu)

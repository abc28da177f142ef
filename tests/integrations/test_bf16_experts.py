"""Experts of bfloat16 modules under transformers' decorator: layouts that reach the operation, and what is refused."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers import models
from transformers.integrations.moe import use_experts_implementation

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.ops.weights import Activation

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

BF16 = torch.bfloat16


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
    hidden, index, weights = peers.random_call(module, 3)
    call = hidden.to(dtype), index, weights.to(dtype)  # as a whole model of that dtype gives
    with pytest.raises(UnsupportedError, match=said) as refusal, torch.no_grad():
        module(*call)
    assert 'experts_implementation="grouped_mm"' in refusal.value.advice
    module.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        assert module(*call).any()


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


class _Config(SimpleNamespace):
    """A configuration of tiny experts, whatever a class calls their sizes; None for all else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name and "alpha" not in name:
            return "silu"
        if "hidden_size" in name or "intermediate_size" in name:
            return 64
        if ("num" in name and "expert" in name) or name == "n_routed_experts":
            return 4
        return {"swiglu_limit": 7.0, "swiglu_alpha": 1.7}.get(name)


def decorated_classes() -> list[tuple[str, str]]:
    """Return module and class of all experts of transformers' models that the decorator stands over, read off their source."""
    found = []
    for package in pkgutil.iter_modules(models.__path__):
        for path in sorted(Path(models.__path__[0], package.name).glob("modeling_*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines):
                if line.startswith("@use_experts_implementation"):
                    name = next(text for text in lines[number:] if text.startswith("class "))
                    found.append((f"{models.__name__}.{package.name}.{path.stem}", name.split()[1].split("(")[0].rstrip(":")))
    return found


def test_experts_of_all_models_of_transformers_reach_the_operation_or_are_refused(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate of the class's own, without ``act_fn``, is one of them."""
    monkeypatch.setattr(ops, "bf16_experts", lambda hidden, *_, activation, **__: served.append(activation.kind) or hidden)
    outcomes: dict[str, str] = {}
    for module_name, name in decorated_classes():
        served: list[str] = []
        try:
            cls = getattr(importlib.import_module(module_name), name)
            module = cls(_Config(_experts_implementation=integration.NAME)).to(BF16).requires_grad_(False)
        except Exception as error:  # the class wants a configuration that we do not know
            outcomes[name] = f"not made: {error!r}"
            continue
        hidden = torch.zeros((3, 64), dtype=BF16)
        try:
            with torch.no_grad():
                module(hidden, torch.zeros((3, 2), dtype=torch.long), torch.ones((3, 2)))
            (outcomes[name],) = served
        except UnsupportedError as refused:
            assert module.has_bias or module.has_post_expert_norm, name
            outcomes[name] = f"refused: {refused}"
    assert {outcomes[name] for name in ("MiniMaxM3VLExperts", "Glm5NextTextExperts", "HYV4Experts") if name in outcomes} <= {
        "callback"
    }
    made = [name for name, outcome in outcomes.items() if not outcome.startswith("not made")]
    assert len(made) > 0.8 * len(outcomes) > 20, {name: outcome for name, outcome in outcomes.items() if name not in made}

"""The experts forwards that transformers calls: from a module's parameters and scheme to the operations.

transformers marks a model that lies on several GPUs with ``_deepgemm_disabled``, because DeepGEMM keeps one copy of a kernel for
all contexts. Ours are loaded into each context, so the mark says nothing about them and is not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.integrations import prepared
from deepgemm_jit.integrations.gates import activation_of
from deepgemm_jit.ops.weights import Activation, Experts

FP8_BLOCKS = ((128, 128), (1, 128), None)
"""Weight blocks served; None is one scale per tensor."""


class _Fp8(NamedTuple):
    """An FP8 experts module, prepared."""

    experts: Experts
    own_gate: bool
    """The gate is the module's own method. It is bound anew in each call: kept here, it would keep the module alive."""


class _Bf16(NamedTuple):
    """The activation of a bf16 experts module; None: the module's own method."""

    activation: Activation | None


def fp8_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts of transformers' ``FP8Experts``.

    Args:
        self: the module; its parameters are prepared in the first call, and again when they were loaded or moved.
        hidden_states: (T, H) bfloat16.
        top_k_index: (T, k); an index below 0 or not below the number of experts contributes nothing.
        top_k_weights: (T, k).

    Raises:
        OperandError: hidden states that are not bfloat16, or inputs that require grad.
        ContextMismatchError: hidden states on another device than the weights.
        UnsupportedError: a scheme without kernel; it names an ``experts_implementation`` that runs it.
    """
    _check_inputs(self, hidden_states, top_k_weights)
    kept: _Fp8 = _value_for(self)
    experts = kept.experts
    if kept.own_gate:
        own = Activation("callback", callback=self._apply_gate)
        experts = Experts(experts.gate_up, experts.down, experts.gated, own)
    return ops.fp8_experts(hidden_states, top_k_index, top_k_weights, experts)


def bf16_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts of a module under transformers' ``use_experts_implementation`` with bfloat16 weights.

    Args:
        self: the module; its weights are read where they lie.
        hidden_states: (T, H) bfloat16.
        top_k_index: (T, k); an index below 0 or not below the number of experts contributes nothing.
        top_k_weights: (T, k).

    Raises:
        OperandError: hidden states that are not bfloat16, or inputs or weights that require grad.
        ContextMismatchError: hidden states on another device than the weights.
        UnsupportedError: biases, a norm after the experts, or weights of another dtype.
    """
    _check_inputs(self, hidden_states, top_k_weights)
    up = first_projection(self)
    if torch.is_grad_enabled() and (up.requires_grad or self.down_proj.requires_grad):
        fault = "weights require grad, and this forward has no backward; call it under torch.no_grad() or freeze the experts"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])
    kept: _Bf16 = _value_for(self)
    # A gate of the module's own takes its columns as they lie; only ours has to be told how they do.
    activation = Activation("callback", callback=self._apply_gate) if kept.activation is None else kept.activation
    interleaved = self.has_gate and kept.activation is not None and not getattr(self, "is_concatenated", True)
    return ops.bf16_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        prepared.local(up),
        prepared.local(self.down_proj),
        gated=self.has_gate,
        transposed=getattr(self, "is_transposed", False),
        interleaved=interleaved,
        activation=activation,
    )


def first_projection(module: Any) -> torch.Tensor:
    """Return the weights of the first GEMM of an experts module."""
    weights: torch.Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return weights


def prepare(module: Any) -> int:
    """Prepare one experts module, unless it is prepared already; return the bytes that the preparation holds beside it."""
    if not prepared.is_prepared(module):
        value = _prepare_fp8(module) if is_fp8(module) else _prepare_bf16(module)
        prepared.remember(module, value)
    kept = prepared.value_of(module)
    return kept.experts.added_bytes if isinstance(kept, _Fp8) else 0


def is_fp8(module: Any) -> bool:
    """Return whether an experts module holds quantized weights."""
    return hasattr(module, "down_proj_scale_inv")


def _value_for(module: Any) -> Any:
    if torch.compiler.is_compiling():
        _prepare_while_tracing(id(module))
    elif not prepared.is_prepared(module):
        prepare(module)
    return prepared.value_of(module)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare_while_tracing(identity: int) -> bool:
    """Prepare before the graph that reads the result is built; the graph holds no trace of it."""
    prepare(prepared.module_of(identity))
    return True


def _check_inputs(module: Any, hidden: torch.Tensor, weights: torch.Tensor) -> None:
    if hidden.dtype != torch.bfloat16:
        fault = f"hidden states must be torch.bfloat16, not {hidden.dtype}; load the model with dtype=torch.bfloat16"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])
    if hidden.device != module.down_proj.device:
        raise ContextMismatchError(
            what="the experts' weights",
            belongs_to=str(module.down_proj.device),
            used_in=f"a call with hidden states on {hidden.device}",
        )
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        name = "hidden states" if hidden.requires_grad else "top-k weights"
        fault = f"{name} require grad, and this forward has no backward; call the model under torch.no_grad()"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])


def _prepare_fp8(module: Any) -> _Fp8:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    _refuse_what_has_no_kernel(module)
    activation = activation_of(module, (FP8Experts._apply_gate,))
    name = "gate_up_proj" if module.has_gate else "up_proj"
    given: dict[str, Any] = {"activation": "silu"} if activation is None else _as_arguments(activation)
    if module.activation_scheme == "static":
        # transformers gives both kinds of first projection the scale of the gated one's name.
        given["gate_up_activation_scale"] = prepared.local(module.gate_up_proj_activation_scale)
        given["down_activation_scale"] = prepared.local(module.down_proj_activation_scale)
    try:
        experts = ops.prepare_experts(
            prepared.local(getattr(module, name)),
            prepared.local(module.down_proj),
            prepared.local(getattr(module, f"{name}_scale_inv")),
            prepared.local(module.down_proj_scale_inv),
            block_size=_block_size(module),
            gated=module.has_gate,
            transposed=getattr(module, "is_transposed", False),
            **given,
        )
    except UnsupportedError as refused:
        advice = " ".join(text for text in (refused.advice, _fp8_advice(module)) if text)
        raise UnsupportedError(given=refused.given, supported=refused.supported, advice=advice) from refused
    return _Fp8(experts, own_gate=activation is None)


def _prepare_bf16(module: Any) -> _Bf16:
    from transformers.integrations.moe import _default_apply_gate

    advice = 'experts_implementation="grouped_mm" runs it'
    if module.has_bias:
        raise UnsupportedError(given=f"{_name(module)} with biases", supported="experts without biases", advice=advice)
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(given=f"{_name(module)} with a norm after each expert", supported="experts without", advice=advice)
    for weights in (first_projection(module), module.down_proj):
        if weights.dtype != torch.bfloat16:
            given = f"{_name(module)} with {weights.dtype} weights"
            raise UnsupportedError(given=given, supported="torch.bfloat16 weights, or FP8 with scales", advice=advice)
    return _Bf16(activation_of(module, (_default_apply_gate,)))


def _refuse_what_has_no_kernel(module: Any) -> None:
    """Look at the scheme alone: nothing of a weight is read yet."""
    name, weights = _name(module), first_projection(module)
    if weights.element_size() > 1:
        raise UnsupportedError(
            given=f"{name} with {weights.dtype} weights beside FP8 scales",
            supported="FP8 or packed FP4 weights",
            advice='experts_implementation="eager" runs it',
        )
    if module.activation_scheme not in ("dynamic", "static"):
        raise UnsupportedError(
            given=f"{name} with activation_scheme={module.activation_scheme!r}",
            supported="'dynamic' and 'static'",
            advice='experts_implementation="eager" treats it as dynamic',
        )
    if weights.dtype != torch.int8 and _block_size(module) not in FP8_BLOCKS:  # FP4 has its own blocks
        raise UnsupportedError(
            given=f"{name} with FP8 weight blocks of {_block_size(module)} and {module.activation_scheme} activations",
            supported="blocks (128, 128), (1, 128) and None (one scale per tensor)",
            advice=_fp8_advice(module),
        )


def _fp8_advice(module: Any) -> str:
    """Name an implementation of transformers that runs the scheme: with static activations all but eager refuse."""
    return f'experts_implementation="{"eager" if module.activation_scheme == "static" else "grouped_mm"}" runs it'


def _block_size(module: Any) -> tuple[int, int] | None:
    return None if module.block_size is None else (int(module.block_size[0]), int(module.block_size[1]))


def _as_arguments(activation: Activation) -> dict[str, Any]:
    if activation.kind == "callback":
        return {"activation": activation.callback}
    return {"activation": "silu", "swiglu_limit": activation.limit, "swiglu_alpha": activation.alpha}


def _name(module: Any) -> str:
    return f"experts module {type(module).__name__}"

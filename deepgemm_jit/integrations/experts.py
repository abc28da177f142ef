"""The experts forwards that transformers calls: from a module's parameters and scheme to the operations.

transformers marks a model that lies on several GPUs with ``_deepgemm_disabled``, because DeepGEMM keeps one copy of a kernel for
all contexts. Ours are loaded into each context, so the mark says nothing about them and is not read.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.integrations import prepared
from deepgemm_jit.integrations.gates import activation_of
from deepgemm_jit.ops import fp4
from deepgemm_jit.ops.scales import ScaleKind
from deepgemm_jit.ops.weights import Activation, Experts, Projection

FP8_BLOCKS = ((128, 128), (1, 128), None)
"""Weight blocks served; None is one scale per tensor."""


class _Projection(NamedTuple):
    """What was made for one projection; None: it serves as it lies in the module."""

    weight: torch.Tensor | None
    scale: torch.Tensor | None
    activation_scale: torch.Tensor | None
    scale_kind: ScaleKind
    fragments: torch.Tensor | None


class _Fp8(NamedTuple):
    """An FP8 experts module, prepared."""

    gate_up: _Projection
    down: _Projection
    activation: Activation | None
    """None: the module's own method. It is bound anew in each call: kept here, it would keep the module alive."""


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
    return ops.fp8_experts(hidden_states, top_k_index, top_k_weights, prepared_experts(self))


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
    kept: _Bf16 = _value_for(self)  # before the inputs: a model of another dtype is told what runs it
    _check_inputs(self, hidden_states, top_k_weights)
    up = first_projection(self)
    if torch.is_grad_enabled() and (up.requires_grad or self.down_proj.requires_grad):
        fault = "weights require grad, and this forward has no backward; call it under torch.no_grad() or freeze the experts"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])
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


def prepared_experts(module: Any) -> Experts:
    """Return an FP8 experts module as the operation takes it: what lies right as it lies now, the rest as it was prepared."""
    kept: _Fp8 = _value_for(module)
    activation = Activation("callback", callback=module._apply_gate) if kept.activation is None else kept.activation
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return Experts(
        _projection(module, first, "gate_up_proj_activation_scale", kept.gate_up),
        _projection(module, "down_proj", "down_proj_activation_scale", kept.down),
        module.has_gate,
        activation,
    )


def prepare(module: Any, *, fragments: bool = False) -> int:
    """Prepare one experts module, unless it is prepared already; return the bytes that the preparation holds beside it.

    ``fragments``: FP4 weights are also kept as a forward of few tokens reads them, unless it cannot read their scales.
    """
    again = fragments and not _has_fragments(module) and _may_have_fragments(module)
    return prepared.added_bytes(prepared.value_for(module, partial(_make, fragments=fragments), again=again))


def is_prepared(module: Any) -> bool:
    """Return whether a module was prepared where it lies, of whatever its parameters were: a captured graph may read that."""
    prepared.forget_if_elsewhere(module)
    return prepared.try_kept(module) is not None


def bytes_to_prepare(module: Any) -> tuple[int, int]:
    """Return the bytes that folding the FP4 weights of an experts module takes, and those that their fragments take beside."""
    if not is_fp8(module):
        return 0, 0
    shapes = [tuple(weight.shape) for weight in _weights(module) if weight.dtype == torch.int8]
    folded = sum(2 * math.prod(shape) for shape in shapes)
    return folded, sum(math.prod(fp4.fragments_shape(count, n, 2 * k_bytes)) for count, n, k_bytes in shapes)


def _weights(module: Any) -> list[torch.Tensor]:
    return [prepared.local(weight) for weight in (first_projection(module), module.down_proj)]


def _has_fragments(module: Any) -> bool:
    """Return whether FP4 weights were kept as fragments, which a captured graph may read."""
    kept = prepared.try_kept(module)
    return isinstance(kept, _Fp8) and any(part.fragments is not None for part in (kept.gate_up, kept.down))


def _may_have_fragments(module: Any) -> bool:
    """Return whether a module has FP4 weights whose scales fragments hold. Waits for the device."""
    if not is_fp8(module) or all(weight.dtype != torch.int8 for weight in _weights(module)) or module.down_proj.is_meta:
        return False  # what is on no device is refused by the operation
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    return all(fp4.fit_fragments(prepared.wide(prepared.local(getattr(module, f"{name}_scale_inv")))) for name in names)


def is_fp8(module: Any) -> bool:
    """Return whether an experts module holds quantized weights."""
    return hasattr(module, "down_proj_scale_inv")


def _value_for(module: Any) -> Any:
    if torch.compiler.is_compiling():
        return prepared.value_while_tracing(module, _prepare_while_tracing)
    return prepared.value_for(module, _make)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare_while_tracing(identity: int) -> bool:
    """Prepare before the graph that reads the result is built; the graph holds no trace of it."""
    prepared.prepare_traced(identity, _make)
    return True


def _make(module: Any, *, fragments: bool = False) -> _Fp8 | _Bf16:
    return _prepare_fp8(module, fragments) if is_fp8(module) else _prepare_bf16(module)


def _projection(module: Any, name: str, activation_scale_name: str, kept: _Projection) -> Projection:
    weight, scale, static = kept.weight, kept.scale, kept.activation_scale
    if weight is None:
        weight = prepared.local(getattr(module, name))
        if getattr(module, "is_transposed", False):
            weight = weight.transpose(1, 2)
    if scale is None:
        scale = prepared.local(getattr(module, f"{name}_scale_inv"))
    if static is None and module.activation_scheme == "static":
        static = prepared.local(getattr(module, activation_scale_name))
    return Projection(weight, scale, kept.scale_kind, static, added_bytes=0, fragments=kept.fragments)


def _check_inputs(module: Any, hidden: torch.Tensor, weights: torch.Tensor) -> None:
    if hidden.dtype != torch.bfloat16:
        fault = f"hidden states must be torch.bfloat16, not {hidden.dtype}; load the model with dtype=torch.bfloat16"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])
    if hidden.device != module.down_proj.device:
        if not torch.compiler.is_compiling():
            prepared.forget_if_elsewhere(module)
        raise ContextMismatchError(
            what="the experts' weights",
            belongs_to=str(module.down_proj.device),
            used_in=f"a call with hidden states on {hidden.device}",
        )
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        name = "hidden states" if hidden.requires_grad else "top-k weights"
        fault = f"{name} require grad, and this forward has no backward; call the model under torch.no_grad()"
        raise OperandError(operation="deepgemm_jit experts", faults=[fault])


def _prepare_fp8(module: Any, fragments: bool) -> _Fp8:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    refuse_what_has_no_kernel(module)
    activation = activation_of(module, (FP8Experts._apply_gate,))
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weights = _weights(module)
    scales = [prepared.local(getattr(module, f"{which}_scale_inv")) for which in (name, "down_proj")]
    static_scales: list[torch.Tensor | None] = [None, None]
    if module.activation_scheme == "static":
        # transformers gives both kinds of first projection the scale of the gated one's name.
        static_scales = [prepared.local(getattr(module, f"{which}_activation_scale")) for which in ("gate_up_proj", "down_proj")]
    transposed = getattr(module, "is_transposed", False)
    given: dict[str, Any] = {"activation": "silu"} if activation is None else _as_arguments(activation)
    try:
        experts = ops.prepare_experts(
            *weights,
            *(prepared.wide(scale) for scale in scales),
            block_size=_block_size(module),
            gate_up_activation_scale=None if static_scales[0] is None else prepared.wide(static_scales[0]),
            down_activation_scale=None if static_scales[1] is None else prepared.wide(static_scales[1]),
            gated=module.has_gate,
            transposed=transposed,
            decode=_decode_for(module, fragments),
            **given,
        )
    except UnsupportedError as refused:
        advice = " ".join(text for text in (refused.advice, _fp8_advice(module)) if text)
        raise UnsupportedError(given=refused.given, supported=refused.supported, advice=advice) from refused
    first, second = (
        _Projection(
            _if_made(made.weight, weight.transpose(1, 2) if transposed else weight),
            _if_made(made.scale, scale),
            None if static is None or made.activation_scale is None else _if_made(made.activation_scale, static),
            made.scale_kind,
            made.fragments,
        )
        for made, weight, scale, static in zip((experts.gate_up, experts.down), weights, scales, static_scales, strict=True)
    )
    return _Fp8(first, second, None if activation is None else experts.activation)


def _decode_for(module: Any, fragments: bool) -> Literal["fp4", "fp8"]:
    """Return how FP4 weights are prepared: fragments that a captured graph may read are made anew in any case."""
    before = _has_fragments(module)
    if not (fragments or before):
        return "fp8"
    if _may_have_fragments(module):
        return "fp4"
    if before and any(weight.dtype == torch.int8 for weight in _weights(module)):
        raise UnsupportedError(
            given=f"{_name(module)} with an FP4 scale above 2^{fp4.MAX_FRAGMENT_EXPONENT}, loaded where fragments are kept",
            supported="smaller scales there: a captured graph may still read the fragments",
            advice="Load these weights into another module.",
        )
    return "fp8"


def _if_made(used: torch.Tensor, given: torch.Tensor) -> torch.Tensor | None:
    """Return what a GEMM reads unless it is what was given; a view of it of another shape becomes a tensor of its own."""
    if used.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        return used
    same = used.data_ptr() == given.data_ptr() and (used.shape, used.stride()) == (given.shape, given.stride())
    return None if same else used.clone()


def _prepare_bf16(module: Any) -> _Bf16:
    from transformers.integrations.moe import _default_apply_gate

    refuse_what_has_no_kernel(module)
    return _Bf16(activation_of(module, (_default_apply_gate,)))


def refuse_what_has_no_kernel(module: Any) -> None:
    """Look at the scheme alone: nothing of a weight is read, which may have none as yet.

    Raises:
        UnsupportedError: there are no kernels for it; it names an ``experts_implementation`` that runs it.
    """
    if is_fp8(module):
        _refuse_fp8(module)
    else:
        _refuse_bf16(module)


def _refuse_bf16(module: Any) -> None:
    advice = 'experts_implementation="grouped_mm" runs it'
    if module.has_bias:
        raise UnsupportedError(given=f"{_name(module)} with biases", supported="experts without biases", advice=advice)
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(given=f"{_name(module)} with a norm after each expert", supported="experts without", advice=advice)
    for weights in (first_projection(module), module.down_proj):
        if weights.dtype != torch.bfloat16:
            given = f"{_name(module)} with {weights.dtype} weights"
            raise UnsupportedError(given=given, supported="torch.bfloat16 weights, or FP8 with scales", advice=advice)


def _refuse_fp8(module: Any) -> None:
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

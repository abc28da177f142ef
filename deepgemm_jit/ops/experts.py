"""The experts forward: route, gather, multiply, activate, multiply, combine; six launches, nothing read back by the host.

Rows of the grouped matrices are counted for the worst case, which needs no number from the device. A forward is one piece where
nothing traces or watches, and two torch operators else, so that an activation of the caller's can stand between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepgemm_jit.errors import OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.forward import forward
from deepgemm_jit.ops.halves import experts_down, experts_up
from deepgemm_jit.ops.pipeline import Layer
from deepgemm_jit.ops.prepared import are_plain, is_watched
from deepgemm_jit.ops.weights import Activation, Experts, activation_for, gating_for


def fp8_experts(hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the weighted sum of each token's experts, in FP8.

    Activations are quantized before each GEMM, per row and 128 columns or with the static scales of ``experts``; products are
    rounded to bfloat16 after each; routing weights multiply in float32, in the order of the choices: the same bits on every run.

    Args:
        hidden: (T, H) bfloat16; T may be 0.
        topk_index: (T, k) int32 or int64, k at most 16. An index that is no expert (negative, or E and more: an expert of another
            rank) contributes nothing; an index twice in a row counts twice.
        topk_weights: (T, k) float32, bfloat16 or float16.
        experts: what :func:`prepare_experts` returned, on the device of ``hidden``.

    Returns:
        (T, H) bfloat16.

    Raises:
        OperandError: what is wrong with the operands, all at once.
        ContextMismatchError: tokens and weights on different devices, or a stream of a foreign context.
        UnsupportedError: the GPU has no kernels.
        KernelNotBuiltError: the compile policy is "never" and a kernel is not built.
    """
    given: object = experts
    if not isinstance(given, Experts):
        fault = f"experts must be what prepare_experts returns, not {type(given).__name__}"
        raise OperandError(operation="fp8_experts", faults=[fault])
    return _experts("fp8_experts", hidden, topk_index, topk_weights, experts.layer, experts.activation)


def bf16_experts(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    activation: str | Callable[[torch.Tensor], torch.Tensor] | Activation = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, in bfloat16; rounding and routing as in :func:`fp8_experts`.

    Args:
        hidden: (T, H) bfloat16.
        topk_index: (T, k) int32 or int64, as in :func:`fp8_experts`.
        topk_weights: (T, k) float32, bfloat16 or float16.
        gate_up: (E, 2I, H) bfloat16, or (E, I, H) without gate; ``transposed``: (E, H, 2I) or (E, H, I).
        down: (E, H, I) bfloat16; ``transposed``: (E, I, H).
        gated: the first GEMM gives gate and up.
        transposed: weights lie N-major; the tensor core transposes them.
        interleaved: gate and up columns alternate instead of following each other.
        activation: "silu", or a function of (R, N1) bfloat16, N1 = 2I or I, that returns (R, I) bfloat16; or both it and the
            numbers below as an ``Activation``.
        swiglu_limit: as for :func:`prepare_experts`.
        swiglu_alpha: as for :func:`prepare_experts`.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_experts`.
    """
    checks.require_tensors(
        "bf16_experts", hidden=hidden, topk_index=topk_index, topk_weights=topk_weights, gate_up=gate_up, down=down
    )
    function = activation_for("bf16_experts", activation, gated, swiglu_limit, swiglu_alpha)
    layer = Layer(gate_up, None, None, down, None, None, False, False, transposed, gating_for(function, gated, interleaved))
    return _experts("bf16_experts", hidden, topk_index, topk_weights, layer, function)


def _experts(
    operation: str,
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: Layer,
    activation: Activation,
) -> torch.Tensor:
    if activation.callback is None and not is_watched():
        # torch's dispatcher is for what it has yet to negate, and for tensors of other kinds.
        tokens_are_plain = are_plain((hidden, topk_index, topk_weights))
        if tokens_are_plain and hidden.is_cuda and are_plain(layer.tensors):
            return forward(hidden, topk_index, topk_weights, layer)
    checks.require_tensors(operation, hidden=hidden, topk_index=topk_index, topk_weights=topk_weights)
    projected, rows, ends = experts_up(hidden, topk_index, topk_weights, layer)
    if activation.callback is not None:
        intermediate = layer.down.shape[1 if layer.n_major else 2]
        projected = _called_back(operation, activation.callback, projected, intermediate)
    return experts_down(projected, topk_index, topk_weights, rows, ends, layer)


def _called_back(
    operation: str, callback: Callable[[torch.Tensor], torch.Tensor], projected: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return what the caller's activation makes of ``projected``."""
    activated: object = callback(projected)
    wanted = (projected.shape[0], columns)
    if not isinstance(activated, torch.Tensor):
        given = type(activated).__name__
    elif activated.dtype != torch.bfloat16 or tuple(activated.shape) != wanted or activated.device != projected.device:
        given = f"{tuple(activated.shape)} {activated.dtype} on {activated.device}"
    else:
        return activated
    fault = f"the activation must return {wanted} {torch.bfloat16} on {projected.device}, not {given}"
    raise OperandError(operation=operation, faults=[fault])

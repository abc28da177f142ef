"""FP8 linears of transformers on our dense GEMM: what `accelerate_linears` puts in place of their forward."""

from __future__ import annotations

import math
import types
from typing import Any, NamedTuple

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError
from deepgemm_jit.integrations import prepared
from deepgemm_jit.ops import checks

_OPERATION = "deepgemm_jit FP8 linear"
_E4M3_MAX = 448.0
_SLOTS = ("_old_forward", "forward")
"""Where a module's forward is found: accelerate moves it to the first when it puts a hook around it."""
_REPLACED = "_deepgemm_jit_replaced_forward"


class _Linear(NamedTuple):
    """What was made for an FP8 linear; None: it serves as it lies in the module."""

    scale: torch.Tensor | None
    """(ceil(N / 128), ceil(K / 128)) float32."""
    activation_scale: torch.Tensor | None
    """() float32."""


def reason_against(module: Any) -> str | None:
    """Return why an FP8 linear of transformers has no kernel, None if it has one; looks at classes, dtypes and shapes alone."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    if type(module) is not FP8Linear:
        return f"{type(module).__name__} has a forward of its own"
    weight, block = module.weight, module.block_size
    n, k = weight.shape[-2:]
    if weight.dtype != torch.float8_e4m3fn:
        return f"weights are {weight.dtype}, not torch.float8_e4m3fn"
    if block is not None and tuple(block) != (128, 128):
        return f"weight blocks are {tuple(block)}; the dense GEMM reads (128, 128) and None (one scale per tensor)"
    if module.weight_scale_inv.dtype not in (torch.float32, torch.bfloat16, torch.uint8, getattr(torch, "float8_e8m0fnu", None)):
        return f"weight scales are {module.weight_scale_inv.dtype}, neither float32 nor UE8M0"
    if n % 8 or k % 16:
        return f"weights are ({n}, {k}); N must be a multiple of 8 and K one of 16"
    if module.activation_scheme not in ("dynamic", "static"):
        return f"activation_scheme is {module.activation_scheme!r}"
    return None


def replace_forward(module: Any) -> bool:
    """Put our forward in the place of a linear's own, inside of any hook of accelerate; return False if it is there already."""
    if is_replaced(module):
        return False
    slot = next(slot for slot in _SLOTS if slot == "forward" or slot in vars(module))
    setattr(module, _REPLACED, vars(module).get(slot))
    setattr(module, slot, types.MethodType(linear_forward, module))
    return True


def restore_forward(module: Any) -> None:
    """Undo :func:`replace_forward`, also where a hook was put around it, or taken off, in the meantime."""
    slot = _slot_of_ours(module)
    if slot is None:
        return
    before = vars(module).pop(_REPLACED)
    if before is None and slot == "forward":
        delattr(module, slot)  # the class has it
    else:
        setattr(module, slot, types.MethodType(type(module).forward, module) if before is None else before)
    prepared.forget(module)


def is_replaced(module: Any) -> bool:
    """Return whether our forward is in place."""
    return _slot_of_ours(module) is not None


def linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name transformers gives it
    """Run an FP8 linear: (..., K) bfloat16 to (..., N) bfloat16, the bias added.

    Raises:
        OperandError: an input of another dtype or number of columns, or one that requires grad; a static scale that is none.
        ContextMismatchError: an input on another device than the weight.
    """
    _check_input(self, input)
    kept = _value_for(self)
    weight = prepared.local(self.weight)
    scale = prepared.local(self.weight_scale_inv) if kept.scale is None else kept.scale
    n, k = weight.shape
    x = input.reshape(-1, k).contiguous()
    if self.activation_scheme == "static":
        static = prepared.local(self.activation_scale) if kept.activation_scale is None else kept.activation_scale
        a = static_cast_to_fp8(x, static)
    else:
        a = ops.per_token_cast_to_fp8(x)
    out = x.new_empty((x.shape[0], n))
    ops.fp8_gemm_nt(a, (weight, scale), out)
    if self.bias is not None:
        out += prepared.local(self.bias)
    return out.reshape(*input.shape[:-1], n)


def static_cast_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast activations to FP8 with one scale given: values ``x / scale``, clamped to the largest E4M3.

    Args:
        x: (M, K) bfloat16.
        scale: () float32 on the device of ``x``.

    Returns:
        (M, K) float8_e4m3fn, and (M, ceil(K / 128)) float32 scales, all equal and M-major as the GEMM reads them.
    """
    m, k = x.shape
    values = (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    pitch = checks.round_up(max(m, 1), 4)
    scales = scale.expand(checks.ceil_div(k, checks.SCALE_BLOCK), pitch).contiguous()
    return values, scales.T[:m]


def prepare(module: Any) -> int:
    """Prepare one FP8 linear, unless it is prepared already; return the bytes that the preparation holds beside it."""
    return prepared.added_bytes(prepared.value_for(module, _make))


def _make(module: Any) -> _Linear:
    given = prepared.local(module.weight_scale_inv)
    blocks = [checks.ceil_div(size, checks.SCALE_BLOCK) for size in prepared.local(module.weight).shape]
    scale = (given.view(torch.float8_e8m0fnu) if given.dtype == torch.uint8 else given).float()
    if module.block_size is None and scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(blocks).clone(memory_format=torch.contiguous_format)
    elif list(scale.shape) != blocks or module.block_size is None:
        needed = "one element" if module.block_size is None else f"shape {tuple(blocks)}"
        raise OperandError(operation=_OPERATION, faults=[f"the weight scale has shape {tuple(scale.shape)}, needed: {needed}"])
    scale = scale.contiguous()
    static = _static_scale(module) if module.activation_scheme == "static" else None
    return _Linear(None if scale is given else scale, static)


def _static_scale(module: Any) -> torch.Tensor | None:
    """Check a static scale, which waits for the device; return a copy unless it serves as it lies."""
    scale = prepared.local(module.activation_scale)
    fault = None
    if scale.numel() != 1:
        fault = f"the static activation scale has shape {tuple(scale.shape)}, needed: one element"
    elif scale.dtype not in (torch.float32, torch.bfloat16):
        fault = f"the static activation scale is {scale.dtype}, needed: {torch.float32} or {torch.bfloat16}"
    elif not (math.isfinite(value := float(scale)) and value > 0):
        fault = f"the static activation scale is {value}, which must be finite and greater than 0"
    if fault:
        raise OperandError(operation=_OPERATION, faults=[fault])
    as_it_lies = scale.dtype == torch.float32 and scale.dim() == 0
    return None if as_it_lies else scale.float().reshape(()).clone()


def _slot_of_ours(module: Any) -> str | None:
    slots = (slot for slot in _SLOTS if getattr(vars(module).get(slot), "__func__", None) is linear_forward)
    return next(slots, None)


def _value_for(module: Any) -> _Linear:
    linear: _Linear
    if torch.compiler.is_compiling():
        linear = prepared.value_while_tracing(module, _prepare_while_tracing)
    else:
        linear = prepared.value_for(module, _make)
    return linear


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare_while_tracing(identity: int) -> bool:
    """Prepare before the graph that reads the result is built; the graph holds no trace of it."""
    prepared.prepare_traced(identity, _make)
    return True


def _check_input(module: Any, x: torch.Tensor) -> None:
    faults = []
    if x.dtype != torch.bfloat16:
        faults.append(f"the input must be torch.bfloat16, not {x.dtype}; load the model with dtype=torch.bfloat16")
    k = module.weight.shape[-1]
    if x.dim() == 0 or x.shape[-1] != k:
        faults.append(f"the input has shape {tuple(x.shape)}, and the weight takes K = {k} columns")
    if torch.is_grad_enabled() and x.requires_grad:
        faults.append("the input requires grad, and this forward has no backward; call the model under torch.no_grad()")
    if faults:
        raise OperandError(operation=_OPERATION, faults=faults)
    if x.device != module.weight.device:
        if not torch.compiler.is_compiling():
            prepared.forget_if_elsewhere(module)
        raise ContextMismatchError(
            what="an FP8 linear's weight", belongs_to=str(module.weight.device), used_in=f"a call with an input on {x.device}"
        )

"""Stacks of expert matrices as a caller gives them: which schemes have kernels, and what else is wrong with a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.ops.scales import FP4_BLOCK, PER_BLOCK, PER_ROW, ScaleBlock, StackShape, scale_faults, value_faults
from deepgemm_jit.ops.ue8m0 import try_first

OPERATION = "prepare_experts"
MAX_EXPERTS = 512
_K_STEP = 16


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection as it was given, of a scheme that has kernels."""

    name: str
    weight: torch.Tensor
    """(E, N, K), or (E, N, K / 2) packed; transposed weights as a view."""
    scale: torch.Tensor
    activation_scale: torch.Tensor | None
    block: ScaleBlock
    halves: bool

    @property
    def shape(self) -> StackShape:
        """The sizes, unpacked."""
        count, n, k = self.weight.shape
        return StackShape(count, n, 2 * k if self.block == FP4_BLOCK else k, self.halves)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by the names they were given under."""
        named = {self.name: self.weight, f"{self.name}_scale": self.scale}
        return named if self.activation_scale is None else {**named, f"{self.name}_activation_scale": self.activation_scale}


def take_tensors(**tensors: Any) -> dict[str, torch.Tensor]:
    """Return the tensors given, local and without gradients; activation scales that are None are left out.

    Raises:
        OperandError: what is no tensor, has no values, or is a weight that is no stack of matrices.
    """
    given: dict[str, torch.Tensor] = {}
    faults = []
    for name, tensor in tensors.items():
        if tensor is None and name.endswith("_activation_scale"):
            continue
        if not isinstance(tensor, torch.Tensor):
            faults.append(f"{name} must be a tensor, not {type(tensor).__name__}")
            continue
        to_local = getattr(tensor, "to_local", None)  # a DTensor: experts are split before they come here
        given[name] = (to_local() if to_local else tensor).detach()
        if name in ("gate_up", "down") and tensor.dim() != 3:
            faults.append(f"{name} must have 3 dimensions, not shape {tuple(tensor.shape)}")
        if tensor.is_meta:
            faults.append(f"{name} is on the meta device and has no values")
    if faults:
        raise OperandError(operation=OPERATION, faults=faults)
    return given


def stack_for(name: str, given: dict[str, torch.Tensor], block_size: Any, *, transposed: bool, halves: bool) -> Stack:
    """Return one projection, or refuse a scheme that no kernel reads; looks at dtypes and shapes alone.

    Raises:
        UnsupportedError: the dtype, block size, layout or static scale has no kernel.
    """
    weight = given[name]
    block = tuple(block_size) if isinstance(block_size, Sequence) else block_size
    if weight.dtype == torch.int8:
        if transposed:
            raise UnsupportedError(given=f"transposed = True with FP4 weights ({name})", supported="FP4 as (E, N, K / 2)")
        block = FP4_BLOCK
    elif weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(
            given=f"{name} of dtype {weight.dtype}",
            supported=f"{torch.float8_e4m3fn}, or FP4 as {torch.int8} with two e2m1 values a byte",
            advice="Experts without quantization run through bf16_experts" if weight.dtype == torch.bfloat16 else "",
        )
    elif block not in (PER_BLOCK, PER_ROW, None):
        raise UnsupportedError(
            given=f"block_size = {block}",
            supported=f"{PER_BLOCK}, {PER_ROW}, or None for a scale per tensor",
            advice="Requantize the weights to one of these, or dequantize them to bfloat16",
        )
    key = f"{name}_activation_scale"
    static = given.get(key)
    if static is not None and tuple(static.shape) not in ((weight.shape[0],), (1,), ()):
        raise UnsupportedError(
            given=f"{key} of shape {tuple(static.shape)}",
            supported=f"one static scale per expert, (E,) = ({weight.shape[0]},), or one for all, (1,) or ()",
            advice=f"Leave {key} out to quantize activations dynamically",
        )
    return Stack(name, weight.transpose(1, 2) if transposed else weight, given[f"{name}_scale"], static, block, halves)


def check_stacks(gate_up: Stack, down: Stack) -> None:
    """Check both projections of a layer; the values of scales are looked at last, which waits for the device.

    Raises:
        OperandError: all that is wrong with sizes, shapes and dtypes; or else all that is wrong with values.
        ContextMismatchError: tensors on different devices.
    """
    stacks = (gate_up, down)
    faults = _fit_faults(gate_up.shape, down.shape)
    # Each N is a K of the other projection, or twice one, and so a multiple of 16 too.
    for stack, size in zip(stacks, "HI", strict=True):
        faults += _size_faults(stack, size)
        faults += scale_faults(f"{stack.name}_scale", stack.scale, stack.shape, stack.block)
        if stack.activation_scale is not None and stack.activation_scale.dtype != torch.float32:
            faults.append(f"{stack.name}_activation_scale must be {torch.float32}, not {stack.activation_scale.dtype}")
    if faults:
        raise OperandError(operation=OPERATION, faults=faults)
    device = gate_up.weight.device
    for name, tensor in (gate_up.tensors | down.tensors).items():
        if tensor.device != device:
            raise ContextMismatchError(
                what=f"{name} of {OPERATION}", belongs_to=str(tensor.device), used_in=f"a call whose gate_up is on {device}"
            )
    for stack in stacks:
        faults += value_faults(f"{stack.name}_scale", stack.scale, stack.block)
        faults += _static_faults(stack)
    if faults:
        raise OperandError(operation=OPERATION, faults=faults)


def _fit_faults(gate_up: StackShape, down: StackShape) -> list[str]:
    faults = []
    if not 1 <= gate_up.count <= MAX_EXPERTS:
        faults.append(f"gate_up holds E = {gate_up.count} experts; 1 to {MAX_EXPERTS} are supported")
    if down.count != gate_up.count:
        faults.append(f"gate_up holds {gate_up.count} experts and down {down.count}")
    if down.n != gate_up.k:
        faults.append(f"gate_up has K = {gate_up.k} columns and down N = {down.n} rows; both are the hidden size H")
    if gate_up.n != (2 if gate_up.halves else 1) * down.k:
        needed = "2I, gate and up" if gate_up.halves else "I, without a gate"
        faults.append(f"gate_up has N = {gate_up.n} rows, which must be {needed}, where down has K = I = {down.k} columns")
    return faults


def _size_faults(stack: Stack, size: str) -> list[str]:
    k = stack.shape.k
    if k >= _K_STEP and k % _K_STEP == 0:
        return []
    packed = f" ({k // 2} bytes of two values)" if stack.block == FP4_BLOCK else ""
    lower = k // _K_STEP * _K_STEP
    nearest = f"{lower} or {lower + _K_STEP}" if lower else f"{_K_STEP}"
    return [f"{stack.name} has K = {size} = {k}{packed}, which must be a multiple of {_K_STEP}; nearest: {nearest}"]


def _static_faults(stack: Stack) -> list[str]:
    scale = stack.activation_scale
    index = None if scale is None else try_first(~(scale.isfinite() & (scale > 0)))
    if scale is None or index is None:
        return []
    place = f" of expert {index[0]}" if index else ""
    return [f"{stack.name}_activation_scale{place} is {float(scale[index])!r}; static scales must be finite and greater than 0"]

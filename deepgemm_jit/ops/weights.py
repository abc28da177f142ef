"""Expert weights, prepared once: in the layouts that the GEMMs read, whatever scheme the checkpoint is in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import torch

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.ops import fp4
from deepgemm_jit.ops.pipeline import Gating, Layer
from deepgemm_jit.ops.scales import FP4_BLOCK, ScaleKind, scale_for_gemm
from deepgemm_jit.ops.stacks import OPERATION, Stack, check_stacks, stack_for, take_tensors
from deepgemm_jit.runtime.steps import Gate
from deepgemm_jit.spec import arch_of

Decode = Literal["auto", "fp4", "fp8"]

_COPY_ALIGNMENT_BYTES = 16
"""What tensor maps ask of addresses and strides; an FP8 element is a byte."""
_SPARE_SHARE = 0.5
"""Of a GPU's memory, that fragments kept by ``decode="auto"`` leave free: a call knows nothing of layers, caches and workspaces
that are still to come."""


class Activation(NamedTuple):
    """What happens between the two GEMMs, to (R, N1) bfloat16; rows are independent, and some hold garbage."""

    kind: str
    """"silu": SiLU, of the gate times up where there is a gate. "callback": whatever the caller's function does."""
    limit: float | None = None
    """The gate is clamped to at most this and up to within plus and minus this, before anything else."""
    alpha: float | None = None
    """(up + 1) * gate * sigmoid(alpha * gate) instead of silu(gate) * up."""
    callback: Callable[[torch.Tensor], torch.Tensor] | None = None
    """(R, N1) bfloat16 to (R, I) bfloat16."""


def gating_for(activation: Activation, gated: bool, interleaved: bool = False) -> Gating:
    """Return what the kernel between the GEMMs does for an activation."""
    if activation.callback is not None:
        gate = Gate.PASS
    elif not gated:
        gate = Gate.SILU
    elif activation.alpha is not None:
        gate = Gate.ALPHA_GATE
    else:
        gate = Gate.SILU_GATE if activation.limit is None else Gate.CLAMPED_GATE
    limit = float("inf") if activation.limit is None else float(activation.limit)
    alpha = 0.0 if activation.alpha is None else float(activation.alpha)
    return Gating(gate, interleaved, limit, alpha)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """One stack of expert matrices as the GEMMs read it; dequantized value = stored value x scale."""

    weight: torch.Tensor
    """(E, N, K) float8_e4m3fn, K-major: rows are contiguous and start at multiples of 16 bytes."""
    scale: torch.Tensor
    """float32. Per block: (E, ceil(N / 128), ceil(K / 128)), contiguous. Per row: (E, N, ceil(K / 128)), N contiguous."""
    scale_kind: ScaleKind
    activation_scale: torch.Tensor | None
    """(E,) float32 if activations are quantized with one static scale per expert; None if they are quantized dynamically."""
    added_bytes: int
    """Memory of the tensors that were made for this projection beside those of the caller."""
    fragments: torch.Tensor | None = None
    """Of FP4, where they are kept: the same weights with their scales at 4.25 bits, (E, row blocks, k-blocks, 4352) uint8."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Weights and activation of a layer's experts, ready for ``fp8_experts``; see :func:`prepare_experts`."""

    gate_up: Projection
    down: Projection
    gated: bool
    activation: Activation
    layer: Layer = field(init=False, repr=False)
    """The same as a forward takes it."""

    def __post_init__(self) -> None:
        up, down = self.gate_up, self.down
        layer = Layer(
            up.weight, up.scale, up.activation_scale, down.weight, down.scale, down.activation_scale,
            up.scale_kind == "row", down.scale_kind == "row", False, gating_for(self.activation, self.gated),
            up.fragments, down.fragments,
        )  # fmt: skip
        object.__setattr__(self, "layer", layer)

    @property
    def count(self) -> int:
        """Experts, E."""
        return int(self.down.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Columns of hidden states, H."""
        return int(self.down.weight.shape[1])

    @property
    def intermediate_size(self) -> int:
        """Columns between the GEMMs after the activation, I."""
        return int(self.down.weight.shape[2])

    @property
    def added_bytes(self) -> int:
        """Memory of the tensors that were made beside those of the caller."""
        return self.gate_up.added_bytes + self.down.added_bytes

    @property
    def decodes_fp4(self) -> bool:
        """Whether FP4 weights are kept as fragments, and a forward of few tokens reads these instead of the folded copy."""
        return self.gate_up.fragments is not None or self.down.fragments is not None

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.down.weight.device


def prepare_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    block_size: Sequence[int] | None = (128, 128),
    gate_up_activation_scale: torch.Tensor | None = None,
    down_activation_scale: torch.Tensor | None = None,
    gated: bool = True,
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    transposed: bool = False,
    gate_up_blocks: Literal["together", "apart"] = "together",
    decode: Decode = "auto",
) -> Experts:
    """Bring the weights of a layer's experts into the layouts that the GEMMs read; call it once, not in each forward.

    What lies right already is used as it is, so that it follows later changes of the caller's tensors; the rest is copied, and
    ``Experts.added_bytes`` says how much. The tensors given are never changed; DTensors are taken local. E is at most 512,
    H and I are multiples of 16. Dequantized value = stored value x scale, for weights and for static activations.

    Args:
        gate_up: (E, 2I, H), the I rows of the gate before the I rows of up, or (E, I, H) without a gate. float8_e4m3fn; or FP4 as
            int8 with two e2m1 values a byte, the lower four bits first, thus (E, N, K / 2). FP4 is folded into FP8, exactly, and
            may be kept as fragments too (``decode``).
        down: (E, H, I), likewise.
        gate_up_scale: float32 or UE8M0 (float8_e8m0fnu, or uint8 with its bits), read exactly. With N rows and K columns:
            blocks of (128, 128): (E, ceil(N / 128), ceil(K / 128)), or (E, 2 * ceil(I / 128), ceil(K / 128)) where the blocks of
            gate and up were counted apart; (1, 128): (E, N, ceil(K / 128)); per tensor: (E, 2, 1) with one scale for gate and one
            for up, (E, 1, 1), (E, 1), (E,) or (); FP4: (E, N, ceil(K / 32)), powers of two or zero. Where both counts of blocks
            give one shape, they were counted together, as transformers' FP8Experts counts, unless ``gate_up_blocks`` says not.
        down_scale: likewise, without the forms for gate and up.
        block_size: rows and columns that share a scale of FP8 weights: (128, 128), (1, 128), or None for a scale per tensor.
        gate_up_activation_scale: (E,), (1,) or () float32: activations are quantized with this static scale. None: dynamically.
        down_activation_scale: likewise, for the input of ``down``.
        gated: ``gate_up`` has a gate.
        activation: "silu", or a function of (R, N1) bfloat16, N1 = 2I or I, that returns (R, I) bfloat16.
        swiglu_limit: clamp the gate to at most this, and up to within plus and minus this.
        swiglu_alpha: (up + 1) * gate * sigmoid(alpha * gate) instead of silu(gate) * up.
        gate_up_blocks: how (128, 128) blocks of gate and up were counted, where the shape of their scales does not tell.
        transposed: FP8 weights are (E, K, N), each of which gets a K-major copy; scales have the shapes above all the same.
        decode: what a forward of few tokens reads of FP4 weights. "fp8": the folded copy, as one of many tokens does. "fp4": FP4
            fragments kept beside it, about half of its bytes. "auto": fragments if their kernel can read the scales and half
            of the GPU's memory stays free. ``Experts.decodes_fp4`` says which it is.

    Returns:
        What ``fp8_experts`` takes.

    Raises:
        UnsupportedError: a scheme without a kernel; FP4 scales that span more than 14 binades inside of a block, or with
            decode = "fp4" one above 2^114.
        OperandError: all that is wrong with shapes, dtypes, scales and the activation's numbers.
        ContextMismatchError: tensors on different devices.
    """
    function = activation_for(OPERATION, activation, gated, swiglu_limit, swiglu_alpha)
    _check_words(gate_up_blocks=(gate_up_blocks, ("together", "apart")), decode=(decode, get_args(Decode)))
    with torch.no_grad():
        given = take_tensors(
            gate_up=gate_up,
            down=down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
            gate_up_activation_scale=gate_up_activation_scale,
            down_activation_scale=down_activation_scale,
        )
        stacks = (
            stack_for("gate_up", given, block_size, transposed=transposed, halves=gated),
            stack_for("down", given, block_size, transposed=transposed, halves=False),
        )
        check_stacks(*stacks)
        device = stacks[0].weight.device
        if device.type == "cuda":
            # A GPU without kernels is refused before anything is folded or copied on it.
            arch_of(torch.cuda.get_device_capability(device))
        # FP4 is planned for both before either is written: a refusal leaves nothing behind.
        plans = [fp4.plan_fold(s.name, s.weight, s.scale) if s.block == FP4_BLOCK else None for s in stacks]
        _check_decode(decode, stacks, plans)
        apart = (gate_up_blocks == "apart" and gated, False)
        projections = [_projection(stack, plan, halves) for stack, plan, halves in zip(stacks, plans, apart, strict=True)]
        if _keeps_fragments(decode, stacks, plans, projections):
            projections = [_with_fragments(*each) for each in zip(projections, stacks, strict=True)]
    return Experts(projections[0], projections[1], gated, function)


def activation_for(operation: str, activation: object, gated: bool, limit: object, alpha: object) -> Activation:
    """Return the checked activation of a call's arguments; ``activation`` may be one already, and then comes alone.

    Raises:
        UnsupportedError: an activation that has no kernel.
        OperandError: numbers that mean nothing, or that nothing would read.
    """
    if isinstance(activation, Activation):
        if (limit, alpha) != (None, None):
            fault = "swiglu_limit and swiglu_alpha belong into the Activation that is given"
            raise OperandError(operation=operation, faults=[fault])
        kind, limit, alpha, callback = activation
        activation = callback if callback is not None else kind
    faults = []
    for name, value, least in (("swiglu_limit", limit, 0.0), ("swiglu_alpha", alpha, -math.inf)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > least):
            faults.append(f"{name} = {value!r} must be a finite number" + (" greater than 0" if least == 0 else ""))
    if (limit, alpha) != (None, None) and (callable(activation) or not gated):
        owner = "a callback clamps and gates for itself" if callable(activation) else "experts without a gate have neither"
        faults.append(f"swiglu_limit and swiglu_alpha belong to the built-in gate; {owner}")
    if faults:
        raise OperandError(operation=operation, faults=faults)
    if callable(activation):
        return Activation("callback", callback=activation)
    if activation != "silu":
        raise UnsupportedError(given=f"activation = {activation!r}", supported="'silu', or a function of (R, N1) bfloat16")
    return Activation("silu", *(None if value is None else float(value) for value in (limit, alpha)))  # type: ignore[arg-type]


def _check_words(**given: tuple[object, tuple[str, ...]]) -> None:
    """Refuse arguments that are none of the words they may be."""
    faults = [
        f"{name} = {value!r} must be " + " or ".join(map(repr, words))
        for name, (value, words) in given.items()
        if not (isinstance(value, str) and value in words)
    ]
    if faults:
        raise OperandError(operation=OPERATION, faults=faults)


def _check_decode(decode: Decode, stacks: Sequence[Stack], plans: Sequence[fp4.Fold | None]) -> None:
    """Refuse to keep fragments where there is nothing to keep, or where their kernel does not read the scales."""
    if decode != "fp4":
        return
    if not any(plans):
        kinds = " and ".join(f"{stack.name} is {stack.weight.dtype}" for stack in stacks)
        raise OperandError(operation=OPERATION, faults=[f"decode = 'fp4' needs FP4 weights (int8), and {kinds}"])
    for stack, plan in zip(stacks, plans, strict=True):
        index = None if plan is None else fp4.try_beyond_fragments(plan)
        if index is not None:
            raise UnsupportedError(
                given=f"decode = 'fp4' with a scale above 2^{fp4.MAX_FRAGMENT_EXPONENT} in {stack.name} at {index}",
                supported="smaller scales",
                advice="decode = 'fp8' reads them, and so does 'auto'",
            )


def _keeps_fragments(
    decode: Decode, stacks: Sequence[Stack], plans: Sequence[fp4.Fold | None], projections: Sequence[Projection]
) -> bool:
    """Return whether FP4 weights are kept as fragments beside the folded copy, which is there already."""
    # Beside a scale per row no tile has few tokens: nothing would read fragments.
    are_read = all(projection.scale_kind == "block" for projection in projections)
    if decode == "fp4" and not are_read:
        kinds = " and ".join(f"{s.name} has a scale per {p.scale_kind}" for s, p in zip(stacks, projections, strict=True))
        raise OperandError(operation=OPERATION, faults=[f"decode = 'fp4' needs a scale per block or FP4 in both, and {kinds}"])
    if decode != "auto":
        return decode == "fp4"
    device = stacks[0].weight.device
    if device.type != "cuda" or not are_read or not any(plans):
        return False
    if any(plan is not None and fp4.try_beyond_fragments(plan) is not None for plan in plans):
        return False
    shapes = [fp4.fragments_shape(s.shape.count, s.shape.n, s.shape.k) for s in stacks if s.block == FP4_BLOCK]
    return leaves_free(device, sum(math.prod(shape) for shape in shapes), _SPARE_SHARE)


def leaves_free(device: torch.device, needed_bytes: int, share: float) -> bool:
    """Return whether a share of a GPU's memory stays free when so much more is taken; what torch has cached counts as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return free + cached - needed_bytes >= share * total


def _with_fragments(projection: Projection, stack: Stack) -> Projection:
    if stack.block != FP4_BLOCK:
        return projection
    fragments = fp4.pack_fragments(stack.weight, stack.scale)
    return replace(projection, fragments=fragments, added_bytes=projection.added_bytes + fragments.nbytes)


def _projection(stack: Stack, plan: fp4.Fold | None, halves_apart: bool) -> Projection:
    kind: ScaleKind
    if plan is not None:
        weight, scale = fp4.fold(stack.weight, plan)
        kind = "block"
    else:
        weight = _as_gemms_read(stack.weight)
        scale, kind = scale_for_gemm(stack.scale, stack.shape, stack.block, halves_apart)
    static = stack.activation_scale
    if static is not None:
        static = static.expand(stack.shape.count).contiguous()
    pairs = ((weight, stack.weight), (scale, stack.scale), (static, stack.activation_scale))
    return Projection(weight, scale, kind, static, sum(_added_bytes(made, given) for made, given in pairs))


def _as_gemms_read(weight: torch.Tensor) -> torch.Tensor:
    """Return an (E, N, K) FP8 view as it is if tensor maps can read it, otherwise a copy that they can."""
    strides = weight.stride()
    aligned = all(strides[d] > 0 and strides[d] % _COPY_ALIGNMENT_BYTES == 0 for d in (0, 1) if weight.size(d) > 1)
    if strides[2] == 1 and aligned and weight.data_ptr() % _COPY_ALIGNMENT_BYTES == 0:
        return weight
    # As bytes: not every torch copies FP8 between strides.
    copy = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    return copy.copy_(weight.view(torch.uint8)).view(weight.dtype)


def _added_bytes(made: torch.Tensor | None, given: torch.Tensor | None) -> int:
    if made is None or given is None or made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
        return 0
    return int(made.untyped_storage().nbytes())

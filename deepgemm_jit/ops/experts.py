"""The experts forward: route, gather, multiply, activate, multiply, combine; six launches, nothing read back by the host.

Two torch operators make it up, so that an activation of the caller's can stand between them; both are opaque to torch.compile.
Rows of the grouped matrices are counted for the worst case, which needs no number from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from deepgemm_jit.errors import OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.gemm import ALIGNMENT, NARROW_ALIGNMENTS, get_mk_alignment_for_contiguous_layout
from deepgemm_jit.ops.launching import call_on, column_stride, empty_m_major, kernel_for, run, run_gemm
from deepgemm_jit.ops.library import define
from deepgemm_jit.ops.weights import Activation, Experts, activation_for
from deepgemm_jit.runtime.steps import (
    CombineCall,
    Gate,
    Pairs,
    RouteCall,
    RowsCall,
    prepare_activate,
    prepare_combine,
    prepare_gather,
    prepare_route,
)
from deepgemm_jit.spec import (
    ACTIVATE,
    COMBINE,
    GATHER,
    MAX_EXPERTS,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    GemmProblem,
    Layout,
    StepProblem,
    select,
)

MAX_TOP_K = 16
_ROUTING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    checks.require_tensors("fp8_experts", hidden=hidden, topk_index=topk_index, topk_weights=topk_weights)
    up, down, gate = experts.gate_up, experts.down, _gate(experts.activation, experts.gated)
    # Groups that start at multiples of fewer than 64 rows are for tiles of few tokens, which want a scale per block.
    narrow = "row" not in (up.scale_kind, down.scale_kind)
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(
        hidden, topk_index, topk_weights, down.weight, up.weight, up.scale, up.activation_scale, up.scale_kind == "row", False,
        narrow, gate.value,
    )  # fmt: skip
    projected = _called_back("fp8_experts", experts.activation, projected, experts.intermediate_size)
    return _down(
        projected, topk_index, topk_weights, rows, ends, down.weight, down.scale, down.activation_scale, down.scale_kind == "row",
        False, narrow, gate, False, experts.activation,
    )  # fmt: skip


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
    gate = _gate(function, gated)
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(
        hidden, topk_index, topk_weights, down, gate_up, None, None, False, transposed, False, gate.value
    )
    projected = _called_back("bf16_experts", function, projected, down.shape[1 if transposed else 2])
    return _down(
        projected, topk_index, topk_weights, rows, ends, down, None, None, False, transposed, False, gate, interleaved, function
    )


def _gate(activation: Activation, gated: bool) -> Gate:
    if activation.callback is not None:
        return Gate.PASS
    if not gated:
        return Gate.SILU
    if activation.alpha is not None:
        return Gate.ALPHA_GATE
    return Gate.SILU_GATE if activation.limit is None else Gate.CLAMPED_GATE


def _called_back(operation: str, activation: Activation, projected: torch.Tensor, columns: int) -> torch.Tensor:
    """Return what the caller's activation makes of ``projected``, or that where there is none."""
    if activation.callback is None:
        return projected
    activated: object = activation.callback(projected)
    wanted = (projected.shape[0], columns)
    if not isinstance(activated, torch.Tensor):
        given = type(activated).__name__
    elif activated.dtype != torch.bfloat16 or tuple(activated.shape) != wanted or activated.device != projected.device:
        given = f"{tuple(activated.shape)} {activated.dtype} on {activated.device}"
    else:
        return activated
    fault = f"the activation must return {wanted} {torch.bfloat16} on {projected.device}, not {given}"
    raise OperandError(operation=operation, faults=[fault])


def _down(
    projected: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    row_scales: bool,
    n_major: bool,
    narrow: bool,
    gate: Gate,
    interleaved: bool,
    activation: Activation,
) -> torch.Tensor:
    limit = float("inf") if activation.limit is None else float(activation.limit)
    alpha = 0.0 if activation.alpha is None else float(activation.alpha)
    out: torch.Tensor = torch.ops.deepgemm_jit.experts_down(
        projected, topk_index, topk_weights, rows, ends, weight, scale, activation_scale, row_scales, n_major, narrow,
        gate.value, interleaved, limit, alpha,
    )  # fmt: skip
    return out


def _factor(gate: int) -> int:
    """Return how many columns of the first GEMM make one of the second."""
    return 1 if gate in (Gate.PASS.value, Gate.SILU.value) else 2


def _check(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    quantized: bool,
    n_major: bool,
    gate: int,
    fake: bool,
) -> None:
    """Check all operands of a forward, those of its second half too: nothing is launched when one is wrong."""
    faults = checks.Faults("the experts forward", fake)
    index_dtype = topk_index.dtype if topk_index.dtype in (torch.int32, torch.int64) else torch.int64
    routing_dtype = topk_weights.dtype if topk_weights.dtype in _ROUTING_DTYPES else torch.float32
    weight_dtype, step = (torch.float8_e4m3fn, 16) if quantized else (torch.bfloat16, 8)
    looked_at = [
        faults.look_at("hidden", hidden, torch.bfloat16, 2),
        faults.look_at("topk_index", topk_index, index_dtype, 2),
        faults.look_at("topk_weights", topk_weights, routing_dtype, 2),
        faults.look_at("gate_up weights", up, weight_dtype, 3),
        faults.look_at("down weights", down, weight_dtype, 3),
    ]
    if not all(looked_at):
        faults.raise_if_any()
    faults.look_at_devices(
        {"hidden": hidden, "topk_index": topk_index, "topk_weights": topk_weights, "gate_up weights": up, "down weights": down}
    )
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], up.shape[0]
    intermediate = down.shape[1 if n_major else 2]
    wide = (
        up.shape[2 if n_major else 1] if gate == Gate.PASS.value else _factor(gate) * intermediate
    )  # a callback may do as it likes
    up_k = up.shape[1 if n_major else 2]
    if hidden_size != up_k:
        faults.add(f"hidden has {hidden_size} columns and the gate_up weights take {up_k}")
    if n_major:
        faults.look_at_shape("gate_up weights", up, (experts, up_k, wide), "(E, H, N1)")
        faults.look_at_shape("down weights", down, (experts, intermediate, up_k), "(E, I, H)")
    else:
        faults.look_at_shape("gate_up weights", up, (experts, wide, up_k), "(E, N1, H)")
        faults.look_at_shape("down weights", down, (experts, up_k, intermediate), "(E, H, I)")
    faults.look_at_size("hidden size", hidden_size, step)
    faults.look_at_size("intermediate size", intermediate, step)
    faults.look_at_rows("hidden", hidden, 8)
    faults.look_at_rows("gate_up weights", up, step)
    faults.look_at_rows("down weights", down, step)
    faults.look_at_shape("topk_index", topk_index, (tokens, top_k), "(T, k)")
    faults.look_at_shape("topk_weights", topk_weights, tuple(topk_index.shape), "that of topk_index")
    if not 1 <= top_k <= MAX_TOP_K:
        faults.add(f"topk_index has k = {top_k}, needed: 1 to {MAX_TOP_K}")
    if not 1 <= experts <= MAX_EXPERTS:
        faults.add(f"there are {experts} experts, needed: 1 to {MAX_EXPERTS}")
    faults.raise_if_any()


def _capacity(tokens: int, top_k: int, experts: int) -> int:
    """Return rows enough for any routing: every expert that is hit may end in a tile that is all padding but for one row."""
    pairs = tokens * top_k
    return checks.round_up(pairs + torch.sym_min(pairs, experts) * (ALIGNMENT - 1), ALIGNMENT)  # type: ignore[no-untyped-call]


def _layout(pairs: int, experts: int, narrow: bool) -> tuple[int, int]:
    """Return the alignment of groups, and the rows that selection counts on: those of pairs spread evenly."""
    hit = min(pairs, experts)
    rows = checks.ceil_div(pairs, hit)
    proposed = get_mk_alignment_for_contiguous_layout(rows)
    alignment = proposed if narrow else max(proposed, NARROW_ALIGNMENTS[-1])
    return alignment, hit * checks.round_up(rows, alignment)


def _pairs(topk_index: torch.Tensor, rows: torch.Tensor) -> Pairs:
    return Pairs(topk_index.data_ptr(), rows.data_ptr(), rows.numel(), rows.shape[1], topk_index.dtype == torch.int64)


def _problem(pairs: int, weight: torch.Tensor, quantized: bool, row_scales: bool, n_major: bool, narrow: bool) -> GemmProblem:
    experts, n, k = weight.shape[0], weight.shape[2 if n_major else 1], weight.shape[1 if n_major else 2]
    alignment, rows = _layout(pairs, experts, narrow)
    dtype = "e4m3" if quantized else "bf16"
    variant = (N_MAJOR,) if n_major else (ROW_SCALES,) if row_scales else ()
    return GemmProblem(rows, n, k, experts, Layout.PREFIX_SUMS, alignment, (dtype, dtype, "bf16"), variant)


def _empty_rows(capacity: int, columns: int, device: torch.device, quantized: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not quantized:
        return torch.empty((capacity, columns), dtype=torch.bfloat16, device=device), None
    scales = empty_m_major((capacity, checks.ceil_div(columns, checks.SCALE_BLOCK)), device)
    return torch.empty((capacity, columns), dtype=torch.float8_e4m3fn, device=device), scales


def _scales(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if a is None or b is None else (a, b)


def _rows_call(
    source: torch.Tensor, target: torch.Tensor, scales: torch.Tensor | None, static: torch.Tensor | None, pairs: Pairs
) -> RowsCall:
    return RowsCall(
        input=source.data_ptr(),
        output=target.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        static_scales=0 if static is None else static.data_ptr(),
        pairs=pairs,
        input_stride=source.stride(0),
        scales_stride=0 if scales is None else column_stride(scales),
        columns=target.shape[1],
    )


def _experts_up(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    down: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    row_scales: bool,
    n_major: bool,
    narrow: bool,
    gate: int,
    *,
    fake: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quantized = scale is not None
    _check(hidden, topk_index, topk_weights, weight, down, quantized, n_major, gate, fake)
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], weight.shape[0]
    capacity = _capacity(tokens, top_k, experts)
    projected = torch.empty((capacity, weight.shape[2 if n_major else 1]), dtype=torch.bfloat16, device=hidden.device)
    rows = torch.empty((tokens, top_k), dtype=torch.int32, device=hidden.device)
    ends = torch.empty((experts,), dtype=torch.int32, device=hidden.device)
    if fake or tokens == 0:
        return projected, rows, ends
    index = topk_index.contiguous()
    pairs = _pairs(index, rows)
    problem = _problem(pairs.total, weight, quantized, row_scales, n_major, narrow)
    with call_on(hidden) as call:
        chosen = kernel_for(call, problem)  # first: if it cannot be had, nothing is launched
        route = select(StepProblem(ROUTE, ("i32",)), call.limits)
        run(call, route, prepare_route(route, RouteCall(pairs, ends.data_ptr(), experts, problem.alignment)))
        a, a_scale = _empty_rows(capacity, hidden_size, hidden.device, quantized)
        gather = select(StepProblem(GATHER, ("bf16", "e4m3" if quantized else "bf16")), call.limits)
        run(call, gather, prepare_gather(gather, _rows_call(hidden, a, a_scale, activation_scale, pairs)))
        run_gemm(call, chosen, problem, a, weight, projected, ends, _scales(a_scale, scale))
    return projected, rows, ends


def _experts_down(
    projected: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    row_scales: bool,
    n_major: bool,
    narrow: bool,
    gate: int,
    interleaved: bool,
    limit: float,
    alpha: float,
    *,
    fake: bool = False,
) -> torch.Tensor:
    intermediate, hidden_size = weight.shape[1 if n_major else 2], weight.shape[2 if n_major else 1]
    faults = checks.Faults("the experts forward", fake)
    capacity = _capacity(topk_index.shape[0], topk_index.shape[1], weight.shape[0])
    if faults.look_at("projected", projected, torch.bfloat16, 2):
        faults.look_at_shape("projected", projected, (capacity, _factor(gate) * intermediate), "(rows of experts_up, N1)")
    faults.look_at_devices({"projected": projected, "topk_weights": topk_weights, "weights": weight})
    faults.raise_if_any()
    tokens = topk_index.shape[0]
    out = torch.empty((tokens, hidden_size), dtype=torch.bfloat16, device=projected.device)
    if fake or tokens == 0:
        return out
    index = topk_index.contiguous()
    pairs = _pairs(index, rows)
    weights = topk_weights.contiguous() if topk_weights.dtype in (torch.float32, torch.bfloat16) else topk_weights.float()
    stride = projected.stride(0)
    if projected.stride(1) != 1 or stride < projected.shape[1] or stride % 8 or projected.data_ptr() % 16:
        projected = projected.contiguous()
    problem = _problem(pairs.total, weight, scale is not None, row_scales, n_major, narrow)
    with call_on(projected) as call:
        chosen = kernel_for(call, problem)
        if scale is None and gate == Gate.PASS.value:
            a: torch.Tensor = projected
            a_scale: torch.Tensor | None = None
        else:
            a, a_scale = _empty_rows(capacity, intermediate, projected.device, scale is not None)
            activate = select(StepProblem(ACTIVATE, ("bf16", "bf16" if scale is None else "e4m3")), call.limits)
            rows_call = _rows_call(projected, a, a_scale, activation_scale, pairs)._replace(
                gate=Gate(gate), interleaved=interleaved, limit=limit, alpha=alpha
            )
            run(call, activate, prepare_activate(activate, rows_call))
        multiplied = torch.empty((capacity, hidden_size), dtype=torch.bfloat16, device=projected.device)
        run_gemm(call, chosen, problem, a, weight, multiplied, ends, _scales(a_scale, scale))
        combine = select(StepProblem(COMBINE, ("bf16",)), call.limits)
        combined = CombineCall(
            input=multiplied.data_ptr(),
            weights=weights.data_ptr(),
            output=out.data_ptr(),
            pairs=pairs,
            input_stride=multiplied.stride(0),
            columns=hidden_size,
            bf16_weights=weights.dtype == torch.bfloat16,
        )
        run(call, combine, prepare_combine(combine, combined))
    return out


_WEIGHTS = "Tensor weight, Tensor? scale, Tensor? activation_scale, bool row_scales, bool n_major, bool narrow"

define(
    f"experts_up(Tensor hidden, Tensor topk_index, Tensor topk_weights, Tensor down, {_WEIGHTS}, int gate) "
    "-> (Tensor, Tensor, Tensor)",
    _experts_up,
    partial(_experts_up, fake=True),
)
define(
    "experts_down(Tensor projected, Tensor topk_index, Tensor topk_weights, Tensor rows, Tensor ends, "
    f"{_WEIGHTS}, int gate, bool interleaved, float limit, float alpha) -> Tensor",
    _experts_down,
    partial(_experts_down, fake=True),
)

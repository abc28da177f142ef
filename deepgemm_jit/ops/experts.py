"""The experts forward: route, gather, multiply, activate, multiply, combine; six launches, nothing read back by the host.

Two torch operators make it up, so that an activation of the caller's can stand between them; both are opaque to torch.compile.
Rows of the grouped matrices are counted for the worst case, which needs no number from the device.
"""

from __future__ import annotations

from functools import partial

import torch

from deepgemm_jit.ops import checks
from deepgemm_jit.ops.launching import call_on, column_stride, empty_m_major, kernel_for, run, run_gemm
from deepgemm_jit.ops.library import define
from deepgemm_jit.ops.weights import Activation, Experts
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
from deepgemm_jit.service import Call
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
_ALIGNMENT = 128
_SILU = Activation("silu")
_ROUTING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW_ROWS = 64
"""Rows per expert up to which groups are aligned to 64, where only tiles of 64 rows fit."""


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
    up, down = experts.gate_up, experts.down
    checks.require_tensors("fp8_experts", hidden=hidden, topk_index=topk_index, topk_weights=topk_weights)
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(
        hidden, topk_index, topk_weights, up.weight, up.scale, up.activation_scale, up.scale_kind == "row", False
    )
    gate, projected = _gate(experts.activation, experts.gated, projected)
    return _down(
        projected, topk_index, topk_weights, rows, ends, down.weight, down.scale, down.activation_scale, down.scale_kind == "row",
        False, gate, False, experts.activation,
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
    activation: Activation = _SILU,
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
        activation: between the GEMMs.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_experts`.
    """
    checks.require_tensors(
        "bf16_experts", hidden=hidden, topk_index=topk_index, topk_weights=topk_weights, gate_up=gate_up, down=down
    )
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(
        hidden, topk_index, topk_weights, gate_up, None, None, False, transposed
    )
    gate, projected = _gate(activation, gated, projected)
    return _down(
        projected, topk_index, topk_weights, rows, ends, down, None, None, False, transposed, gate, interleaved, activation
    )


def _gate(activation: Activation, gated: bool, projected: torch.Tensor) -> tuple[Gate, torch.Tensor]:
    if activation.callback is not None:
        return Gate.PASS, activation.callback(projected)
    if not gated:
        return Gate.SILU, projected
    if activation.alpha is not None:
        return Gate.ALPHA_GATE, projected
    return (Gate.SILU_GATE if activation.limit is None else Gate.CLAMPED_GATE), projected


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
    gate: Gate,
    interleaved: bool,
    activation: Activation,
) -> torch.Tensor:
    limit = float("inf") if activation.limit is None else float(activation.limit)
    alpha = 0.0 if activation.alpha is None else float(activation.alpha)
    out: torch.Tensor = torch.ops.deepgemm_jit.experts_down(
        projected, topk_index, topk_weights, rows, ends, weight, scale, activation_scale, row_scales, n_major, gate.value,
        interleaved, limit, alpha,
    )  # fmt: skip
    return out


def _check(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    n_major: bool,
    fake: bool,
) -> None:
    faults = checks.Faults("the experts forward", fake)
    index_dtype = topk_index.dtype if topk_index.dtype in (torch.int32, torch.int64) else torch.int64
    routing_dtype = topk_weights.dtype if topk_weights.dtype in _ROUTING_DTYPES else torch.float32
    looked_at = [
        faults.look_at("hidden", hidden, torch.bfloat16, 2),
        faults.look_at("topk_index", topk_index, index_dtype, 2),
        faults.look_at("topk_weights", topk_weights, routing_dtype, 2),
        faults.look_at("weights", weight, torch.bfloat16 if scale is None else torch.float8_e4m3fn, 3),
    ]
    if not all(looked_at):
        faults.raise_if_any()
    faults.look_at_devices({"hidden": hidden, "topk_index": topk_index, "topk_weights": topk_weights, "weights": weight})
    (tokens, hidden_size), top_k = hidden.shape, topk_index.shape[1]
    experts, k = weight.shape[0], weight.shape[1 if n_major else 2]
    if hidden_size != k:
        faults.add(f"hidden has {hidden_size} columns and the weights take {k}")
    faults.look_at_size("hidden size", hidden_size, 8 if scale is None else 16)
    faults.look_at_rows("hidden", hidden, 8)
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
    return checks.round_up(pairs + torch.sym_min(pairs, experts) * (_ALIGNMENT - 1), _ALIGNMENT)  # type: ignore[no-untyped-call]


def _layout(pairs: int, experts: int) -> tuple[int, int]:
    """Return the alignment of groups, and the rows that selection counts on: those of pairs spread evenly."""
    hit = min(pairs, experts)
    rows = checks.ceil_div(pairs, hit)
    alignment = 64 if rows <= _FEW_ROWS else _ALIGNMENT
    return alignment, hit * checks.round_up(rows, alignment)


def _pairs(topk_index: torch.Tensor, rows: torch.Tensor) -> Pairs:
    return Pairs(topk_index.data_ptr(), rows.data_ptr(), rows.numel(), rows.shape[1], topk_index.dtype == torch.int64)


def _grouped(
    call: Call,
    pairs: int,
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    ends: torch.Tensor,
    row_scales: bool,
    n_major: bool,
) -> None:
    experts = weight.shape[0]
    alignment, rows = _layout(pairs, experts)
    dtype = "bf16" if scale is None else "e4m3"
    variant = (N_MAJOR,) if n_major else (ROW_SCALES,) if row_scales else ()
    problem = GemmProblem(rows, out.shape[1], a.shape[1], experts, Layout.PREFIX_SUMS, alignment, (dtype, dtype, "bf16"), variant)
    scales = None if a_scale is None or scale is None else (a_scale, scale)
    run_gemm(call, kernel_for(call, problem), problem, a, weight, out, ends, scales)


def _empty_rows(capacity: int, columns: int, device: torch.device, quantized: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not quantized:
        return torch.empty((capacity, columns), dtype=torch.bfloat16, device=device), None
    scales = empty_m_major((capacity, checks.ceil_div(columns, checks.SCALE_BLOCK)), device)
    return torch.empty((capacity, columns), dtype=torch.float8_e4m3fn, device=device), scales


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
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    row_scales: bool,
    n_major: bool,
    *,
    fake: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(hidden, topk_index, topk_weights, weight, scale, n_major, fake)
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], weight.shape[0]
    capacity = _capacity(tokens, top_k, experts)
    projected = torch.empty((capacity, weight.shape[2 if n_major else 1]), dtype=torch.bfloat16, device=hidden.device)
    rows = torch.empty((tokens, top_k), dtype=torch.int32, device=hidden.device)
    ends = torch.empty((experts,), dtype=torch.int32, device=hidden.device)
    if fake or tokens == 0:
        return projected, rows, ends
    index = topk_index.contiguous()
    pairs = _pairs(index, rows)
    with call_on(hidden) as call:
        route = select(StepProblem(ROUTE, ("i32",)), call.limits)
        alignment, _ = _layout(pairs.total, experts)
        run(call, route, prepare_route(route, RouteCall(pairs, ends.data_ptr(), experts, alignment)))
        a, a_scale = _empty_rows(capacity, hidden_size, hidden.device, scale is not None)
        gather = select(StepProblem(GATHER, ("bf16", "bf16" if scale is None else "e4m3")), call.limits)
        run(call, gather, prepare_gather(gather, _rows_call(hidden, a, a_scale, activation_scale, pairs)))
        _grouped(call, pairs.total, a, a_scale, weight, scale, projected, ends, row_scales, n_major)
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
    gate: int,
    interleaved: bool,
    limit: float,
    alpha: float,
    *,
    fake: bool = False,
) -> torch.Tensor:
    intermediate, hidden_size = weight.shape[1 if n_major else 2], weight.shape[2 if n_major else 1]
    factor = 1 if gate in (Gate.PASS.value, Gate.SILU.value) else 2
    faults = checks.Faults("the experts forward", fake)
    faults.look_at("projected", projected, torch.bfloat16, 2)
    if projected.shape[-1] != factor * intermediate:
        faults.add(
            f"the activation gives {projected.shape[-1]} columns and the down weights take {intermediate}"
            if gate == Gate.PASS.value
            else f"the up weights have {projected.shape[-1]} rows, needed: {factor * intermediate} ({factor} x intermediate size)"
        )
    faults.look_at_devices({"projected": projected, "topk_weights": topk_weights, "weights": weight})
    faults.raise_if_any()
    tokens = topk_index.shape[0]
    out = torch.empty((tokens, hidden_size), dtype=torch.bfloat16, device=projected.device)
    if fake or tokens == 0:
        return out
    index = topk_index.contiguous()
    pairs = _pairs(index, rows)
    weights = topk_weights.contiguous() if topk_weights.dtype in (torch.float32, torch.bfloat16) else topk_weights.float()
    if projected.stride(-1) != 1 or projected.stride(0) % 8 or projected.data_ptr() % 16:
        projected = projected.contiguous()
    capacity = projected.shape[0]
    with call_on(projected) as call:
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
        _grouped(call, pairs.total, a, a_scale, weight, scale, multiplied, ends, row_scales, n_major)
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


_WEIGHTS = "Tensor weight, Tensor? scale, Tensor? activation_scale, bool row_scales, bool n_major"

define(
    f"experts_up(Tensor hidden, Tensor topk_index, Tensor topk_weights, {_WEIGHTS}) -> (Tensor, Tensor, Tensor)",
    _experts_up,
    partial(_experts_up, fake=True),
)
define(
    "experts_down(Tensor projected, Tensor topk_index, Tensor topk_weights, Tensor rows, Tensor ends, "
    f"{_WEIGHTS}, int gate, bool interleaved, float limit, float alpha) -> Tensor",
    _experts_down,
    partial(_experts_down, fake=True),
)

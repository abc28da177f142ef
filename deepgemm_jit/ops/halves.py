"""The experts forward as two torch operators, before and after the activation; both are opaque to torch.compile."""

from __future__ import annotations

from functools import partial

import torch

from deepgemm_jit.ops import checks
from deepgemm_jit.ops.gemm import ALIGNMENT
from deepgemm_jit.ops.launching import call_on, empty_m_major
from deepgemm_jit.ops.library import define
from deepgemm_jit.ops.pipeline import (
    Buffers,
    Gating,
    Layer,
    Sizes,
    Tokens,
    activates,
    alignment_for,
    capacity_for,
    half_for,
    run_steps,
    steps_down,
    steps_up,
    weights_as_read,
)
from deepgemm_jit.runtime.steps import Gate


def experts_up(
    hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the first half, up to the activation.

    Returns:
        Rows of the grouped matrix (R, N1) bfloat16; the row of each pair (T, k) int32; the end row of each expert (E,) int32.
    """
    up: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.deepgemm_jit.experts_up(
        hidden, topk_index, topk_weights, layer.down, layer.up, layer.up_scale, layer.up_static, layer.up_scales_rows,
        layer.n_major, layer.narrow, layer.up_fragments, layer.gating.gate.value,
    )  # fmt: skip
    return up


def experts_down(
    projected: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    layer: Layer,
) -> torch.Tensor:
    """Run the second half on what :func:`experts_up` returned; return (T, H) bfloat16."""
    gate, interleaved, limit, alpha = layer.gating
    out: torch.Tensor = torch.ops.deepgemm_jit.experts_down(
        projected, topk_index, topk_weights, rows, ends, layer.down, layer.down_scale, layer.down_static, layer.down_scales_rows,
        layer.n_major, layer.narrow, layer.down_fragments, gate.value, interleaved, limit, alpha,
    )  # fmt: skip
    return out


def _sizes(
    topk_index: torch.Tensor, experts: int, hidden: int, projected: int, intermediate: int, quantized: bool, narrow: bool
) -> Sizes:
    tokens, top_k = topk_index.shape
    # The widest alignment, so that torch.compile need not know the number of tokens to know the rows.
    capacity = capacity_for(tokens * top_k, experts, ALIGNMENT)
    alignment, _ = alignment_for(tokens * top_k, experts, narrow)
    return Sizes(
        tokens, top_k, experts, hidden, projected, intermediate, capacity, alignment, topk_index.dtype.itemsize, quantized
    )


def _empty_rows(capacity: int, columns: int, device: torch.device, quantized: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not quantized:
        return torch.empty((capacity, columns), dtype=torch.bfloat16, device=device), None
    scales = empty_m_major((capacity, checks.ceil_div(columns, checks.SCALE_BLOCK)), device)
    return torch.empty((capacity, columns), dtype=torch.float8_e4m3fn, device=device), scales


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    fragments: torch.Tensor | None,
    gate: int,
    *,
    fake: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quantized, per_column = scale is not None, Gating(Gate(gate)).columns_per_column
    checks.check_experts(
        hidden, topk_index, topk_weights, weight, down,
        quantized=quantized, n_major=n_major, columns_per_column=per_column, fake=fake,
    )  # fmt: skip
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], weight.shape[0]
    columns, intermediate = weight.shape[2 if n_major else 1], down.shape[1 if n_major else 2]
    capacity = capacity_for(tokens * top_k, experts, ALIGNMENT)
    projected = torch.empty((capacity, columns), dtype=torch.bfloat16, device=hidden.device)
    rows = torch.empty((tokens, top_k), dtype=torch.int32, device=hidden.device)
    ends = torch.empty((experts,), dtype=torch.int32, device=hidden.device)
    if fake or tokens == 0:
        return projected, rows, ends
    index = topk_index.contiguous()
    sizes = _sizes(index, experts, hidden_size, columns, intermediate, quantized, narrow)
    half = half_for(weight, scale, activation_scale, sizes.pairs, row_scales, n_major, narrow, fragments)
    gathered, scales = _empty_rows(capacity, hidden_size, hidden.device, quantized)
    buffers = Buffers(rows.data_ptr(), ends.data_ptr(), gathered.data_ptr(), _address(scales), projected.data_ptr(), 0, 0, 0)
    with call_on(hidden) as call:
        run_steps(call, steps_up(call, sizes, half, Tokens(hidden.data_ptr(), hidden.stride(0), index.data_ptr()), buffers))
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
    fragments: torch.Tensor | None,
    gate: int,
    interleaved: bool,
    limit: float,
    alpha: float,
    *,
    fake: bool = False,
) -> torch.Tensor:
    experts, intermediate, hidden_size = weight.shape[0], weight.shape[1 if n_major else 2], weight.shape[2 if n_major else 1]
    gating, quantized, tokens = Gating(Gate(gate), interleaved, limit, alpha), scale is not None, topk_index.shape[0]
    faults = checks.Faults("the experts forward", fake)
    capacity = capacity_for(tokens * topk_index.shape[1], experts, ALIGNMENT)
    if faults.look_at("projected", projected, torch.bfloat16, 2):
        wanted = (capacity, (gating.columns_per_column or 1) * intermediate)
        faults.look_at_shape("projected", projected, wanted, "(rows of experts_up, N1)")
    faults.look_at_devices({"projected": projected, "topk_weights": topk_weights, "weights": weight})
    faults.raise_if_any()
    out = torch.empty((tokens, hidden_size), dtype=torch.bfloat16, device=projected.device)
    if fake or tokens == 0:
        return out
    index, weights = topk_index.contiguous(), weights_as_read(topk_weights)
    stride = projected.stride(0)
    if projected.stride(1) != 1 or stride < projected.shape[1] or stride % 8 or projected.data_ptr() % 16:
        projected = projected.contiguous()
    sizes = _sizes(index, experts, hidden_size, projected.shape[1], intermediate, quantized, narrow)
    half = half_for(weight, scale, activation_scale, sizes.pairs, row_scales, n_major, narrow, fragments)
    activated: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    if activates(quantized, gating.gate):
        activated, scales = _empty_rows(capacity, intermediate, projected.device, quantized)
    multiplied = torch.empty((capacity, hidden_size), dtype=torch.bfloat16, device=projected.device)
    buffers = Buffers(
        rows.data_ptr(), ends.data_ptr(), 0, 0, projected.data_ptr(), _address(activated), _address(scales), multiplied.data_ptr()
    )
    with call_on(projected) as call:
        steps = steps_down(
            call, sizes, half, gating, index.data_ptr(), weights.data_ptr(), weights.dtype == torch.bfloat16, buffers,
            out.data_ptr(), projected.stride(0), follows_up=False,
        )  # fmt: skip
        run_steps(call, steps)
    return out


_WEIGHTS = "Tensor weight, Tensor? scale, Tensor? activation_scale, bool row_scales, bool n_major, bool narrow, Tensor? fragments"

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

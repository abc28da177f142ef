"""An experts forward in one piece: an output, a workspace, and six launches, kept for the next call like it.

The workspace comes from torch's allocator and goes back with the call: a captured graph has one of its own, and a loop gets the
same memory again, so that the launches on it are found as they are. Nothing here holds a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepgemm_jit.errors import UnloadedKernelError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.launching import call_on
from deepgemm_jit.ops.pipeline import (
    Buffers,
    Layer,
    Sizes,
    Step,
    Tokens,
    activates,
    alignment_for,
    capacity_for,
    half_for,
    run_steps,
    steps_down,
    steps_up,
    weights_as_read,
    workspace_for,
)
from deepgemm_jit.ops.prepared import Key, PreparedLaunch, keep_in, prepared_on
from deepgemm_jit.service import Call

_CAPACITY = 4
"""Sets of addresses for which the launches of forwards like each other are kept: some 8 KB each. A loop has one or two."""
_ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """All of a forward but the addresses of its tokens, workspace and output; and the launches on those it had."""

    sizes: Sizes
    offsets: Buffers
    workspace_bytes: int
    launches: dict[tuple[int, ...], tuple[PreparedLaunch, ...]] = field(default_factory=dict)


def forward(hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return the experts forward of plain tensors, ``hidden`` on a CUDA device; see ``fp8_experts``.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as ``fp8_experts``.
    """
    if not hidden.numel():
        _check(hidden, topk_index, topk_weights, layer)
        return torch.empty_like(hidden)  # no tokens: no launch, no compile
    with call_on(hidden) as call:
        key = _key_of(hidden, topk_index, topk_weights, layer)
        known: _Prepared | None = call.prepared.get(key)
        if known is None:
            _check(hidden, topk_index, topk_weights, layer)
            known = _prepare(hidden, topk_index, layer)
            keep_in(call.prepared, key, known)
        sizes = known.sizes
        out = torch.empty((sizes.tokens, sizes.hidden), dtype=torch.bfloat16, device=hidden.device)
        workspace = torch.empty(known.workspace_bytes, dtype=torch.uint8, device=hidden.device)
        index, weights = topk_index.contiguous(), weights_as_read(topk_weights)
        at = call.stream, hidden.data_ptr(), index.data_ptr(), weights.data_ptr(), workspace.data_ptr(), out.data_ptr()
        launches = known.launches.get(at)
        if launches is None:
            if at[1] % _ROW_ALIGNMENT_BYTES:
                _check(hidden, topk_index, topk_weights, layer)
            launches = tuple([prepared_on(call, *step) for step in _steps(call, known, layer, hidden.stride(0), weights, at)])
            keep_in(known.launches, at, launches, _CAPACITY)
        try:
            for launch in launches:
                launch.kernel.launch_entered(call.context, launch.config_pointer, launch.params_pointer)
        except UnloadedKernelError:  # by another thread, meanwhile: all steps again, on kernels that are loaded again
            run_steps(call, _steps(call, known, layer, hidden.stride(0), weights, at))
    return out


def _check(hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, layer: Layer) -> None:
    checks.check_experts(
        hidden, topk_index, topk_weights, layer.up, layer.down,
        quantized=layer.up_scale is not None, n_major=layer.n_major, columns_per_column=layer.gating.columns_per_column,
    )  # fmt: skip
    for half, weight, scale, static, by_rows in (
        ("gate_up", layer.up, layer.up_scale, layer.up_static, layer.up_scales_rows),
        ("down", layer.down, layer.down_scale, layer.down_static, layer.down_scales_rows),
    ):
        checks.check_expert_scales(half, weight, scale, static, by_rows=by_rows)


def _key_of(hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, layer: Layer) -> Key:
    """Return all that the checks and the launches depend on, beside the context, the stream and the addresses of the tokens.

    Tensors of a layer may be changed in place: all that is read of them is looked at again.
    """
    h, i, w = hidden, topk_index, topk_weights
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (h, i, w, *layer.tensors))
    return (
        layer.form, differentiates,
        *[(t.data_ptr(), t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device()) for t in layer.tensors],
        h.shape, h.is_contiguous() or h.stride(), h.dtype, h.get_device(),
        i.shape, i.is_contiguous() or i.stride(), i.dtype, i.get_device(),
        w.shape, w.is_contiguous() or w.stride(), w.dtype, w.get_device(),
    )  # fmt: skip


def _prepare(hidden: torch.Tensor, topk_index: torch.Tensor, layer: Layer) -> _Prepared:
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], layer.up.shape[0]
    pairs, quantized = tokens * top_k, layer.up_scale is not None
    alignment, _ = alignment_for(pairs, experts, layer.narrow)
    sizes = Sizes(
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden_size,
        projected=layer.up.shape[2 if layer.n_major else 1],
        intermediate=layer.down.shape[1 if layer.n_major else 2],
        capacity=capacity_for(pairs, experts, alignment),
        alignment=alignment,
        index_bytes=topk_index.dtype.itemsize,
        quantized=quantized,
    )
    return _Prepared(sizes, *workspace_for(sizes, activates(quantized, layer.gating.gate)))


def _steps(
    call: Call, known: _Prepared, layer: Layer, hidden_stride: int, weights: torch.Tensor, at: tuple[int, ...]
) -> list[Step]:
    sizes = known.sizes
    _, hidden, index, weights_at, workspace, out = at
    buffers = known.offsets.at(workspace)
    up, down = (
        half_for(weight, scale, static, sizes.pairs, scales_rows, layer.n_major, layer.narrow, fragments)
        for weight, scale, static, scales_rows, fragments in (
            (layer.up, layer.up_scale, layer.up_static, layer.up_scales_rows, layer.up_fragments),
            (layer.down, layer.down_scale, layer.down_static, layer.down_scales_rows, layer.down_fragments),
        )
    )
    return [
        *steps_up(call, sizes, up, Tokens(hidden, hidden_stride, index), buffers),
        *steps_down(
            call,
            sizes,
            down,
            layer.gating,
            index,
            weights_at,
            weights.dtype == torch.bfloat16,
            buffers,
            out,
            sizes.projected,
            follows_up=True,
        ),
    ]

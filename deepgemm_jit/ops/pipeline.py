"""The steps of an experts forward, from addresses to launches: route, gather, multiply, activate, multiply, combine.

They run in one stream and each but the first starts while the one before it ends (programmatic dependent launch). Every kernel
waits for the one before it before it lets the next one start, so that what was written two launches ago may be read at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from deepgemm_jit.ops import checks
from deepgemm_jit.ops.gemm import ALIGNMENT
from deepgemm_jit.ops.launching import blocks_for, m_major_matrices, matrices, padded_rows
from deepgemm_jit.runtime import GemmCall, Launch, Matrices, prepare_gemm
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
from deepgemm_jit.service import Call, default_service
from deepgemm_jit.spec import (
    ACTIVATE,
    COMBINE,
    GATHER,
    MOST_FP4_ROWS,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCATTERED_ALIGNMENT,
    GemmProblem,
    KernelSpec,
    Layout,
    Overlap,
    StepProblem,
    scattered_rows,
    select,
    selected,
)

Step = tuple[KernelSpec, Callable[[], Launch]]
"""A kernel, and what prepares its launch; that lasts until this thread prepares the next."""

WIDE_ALIGNMENTS = (64, ALIGNMENT)
"""Of groups for kernels whose tiles have at least 64 rows."""
_WORKSPACE_ALIGNMENT_BYTES = 256


class Sizes(NamedTuple):
    """Of a forward."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    projected: int
    """Columns of the first GEMM's output."""
    intermediate: int
    capacity: int
    """Rows of the grouped matrices: enough for any routing."""
    alignment: int
    """Multiples of rows at which experts start."""
    index_bytes: int
    quantized: bool

    @property
    def pairs(self) -> int:
        """Pairs of token and choice."""
        return self.tokens * self.top_k


class Half(NamedTuple):
    """Weights of one of the two GEMMs and the problem that selects its kernel."""

    weight: Matrices
    """Of FP4: fragments, with their scales."""
    scale: Matrices | None
    static: int
    """Address of the activations' static scales, or 0."""
    problem: GemmProblem


class Tokens(NamedTuple):
    """Addresses of a forward's input."""

    hidden: int
    hidden_stride: int
    topk_index: int


class Gating(NamedTuple):
    """What the kernel between the GEMMs does."""

    gate: Gate
    interleaved: bool = False
    limit: float = float("inf")
    alpha: float = 0.0

    @property
    def columns_per_column(self) -> int | None:
        """How many columns of the first GEMM make one of the second; None: whatever a callback makes of them."""
        return {Gate.PASS: None, Gate.SILU: 1}.get(self.gate, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of a layer's experts and what happens between the GEMMs; scales and static scales where they are FP8.

    Attributes:
        up_fragments: the same weights in FP4, if they are kept; ``down_fragments`` likewise.
        tensors: all there are.
        form: what a forward depends on beside them.
    """

    up: torch.Tensor
    up_scale: torch.Tensor | None
    up_static: torch.Tensor | None
    down: torch.Tensor
    down_scale: torch.Tensor | None
    down_static: torch.Tensor | None
    up_scales_rows: bool
    down_scales_rows: bool
    n_major: bool
    gating: Gating
    up_fragments: torch.Tensor | None = None
    down_fragments: torch.Tensor | None = None
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    form: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        given = (
            self.up, self.up_scale, self.up_static, self.up_fragments,
            self.down, self.down_scale, self.down_static, self.down_fragments,
        )  # fmt: skip
        object.__setattr__(self, "tensors", tuple([tensor for tensor in given if tensor is not None]))
        gate, interleaved, limit, alpha = self.gating
        missing = [tensor is None for tensor in given]
        rows = self.up_scales_rows, self.down_scales_rows
        object.__setattr__(self, "form", (*missing, *rows, self.n_major, gate.value, interleaved, limit, alpha))

    @property
    def narrow(self) -> bool:
        """Whether there are tiles of few tokens, which want a scale per block of weights."""
        return self.up_scale is not None and not (self.up_scales_rows or self.down_scales_rows)


class Buffers(NamedTuple):
    """Addresses of what a forward writes on its way; in a workspace, offsets."""

    rows: int
    ends: int
    gathered: int
    gathered_scales: int
    projected: int
    activated: int
    activated_scales: int
    multiplied: int

    def at(self, workspace: int) -> Buffers:
        """Return the addresses in a workspace."""
        return Buffers(*[workspace + offset for offset in self])


def alignment_for(pairs: int, experts: int, narrow: bool) -> tuple[int, int]:
    """Return the alignment of groups, and the rows that selection counts on.

    Args:
        pairs: of token and choice.
        experts: of the layer.
        narrow: kernels for tiles of few tokens serve it, and any tile may reach beyond its group.
    """
    if narrow:
        return SCATTERED_ALIGNMENT, scattered_rows(pairs, experts)
    hit = min(pairs, experts)
    rows = checks.ceil_div(pairs, hit)
    alignment = WIDE_ALIGNMENTS[rows > WIDE_ALIGNMENTS[0]]
    return alignment, hit * checks.round_up(rows, alignment)


def capacity_for(pairs: int, experts: int, alignment: int) -> int:
    """Return rows enough for any routing: every expert that is hit may end in a tile that is all padding but for one row."""
    most = pairs + torch.sym_min(pairs, experts) * (alignment - 1)  # type: ignore[no-untyped-call]
    return checks.round_up(most, ALIGNMENT)


def half_for(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    pairs: int,
    row_scales: bool,
    n_major: bool,
    narrow: bool,
    fragments: torch.Tensor | None = None,
) -> Half:
    """Return one half of a forward: weights (E, N, K), or (E, K, N) where ``n_major``, and float32 scales where they are FP8.

    ``fragments``: the same weights in FP4, which are read instead while the rows of an expert are few.
    """
    experts, n, k = weight.shape[0], weight.shape[2 if n_major else 1], weight.shape[1 if n_major else 2]
    alignment, rows = alignment_for(pairs, experts, narrow)
    static = 0 if activation_scale is None else activation_scale.data_ptr()
    if fragments is not None and rows <= MOST_FP4_ROWS * min(pairs, experts):
        problem = GemmProblem(rows, n, k, experts, Layout.PREFIX_SUMS, alignment, ("e4m3", "e2m1", "bf16"))
        return Half(Matrices(fragments.data_ptr(), fragments.stride(0), fragments.stride(1)), None, static, problem)
    dtype = "bf16" if scale is None else "e4m3"
    variant = (N_MAJOR,) if n_major else (ROW_SCALES,) if row_scales else ()
    problem = GemmProblem(rows, n, k, experts, Layout.PREFIX_SUMS, alignment, (dtype, dtype, "bf16"), variant)
    scales = None if scale is None else m_major_matrices(scale) if row_scales else matrices(scale)
    return Half(matrices(weight), scales, static, problem)


def weights_as_read(topk_weights: torch.Tensor) -> torch.Tensor:
    """Return routing weights as the last step reads them: contiguous, float32 or bfloat16."""
    read = topk_weights if topk_weights.dtype in (torch.float32, torch.bfloat16) else topk_weights.float()
    return read.contiguous()


def workspace_for(sizes: Sizes, activates: bool) -> tuple[Buffers, int]:
    """Return where a forward's buffers lie in a workspace, and its bytes; the last one lies over what is dead by then."""
    element_bytes = 1 if sizes.quantized else 2
    end = 0

    def take(size_bytes: int) -> int:
        nonlocal end
        start = end
        end = checks.round_up(start + size_bytes, _WORKSPACE_ALIGNMENT_BYTES)
        return start

    def take_rows(columns: int, needed: bool = True) -> tuple[int, int]:
        if not needed:
            return 0, 0
        scale_bytes = 4 * padded_rows(sizes.capacity) * checks.ceil_div(columns, checks.SCALE_BLOCK)
        return take(sizes.capacity * columns * element_bytes), take(scale_bytes if sizes.quantized else 0)

    rows, ends = take(4 * sizes.pairs), take(4 * sizes.experts)
    activated = take_rows(sizes.intermediate, activates)
    # Without a kernel between the GEMMs the second reads what the first wrote: nothing may lie over that.
    multiplied = end if activates else take(2 * sizes.capacity * sizes.hidden)
    gathered, projected = take_rows(sizes.hidden), take(2 * sizes.capacity * sizes.projected)
    end = max(end, multiplied + 2 * sizes.capacity * sizes.hidden)
    return Buffers(rows, ends, *gathered, projected, *activated, multiplied), end


def steps_up(call: Call, sizes: Sizes, up: Half, tokens: Tokens, buffers: Buffers) -> list[Step]:
    """Return the steps from tokens to the output of the first GEMM."""
    pairs = _pairs(sizes, tokens.topk_index, buffers)
    route = select(StepProblem(ROUTE, ("i32",)), call.limits)
    gather = select(StepProblem(GATHER, ("bf16", "e4m3" if sizes.quantized else "bf16")), call.limits)
    routing = RouteCall(pairs, buffers.ends, sizes.experts, sizes.alignment)
    gathering = RowsCall(
        input=tokens.hidden,
        output=buffers.gathered,
        scales=buffers.gathered_scales,
        static_scales=up.static,
        pairs=pairs,
        input_stride=tokens.hidden_stride,
        scales_stride=padded_rows(sizes.capacity),
        columns=sizes.hidden,
    )
    return [
        # What comes before the first is not ours: it starts early only where the caller said so.
        (route, partial(prepare_route, route, routing, dependent=call.limits.overlap is not Overlap.NONE)),
        (gather, partial(prepare_gather, gather, gathering)),
        _gemm(call, sizes, up, buffers.gathered, buffers.gathered_scales, buffers.projected, buffers.ends),
    ]


def steps_down(
    call: Call,
    sizes: Sizes,
    down: Half,
    gating: Gating,
    index: int,
    weights: int,
    bf16_weights: bool,
    buffers: Buffers,
    out: int,
    projected_stride: int,
    *,
    follows_up: bool,
) -> list[Step]:
    """Return the steps from the output of the first GEMM, or what a callback made of it, to that of the forward.

    ``follows_up``: no kernel of anybody else's stands between the first half and these.
    """
    early = follows_up or call.limits.overlap is not Overlap.NONE
    pairs = _pairs(sizes, index, buffers)
    steps: list[Step] = []
    a, a_scales = buffers.projected, 0
    if activates(sizes.quantized, gating.gate):
        a, a_scales = buffers.activated, buffers.activated_scales
        activate = select(StepProblem(ACTIVATE, ("bf16", "e4m3" if sizes.quantized else "bf16")), call.limits)
        activating = RowsCall(
            input=buffers.projected,
            output=a,
            scales=a_scales,
            static_scales=down.static,
            pairs=pairs,
            input_stride=projected_stride,
            scales_stride=padded_rows(sizes.capacity),
            columns=sizes.intermediate,
            gate=gating.gate,
            interleaved=gating.interleaved,
            limit=gating.limit,
            alpha=gating.alpha,
        )
        steps.append((activate, partial(prepare_activate, activate, activating, dependent=early)))
    a_stride = sizes.intermediate if steps else projected_stride
    dependent = bool(steps) or early
    steps.append(
        _gemm(call, sizes, down, a, a_scales, buffers.multiplied, buffers.ends, a_stride, dependent, reads_early=follows_up)
    )
    combine = select(StepProblem(COMBINE, ("bf16",)), call.limits)
    combining = CombineCall(buffers.multiplied, weights, out, pairs, sizes.hidden, sizes.hidden, bf16_weights)
    return [*steps, (combine, partial(prepare_combine, combine, combining))]


def activates(quantized: bool, gate: Gate) -> bool:
    """Return whether a kernel stands between the GEMMs: not for bf16 rows that a callback has activated."""
    return quantized or gate is not Gate.PASS


def run_steps(call: Call, steps: list[Step]) -> None:
    """Launch steps on the stream of a call; if a kernel cannot be had, nothing is launched."""
    for spec, _ in steps:
        call.kernel(spec)
    for spec, prepare in steps:
        call.launch(spec, prepare())


def _pairs(sizes: Sizes, index: int, buffers: Buffers) -> Pairs:
    return Pairs(index, buffers.rows, sizes.pairs, sizes.top_k, sizes.index_bytes == 8)


def _gemm(
    call: Call,
    sizes: Sizes,
    half: Half,
    a: int,
    a_scales: int,
    d: int,
    ends: int,
    a_stride: int | None = None,
    dependent: bool = True,
    *,
    reads_early: bool = True,
) -> Step:
    spec, split_k = selected(half.problem, call.limits)
    n, k = half.problem.n, half.problem.k
    gemm = GemmCall(
        a=Matrices(a, 0, k if a_stride is None else a_stride),
        b=half.weight,
        d=Matrices(d, 0, n),
        group_data=ends,
        m=sizes.capacity,
        n=n,
        k=k,
        groups=sizes.experts,
        layout=Layout.PREFIX_SUMS,
        alignment=sizes.alignment,
        a_scales=Matrices(a_scales, 0, padded_rows(sizes.capacity)) if sizes.quantized else None,
        b_scales=half.scale,
    )
    return spec, partial(
        prepare_gemm, spec, blocks_for(call, spec), default_service().maps, gemm, split_k,
        dependent=dependent, waits_for_tokens=reads_early,
    )  # fmt: skip

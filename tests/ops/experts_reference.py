"""Experts drawn at random in every scheme, the forward they stand for in float64, and one that rounds where the pipeline rounds.

Dequantized value = stored value x scale. Sizes: T tokens, E experts, k experts per token, H hidden and I intermediate features.
An entry of the top-k index that is no expert (-1, or E and more) contributes nothing, whatever its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ops.reference import E4M3, E4M3_MAX, SCALE_BLOCK, cast_rows, ceil_div

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Activate = Callable[[torch.Tensor], torch.Tensor]

FROBENIUS_RATIO = 1.05
ELEMENT_RATIO = 2.0
TELLING_COLUMNS = 512
"""Columns whose largest error tells what errors are usual."""
ONE_SMALL_TOKEN_RATIO = 1.42
"""For one token of a few hundred intermediate values. FP8 tensor cores sum with few bits, so some elements move by one step of
bf16, and where one was its block's largest the cast draws the block's noise anew: so few values do not average that out.
bench/results/h200_2026-11-30.md has the spread of the reference against itself."""
UE8M0_BIAS = 127
FP4_GROUP = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# --- one stack of matrices


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix per expert: as a checkpoint keeps it, and how to read it."""

    weight: torch.Tensor
    """(E, N, K) FP8 or bfloat16, (E, N, K / 2) int8 with two e2m1 each; (E, K, N) when transposed."""
    scale: torch.Tensor | None
    """(E, rows, columns) in the format under test; None for bfloat16."""
    scale_block: tuple[int, int]
    """Rows and columns of the matrix that one scale is for."""
    scale_parts: int = 1
    """Equal parts of the rows, each of which starts with a block of its own."""
    transposed: bool = False
    interleaved: bool = False
    """Rows are gate and up in turns."""
    activation_scale: torch.Tensor | None = None
    """Float32 of shape (E,), (1,) or (); None: activations get a scale per row and 128 columns."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.weight, self.scale, self.activation_scale) if tensor is not None]

    def matrix(self, expert: int) -> torch.Tensor:
        """Return one expert's (N, K) matrix in float64, gate before up."""
        stored = self.weight[expert]
        values = e2m1_values(stored) if stored.dtype == torch.int8 else stored.double()
        if self.transposed:
            values = values.T
        if self.scale is not None:
            rows, columns = values.shape
            wide = scale_values(self.scale[expert]).repeat_interleave(self.scale_block[1], 1)[:, :columns]
            parts = wide.unflatten(0, (self.scale_parts, -1)).repeat_interleave(self.scale_block[0], 1)
            values = values * parts[:, : rows // self.scale_parts].flatten(0, 1)
        return torch.cat((values[0::2], values[1::2])) if self.interleaved else values

    def quantized(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return float32 (rows, K) as it reads after the cast to FP8, in float64; unchanged if the weights are bfloat16."""
        if self.scale is None:
            return x.double()
        if self.activation_scale is None:
            values, scales = cast_rows(x)
            return values.double() * scales.double().repeat_interleave(SCALE_BLOCK, 1)[:, : x.shape[1]]
        scale = self.activation_scale.flatten()[expert if self.activation_scale.numel() > 1 else 0]
        return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).double() * scale.double()


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Return (..., K / 2) int8 as (..., K) float64; the low half of a byte comes first."""
    pairs = packed.view(torch.uint8).long()
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=packed.device)
    return magnitudes[codes & 7] * (1 - 2 * (codes >> 3))


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales, float32 or UE8M0, in float64."""
    if scale.dtype == torch.float32:
        return scale.double()
    return torch.exp2(scale.view(torch.uint8).double() - UE8M0_BIAS)


# --- experts


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Two stacks of matrices and what happens between them."""

    gate_up: Stack
    down: Stack
    gated: bool = True
    activation: Literal["silu"] | Activate = "silu"
    limit: float | None = None
    alpha: float | None = None
    block_size: tuple[int, int] | None = (SCALE_BLOCK, SCALE_BLOCK)

    @property
    def count(self) -> int:
        return self.gate_up.weight.shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.gate_up.tensors + self.down.tensors

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``ops.prepare_experts``."""
        return {
            "gate_up": self.gate_up.weight,
            "down": self.down.weight,
            "gate_up_scale": self.gate_up.scale,
            "down_scale": self.down.scale,
            "block_size": self.block_size,
            "gate_up_activation_scale": self.gate_up.activation_scale,
            "down_activation_scale": self.down.activation_scale,
            "gated": self.gated,
            "activation": self.activation,
            "swiglu_limit": self.limit,
            "swiglu_alpha": self.alpha,
            "transposed": self.gate_up.transposed,
        }

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply what lies between the products, in the precision of x."""
        if self.activation != "silu":
            return self.activation(x)
        if not self.gated:
            return x * torch.sigmoid(x)
        gate, up = x.chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.alpha is not None:
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        return gate * torch.sigmoid(gate) * up


# --- forwards


def exact_forward(
    hidden: torch.Tensor, topk_index: torch.Tensor, topk_weights: torch.Tensor, experts: ReferenceExperts
) -> torch.Tensor:
    """Return the (T, H) forward in float64, on dequantized weights and with no rounding at all."""

    def one_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        between = experts.activate(x.double() @ experts.gate_up.matrix(expert).T)
        return between @ experts.down.matrix(expert).T

    products = _products_of_entries(hidden, topk_index, experts.count, one_expert, torch.float64)
    weights = topk_weights.double().masked_fill(~is_expert(topk_index, experts.count), 0)
    return (products * weights[..., None]).sum(1)


def rounded_forward(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ReferenceExperts,
    matmul: Matmul = torch.mm,
) -> torch.Tensor:
    """Return the (T, H) bfloat16 forward that rounds where the pipeline rounds, with exact sums in its products.

    Activations are cast to FP8 before each product and each product to bfloat16; the activation is computed in float32 (a
    callback in bfloat16) and the sum over a token's experts in float32, in the order of its top-k.

    Args:
        matmul: of float64 matrices.
    """

    def one_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        product = matmul(experts.gate_up.quantized(x.float(), expert), experts.gate_up.matrix(expert).T).bfloat16()
        between = experts.activate(product if callable(experts.activation) else product.float())
        if experts.down.scale is None:
            between = between.bfloat16()
        return matmul(experts.down.quantized(between.float(), expert), experts.down.matrix(expert).T).bfloat16()

    products = _products_of_entries(hidden, topk_index, experts.count, one_expert, torch.bfloat16).float()
    weights = topk_weights.float().masked_fill(~is_expert(topk_index, experts.count), 0)
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for j in range(topk_index.shape[1]):
        total += weights[:, j, None] * products[:, j]
    return total.bfloat16()


def is_expert(topk_index: torch.Tensor, count: int) -> torch.Tensor:
    """Return which entries of a top-k index name an expert."""
    return (topk_index >= 0) & (topk_index < count)


def _products_of_entries(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    count: int,
    one_expert: Callable[[int, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (T, k, H): what each entry's expert makes of its token, zero where the entry names none."""
    tokens, k = topk_index.shape
    flat = torch.where(is_expert(topk_index, count), topk_index, count).flatten().long()
    order = torch.sort(flat, stable=True).indices
    ends = torch.bincount(flat, minlength=count + 1).cumsum(0).tolist()
    products = torch.zeros((tokens * k, hidden.shape[1]), dtype=dtype, device=hidden.device)
    for expert in range(count):
        entries = order[ends[expert - 1] if expert else 0 : ends[expert]]
        if len(entries):
            products[entries] = one_expert(expert, hidden[entries // k])
    return products.view(tokens, k, hidden.shape[1])


# --- the rule


def assert_as_good_as_torch(
    out: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, what: str = "", ratio: float = FROBENIUS_RATIO
) -> None:
    """Fail unless ``out`` is about as near to the float64 forward as torch is when it rounds at the same points.

    Its Frobenius error is at most ``ratio`` times torch's. The element rule of one product (2^-7 of the element plus 2^-9 of
    the row's largest) cannot hold across two casts to FP8 by itself, so what it allows is added to twice torch's largest error
    in the same row. Where a row is too narrow to tell what errors are usual (torch itself, with other sums, then broke the rule
    in one of five drawings of 16 columns), rows that together have enough columns are looked at, each by its own magnitude. A row
    that is zero in both must be zero.
    """
    assert (out.shape, out.dtype) == (exact.shape, torch.bfloat16), f"{what}: {tuple(out.shape)} {out.dtype}"
    if out.numel() == 0:
        return
    assert exact.isfinite().all() and rounded.isfinite().all(), f"{what}: a reference that is not finite"
    error, allowed = (out.double() - exact).abs(), (rounded.double() - exact).abs()
    magnitude = exact.abs()
    largest = magnitude.amax(-1, keepdim=True)
    bound = ELEMENT_RATIO * _usual_errors(allowed, largest) + 2.0**-7 * magnitude + 2.0**-9 * largest
    wrong = ~(error <= bound)  # also where out is NaN
    if wrong.any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off, in {int(wrong.any(1).sum())} rows; the first, "
            f"[{row}, {column}], is {float(out[row, column])!r} where {float(exact[row, column])!r} is right, "
            f"off by {float(error[row, column]):.3e} of {float(bound[row, 0]):.3e} allowed"
        )
    ours, torchs = float(error.norm()), float(allowed.norm())
    assert ours <= ratio * torchs, f"{what}: error {ours:.4e}, {ours / max(torchs, 1e-300):.3f} times torch's"


def _usual_errors(errors: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each row, or of as many rows as have enough columns, relative to their magnitudes."""
    own = errors.amax(-1, keepdim=True)
    rows = -(-TELLING_COLUMNS // errors.shape[-1])
    if rows == 1:
        return own
    relative = torch.where(largest > 0, own / largest, 0.0).flatten()
    padded = torch.nn.functional.pad(relative, (0, -len(relative) % rows))
    usual = padded.view(-1, rows).amax(1).repeat_interleave(rows)[: len(relative), None] * largest
    return torch.maximum(own, usual)


# --- random experts


UP_SPREAD = 1.5
"""Spread of the first product for activations of size 1: the gate bends, and limits of 1 to 2 cut."""
VALUE_SPREAD = 100.0
STATIC_LARGEST = 12.0, 300.0
"""What a static scale makes 448 of, for the input of each product: nearly nothing is cut."""

SCHEMES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "blocks_uint8": {"scales": "uint8"},
    "blocks_e8m0": {"scales": "e8m0"},
    "blocks_apart": {"weights": "apart"},
    "rows": {"weights": "row"},
    "rows_e8m0": {"weights": "row", "scales": "e8m0"},
    "tensor_halves": {"weights": "halves"},
    "tensor": {"weights": "tensor"},
    "fp4_span_0": {"weights": "fp4", "scales": "e8m0", "span": 0},
    "fp4_span_3": {"weights": "fp4", "scales": "uint8", "span": 3},
    "fp4_span_14": {"weights": "fp4", "scales": "e8m0", "span": 14},
    "fp4_float_scales": {"weights": "fp4", "span": 3},
    "static_per_expert": {"static": "(E,)"},
    "static_one": {"static": "(1,)", "scales": "e8m0"},
    "static_scalar": {"static": "()", "weights": "row"},
    "static_tensor_halves": {"static": "(E,)", "weights": "halves"},
    "transposed": {"transposed": True},
    "not_gated": {"gated": False},
    "limit": {"limit": 1.5},
    "alpha": {"limit": 2.0, "alpha": 1.702},
    "callback": {"activation": "gelu"},
    "not_gated_callback": {"gated": False, "activation": "gelu", "static": "(E,)"},
}
"""The arguments of :func:`random_experts` for each scheme that is served."""


def gelu_times_up(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.gelu(gate) * up


def random_experts(
    count: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    weights: Literal["block", "apart", "row", "halves", "tensor", "fp4"] = "block",
    scales: Literal["float32", "uint8", "e8m0"] = "float32",
    static: Literal["(E,)", "(1,)", "()"] | None = None,
    gated: bool = True,
    activation: Literal["silu", "gelu"] = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    transposed: bool = False,
    span: int = 0,
    device: torch.device | str = "cuda",
) -> ReferenceExperts:
    """Draw FP8 or FP4 experts.

    Args:
        weights: what one scale is for: a block of 128 x 128, the same with blocks of gate and up counted apart, (1, 128), each
            half of gate and up (then the whole of down), the whole matrix, or (1, 32) with two e2m1 per byte.
        scales: their format.
        static: shape of the activation scales; None for a cast by row and 128 columns.
        activation: "gelu" is a callback.
        span: binades between the smallest and largest scale of every full 128 x 128 block of FP4.
    """
    up_rows = intermediate_size * (2 if gated else 1)

    def stack(n: int, k: int, largest: float, halves: bool) -> Stack:
        parts = 2 if halves and weights in ("apart", "halves") else 1
        granularity = {"row": (1, SCALE_BLOCK), "halves": (n // parts, k), "tensor": (n, k), "fp4": (1, FP4_GROUP)}.get(
            weights, (SCALE_BLOCK, SCALE_BLOCK)
        )
        grid = (count, parts * ceil_div(n // parts, granularity[0]), ceil_div(k, granularity[1]))
        if weights == "fp4":
            weight = torch.randint(-128, 128, (count, n, k // 2), dtype=torch.int8, device=device)
            scale = _fp4_scales(grid, UP_SPREAD / math.sqrt(k), span, scales, device)
        else:
            drawn = torch.randn((count, n, k), device=device).mul_(VALUE_SPREAD).clamp_(-E4M3_MAX, E4M3_MAX)
            weight = drawn.to(E4M3)
            scale = _scales(grid, UP_SPREAD / math.sqrt(k) / VALUE_SPREAD, scales, device)
        if transposed:
            weight = weight.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3)
        activation_scale = None
        if static is not None:
            shape = {"(E,)": (count,), "(1,)": (1,), "()": ()}[static]
            activation_scale = largest / E4M3_MAX * torch.exp2(torch.rand(shape, device=device) - 0.5)
        return Stack(weight, scale, granularity, parts, transposed, activation_scale=activation_scale)

    return ReferenceExperts(
        stack(up_rows, hidden_size, STATIC_LARGEST[0], gated),
        stack(hidden_size, intermediate_size, STATIC_LARGEST[1], False),
        gated,
        "silu" if activation == "silu" else gelu_times_up if gated else torch.nn.functional.gelu,
        limit,
        alpha,
        None if weights in ("halves", "tensor") else (1 if weights == "row" else SCALE_BLOCK, SCALE_BLOCK),
    )


def _scales(grid: tuple[int, int, int], typical: float, scales: str, device: torch.device | str) -> torch.Tensor:
    """Draw scales around a typical one that differ by a factor of up to four, so that a neighbour's scale shows."""
    if scales == "float32":
        return typical * torch.exp2(2 * torch.rand(grid, device=device) - 1)
    exponents = torch.randint(-1, 2, grid, device=device) + round(math.log2(typical))
    return _ue8m0(exponents, scales)


def _fp4_scales(grid: tuple[int, int, int], spread: float, span: int, scales: str, device: torch.device | str) -> torch.Tensor:
    """Draw powers of two that take every value of a range of ``span`` binades, both ends in each block of 128 x 128."""
    rms = math.sqrt(sum(magnitude**2 for magnitude in E2M1_MAGNITUDES) / len(E2M1_MAGNITUDES))
    steps = torch.randint(0, span + 1, grid, device=device)
    steps[:, 0::SCALE_BLOCK, 0 :: SCALE_BLOCK // FP4_GROUP] = 0
    steps[:, 1::SCALE_BLOCK, 0 :: SCALE_BLOCK // FP4_GROUP] = span
    mean_square = sum(4.0**step for step in range(span + 1)) / (span + 1)
    lowest = round(math.log2(spread / rms / math.sqrt(mean_square)))
    return torch.exp2((steps + lowest).float()) if scales == "float32" else _ue8m0(steps + lowest, scales)


def _ue8m0(exponents: torch.Tensor, scales: str) -> torch.Tensor:
    raw = (exponents + UE8M0_BIAS).to(torch.uint8)
    return raw if scales == "uint8" else raw.view(torch.float8_e8m0fnu)


def random_bf16_experts(
    count: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    activation: Literal["silu"] | Activate = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    device: torch.device | str = "cuda",
) -> ReferenceExperts:
    """Draw bfloat16 experts: gate_up (E, 2I, H) or (E, H, 2I), down (E, H, I) or (E, I, H)."""

    def stack(n: int, k: int, interleaved: bool) -> Stack:
        shape = (count, k, n) if transposed else (count, n, k)
        weight = torch.randn(shape, device=device).mul_(UP_SPREAD / math.sqrt(k)).bfloat16()
        return Stack(weight, None, (1, 1), 1, transposed, interleaved)

    up_rows = intermediate_size * (2 if gated else 1)
    up, down = stack(up_rows, hidden_size, interleaved), stack(hidden_size, intermediate_size, False)
    return ReferenceExperts(up, down, gated, activation, limit, alpha)


# --- random input


def random_hidden(tokens: int, hidden_size: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """Draw (T, H) bfloat16 whose rows differ in size by a factor of up to three."""
    x = torch.randn((tokens, hidden_size), device=device)
    return (x * (0.5 + torch.rand((tokens, 1), device=device))).bfloat16()


def random_routing(tokens: int, k: int, count: int, device: torch.device | str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (T, k) different experts for each token, int64, and float32 weights that sum to 1."""
    index = torch.rand((tokens, count), device=device).topk(k).indices
    weights = 0.2 + torch.rand((tokens, k), device=device)
    return index, weights / weights.sum(-1, keepdim=True)


def with_sentinels(index: torch.Tensor, count: int, share: float, kinds: Sequence[int] = (0, 5, -1)) -> torch.Tensor:
    """Return a top-k index in which a share of the entries names no expert: E plus each of ``kinds``, or -1."""
    values = torch.tensor([kind if kind < 0 else count + kind for kind in kinds], dtype=index.dtype, device=index.device)
    drawn = values[torch.randint(0, len(values), index.shape, device=index.device)]
    return torch.where(torch.rand(index.shape, device=index.device) < share, drawn, index)

"""The forwards that experts are held against: right by a plain loop, exact on stored bits, and able to fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.experts_reference import (
    ONE_SMALL_TOKEN_RATIO,
    SCHEMES,
    Matmul,
    ReferenceExperts,
    Stack,
    assert_as_good_as_torch,
    exact_forward,
    random_bf16_experts,
    random_experts,
    random_hidden,
    random_routing,
    rounded_forward,
    scale_values,
    with_sentinels,
)
from ops.reference import E4M3, cast_rows

pytestmark = pytest.mark.none

COUNT, K = 4, 2
HIDDEN, INTERMEDIATE = 288, 160  # neither a multiple of 128: gate meets up inside a block

BF16: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16_transposed": {"transposed": True},
    "bf16_interleaved": {"interleaved": True},
    "bf16_transposed_interleaved": {"transposed": True, "interleaved": True},
    "bf16_not_gated": {"gated": False},
}
ALL = [*SCHEMES, *BF16]


def drawn(scheme: str, count: int = COUNT, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> ReferenceExperts:
    if scheme in BF16:
        return random_bf16_experts(count, hidden, intermediate, device="cpu", **BF16[scheme])
    return random_experts(count, hidden, intermediate, device="cpu", **SCHEMES[scheme])


def drawn_input(tokens: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_hidden(tokens, hidden, "cpu"), *random_routing(tokens, K, COUNT, "cpu")


# --- dequantized weights


def stored_value(stack: Stack, expert: int, row: int, column: int) -> float:
    """Return one weight times its scale, read by itself from what the checkpoint keeps."""
    if stack.interleaved:
        half = stack.weight.shape[2 if stack.transposed else 1] // 2
        row = 2 * row if row < half else 2 * (row - half) + 1
    if stack.weight.dtype == torch.int8:
        byte = int(stack.weight[expert, row, column // 2]) & 0xFF
        code = byte >> 4 if column % 2 else byte & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        value = -value if code & 8 else value
    else:
        value = float(stack.weight[expert, column, row] if stack.transposed else stack.weight[expert, row, column])
    if stack.scale is None:
        return value
    part = stack.weight.shape[2 if stack.transposed else 1] // stack.scale_parts
    first = row // part * (stack.scale.shape[1] // stack.scale_parts)
    scale = stack.scale[expert, first + row % part // stack.scale_block[0], column // stack.scale_block[1]]
    bits = scale.dtype != torch.float32
    return value * (math.ldexp(1.0, int(scale.view(torch.uint8)) - 127) if bits else float(scale))


@pytest.mark.parametrize("scheme", ALL)
def test_matrices_are_stored_values_times_their_scales(scheme: str) -> None:
    experts = drawn(scheme)
    for stack, rows, columns in (
        (experts.gate_up, INTERMEDIATE * (2 if experts.gated else 1), HIDDEN),
        (experts.down, HIDDEN, INTERMEDIATE),
    ):
        for expert in range(COUNT):
            matrix = stack.matrix(expert)
            assert (matrix.shape, matrix.dtype) == ((rows, columns), torch.float64)
            for row, column in (torch.rand(100, 2) * torch.tensor([rows, columns])).long().tolist():
                assert float(matrix[row, column]) == stored_value(stack, expert, row, column)


@pytest.mark.parametrize(("scheme", "span"), [("fp4_span_0", 0), ("fp4_span_3", 3), ("fp4_span_14", 14)])
def test_scales_of_fp4_span_what_they_say_in_every_block(scheme: str, span: int) -> None:
    for stack in (drawn(scheme).gate_up, drawn(scheme).down):
        steps = scale_values(stack.scale).log2()
        for rows in steps.split(128, 1):
            for block in rows.split(4, 2):
                assert (block.amax((1, 2)) - block.amin((1, 2)) == span).all()


@pytest.mark.parametrize(
    ("scheme", "gate_up", "down", "block_size"),
    [
        ("blocks", (COUNT, 3, 3), (COUNT, 3, 2), (128, 128)),
        ("rows", (COUNT, 320, 3), (COUNT, 288, 2), (1, 128)),
        ("tensor_halves", (COUNT, 2, 1), (COUNT, 1, 1), None),
        ("fp4_span_3", (COUNT, 320, 9), (COUNT, 288, 5), (128, 128)),
        ("blocks_apart", (COUNT, 4, 3), (COUNT, 3, 2), (128, 128)),
        ("transposed", (COUNT, 3, 3), (COUNT, 3, 2), (128, 128)),
    ],
)
def test_scales_have_the_shapes_of_checkpoints(scheme: str, gate_up: Any, down: Any, block_size: Any) -> None:
    experts = drawn(scheme)
    assert (experts.gate_up.scale.shape, experts.down.scale.shape) == (gate_up, down)
    assert experts.arguments["block_size"] == block_size
    assert experts.gate_up.scale.unique().numel() > 1


# --- the forwards


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def between_by_loop(experts: ReferenceExperts, row: list[float]) -> list[float]:
    half = len(row) // 2
    if callable(experts.activation):
        gate = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in (row[:half] if experts.gated else row)]
        return [g * u for g, u in zip(gate, row[half:], strict=True)] if experts.gated else gate
    if not experts.gated:
        return [silu(x) for x in row]
    limit = math.inf if experts.limit is None else experts.limit
    gates, ups = [min(gate, limit) for gate in row[:half]], [max(min(up, limit), -limit) for up in row[half:]]
    if experts.alpha is not None:
        return [(up + 1) * gate / (1 + math.exp(-experts.alpha * gate)) for gate, up in zip(gates, ups, strict=True)]
    return [silu(gate) * up for gate, up in zip(gates, ups, strict=True)]


def forward_by_loop(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: ReferenceExperts) -> torch.Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(hidden.shape[0]):
        for j in range(index.shape[1]):
            expert = int(index[token, j])
            if not 0 <= expert < experts.count:
                continue
            product = experts.gate_up.matrix(expert) @ hidden[token].double()
            between = torch.tensor(between_by_loop(experts, product.tolist()), dtype=torch.float64)
            out[token] += float(weights[token, j]) * (experts.down.matrix(expert) @ between)
    return out


@pytest.mark.parametrize("scheme", ALL)
def test_the_exact_forward_is_a_loop_over_tokens_and_their_experts(scheme: str) -> None:
    experts = drawn(scheme)
    hidden, index, weights = drawn_input(9)
    index[0] = 2  # the same expert twice
    index[1, 0], index[2, 1], index[3], index[4] = -1, COUNT, COUNT + 5, -7
    weights[1, 0] = torch.nan
    expected = forward_by_loop(hidden, index, weights, experts)
    torch.testing.assert_close(exact_forward(hidden, index, weights, experts), expected, rtol=1e-9, atol=1e-12)
    assert not expected[3:5].any() and expected[5:].any(-1).all()


@pytest.mark.parametrize("scheme", ALL)
def test_the_rounded_forward_is_near_the_exact_one_and_not_equal(scheme: str) -> None:
    experts = drawn(scheme)
    hidden, index, weights = drawn_input(40)
    index = with_sentinels(index, COUNT, 0.1)
    exact, rounded = exact_forward(hidden, index, weights, experts), rounded_forward(hidden, index, weights, experts)
    assert (rounded.shape, rounded.dtype) == (hidden.shape, torch.bfloat16)
    error = float((rounded.double() - exact).norm() / exact.norm())
    assert (0.002 < error < 0.006) if scheme in BF16 else (0.02 < error < 0.08)
    assert_as_good_as_torch(rounded, exact, rounded)


@pytest.mark.parametrize("scheme", ["blocks", "static_per_expert", "callback", "bf16"])
def test_the_rounded_forward_rounds_at_each_step_of_a_loop(scheme: str) -> None:
    experts = drawn(scheme)
    hidden, index, weights = drawn_input(5)

    def cast(x: torch.Tensor, stack: Stack, expert: int) -> torch.Tensor:
        if stack.scale is None:
            return x.double()
        if stack.activation_scale is not None:
            scale = stack.activation_scale[expert]
            return torch.clamp(x / scale, -448, 448).to(E4M3).double() * scale
        parts = [cast_rows(part[None]) for part in x.split(128)]
        return torch.cat([values[0].double() * scale[0] for values, scale in parts])

    expected = torch.zeros(hidden.shape)
    for token in range(5):
        for j in range(K):
            expert = int(index[token, j])
            product = experts.gate_up.matrix(expert) @ cast(hidden[token].float(), experts.gate_up, expert)
            between = experts.activate(product.bfloat16() if scheme == "callback" else product.bfloat16().float())
            between = between.bfloat16().float() if scheme == "bf16" else between.float()
            result = experts.down.matrix(expert) @ cast(between, experts.down, expert)
            expected[token] += weights[token, j] * result.bfloat16().float()
    rounded = rounded_forward(hidden, index, weights, experts).float()
    # Sums in another order may tip one rounding in a million, of which all of a row would feel a little.
    assert float((rounded - expected.bfloat16().float()).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("scheme", ["blocks", "static_scalar", "bf16"])
def test_no_tokens_give_none_and_no_experts_give_zeros(scheme: str, tokens: int) -> None:
    experts = drawn(scheme)
    hidden, index, weights = drawn_input(tokens)
    index.fill_(COUNT)
    for forward, dtype in ((exact_forward, torch.float64), (rounded_forward, torch.bfloat16)):
        out = forward(hidden, index, weights, experts)
        assert (out.shape, out.dtype) == ((tokens, HIDDEN), dtype) and not out.any()
    assert_as_good_as_torch(rounded_forward(hidden, index, weights, experts), out.double(), out)


def test_static_activations_are_cut_at_the_largest_fp8_value() -> None:
    stack = drawn("static_scalar").gate_up
    read = stack.quantized(torch.tensor([[1e6, -1e6, 0.0]]), 1) / stack.activation_scale.double()
    assert read.tolist() == [[448.0, -448.0, 0.0]]


# --- the rule can fail


def about_right(scheme: str, tokens: int = 48) -> tuple[ReferenceExperts, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    experts = drawn(scheme, COUNT, 1024, 512)
    given = drawn_input(tokens, 1024)
    return experts, given, exact_forward(*given, experts), rounded_forward(*given, experts)


def noisy(noise: float) -> Matmul:
    """Return a product that is off as a tensor core's sums are."""

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        return product + noise * product.square().mean(-1, keepdim=True).sqrt() * torch.randn_like(product)

    return matmul


@pytest.mark.parametrize("scheme", ["blocks", "static_per_expert", "limit", "bf16"])
def test_sums_that_a_tensor_core_rounds_pass(scheme: str) -> None:
    experts, given, exact, rounded = about_right(scheme)
    matmul = noisy(1e-5 if scheme == "bf16" else 2e-4)
    assert_as_good_as_torch(rounded_forward(*given, experts, matmul), exact, rounded)


@pytest.mark.parametrize("scheme", ["blocks", "callback"])
def test_one_small_token_strays_less_than_it_may_and_both_ways(scheme: str) -> None:
    experts = drawn(scheme, 8, 512, 256)
    ratios = []
    for _ in range(100):
        given = random_hidden(1, 512, "cpu"), *random_routing(1, K, 8, "cpu")
        exact, rounded = exact_forward(*given, experts), rounded_forward(*given, experts)
        out = rounded_forward(*given, experts, noisy(2.0**-11))
        assert_as_good_as_torch(out, exact, rounded, ratio=ONE_SMALL_TOKEN_RATIO)
        ratios.append(float((out.double() - exact).norm() / (rounded.double() - exact).norm()))
    assert 0.99 < sorted(ratios)[50] < 1.01


@pytest.mark.parametrize("sizes", [(16, 16), (144, 48)], ids=str)
@pytest.mark.parametrize("scheme", ["blocks", "static_tensor_halves"])
def test_narrow_rows_stray_less_than_they_may(scheme: str, sizes: tuple[int, int]) -> None:
    for _ in range(10):
        experts = drawn(scheme, 5, *sizes)
        given = random_hidden(1200, sizes[0], "cpu"), *random_routing(1200, 3, 5, "cpu")
        out = rounded_forward(*given, experts, noisy(2.0**-11))
        assert_as_good_as_torch(out, exact_forward(*given, experts), rounded_forward(*given, experts))


def another_scale(stack: Stack) -> Stack:
    return replace(stack, scale=stack.scale.roll(1, 1))


WRONG: dict[str, tuple[str, Callable[[ReferenceExperts], ReferenceExperts]]] = {
    "the limit is forgotten": ("limit", lambda e: replace(e, limit=None)),
    "alpha is forgotten": ("alpha", lambda e: replace(e, alpha=None)),
    "the halves are swapped": ("tensor_halves", lambda e: replace(e, gate_up=another_scale(e.gate_up))),
    "rows use each other's scale": ("rows", lambda e: replace(e, down=another_scale(e.down))),
    "blocks use each other's scale": ("blocks", lambda e: replace(e, gate_up=another_scale(e.gate_up))),
    "gate and up in turns": ("bf16_interleaved", lambda e: replace(e, gate_up=replace(e.gate_up, interleaved=False))),
    "another activation": ("callback", lambda e: replace(e, activation="silu")),
    "the first static scale for all": (
        "static_per_expert",
        lambda e: replace(e, gate_up=replace(e.gate_up, activation_scale=e.gate_up.activation_scale.amin() / 4)),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_scheme_is_seen(wrong: str) -> None:
    scheme, spoil = WRONG[wrong]
    experts, given, exact, rounded = about_right(scheme)
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(rounded_forward(*given, spoil(experts)), exact, rounded)


@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_a_wrong_token_or_element_is_seen(scheme: str) -> None:
    experts, (hidden, index, weights), exact, rounded = about_right(scheme)
    other = index.clone()
    other[17, 0] = next(expert for expert in range(COUNT) if expert not in index[17].tolist())
    turned = weights.clone()
    turned[17] = torch.tensor([0.9, 0.1])
    for out in (
        rounded_forward(hidden, other, weights, experts),
        rounded_forward(hidden, index, turned, experts),
        rounded.index_fill(0, torch.tensor([17]), 0),
        rounded.index_fill(0, torch.tensor([17]), torch.nan),
    ):
        with pytest.raises(AssertionError, match=r"in 1 rows; the first, \[17, "):
            assert_as_good_as_torch(out, exact, rounded)
    one = rounded.clone()
    one[5, 7] += float(exact[5].abs().max())
    with pytest.raises(AssertionError, match=r"1 of \d+ elements are off.*\[5, 7\]"):
        assert_as_good_as_torch(one, exact, rounded)


@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_an_error_that_every_element_shares_is_seen(tokens: int) -> None:
    _experts, _given, exact, rounded = about_right("blocks", tokens)
    with pytest.raises(AssertionError, match=r"times torch's"):
        assert_as_good_as_torch((exact + 1.1 * (rounded - exact)).bfloat16(), exact, rounded)


def test_a_row_of_no_expert_must_be_zero() -> None:
    experts, (hidden, index, weights), _exact, _rounded = about_right("blocks")
    index[3] = -1
    exact, rounded = exact_forward(hidden, index, weights, experts), rounded_forward(hidden, index, weights, experts)
    out = rounded.clone()
    assert_as_good_as_torch(out, exact, rounded)
    out[3, 4] = 1e-30
    with pytest.raises(AssertionError, match=r"1 of \d+ elements are off, in 1 rows; the first, \[3, 4\]"):
        assert_as_good_as_torch(out, exact, rounded)


def test_another_shape_or_dtype_is_seen() -> None:
    _experts, _given, exact, rounded = about_right("bf16", tokens=3)
    for out in (rounded[:2], rounded.float()):
        with pytest.raises(AssertionError):
            assert_as_good_as_torch(out, exact, rounded)

"""The experts forward on a GPU: as near to float64 as torch in every scheme, in any routing, and the same bits every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.experts_reference import (
    FROBENIUS_RATIO,
    ONE_SMALL_TOKEN_RATIO,
    SCHEMES,
    ReferenceExperts,
    assert_as_good_as_torch,
    exact_forward,
    gelu_times_up,
    random_bf16_experts,
    random_experts,
    random_hidden,
    random_routing,
    rounded_forward,
    with_sentinels,
)
from ops.gpu_memory import poison_free_memory

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError

pytestmark = pytest.mark.gpu

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Layer = tuple[Forward, ReferenceExperts]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SHAPES = {  # E, k, H, I
    "8_experts": (8, 2, 2048, 768),
    "128_experts": (128, 8, 2048, 768),
    "33_experts": (33, 3, 2880, 1440),
}
SMALL = (8, 2, 512, 256)
TOKENS = (0, 1, 7, 128, 1000)

BF16_SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16_transposed": {"transposed": True},
    "bf16_interleaved": {"interleaved": True},
    "bf16_transposed_interleaved": {"transposed": True, "interleaved": True},
    "bf16_not_gated": {"gated": False},
    "bf16_transposed_not_gated": {"gated": False, "transposed": True},
    "bf16_limit": {"limit": 1.5},
    "bf16_alpha_interleaved": {"limit": 2.0, "alpha": 1.702, "interleaved": True},
    "bf16_callback": {"activation": gelu_times_up},
    "bf16_not_gated_callback": {"gated": False, "activation": torch.nn.functional.gelu},
}
KINDS = ("blocks", "rows", "fp4_span_3", "static_per_expert", "callback", "bf16", "bf16_transposed")
"""One scheme for each way that a forward takes."""


@lru_cache(maxsize=1)
def layer(scheme: str, shape: tuple[int, int, int, int]) -> Layer:
    """Return a forward and the experts it stands for; tests ask for one scheme and shape after another."""
    count, _, hidden, intermediate = shape
    if scheme in BF16_SCHEMES:
        reference = random_bf16_experts(count, hidden, intermediate, **BF16_SCHEMES[scheme])
        return bf16_forward(reference), reference
    reference = random_experts(count, hidden, intermediate, **SCHEMES[scheme])
    experts = ops.prepare_experts(**reference.arguments)
    return lambda hidden, index, weights: ops.fp8_experts(hidden, index, weights, experts), reference


def bf16_forward(reference: ReferenceExperts) -> Forward:
    up, down = reference.gate_up, reference.down
    function = reference.activation
    activation = (
        ops.Activation("callback", callback=function)
        if callable(function)
        else ops.Activation("silu", reference.limit, reference.alpha)
    )
    options = {"gated": reference.gated, "transposed": up.transposed, "interleaved": up.interleaved, "activation": activation}
    return lambda hidden, index, weights: ops.bf16_experts(hidden, index, weights, up.weight, down.weight, **options)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    layer.cache_clear()
    torch.cuda.empty_cache()


def drawn(tokens: int, shape: tuple[int, int, int, int]) -> Given:
    count, k, hidden, _ = shape
    return random_hidden(tokens, hidden), *random_routing(tokens, k, count)


def bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16)


def check(
    forward: Forward, reference: ReferenceExperts, given: Given, what: str = "", ratio: float = FROBENIUS_RATIO
) -> torch.Tensor:
    """Run twice, the second time on memory full of NaN, and compare with each other and with both references."""
    first = forward(*given)
    poison_free_memory()
    out = forward(*given)
    assert torch.equal(bits(out), bits(first)), f"{what}: two runs differ"
    assert_as_good_as_torch(out, exact_forward(*given, reference), rounded_forward(*given, reference), what, ratio)
    return out


def ratio_of_small(tokens: int) -> float:
    return ONE_SMALL_TOKEN_RATIO if tokens == 1 else FROBENIUS_RATIO


# --- every scheme


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_fp8_scheme_is_as_good_as_torch(scheme: str, shape: str, tokens: int) -> None:
    out = check(*layer(scheme, SHAPES[shape]), drawn(tokens, SHAPES[shape]))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((tokens, SHAPES[shape][2]), torch.bfloat16, True)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", BF16_SCHEMES)
def test_every_bf16_layout_is_as_good_as_torch(scheme: str, shape: str, tokens: int) -> None:
    out = check(*layer(scheme, SHAPES[shape]), drawn(tokens, SHAPES[shape]))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((tokens, SHAPES[shape][2]), torch.bfloat16, True)


@pytest.mark.parametrize("sizes", [(16, 16), (144, 48), (272, 400), (128, 128), (7168, 64)], ids=str)
@pytest.mark.parametrize(
    "scheme", ["blocks", "blocks_apart", "rows", "tensor_halves", "static_tensor_halves", "not_gated", "bf16"]
)
def test_sizes_that_are_no_multiple_of_a_tile_are_right(scheme: str, sizes: tuple[int, int]) -> None:
    shape = (5, 3, *sizes)
    check(*layer(scheme, shape), drawn(300, shape))


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (512, 1), (512, 16), (16, 16)])
@pytest.mark.parametrize("scheme", ["blocks", "rows", "bf16"])
def test_the_most_and_the_fewest_experts_are_right(scheme: str, experts: int, k: int) -> None:
    shape = (experts, k, 256, 128)
    for tokens in (1, 300):
        check(*layer(scheme, shape), drawn(tokens, shape), f"{tokens} tokens", ratio_of_small(tokens))


# --- every routing


def one_expert_for_all(index: torch.Tensor, _count: int) -> torch.Tensor:
    return torch.full_like(index, 3)


def the_same_two_for_all(index: torch.Tensor, count: int) -> torch.Tensor:
    return torch.tensor([count - 1, 0], device=index.device).expand_as(index).contiguous()


def any_expert_twice(index: torch.Tensor, _count: int) -> torch.Tensor:
    return index[:, :1].expand_as(index).contiguous()


def some_twice(index: torch.Tensor, count: int) -> torch.Tensor:
    return torch.randint(0, count, index.shape, device=index.device)


def a_tenth_of_another_rank(index: torch.Tensor, count: int) -> torch.Tensor:
    return with_sentinels(index, count, 0.1)


def far_off(index: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers whose lower half is an expert's: int64 must be read whole."""
    return torch.where(torch.rand(index.shape, device=index.device) < 0.3, (1 << 32) + 1 - (index % 2 << 33), index)


def none_at_all(index: torch.Tensor, count: int) -> torch.Tensor:
    return with_sentinels(index, count, 1.0)


def only_the_last_token(index: torch.Tensor, count: int) -> torch.Tensor:
    lonely = torch.full_like(index, -1)
    lonely[-1, -1] = count - 1
    return lonely


ROUTINGS = (
    one_expert_for_all,
    the_same_two_for_all,
    any_expert_twice,
    some_twice,
    a_tenth_of_another_rank,
    far_off,
    none_at_all,
    only_the_last_token,
)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
@pytest.mark.parametrize("scheme", KINDS)
def test_every_routing_is_right(scheme: str, routing: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    for tokens in (1, 33, 400):
        hidden, index, weights = drawn(tokens, SMALL)
        index = routing(index, SMALL[0])
        out = check(*layer(scheme, SMALL), (hidden, index, weights), f"{tokens} tokens", ratio_of_small(tokens))
        alone = ~((index >= 0) & (index < SMALL[0])).any(-1)
        assert not bits(out)[alone].any(), "a token of no expert is not plus zero"


@pytest.mark.parametrize("scheme", KINDS)
def test_entries_of_no_expert_contribute_nothing_whatever_their_weight(scheme: str) -> None:
    hidden, index, weights = drawn(200, SMALL)
    index = with_sentinels(index, SMALL[0], 0.3)
    absent = (index < 0) | (index >= SMALL[0])
    forward, _ = layer(scheme, SMALL)
    expected = forward(hidden, index, weights.masked_fill(absent, 0))
    for value in (1e30, torch.inf, torch.nan):
        assert torch.equal(bits(forward(hidden, index, weights.masked_fill(absent, value))), bits(expected))


@pytest.mark.parametrize("scheme", KINDS)
def test_a_token_of_nan_spoils_no_other(scheme: str) -> None:
    hidden, index, weights = drawn(200, SMALL)
    forward, _ = layer(scheme, SMALL)
    expected = forward(hidden, index, weights)
    wrong = torch.zeros(200, dtype=torch.bool, device="cuda").index_fill(0, torch.tensor([0, 77, 199], device="cuda"), True)
    for value in (torch.nan, torch.inf):
        out = forward(hidden.masked_fill(wrong[:, None], value), index, weights)
        assert torch.equal(bits(out)[~wrong], bits(expected)[~wrong])
        if value != torch.inf or scheme != "static_per_expert":  # there an infinity is cut like any large value
            assert not out[wrong].isfinite().any()


@pytest.mark.parametrize("scheme", KINDS)
def test_tokens_of_zeros_give_zeros(scheme: str) -> None:
    hidden, index, weights = drawn(100, SMALL)
    hidden[::3] = 0
    out = check(*layer(scheme, SMALL), (hidden, index, weights))
    assert not out[::3].any() and out[1::3].any(-1).all()


def test_static_activations_beyond_the_largest_fp8_value_are_cut() -> None:
    hidden, index, weights = drawn(200, SMALL)
    hidden[:, ::16] *= 50
    check(*layer("static_per_expert", SMALL), (hidden, index, weights))


# --- how operands lie


@pytest.mark.parametrize("scheme", KINDS)
def test_any_index_dtype_and_layout_of_operands_gives_the_same_bits(scheme: str) -> None:
    hidden, index, weights = drawn(130, SMALL)
    forward, _ = layer(scheme, SMALL)
    expected = bits(forward(hidden, index, weights))
    assert torch.equal(bits(forward(hidden, index.int(), weights)), expected)
    wide = torch.full((130, hidden.shape[1] + 72), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 8:-64] = hidden
    assert torch.equal(bits(forward(wide[:, 8:-64], index, weights)), expected)
    columns = torch.stack((index, index.flip(0)), -1)[..., 0], torch.stack((weights, weights.flip(0)), -1)[..., 0]
    assert torch.equal(bits(forward(hidden, *columns)), expected)
    turned = index.T.contiguous().T, weights.T.contiguous().T
    assert torch.equal(bits(forward(hidden, *turned)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_routing_weights_of_any_float_are_read_exactly(scheme: str, dtype: torch.dtype) -> None:
    hidden, index, weights = drawn(130, SMALL)
    weights = weights.to(dtype)
    forward, reference = layer(scheme, SMALL)
    out = check(forward, reference, (hidden, index, weights))
    assert torch.equal(bits(out), bits(forward(hidden, index, weights.float())))


def test_no_tokens_launch_and_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_launch(_tensor: torch.Tensor) -> None:
        raise AssertionError("the service was asked, though there is nothing to do")

    for scheme in KINDS:
        forward, _ = layer(scheme, SMALL)
        monkeypatch.setattr("deepgemm_jit.ops.forward.call_on", refuse_to_launch)
        out = forward(*drawn(0, SMALL))
        assert (out.shape, out.dtype, out.device.type) == ((0, SMALL[2]), torch.bfloat16, "cuda")
        monkeypatch.undo()


# --- weights


def bytes_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8).clone() for tensor in tensors]


@pytest.mark.parametrize("scheme", [*SCHEMES, *BF16_SCHEMES])
def test_parameters_keep_their_bytes_and_preparing_again_gives_the_same_bits(scheme: str) -> None:
    given = drawn(60, SMALL)
    layer.cache_clear()
    if scheme in BF16_SCHEMES:
        reference = random_bf16_experts(SMALL[0], *SMALL[2:], **BF16_SCHEMES[scheme])
        before = bytes_of(reference.tensors)
        outs = [bf16_forward(reference)(*given) for _ in range(2)]
    else:
        reference = random_experts(SMALL[0], *SMALL[2:], **SCHEMES[scheme])
        before = bytes_of(reference.tensors)
        prepared = [ops.prepare_experts(**reference.arguments) for _ in range(2)]
        outs = [ops.fp8_experts(*given, experts) for experts in prepared]
        assert prepared[0].added_bytes == prepared[1].added_bytes
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    for old, new in zip(before, bytes_of(reference.tensors), strict=True):
        assert torch.equal(old, new)


def test_fp4_scales_that_span_too_much_are_refused_before_anything_is_written() -> None:
    reference = random_experts(SMALL[0], *SMALL[2:], weights="fp4", scales="uint8", span=14)
    reference.gate_up.scale[5, 129, 4] += 1  # the largest of its block
    before = bytes_of(reference.tensors)
    with pytest.raises(UnsupportedError, match=r"gate_up.*expert 5 span 15 binades.*block \(1, 1\)"):
        ops.prepare_experts(**reference.arguments)
    for old, new in zip(before, bytes_of(reference.tensors), strict=True):
        assert torch.equal(old, new)


# --- refusals

FAULTS: dict[str, tuple[dict[str, Callable[[torch.Tensor], Any]], str]] = {
    "hidden in float32": ({"hidden": lambda x: x.float()}, r"hidden must be torch\.bfloat16, not torch\.float32"),
    "hidden of three dimensions": ({"hidden": lambda x: x[None]}, r"hidden must have 2 dimensions"),
    "hidden of another size": ({"hidden": lambda x: x[:, :256].contiguous()}, r"hidden.*256.*512"),
    "an index of floats": ({"index": lambda x: x.float()}, r"topk_index must be torch\.int"),
    "an index of other tokens": ({"index": lambda x: x[:-1], "weights": lambda x: x[:-1]}, r"topk_index must have shape"),
    "an index of too many": (
        {"index": lambda x: x.repeat(1, 9)[:, :17], "weights": lambda x: x.repeat(1, 9)[:, :17]},
        r"topk_index.*17.*16",
    ),
    "weights of other tokens": ({"weights": lambda x: x[:-1]}, r"topk_weights must have shape"),
    "weights of integers": ({"weights": lambda x: x.int()}, r"topk_weights must be torch\.\w+.*not torch\.int32"),
    "no tensor": ({"weights": lambda _x: None}, r"topk_weights must be a tensor, not NoneType"),
}


def spoilt(*faults: str) -> Given:
    operands = dict(zip(("hidden", "index", "weights"), drawn(9, SMALL), strict=True))
    for fault in faults:
        for name, spoil in FAULTS[fault][0].items():
            operands[name] = spoil(operands[name])
    return operands["hidden"], operands["index"], operands["weights"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_one_wrong_operand_is_one_fault(scheme: str, fault: str) -> None:
    with pytest.raises(OperandError) as caught:
        layer(scheme, SMALL)[0](*spoilt(fault))
    (text,) = caught.value.faults
    assert re.search(FAULTS[fault][1], text), text


@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_every_wrong_operand_is_listed_at_once(scheme: str) -> None:
    faults = ("hidden in float32", "hidden of another size", "an index of floats", "weights of other tokens")
    with pytest.raises(OperandError) as caught:
        layer(scheme, SMALL)[0](*spoilt(*faults))
    for fault in faults:
        assert any(re.search(FAULTS[fault][1], text) for text in caught.value.faults), f"{fault}: {caught.value.faults}"


@pytest.mark.parametrize("which", [0, 2], ids=["hidden", "topk_weights"])
@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_inputs_that_require_grad_are_refused_unless_grad_is_off(scheme: str, which: int) -> None:
    forward, _ = layer(scheme, SMALL)
    given = drawn(9, SMALL)
    expected = forward(*given)
    given[which].requires_grad_()
    with pytest.raises(OperandError, match=("hidden", "", "topk_weights")[which] + " requires grad"):
        forward(*given)
    with torch.no_grad():
        assert torch.equal(bits(forward(*given)), bits(expected))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["hidden", "topk_index", "topk_weights"])
@pytest.mark.parametrize("scheme", ["blocks", "bf16"])
def test_operands_in_host_memory_are_refused(scheme: str, which: int) -> None:
    given = list(drawn(9, SMALL))
    given[which] = given[which].cpu()
    with pytest.raises((OperandError, ContextMismatchError), match=("hidden", "topk_index", "topk_weights")[which] + ".*cpu"):
        layer(scheme, SMALL)[0](*given)

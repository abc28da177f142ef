"""Wrong operands of an experts forward are refused before its first launch, those of its second half too."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.ops import Activation

pytestmark = pytest.mark.none

T, K, E, H, I = 5, 2, 4, 64, 32  # noqa: E741 - as in the docs


def operands(**changes: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    given = {
        "hidden": torch.empty((T, H), dtype=torch.bfloat16),
        "topk_index": torch.empty((T, K), dtype=torch.int64),
        "topk_weights": torch.empty((T, K)),
        "gate_up": torch.empty((E, 2 * I, H), dtype=torch.bfloat16),
        "down": torch.empty((E, H, I), dtype=torch.bfloat16),
    }
    return given | {name: change(given[name]) for name, change in changes.items()}


FLAWS: dict[str, tuple[dict[str, Callable[[torch.Tensor], Any]], str]] = {
    "hidden of another size": ({"hidden": lambda x: x[:, :48].contiguous()}, r"hidden has 48 columns and .* take 64"),
    "down of another dtype": ({"down": lambda x: x.float()}, r"down weights must be torch\.bfloat16"),
    "down of fewer experts": ({"down": lambda x: x[:2]}, r"down weights must have shape .* = \(4, 64, 32\), not \(2, 64, 32\)"),
    "down of more experts": ({"down": lambda x: x.repeat(3, 1, 1)}, r"down weights must have shape .*not \(12, 64, 32\)"),
    "down of another hidden size": ({"down": lambda x: x[:, :48]}, r"down weights must have shape .*not \(4, 48, 32\)"),
    "down of two dimensions": ({"down": lambda x: x[0]}, r"down weights must have 3 dimensions"),
    "down of every second column": (
        {"down": lambda x: torch.empty((E, H, 2 * I), dtype=x.dtype)[:, :, ::2]},
        r"down weights must have its last dimension contiguous",
    ),
    "gate_up of every second column": (
        {"gate_up": lambda x: torch.empty((E, 2 * I, 2 * H), dtype=x.dtype)[:, :, ::2]},
        r"gate_up weights must have its last dimension contiguous",
    ),
    "gate_up turned": (
        {"gate_up": lambda x: torch.empty((E, H, 2 * I), dtype=x.dtype).transpose(1, 2)},
        r"gate_up weights must have its last dimension contiguous",
    ),
    "gate_up of another width": ({"gate_up": lambda x: x[:, :48]}, r"gate_up weights must have shape .*= \(4, 64, 64\)"),
    "a down that requires grad": ({"down": lambda x: x.requires_grad_()}, r"down weights requires grad"),
    "an index of another T": ({"topk_index": lambda x: x[:3], "topk_weights": lambda x: x[:3]}, r"topk_index must have shape"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_one_flaw_is_one_fault(flaw: str) -> None:
    changes, text = FLAWS[flaw]
    with FakeTensorMode(), pytest.raises(OperandError, match=text) as refused:
        ops.bf16_experts(**operands(**changes))
    assert len(refused.value.faults) == 1


def test_an_intermediate_size_that_no_tile_takes_is_refused_before_the_first_launch() -> None:
    with FakeTensorMode():
        narrow = {"gate_up": torch.empty((E, 24, H), dtype=torch.bfloat16), "down": torch.empty((E, H, 12), dtype=torch.bfloat16)}
        with pytest.raises(OperandError, match="intermediate size = 12 must be a multiple of 8; nearest: 8 or 16"):
            ops.bf16_experts(**operands() | narrow)


@pytest.mark.parametrize(
    "answer",
    [lambda x: x[:1, :I], lambda x: x[:, :8], lambda x: x[:, :I].float(), lambda _x: None],
    ids=["fewer rows", "fewer columns", "float32", "nothing"],
)
def test_what_a_callback_returns_is_checked(answer: Callable[[torch.Tensor], Any]) -> None:
    with FakeTensorMode(), pytest.raises(OperandError, match=r"the activation must return \(\d+, 32\) torch\.bfloat16"):
        ops.bf16_experts(**operands(), activation=answer)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"activation": Activation("gelu")}, UnsupportedError, "activation = 'gelu'"),
        ({"activation": "gelu"}, UnsupportedError, "activation = 'gelu'"),
        (
            {"activation": Activation("silu", limit=-1.0)},
            OperandError,
            r"swiglu_limit = -1\.0 must be a finite number",
        ),
        ({"swiglu_limit": "7"}, OperandError, "swiglu_limit = '7' must be a finite number"),
        ({"activation": Activation("silu", limit=1.0), "gated": False}, OperandError, "experts without a gate have neither"),
        ({"activation": Activation("silu"), "swiglu_alpha": 1.0}, OperandError, "belong into the Activation"),
    ],
)
def test_activations_that_mean_nothing_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with FakeTensorMode(), pytest.raises(error, match=text):
        ops.bf16_experts(**operands(), **arguments)


@pytest.mark.parametrize(
    "arguments", [{}, {"activation": "silu"}, {"swiglu_limit": 7.0}, {"activation": Activation("silu", 7.0, 1.7)}]
)
def test_activations_that_mean_something_pass(arguments: dict[str, Any]) -> None:
    with FakeTensorMode():
        assert ops.bf16_experts(**operands(), **arguments).shape == (T, H)


def test_experts_that_were_not_prepared_are_refused() -> None:
    given = operands()
    with FakeTensorMode(), pytest.raises(OperandError, match="experts must be what prepare_experts returns, not NoneType"):
        ops.fp8_experts(given["hidden"], given["topk_index"], given["topk_weights"], None)  # type: ignore[arg-type]


def test_one_operand_without_memory_among_real_ones_is_refused() -> None:
    given = operands(down=lambda x: x.to("meta"))
    with pytest.raises(ContextMismatchError, match="down weights"):
        ops.bf16_experts(**given)


def test_blocks_of_gate_and_up_that_were_counted_apart_are_read_so_when_the_caller_says() -> None:
    intermediate = 96  # 2 * ceil(96 / 128) = ceil(192 / 128): the shape does not tell
    weight, down = torch.ones((1, 192, 128)).to(torch.float8_e4m3fn), torch.ones((1, 128, 96)).to(torch.float8_e4m3fn)
    scale, down_scale = torch.tensor([[[1.0], [100.0]]]), torch.ones((1, 1, 1))
    together = ops.prepare_experts(weight, down, scale, down_scale).gate_up
    assert together.scale_kind == "block" and torch.equal(together.scale, scale)
    apart = ops.prepare_experts(weight, down, scale, down_scale, gate_up_blocks="apart").gate_up
    assert apart.scale_kind == "row"
    assert apart.scale[0, :, 0].tolist() == [1.0] * intermediate + [100.0] * intermediate
    with pytest.raises(OperandError, match="must be 'together' or 'apart'"):
        ops.prepare_experts(weight, down, scale, down_scale, gate_up_blocks="guess")  # type: ignore[arg-type]

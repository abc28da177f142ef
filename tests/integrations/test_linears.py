"""FP8 linears of transformers with our forward in place, on a CPU: what is served, what is skipped, and the way back.

The GEMM and the dynamic cast stand on dequantized operands in float64 here; everything else is the real thing.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError, UnsupportedError
from deepgemm_jit.integrations import linears
from deepgemm_jit.integrations import transformers as integration

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def operations_on_floats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Run the GEMM in float64 and leave dynamic activations as they are; return the shapes of the products made."""
    shapes: list[tuple[int, ...]] = []

    def gemm(a: Any, b: Any, out: torch.Tensor) -> None:
        (x, x_scale), (weight, scale) = a, b
        assert scale.dtype == torch.float32 and scale.is_contiguous()
        assert scale.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        assert x_scale is None or (x_scale.shape == (len(x), scale.shape[1]) and x.dtype == torch.float8_e4m3fn)
        left = x.double() if x_scale is None else peers.dequantized(x, x_scale, (1, 128), torch.float64)
        out.copy_(left @ peers.dequantized(weight, scale, (128, 128), torch.float64).T)
        shapes.append((*x.shape, out.shape[1]))

    monkeypatch.setattr(ops, "fp8_gemm_nt", gemm)
    monkeypatch.setattr(ops, "per_token_cast_to_fp8", lambda x: (x, None))
    return shapes


def fp8_linear(
    n: int = 200,
    k: int = 272,
    block: tuple[int, int] | None = (128, 128),
    scheme: str = "dynamic",
    bias: bool = False,
    **more: Any,
) -> nn.Module:
    with torch.device("meta"):
        linear = fp8.FP8Linear(k, n, block_size=block, activation_scheme=scheme, has_bias=bias, **more)
    return peers.fill(nn.Sequential(linear))


SERVED: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"scheme": "static"},
    "bias": {"bias": True},
    "static_bias": {"scheme": "static", "bias": True},
    "per_tensor": {"block": None},
    "per_tensor_static": {"block": None, "scheme": "static"},
    "ue8m0": {"scale_fmt": "ue8m0"},
}


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (2, 0), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_a_linear_gives_what_transformers_gives(case: str, shape: tuple[int, ...]) -> None:
    model = fp8_linear(**SERVED[case])
    x = torch.randn((*shape, 272), dtype=BF16)
    with torch.no_grad():
        with peers.eager_peer():
            theirs = model(x)
        with integration.accelerate_linears(model) as done:
            ours = model(x)
    assert done.served == ("0",) and done.skipped == {}
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if theirs.numel():
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < 5e-3


def test_leading_dimensions_are_one_product(operations_on_floats: list[tuple[int, ...]]) -> None:
    model = fp8_linear()
    with integration.accelerate_linears(model), torch.no_grad():
        model(torch.randn((2, 3, 272), dtype=BF16).transpose(0, 1))
    assert operations_on_floats == [(6, 272, 200)]


def test_static_values_are_divided_clamped_and_carry_the_scale_in_the_layout_of_the_gemm() -> None:
    scale = torch.tensor(0.01)
    x = torch.tensor([[0.9, -9.0, 0.004, 0.0] * 68] * 7, dtype=BF16)
    values, scales = linears.static_cast_to_fp8(x, scale)
    assert values[:, :4].double().tolist() == [[88.0, -448.0, 0.40625, 0.0]] * 7
    assert (scales.shape, scales.stride()) == ((7, 3), (1, 8))
    assert torch.equal(scales, torch.full((7, 3), 0.01))
    assert linears.static_cast_to_fp8(x[:0], scale)[1].shape == (0, 3)


SKIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "block_1_128": ({"block": (1, 128)}, "(1, 128)"),
    "block_64_64": ({"block": (64, 64)}, "(64, 64)"),
    "odd_n": ({"n": 100}, "multiple of 8"),
    "odd_k": ({"k": 136}, "one of 16"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_a_linear_without_kernel_is_left_alone_and_reported(case: str) -> None:
    given, reason = SKIPPED[case]
    model = fp8_linear(**given)
    done = integration.accelerate_linears(model)
    assert done.served == () and list(done.skipped) == ["0"]
    assert reason in done.skipped["0"]
    assert "forward" not in vars(model[0])


def test_what_is_no_plain_fp8_linear_is_left_alone() -> None:
    with torch.device("meta"):
        grouped = fp8.FP8GroupedLinear(128, 256, n_groups=2, block_size=(128, 128))
    packed = fp8_linear()
    packed[0].weight = nn.Parameter(torch.zeros((200, 136), dtype=torch.int8), requires_grad=False)
    wide = fp8_linear()
    wide[0].weight = nn.Parameter(torch.zeros((200, 272), dtype=BF16), requires_grad=False)
    model = nn.ModuleDict({"grouped": grouped, "packed": packed, "wide": wide, "plain": nn.Linear(4, 4)})
    done = integration.accelerate_linears(model)
    assert done.served == () and done.skipped.keys() == {"grouped", "packed.0", "wide.0"}
    assert "FP8GroupedLinear" in done.skipped["grouped"]
    assert "int8" in done.skipped["packed.0"] and "bfloat16" in done.skipped["wide.0"]


# --- the way back


def forwards(model: nn.Module) -> dict[str, Any]:
    return {name: vars(module).get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", peers.MODELS)
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_a_model_gives_the_same_tokens_with_its_linears_accelerated_and_after(kind: str, scheme: str) -> None:
    model = peers.fp8_model(kind, scheme=scheme)
    prompt = torch.randint(0, 256, (2, 7))
    before, state = forwards(model), {name: value.clone() for name, value in model.state_dict().items()}

    def tokens() -> torch.Tensor:
        with torch.no_grad(), peers.eager_peer():
            return model.generate(prompt, max_new_tokens=4, do_sample=False)

    theirs = tokens()
    with integration.accelerate_linears(model) as done:
        assert len(done.served) == sum(isinstance(module, fp8.FP8Linear) for module in model.modules())
        assert done.skipped == {}
        assert torch.equal(tokens(), theirs)
    assert forwards(model) == before
    assert all(torch.equal(value.float(), state[name].float()) for name, value in model.state_dict().items())
    assert torch.equal(tokens(), theirs)


def test_restore_is_reached_also_when_the_block_fails() -> None:
    model = fp8_linear()
    with pytest.raises(UnsupportedError), integration.accelerate_linears(model):
        raise UnsupportedError(given="a", supported="b")
    assert "forward" not in vars(model[0])


def test_accelerating_twice_is_accelerating_once() -> None:
    model = fp8_linear()
    first, second = integration.accelerate_linears(model), integration.accelerate_linears(model)
    assert first.served == second.served == ("0",)
    integration.restore(model)
    integration.restore(model)
    assert "forward" not in vars(model[0]) and not hasattr(model[0], "_deepgemm_jit_prepared")


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.parametrize("hooked", ["before", "between"])
def test_a_hook_of_accelerate_stays_in_place(hooked: str, operations_on_floats: list[tuple[int, ...]]) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *inputs: Any, **more: Any) -> Any:
            self.calls += 1
            return inputs, more

    model, hook = fp8_linear(), Counting()
    x = torch.randn((3, 272), dtype=BF16)
    if hooked == "before":
        add_hook_to_module(model[0], hook)
    integration.accelerate_linears(model)
    if hooked == "between":
        add_hook_to_module(model[0], hook)
    with torch.no_grad():
        model(x)
        assert hook.calls == 1 and len(operations_on_floats) == 1
        integration.restore(model)
        with peers.eager_peer():
            model(x)
    assert hook.calls == 2 and len(operations_on_floats) == 1
    remove_hook_from_module(model[0])
    with torch.no_grad(), peers.eager_peer():
        assert model(x).shape == (3, 200)
    assert hook.calls == 2


def test_a_copy_of_a_model_calls_its_own_weights() -> None:
    model = fp8_linear()
    integration.accelerate_linears(model)
    x = torch.randn((3, 272), dtype=BF16)
    with torch.no_grad():
        before = model(x)
        twin = copy.deepcopy(model)
        twin[0].weight.zero_()
        assert not twin(x).any()
        assert torch.equal(model(x), before)


# --- preparation and refusals


def test_scales_are_expanded_once_and_again_after_a_load() -> None:
    model = fp8_linear(block=None)
    integration.accelerate_linears(model)
    x = torch.randn((3, 272), dtype=BF16)
    assert integration.prepare(model) == 2 * 3 * 4
    with torch.no_grad():
        before = model(x)
        model[0].weight_scale_inv.mul_(2)
        assert torch.equal(model(x), before * 2)


def test_scales_that_lie_right_are_not_copied() -> None:
    model = fp8_linear()
    integration.accelerate_linears(model)
    assert integration.prepare(model) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_input_that_is_not_bf16_is_refused(dtype: torch.dtype) -> None:
    model = fp8_linear()
    integration.accelerate_linears(model)
    with pytest.raises(OperandError, match=str(dtype)), torch.no_grad():
        model(torch.randn((3, 272), dtype=dtype))


def test_an_input_that_requires_grad_is_refused_while_gradients_are_recorded() -> None:
    model = fp8_linear()
    integration.accelerate_linears(model)
    x = torch.randn((3, 272), dtype=BF16, requires_grad=True)
    with pytest.raises(OperandError, match="requires grad"):
        model(x)
    with torch.no_grad():
        assert model(x).shape == (3, 200)


def test_an_input_on_another_device_than_the_weight_is_refused() -> None:
    model = fp8_linear()
    integration.accelerate_linears(model)
    with pytest.raises(ContextMismatchError, match="cpu.*meta"), torch.no_grad():
        model(torch.empty((3, 272), dtype=BF16, device="meta"))


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.tensor(0.0), "0.0"),
        (torch.tensor(-1.0), "-1.0"),
        (torch.tensor(float("nan")), "nan"),
        (torch.tensor(float("inf")), "inf"),
        (torch.ones(2), "one element"),
        (torch.ones((), dtype=torch.float64), "float64"),
    ],
    ids=str,
)
def test_a_static_scale_that_is_none_is_refused(scale: torch.Tensor, said: str, operations_on_floats: list[Any]) -> None:
    model = fp8_linear(scheme="static")
    model[0].activation_scale = nn.Parameter(scale, requires_grad=False)
    integration.accelerate_linears(model)
    with pytest.raises(OperandError, match=f"static activation scale.*{said}"):
        integration.prepare(model)
    with pytest.raises(OperandError, match=f"static activation scale.*{said}"), torch.no_grad():
        model(torch.randn((3, 272), dtype=BF16))
    assert operations_on_floats == []


@pytest.mark.parametrize("shape", [(3, 136), (3, 271), (1, 544), (), (272, 3)], ids=str)
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_an_input_of_another_k_is_refused_before_anything_runs(
    scheme: str, shape: tuple[int, ...], operations_on_floats: list[Any]
) -> None:
    model = fp8_linear(scheme=scheme)
    integration.accelerate_linears(model)
    with pytest.raises(OperandError, match="K = 272"), torch.no_grad():
        model(torch.randn(shape, dtype=BF16))
    assert operations_on_floats == []


@pytest.mark.parametrize(("block", "shape", "said"), [(None, (2,), "one element"), ((128, 128), (3, 2), r"\(2, 3\)")], ids=str)
def test_a_weight_scale_of_another_shape_is_refused(block: Any, shape: tuple[int, ...], said: str) -> None:
    model = fp8_linear(block=block)
    integration.accelerate_linears(model)
    model[0].weight_scale_inv = nn.Parameter(torch.ones(shape), requires_grad=False)
    with pytest.raises(OperandError, match=f"weight scale.*{said}"):
        integration.prepare(model)


@pytest.mark.parametrize("name", ["weight_scale_inv", "activation_scale"])
@pytest.mark.parametrize("block", [(128, 128), None], ids=str)
def test_a_scale_in_bf16_is_read_exactly(block: Any, name: str) -> None:
    model = fp8_linear(block=block, scheme="static")
    x = torch.randn((3, 272), dtype=BF16)
    scale = getattr(model[0], name).to(BF16)
    results = []
    for dtype in (torch.float32, BF16):
        setattr(model[0], name, nn.Parameter(scale.to(dtype), requires_grad=False))
        with integration.accelerate_linears(model) as done, torch.no_grad():
            assert done.served == ("0",)
            results.append(model(x))
    assert torch.equal(*results)


def test_a_block_inside_of_another_restores_what_it_changed_alone() -> None:
    model = nn.Sequential(fp8_linear(), fp8_linear())
    with integration.accelerate_linears(model[0]):
        with integration.accelerate_linears(model) as inner:
            assert inner.served == ("0.0", "1.0")
        assert linears.is_replaced(model[0][0]) and not linears.is_replaced(model[1][0])
    assert not linears.is_replaced(model[0][0])


def test_a_scheme_changed_after_the_first_forward_is_seen() -> None:
    model = fp8_linear(scheme="static", block=None)
    x = torch.randn((3, 272), dtype=BF16)
    with integration.accelerate_linears(model), torch.no_grad():
        model(x)
        model[0].activation_scheme = "dynamic"
        ours = model(x)
    with integration.accelerate_linears(model), torch.no_grad():
        assert torch.equal(model(x), ours)

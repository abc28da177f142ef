"""Scales become powers of two only together with their values; on its own a scale is never rounded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError

pytestmark = pytest.mark.none

E4M3 = torch.float8_e4m3fn


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return (..., N, K) values times their 128 x 128 block scales, in float64."""
    n, k = weight.shape[-2:]
    return weight.double() * scale.double().repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]


def random_weight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 100).clamp(-448, 448).to(E4M3)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out - reference).norm() / reference.norm())


def test_every_power_of_two_becomes_its_byte() -> None:
    scale = torch.exp2(torch.arange(-127, 128).double()).float().view(5, 51)
    stored = ops.to_ue8m0(scale)
    assert stored.dtype == torch.float8_e8m0fnu
    assert stored.view(torch.uint8).flatten().tolist() == list(range(255))


@pytest.mark.parametrize("bad", [1.5 * 2.0**-9, 0.0, -1.0, 2.0**-128, 1e-45, float("nan"), float("inf"), 1 + 2.0**-23])
def test_a_scale_that_is_no_power_of_two_is_refused_not_rounded(bad: float) -> None:
    scale = torch.ones((3, 4))
    scale[2, 1] = bad
    with pytest.raises(OperandError, match=r"scale\[2, 1\] = .* is no power of two.*requantize_ue8m0"):
        ops.to_ue8m0(scale)


def test_rounding_a_scale_alone_is_off_by_a_third_and_the_helper_is_not() -> None:
    weight, scale = random_weight(256, 256), torch.full((2, 2), 1.5 * 2.0**-9)
    exact = dequantized(weight, scale)
    assert relative_error(dequantized(weight, torch.full((2, 2), 2.0**-8)), exact) == pytest.approx(1 / 3)
    with pytest.raises(OperandError):
        ops.to_ue8m0(scale)
    new_weight, new_scale = ops.requantize_ue8m0(weight, scale)
    assert new_scale.tolist() == [[2.0**-8] * 2] * 2
    assert relative_error(dequantized(new_weight, new_scale), exact) < 0.06
    assert ops.to_ue8m0(new_scale).dtype == torch.float8_e8m0fnu


def test_each_value_stays_within_half_a_step_of_itself() -> None:
    weight, scale = random_weight(3, 200, 400), torch.rand((3, 2, 4)) * 2.0**-6 + 1e-5
    new_weight, new_scale = ops.requantize_ue8m0(weight, scale)
    assert (new_weight.shape, new_weight.dtype, new_scale.dtype) == (weight.shape, E4M3, torch.float32)
    assert ((new_scale >= scale) & (new_scale < 2 * scale)).all()
    ops.to_ue8m0(new_scale)
    exact = dequantized(weight, scale)
    subnormal = dequantized(torch.full(weight.shape, 2.0**-10), new_scale)
    assert ((dequantized(new_weight, new_scale) - exact).abs() <= torch.maximum(exact.abs() * 2.0**-4, subnormal)).all()


@pytest.mark.parametrize("power", [-127, -126, -9, 0, 127])
def test_powers_of_two_keep_their_bytes(power: int) -> None:
    weight, scale = torch.arange(256, dtype=torch.uint8).repeat(2).view(2, 256).view(E4M3), torch.full((1, 2), 2.0**power)
    new_weight, new_scale = ops.requantize_ue8m0(weight, scale)
    assert torch.equal(new_scale, scale)
    kept = new_weight.view(torch.uint8) == weight.view(torch.uint8)
    assert (kept | weight.float().isnan()).all()
    assert torch.equal(new_weight.float().isnan(), weight.float().isnan())


@pytest.mark.parametrize(
    ("scale", "rounded"), [(0.0, -127), (1e-45, -127), (2.0**-128, -127), (1.01 * 2.0**-127, -126), (1.5 * 2.0**126, 127)]
)
def test_scales_at_the_ends_of_the_range(scale: float, rounded: int) -> None:
    weight = random_weight(16, 16)
    new_weight, new_scale = ops.requantize_ue8m0(weight, torch.full((1, 1), scale))
    assert new_scale.tolist() == [[2.0**rounded]]
    assert new_weight.float().isfinite().all()
    if scale == 0:
        assert new_weight.float().count_nonzero() == 0


def test_what_was_given_is_not_changed() -> None:
    weight, scale = random_weight(130, 130), torch.rand((2, 2)) + 0.1
    before = weight.view(torch.uint8).clone(), scale.clone()
    ops.requantize_ue8m0(torch.nn.Parameter(weight), torch.nn.Parameter(scale))
    assert torch.equal(weight.view(torch.uint8), before[0])
    assert torch.equal(scale, before[1])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1.5 * 2.0**127])
def test_scales_that_have_no_power_of_two_above_are_refused(bad: float) -> None:
    scale = torch.ones((2, 2))
    scale[1, 0] = bad
    with pytest.raises(OperandError, match=r"scale\[1, 0\] = .* must be finite, not negative and at most 2\^127"):
        ops.requantize_ue8m0(random_weight(256, 256), scale)


@pytest.mark.parametrize(
    ("weight", "scale", "faults"),
    [
        (torch.zeros((16, 16)), torch.ones((1, 1)).double(), ["weight must be torch.float8", "scale must be torch.float32"]),
        (None, 1.0, ["weight must be a tensor, not NoneType", "scale must be a tensor, not float"]),
        (random_weight(16), torch.ones(()), ["weight must have at least 2", "scale must have at least 2"]),
        (random_weight(130, 16), torch.ones((1, 1)), ["scale must have shape (..., ceil(N / 128), ceil(K / 128)) = (2, 1)"]),
    ],
)
def test_all_faults_are_listed_at_once(weight: Any, scale: Any, faults: list[str]) -> None:
    with pytest.raises(OperandError) as caught:
        ops.requantize_ue8m0(weight, scale)
    assert len(caught.value.faults) == len(faults)
    assert all(given.startswith(fault) for given, fault in zip(caught.value.faults, faults, strict=True))


@pytest.mark.parametrize("scale", [torch.ones(2).double(), torch.ones(2, dtype=torch.uint8), 1.0])
def test_only_float32_scales_are_packed(scale: Any) -> None:
    with pytest.raises(OperandError, match=r"scale must be torch\.float32"):
        ops.to_ue8m0(scale)

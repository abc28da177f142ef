"""The cast to FP8 and the layout of A scales on a GPU: bit for bit what plain torch gives."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import E4M3, cast_rows, ceil_div, m_major, round_up

from deepgemm_jit import ops

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32]
E4M3_NAN = 0x7F


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return FP8 values as bytes, with one byte for both NaNs: the sign of a NaN is nobody's promise."""
    raw = values.view(torch.uint8)
    return torch.where((raw & 0x7F) == E4M3_NAN, torch.full_like(raw, E4M3_NAN), raw)


def bits_of(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 scales as int32, with one pattern for all NaNs."""
    raw = scales.contiguous().view(torch.int32)
    return torch.where(scales.isnan(), torch.full_like(raw, 0x7FC00000), raw)


def check_cast(x: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel, compare with plain torch, check the layout of the scales, and return both results."""
    values, scales = ops.per_token_cast_to_fp8(x, use_ue8m0)
    m, k = x.shape
    assert (values.shape, values.dtype, values.is_contiguous()) == ((m, k), E4M3, True)
    assert (scales.shape, scales.dtype) == ((m, ceil_div(k, 128)), torch.float32)
    assert scales.stride() == (1, round_up(max(m, 1), 4))
    right, right_scales = cast_rows(x, use_ue8m0)
    assert torch.equal(bits_of(scales), bits_of(right_scales))
    assert torch.equal(bytes_of(values), bytes_of(right))
    return values, scales


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["float_scales", "ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, 48, 128, 144, 272, 1056, 2880, 7168])
@pytest.mark.parametrize("m", [0, 1, 7, 4096])
def test_the_cast_is_bit_equal_to_torch(m: int, k: int, dtype: torch.dtype, use_ue8m0: bool) -> None:
    # Magnitudes over 40 binades within a row: small values of a block become subnormal FP8, or zero.
    x = torch.randn((m, k), device="cuda") * torch.exp2(torch.randint(-20, 20, (m, k), device="cuda").float())
    check_cast(x.to(dtype), use_ue8m0)


SPECIAL = {
    "zeros": 0.0,
    "negative zeros": -0.0,
    "tiny": 1e-38,
    "subnormal": 1e-40,
    "below the clamp": 9.9e-5,
    "just above the clamp": 1.001e-4,
    "a power of two times 448": 448.0 * 2.0**-7,
    "largest bfloat16": torch.finfo(torch.bfloat16).max,
    "smallest normal": torch.finfo(torch.float32).tiny,
    "infinity": float("inf"),
    "negative infinity": float("-inf"),
    "nan": float("nan"),
}


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["float_scales", "ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alone", [True, False], ids=["whole_block", "one_of_a_block"])
@pytest.mark.parametrize("special", SPECIAL)
def test_special_values_are_cast_as_torch_does(special: str, alone: bool, dtype: torch.dtype, use_ue8m0: bool) -> None:
    x = torch.randn((9, 400), device="cuda").to(dtype)
    if alone:
        x[3, 128:256] = SPECIAL[special]
        x[8, 384:] = SPECIAL[special]
    else:
        x[3, 200] = SPECIAL[special]
        x[8, 399] = SPECIAL[special]
    _values, scales = check_cast(x, use_ue8m0)
    if x.isfinite().all():
        assert scales.isfinite().all() and (scales > 0).all()
    else:
        assert (~scales.isfinite()).nonzero().tolist() == [[3, 1], [8, 3]], "other blocks are not the special one's business"
    if use_ue8m0:
        mantissas = scales.contiguous().view(torch.int32) & 0x7FFFFF
        assert not mantissas[scales.isfinite()].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bfloat16_value_is_cast_as_torch_does(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16)
    check_cast(patterns.view(torch.bfloat16).to(dtype).view(512, 128), use_ue8m0=False)
    shuffled = patterns[torch.randperm(1 << 16, device="cuda")]
    check_cast(shuffled.view(torch.bfloat16).to(dtype).view(256, 256), use_ue8m0=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    wide = torch.randn((77, 400 + 40), device="cuda").to(dtype)
    check_cast(wide[:, 16:416], use_ue8m0=False)
    check_cast(wide[:1, 16:416], use_ue8m0=False)


def test_a_cast_of_more_than_two_billion_elements_reaches_the_end() -> None:
    m, k = 300_032, 7168
    assert m * k > 1 << 31
    x = torch.zeros((m, k), dtype=torch.bfloat16, device="cuda")
    x[-300:] = torch.randn((300, k), device="cuda")
    values, scales = ops.per_token_cast_to_fp8(x)
    right, right_scales = cast_rows(x[-300:])
    assert torch.equal(bytes_of(values[-300:]), bytes_of(right))
    assert torch.equal(scales[-300:], right_scales)
    assert not values[:-300].view(torch.uint8).any()


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 56), (3, 1), (7, 9), (64, 32), (65, 33), (4096, 56), (1, 7, 9), (5, 1, 9), (33, 77, 13)]
)
def test_scales_are_laid_out_m_major(shape: tuple[int, ...]) -> None:
    scales = torch.randn(shape, device="cuda")
    turned = ops.get_mn_major_tma_aligned_tensor(scales)
    assert torch.equal(turned, scales)
    if shape[-2] > 1:
        assert turned.stride(-2) == 1
    if shape[-1] > 1:
        assert turned.stride(-1) % 4 == 0 and turned.stride(-1) >= shape[-2]
    assert turned.data_ptr() % 16 == 0


@pytest.mark.parametrize("shape", [(0, 9), (4, 0, 9)])
def test_no_scales_are_laid_out_as_none(shape: tuple[int, ...]) -> None:
    turned = ops.get_mn_major_tma_aligned_tensor(torch.empty(shape, device="cuda"))
    assert turned.shape == shape


def test_scales_that_lie_m_major_are_returned_as_they_are() -> None:
    scales = m_major(torch.randn((3, 77, 9), device="cuda"))
    assert ops.get_mn_major_tma_aligned_tensor(scales) is scales


@pytest.mark.parametrize("gap", [1, 4, 7])
def test_scales_with_any_strides_are_laid_out(gap: int) -> None:
    wide = torch.randn((5, 77, 9 + gap), device="cuda")
    assert torch.equal(ops.get_mn_major_tma_aligned_tensor(wide[..., :9]), wide[..., :9])
    unaligned = torch.randn((5, 9, 77), device="cuda").transpose(-1, -2)  # M-major, columns of 77 floats
    turned = ops.get_mn_major_tma_aligned_tensor(unaligned)
    assert torch.equal(turned, unaligned) and turned.stride(-1) == 80

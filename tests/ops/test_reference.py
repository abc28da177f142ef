"""The checks of the GPU tests can fail: wrong numbers, rows left out and stray writes are seen."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import E4M3_MAX, Output, assert_close, cast_rows, group_rows, product, random_a, random_b, used_rows

pytestmark = pytest.mark.none


def test_the_reference_is_the_product_of_values_times_scales() -> None:
    a, b = random_a(5, 144, device="cpu"), random_b(200, 144, device="cpu")
    expected = torch.zeros((5, 200), dtype=torch.float64)
    for k in range(144):
        left = a.values[:, k].double() * a.scales[:, k // 128].double()
        right = b.values[:, k].double() * b.scales[torch.arange(200) // 128, k // 128].double()
        expected += left[:, None] * right
    torch.testing.assert_close(product(a, b), expected, rtol=1e-12, atol=1e-15)
    assert_close(expected.bfloat16(), expected)


def test_a_cast_is_within_half_a_step_of_its_input() -> None:
    x = torch.randn((7, 400))
    values, scales = cast_rows(x)
    error = (values.float() * scales.repeat_interleave(128, 1)[:, :400] - x).abs()
    assert (error <= x.abs() * 2.0**-4 + scales.repeat_interleave(128, 1)[:, :400] * 2.0**-10).all()


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["float_scales", "ue8m0"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 9.9e-5, 1.0, 1.0 + 2.0**-7, 3.3895313892515355e38], ids=repr)
def test_a_block_of_any_finite_value_gets_a_scale_that_divides_it(value: float, use_ue8m0: bool) -> None:
    values, scales = cast_rows(torch.full((1, 128), value), use_ue8m0)
    scale = float(scales)
    assert 0 < scale < float("inf")
    assert scale >= max(abs(value), 1e-4) / E4M3_MAX * (1 - 2.0**-23)
    if use_ue8m0:
        assert scale.hex().startswith("0x1.0000000000000p")
        assert scale < 2 * max(abs(value), 1e-4) / E4M3_MAX * (1 + 2.0**-22)
    assert values.float().isfinite().all()
    assert abs(float(values[0, 0]) * scale - value) <= abs(value) * 2.0**-4 + scale * 2.0**-10


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["float_scales", "ue8m0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_block_alone(value: float, use_ue8m0: bool) -> None:
    x = torch.ones((2, 256))
    x[0, 200] = value
    values, scales = cast_rows(x, use_ue8m0)
    assert (~scales.isfinite()).nonzero().tolist() == [[0, 1]]
    back = values.float() * scales.repeat_interleave(128, 1)
    assert back[0, 200].isnan()
    assert torch.allclose(back[1], x[1], rtol=2.0**-4) and torch.allclose(back[0, :128], x[0, :128], rtol=2.0**-4)


def test_one_wrong_element_is_seen() -> None:
    reference = torch.randn((64, 64), dtype=torch.float64)
    for wrong in (float(reference[7].abs().max()) * 0.02, float("nan"), float("inf")):
        out = reference.bfloat16()
        out[7, 9] += wrong
        with pytest.raises(AssertionError, match=r"1 of 4096 elements are off.*\[7, 9\]"):
            assert_close(out, reference)


def test_an_error_that_every_element_shares_is_seen() -> None:
    reference = torch.randn((64, 64), dtype=torch.float64)
    with pytest.raises(AssertionError, match="relative error 3"):
        assert_close(reference * 1.003, reference)
    assert_close(reference[:1] * 1.003, reference[:1])  # too few elements to average


def test_a_reference_of_zeros_tests_nothing() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        assert_close(torch.zeros((4, 8)), torch.zeros((4, 8), dtype=torch.float64))


def test_rows_left_out_and_stray_writes_are_seen() -> None:
    must = used_rows((0, 2, 0), 5, "cpu")
    out = Output(3, 5, 16, row_gap=8, device="cpu")
    out.assert_untouched()
    out.tensor[1, 0] = 1.0
    with pytest.raises(AssertionError, match="1 rows were not written"):
        out.assert_written(must)
    out.tensor[1, 1] = 1.0
    out.assert_written(must)
    out.tensor[2, 4, 3] = 1.0
    with pytest.raises(AssertionError, match="in 1 rows from 14 to 14"):
        out.assert_written(must)
    out.assert_written(must, may=~must)
    out.tensor.as_strided((1,), (1,), 0)[0] = 1.0  # the first element of the guard before it
    with pytest.raises(AssertionError, match="in 1 rows from -16 to -16"):
        out.assert_written(must, may=~must)


def test_a_write_between_rows_is_seen() -> None:
    out = Output(5, 16, row_gap=8, device="cpu")
    out.tensor.fill_(1.0)
    out.assert_written()
    out.tensor.as_strided((5, 24), (24, 1))[2, 20] = 1.0
    with pytest.raises(AssertionError, match="in 1 rows from 2 to 2"):
        out.assert_written()


def test_groups_are_placed_at_multiples_of_the_alignment() -> None:
    rows = group_rows((5, 0, 130), 128, extra_rows=128)
    assert (rows.starts, rows.total, rows.ends("cpu").tolist()) == ((0, 128, 128), 512, [5, 128, 258])
    indices = rows.m_indices("cpu")
    assert [int((indices == group).sum()) for group in (-1, 0, 1, 2)] == [377, 5, 0, 130]
    assert rows.tails(128, "cpu").nonzero().flatten().tolist() == [*range(5, 128), *range(258, 384)]

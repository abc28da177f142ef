"""The checks of the GPU tests can fail: wrong numbers, rows left out and stray writes are seen."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import Output, assert_close, cast_rows, group_rows, product, random_a, random_b, used_rows

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

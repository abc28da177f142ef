"""FP4 weights on GPUs without FP4: folded into E4M3 exactly, or refused with the expert and the block."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.ops import Experts, Projection, fp4
from deepgemm_jit.ops.pipeline import half_for
from deepgemm_jit.ops.weights import Decode
from deepgemm_jit.spec import FP4_GEMM_SWAP_AB, FP8_GEMM, FP8_GEMM_SWAP_AB, limits_of, select

pytestmark = pytest.mark.none

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_FORMS = ("uint8", "e8m0", "float32")
BIAS = 127


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return (..., K) codes of 4 bits as (..., K / 2) int8, the even ones in the lower half of a byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)


def as_form(codes: torch.Tensor, form: str) -> torch.Tensor:
    """Return UE8M0 bytes in one of the forms that scales have."""
    if form == "float32":
        return torch.exp2(codes.double() - BIAS).float()
    raw = codes.to(torch.uint8)
    return raw if form == "uint8" else raw.view(torch.float8_e8m0fnu)


def dequantized(codes: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    """Return e2m1 codes times their scales, (E, N, K) float64."""
    wide = torch.exp2(scale_codes.double() - BIAS).repeat_interleave(32, -1)[..., : codes.shape[-1]]
    return torch.tensor(E2M1, dtype=torch.float64)[codes] * wide


def folded(projection: Projection) -> torch.Tensor:
    """Return what the folded weight stands for, (E, N, K) float64."""
    _, n, k = projection.weight.shape
    wide = projection.scale.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
    return projection.weight.double() * wide


def prepare(codes: torch.Tensor, scale: torch.Tensor, decode: Decode = "auto") -> Experts:
    """Prepare (E, 2I, H) FP4 codes as gate and up, beside a down projection of FP8 ones."""
    count, rows, hidden = codes.shape
    inner = rows // 2
    down = torch.ones((count, hidden, inner)).to(torch.float8_e4m3fn)
    down_scale = torch.ones((count, -(-hidden // 128), -(-inner // 128)))
    return ops.prepare_experts(pack(codes), down, scale, down_scale, decode=decode)


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape)


def spanning(count: int, n: int, k: int, lowest: int, span: int) -> torch.Tensor:
    """Return UE8M0 bytes with every exponent of the span in every block of 128 x 128, and both ends in ragged blocks."""
    steps = torch.arange(n)[:, None] + torch.arange(-(-k // 32))
    return (lowest + steps % (span + 1)).expand(count, -1, -1)


def e4m3_values() -> set[float]:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return set(values[values.isfinite()].tolist())


def fits(span: int, lowest_shift: int) -> bool:
    """Return whether E4M3 has every e2m1 value times every power of two of a span."""
    values = e4m3_values()
    return all(value * 2.0 ** (lowest_shift + step) in values for value in E2M1 for step in range(span + 1))


def test_e4m3_holds_every_e2m1_value_over_14_binades_and_never_over_15() -> None:
    shifts = range(-40, 41)
    assert [[shift for shift in shifts if fits(span, shift)] for span in range(16)] == [
        list(range(-8, 7 - span)) for span in range(16)
    ]


@pytest.mark.parametrize("form", SCALE_FORMS)
@pytest.mark.parametrize("span", range(15))
def test_every_code_under_every_scale_of_a_span_folds_exactly(span: int, form: str) -> None:
    steps = torch.arange(128) % (span + 1)
    scale_codes = (120 + steps)[None, :, None].expand(1, 128, 4)
    codes = torch.arange(128).expand(1, 128, 128) % 16
    scale = as_form(scale_codes, form)
    projection = prepare(codes, scale).gate_up
    expected = dequantized(codes, scale_codes)
    assert torch.equal(folded(projection), expected)
    assert torch.equal(projection.weight.double().signbit(), expected.signbit())


@pytest.mark.parametrize("lowest", [0, 100, 240])
@pytest.mark.parametrize("span", [0, 3, 14])
def test_random_experts_with_ragged_ends_equal_their_dequantized_bits(span: int, lowest: int) -> None:
    count, n, k = 3, 288, 208  # neither N nor K is a multiple of 128, and the last scale is for 16 columns
    codes = random_codes(count, n, k)
    scale_codes = spanning(count, n, k, lowest, span)
    experts = prepare(codes, as_form(scale_codes, "uint8"))
    projection = experts.gate_up
    assert (projection.weight.shape, projection.weight.dtype) == ((count, n, k), torch.float8_e4m3fn)
    assert (projection.scale.shape, projection.scale.dtype, projection.scale_kind) == ((count, 3, 2), torch.float32, "block")
    assert torch.equal(folded(projection), dequantized(codes, scale_codes))
    assert projection.added_bytes == experts.added_bytes
    kept = 0 if projection.fragments is None else projection.fragments.nbytes
    assert projection.added_bytes == count * n * k + count * 3 * 2 * 4 + kept


def test_the_even_column_is_the_lower_half_of_a_byte() -> None:
    packed = torch.zeros((1, 32, 8), dtype=torch.int8)
    packed[0, 5, 3] = 0x72  # columns 6 and 7: codes 2 (1.0) and 7 (6.0)
    down = torch.zeros((1, 16, 16)).to(torch.float8_e4m3fn)
    weight = ops.prepare_experts(packed, down, torch.ones((1, 32, 1)), torch.ones((1, 1, 1))).gate_up.weight.float()
    assert weight[0, 5].tolist() == [0, 0, 0, 0, 0, 0, 1, 6] + [0] * 8
    assert weight.count_nonzero() == 2


def test_values_stay_as_they_are_while_scales_span_8_binades() -> None:
    codes = random_codes(1, 128, 128)
    codes[0, :9] = 7
    projection = prepare(codes, as_form(spanning(1, 128, 128, 110, 8), "e8m0")).gate_up
    assert projection.scale.tolist() == [[[2.0 ** (118 - BIAS)]]]
    assert projection.weight[0, 8].tolist()[:32] == [6.0] * 32


@pytest.mark.parametrize("form", SCALE_FORMS)
@pytest.mark.parametrize("far", [0, 15, 254])
def test_scales_of_groups_that_are_zero_do_not_count(far: int, form: str) -> None:
    codes = random_codes(2, 128, 256)
    scale_codes = torch.full((2, 128, 8), 130)
    codes[1, 7, 32:64] &= 8  # zeros of either sign
    scale_codes[1, 7, 1] = far
    projection = prepare(codes, as_form(scale_codes, form)).gate_up
    expected = dequantized(codes, scale_codes)
    assert torch.equal(folded(projection), expected)
    assert torch.equal(projection.weight.double().signbit(), expected.signbit())


def test_a_block_of_zeros_has_a_scale_of_one() -> None:
    codes = random_codes(1, 256, 128)
    codes[0, 128:] = 0
    scale_codes = spanning(1, 256, 128, 60, 190)
    scale_codes = torch.cat([scale_codes[:, :128].clamp(60, 70), scale_codes[:, 128:]], 1)
    projection = prepare(codes, as_form(scale_codes, "uint8")).gate_up
    assert projection.scale[0, 1].tolist() == [1.0]
    assert torch.equal(folded(projection), dequantized(codes, scale_codes))


def test_a_float32_scale_of_zero_makes_zeros() -> None:
    codes = random_codes(1, 128, 64)
    scale = torch.full((1, 128, 2), 2.0**-5)
    scale[0, 3, 1] = 0.0
    projection = prepare(codes, scale).gate_up
    expected = dequantized(codes, torch.full((1, 128, 2), BIAS - 5))
    expected[0, 3, 32:] = 0
    assert torch.equal(folded(projection), expected)


@pytest.mark.parametrize("form", SCALE_FORMS)
def test_a_span_of_15_binades_is_refused_by_expert_and_block_and_changes_nothing(form: str) -> None:
    codes = random_codes(3, 288, 416) | 1  # no zeros
    scale_codes = torch.full((3, 288, 13), 100)
    scale_codes[2, 130, 12], scale_codes[2, 255, 12] = 92, 107
    wide = pack(codes), as_form(scale_codes, form)
    before = [tensor.view(torch.uint8).clone() for tensor in wide]
    down = torch.ones((3, 416, 144)).to(torch.float8_e4m3fn), torch.ones((3, 4, 2))
    with pytest.raises(UnsupportedError, match=r"gate_up: .* expert 2 span 15 binades inside block \(1, 3\).*at most 14"):
        ops.prepare_experts(wide[0], down[0], wide[1], down[1])
    up = pack(random_codes(3, 832, 288)), torch.ones((3, 832, 9))
    with pytest.raises(UnsupportedError, match=r"down: .* expert 2 span 15 binades inside block \(1, 3\).*at most 14"):
        ops.prepare_experts(up[0], wide[0], up[1], wide[1])
    assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(wide, before, strict=True))


def test_spans_across_blocks_are_free() -> None:
    codes = random_codes(2, 256, 256)
    rows = torch.tensor([10, 240]).repeat_interleave(128)
    scale_codes = torch.stack([rows[:, None].expand(256, 8), rows.flip(0)[:, None].expand(256, 8)])
    assert torch.equal(folded(prepare(codes, as_form(scale_codes, "e8m0")).gate_up), dequantized(codes, scale_codes))


@pytest.mark.parametrize("packed_columns", [45, 4, 12])
def test_columns_that_are_no_multiple_of_16_are_refused(packed_columns: int) -> None:
    k = 2 * packed_columns
    packed = torch.zeros((1, 32, packed_columns), dtype=torch.int8)
    down = torch.zeros((1, k, 16)).to(torch.float8_e4m3fn)
    with pytest.raises(OperandError, match=rf"K = H = {k} \({packed_columns} bytes of two values\).*multiple of 16"):
        ops.prepare_experts(packed, down, torch.ones((1, 32, -(-k // 32))), torch.ones((1, 1, 1)))


def test_an_odd_hidden_size_is_refused() -> None:
    packed = torch.zeros((1, 32, 16), dtype=torch.int8)
    down = torch.zeros((1, 33, 16)).to(torch.float8_e4m3fn)
    with pytest.raises(OperandError, match="K = 32 columns and down N = 33 rows"):
        ops.prepare_experts(packed, down, torch.ones((1, 32, 1)), torch.ones((1, 1, 1)))


@pytest.mark.parametrize("bad", [1.5, -2.0, 2.0**-128, 3e-44])
def test_a_float32_scale_that_is_no_power_of_two_is_refused(bad: float) -> None:
    scale = torch.ones((2, 128, 4))
    scale[1, 9, 2] = bad
    with pytest.raises(OperandError, match=r"gate_up_scale is .* at expert 1, block \(9, 2\).*powers of two"):
        prepare(random_codes(2, 128, 128), scale)


def test_nan_in_a_ue8m0_scale_is_refused() -> None:
    scale = torch.full((2, 128, 4), BIAS, dtype=torch.uint8)
    scale[1, 9, 2] = 255
    with pytest.raises(OperandError, match=r"gate_up_scale is NaN \(UE8M0 byte 255\) at expert 1, block \(9, 2\)"):
        prepare(random_codes(2, 128, 128), scale)


def test_block_sizes_are_those_of_fp8_weights_and_do_not_matter() -> None:
    packed = pack(random_codes(1, 128, 64)), pack(random_codes(1, 64, 64))
    scales = torch.ones((1, 128, 2)), torch.ones((1, 64, 2))
    for block_size in ((128, 128), None, (1, 32), [64, 128]):
        experts = ops.prepare_experts(*packed, *scales, block_size=block_size)
        assert (experts.gate_up.scale_kind, experts.hidden_size, experts.intermediate_size) == ("block", 64, 64)


def test_transposed_fp4_is_refused() -> None:
    packed = torch.zeros((1, 32, 16), dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="transposed"):
        ops.prepare_experts(packed, packed, torch.ones((1, 32, 1)), torch.ones((1, 32, 1)), transposed=True)


# --- what a forward of few tokens reads


def test_fragments_are_kept_beside_the_folded_copy() -> None:
    codes, scale = random_codes(2, 288, 208), as_form(spanning(2, 288, 208, 100, 3), "uint8")
    experts = prepare(codes, scale, "fp4")
    assert not prepare(codes, scale, "auto").decodes_fp4  # on a CPU, where no forward reads them
    folded_only = prepare(codes, scale, "fp8")
    fragments = experts.gate_up.fragments
    assert fragments is not None and torch.equal(fragments, fp4.pack_fragments(pack(codes), scale))
    assert (experts.decodes_fp4, folded_only.decodes_fp4) == (True, False)
    assert folded_only.gate_up.fragments is experts.down.fragments is None
    assert experts.added_bytes == folded_only.added_bytes + 2 * 6 * 2 * 4352
    assert torch.equal(experts.gate_up.weight.view(torch.uint8), folded_only.gate_up.weight.view(torch.uint8))


def test_scales_beyond_what_fragments_hold_are_read_from_the_folded_copy() -> None:
    codes, scale = random_codes(2, 128, 64) | 1, torch.full((2, 128, 2), 240, dtype=torch.uint8)
    scale[1, 7, 1] = 242
    assert not prepare(codes, scale).decodes_fp4
    with pytest.raises(UnsupportedError, match=r"decode = 'fp4'.*above 2\^114 in gate_up at \(1, 7, 1\)"):
        prepare(codes, scale, "fp4")
    scale[1, 7, 1] = 241
    assert prepare(codes, scale, "fp4").decodes_fp4


def test_fp8_weights_have_no_fragments() -> None:
    weights = torch.ones((1, 32, 16)).to(torch.float8_e4m3fn), torch.ones((1, 16, 16)).to(torch.float8_e4m3fn)
    scales = torch.ones((1, 1, 1)), torch.ones((1, 1, 1))
    assert not ops.prepare_experts(*weights, *scales).decodes_fp4
    with pytest.raises(OperandError, match=r"decode = 'fp4' needs FP4 weights .*gate_up is torch.float8_e4m3fn and down is"):
        ops.prepare_experts(*weights, *scales, decode="fp4")


def test_fragments_that_nothing_would_read_are_refused() -> None:
    codes, scale = random_codes(1, 32, 64), as_form(spanning(1, 32, 64, 100, 3), "uint8")
    down, down_scale = torch.ones((1, 64, 16)).to(torch.float8_e4m3fn), torch.ones((1, 64, 1))
    given = pack(codes), down, scale, down_scale
    assert not ops.prepare_experts(*given, block_size=(1, 128)).decodes_fp4
    with pytest.raises(
        OperandError, match="needs a scale per block or FP4 in both, and gate_up .* per block and down .* per row"
    ):
        ops.prepare_experts(*given, block_size=(1, 128), decode="fp4")


def test_every_wrong_word_is_listed_at_once() -> None:
    packed = torch.zeros((1, 32, 8), dtype=torch.int8)
    with pytest.raises(OperandError) as caught:
        ops.prepare_experts(
            packed, packed[:, :16], torch.ones((1, 32, 1)), torch.ones((1, 16, 1)),
            gate_up_blocks="beside", decode="fp5",  # type: ignore[arg-type]
        )  # fmt: skip
    assert caught.value.faults == (
        "gate_up_blocks = 'beside' must be 'together' or 'apart'",
        "decode = 'fp5' must be 'auto' or 'fp4' or 'fp8'",
    )


@pytest.mark.parametrize(
    ("pairs", "families"),
    [(1, {FP4_GEMM_SWAP_AB}), (8, {FP4_GEMM_SWAP_AB}), (128, {FP4_GEMM_SWAP_AB}), (4096, {FP8_GEMM, FP8_GEMM_SWAP_AB})],
)
def test_fragments_are_read_while_the_rows_of_an_expert_are_few(pairs: int, families: set[str]) -> None:
    experts = prepare(random_codes(32, 256, 128), torch.ones((32, 256, 4)), "fp4")
    up = experts.gate_up
    kept = half_for(up.weight, up.scale, None, pairs, False, False, True, up.fragments)
    folded_only = half_for(up.weight, up.scale, None, pairs, False, False, True)
    assert select(kept.problem, limits_of("sm_90a")).family in families
    assert select(folded_only.problem, limits_of("sm_90a")).family in {FP8_GEMM, FP8_GEMM_SWAP_AB}
    if kept.scale is None:
        assert up.fragments is not None
        assert kept.weight == (up.fragments.data_ptr(), 4 * 4352, 4352)

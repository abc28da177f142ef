"""FP4 fragments: every weight where the tensor core wants it, as the kernel unpacks it, and nothing lost on the way."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.experts_reference import e2m1_values, scale_values

from deepgemm_jit.ops import fp4

pytestmark = pytest.mark.none

ROWS, COLUMNS, GROUP = 64, 128, 32
HALF_BYTES, VALUES_BYTES, FRAGMENT_BYTES = 2048, 4096, 4352
REST = 32.0
BIAS = 127


def weights(count: int, n: int, k: int, seed: int, lowest: int = 0, highest: int = 241) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw FP4 weights, zeros of both signs and groups of nothing else among them, and UE8M0 scales of any size."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (count, n, k // 2), generator=draw, dtype=torch.uint8)
    groups = -(-k // GROUP)
    signs_only = torch.rand((count, n, groups), generator=draw) < 0.1
    wide = signs_only.repeat_interleave(GROUP // 2, -1)[..., : k // 2]
    packed = torch.where(wide, packed & 0x88, packed)
    scale = torch.randint(lowest, highest + 1, (count, n, groups), generator=draw, dtype=torch.uint8)
    return packed.view(torch.int8), scale


def dequantized(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return e2m1_values(packed) * scale_values(scale).repeat_interleave(GROUP, -1)[..., : 2 * packed.shape[-1]]


# --- the kernel in numpy: what a thread reads, how it unpacks it, and where the tensor core takes it to lie


def registers(fragment: np.ndarray) -> np.ndarray:
    """Return (thread, group, register) words of four E4M3, as ``Fp4GemmSwapAb`` makes them of a fragment."""
    out = np.zeros((128, 4, 4), dtype=np.uint32)
    for half in range(2):
        for thread in range(128):
            start = half * HALF_BYTES + thread * 16
            words = fragment[start : start + 16].view("<u4")
            for place, word in enumerate(words):
                group, pair = 2 * half + place // 2, place % 2 * 2
                out[thread, group, pair] = word & np.uint32(0x9C9C9C9C)
                out[thread, group, pair + 1] = ((word << np.uint32(2)) & np.uint32(0x8C8C8C8C)) | (
                    (word >> np.uint32(2)) & np.uint32(0x10101010)
                )
    return out


def powers(fragment: np.ndarray) -> np.ndarray:
    """Return (thread, row of two, group) float32: the word's byte, moved to where a float has its exponent."""
    words = fragment[VALUES_BYTES:].view("<u4").reshape(32, 2)[np.arange(128) // 4]
    shifted = [words << np.uint32(23), words << np.uint32(15), words << np.uint32(7), words >> np.uint32(1)]
    return (np.stack(shifted, -1) & np.uint32(0x7F800000)).view(np.float32)


def multiplied(fragment: np.ndarray) -> np.ndarray:
    """Return the 64 x 128 weights that a fragment stands for, float64.

    PTX ISA, wgmma with A in registers, 8-bit types: register a of thread t holds columns (t % 4) * 4 to + 3, from 16 on for a of
    2 and 3, of row 16 * (t / 32) + t % 32 / 4, and of the row 8 below for a of 1 and 3.
    """
    words, scales = registers(fragment), powers(fragment).astype(np.float64)
    values = torch.from_numpy(words.view(np.uint8).copy()).view(torch.float8_e4m3fn).double().numpy().reshape(128, 4, 4, 4)
    out = np.full((ROWS, COLUMNS), np.nan)
    for thread in range(128):
        for register in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
            for group in range(4):
                first = group * GROUP + register // 2 * 16 + thread % 4 * 4
                out[row, first : first + 4] = values[thread, group, register] * scales[thread, register % 2, group] * REST
    return out


@given(
    n=st.integers(1, 20).map(lambda tiles: 16 * tiles),
    k=st.integers(1, 20).map(lambda tiles: 16 * tiles),
    count=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None)
def test_the_tensor_core_gets_every_weight_with_its_scale(count: int, n: int, k: int, seed: int) -> None:
    packed, scale = weights(count, n, k, seed)
    fragments = fp4.pack_fragments(packed, scale)
    row_blocks, k_blocks = 2 * -(-n // 128), -(-k // COLUMNS)
    assert (fragments.shape, fragments.dtype) == ((count, row_blocks, k_blocks, FRAGMENT_BYTES), torch.uint8)
    assert fragments.shape == fp4.fragments_shape(count, n, k) and fragments.is_contiguous()
    expected = np.zeros((count, row_blocks * ROWS, k_blocks * COLUMNS))
    expected[:, :n, :k] = dequantized(packed, scale).numpy()
    for expert in range(count):
        for row in range(row_blocks):
            for column in range(k_blocks):
                part = expected[expert, row * ROWS : (row + 1) * ROWS, column * COLUMNS : (column + 1) * COLUMNS]
                np.testing.assert_array_equal(multiplied(fragments[expert, row, column].numpy()), part)


def test_every_code_keeps_its_sign_also_that_of_zero() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).repeat(1, 64, 1)[..., :64]
    packed = torch.cat([packed, torch.arange(64, 128, dtype=torch.uint8).view(torch.int8).repeat(1, 64, 1)], 1)
    fragments = fp4.pack_fragments(packed, torch.full((1, 128, 4), BIAS, dtype=torch.uint8))
    for row in range(2):
        got = multiplied(fragments[0, row, 0].numpy())
        expected = e2m1_values(packed[0, row * ROWS : (row + 1) * ROWS]).numpy()
        np.testing.assert_array_equal(got, expected)
        signs = registers(fragments[0, row, 0].numpy()).view(np.uint8) >> 7
        assert (
            signs.sum()
            == (packed[0, row * ROWS : (row + 1) * ROWS].view(torch.uint8).long() & 0x8 > 0).sum()
            + (packed[0, row * ROWS : (row + 1) * ROWS].view(torch.uint8).long() & 0x80 > 0).sum()
        )


@pytest.mark.parametrize("exponent", [-127, -126, 0, 113, 114])
def test_the_smallest_and_the_largest_scales_are_exact(exponent: int) -> None:
    packed, _ = weights(1, 64, 128, 7)
    scale = torch.full((1, 64, 4), exponent + BIAS, dtype=torch.uint8)
    fragment = fp4.pack_fragments(packed, scale)[0, 0, 0].numpy()
    np.testing.assert_array_equal(multiplied(fragment), dequantized(packed, scale)[0].numpy())


def test_float_scales_give_the_same_bytes_and_zero_is_zero() -> None:
    packed, scale = weights(2, 48, 80, 3, lowest=100, highest=140)
    as_float = torch.exp2(scale.double() - BIAS).float()
    assert torch.equal(fp4.pack_fragments(packed, as_float), fp4.pack_fragments(packed, scale))
    assert torch.equal(fp4.pack_fragments(packed, scale.view(torch.float8_e8m0fnu)), fp4.pack_fragments(packed, scale))
    as_float[1] = 0
    fragments = fp4.pack_fragments(packed, as_float)
    assert not any(multiplied(part.numpy()).any() for part in fragments[1].flatten(0, 1))


def test_what_is_filled_up_stands_for_zero() -> None:
    packed, scale = weights(1, 16, 16, 5)
    fragments = fp4.pack_fragments(packed, scale)
    assert not fragments[0, 1].any()
    assert not multiplied(fragments[0, 0, 0].numpy())[16:].any()


def test_a_scale_beyond_what_fragments_hold_is_found() -> None:
    packed, scale = weights(2, 32, 64, 11, lowest=235)
    packed[1, 5, 16:] = 0x11
    packed[0, 3, :16] = -0x78  # zeros: whatever their scale
    scale[1, 5, 1], scale[0, 3, 0] = 242, 254
    assert fp4.try_beyond_fragments(fp4.plan_fold("gate_up", packed, scale)) == (1, 5, 1)
    scale[1, 5, 1] = 241
    assert fp4.try_beyond_fragments(fp4.plan_fold("gate_up", packed, scale)) is None

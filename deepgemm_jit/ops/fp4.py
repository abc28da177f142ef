"""FP4 weights for GPUs that multiply FP8 and not FP4: folded exactly into FP8, or in fragments that a GEMM unpacks as it goes.

An FP4 weight is e2m1 values with one power of two per row and 32 columns. Times 2^d, an e2m1 value is an E4M3 value for every
d from -8 (0.5 becomes 2^-9, the smallest subnormal) to 6 (6 becomes 384, below the largest, 448). So the scales inside of a
block of 128 x 128 go into its values as long as they span at most 14 binades, and one power of two for the block is left over.

Fragments keep the four bits of a value and the byte of its power of two, in the order in which the threads of
``kernels_src/include/dj/kernels/fp4_gemm_swap_ab.cuh`` want them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.ops.checks import SCALE_BLOCK, ceil_div
from deepgemm_jit.ops.ue8m0 import BIAS, codes_of, float_from_ue8m0, try_first
from deepgemm_jit.spec.kernel_set import FRAGMENT, FRAGMENT_BYTES

GROUP = 32
"""Columns that share a scale."""
MAX_SPAN = 14
MAX_FRAGMENT_EXPONENT = 114
"""Of a power of two in fragments: a block's sum under a larger one, without the scale of its token, might not be finite."""

_LOWEST_SHIFT, _HIGHEST_SHIFT = -8, 6
_ZEROS = _HIGHEST_SHIFT - _LOWEST_SHIFT + 1
"""The row of the table for groups that are zero as a whole: it keeps nothing but signs."""
_UNUSED = -1
_GROUP_BYTES = GROUP // 2
_BLOCK_GROUPS = SCALE_BLOCK // GROUP
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE_BITS = 0x77
"""Of a byte with two e2m1 values: all but their signs."""


class Fold(NamedTuple):
    """How the scales of one FP4 weight are divided between its values and its blocks; exponents are UE8M0 bytes."""

    groups: torch.Tensor
    """(E, N, ceil(K / 32)) int16, -1 where all values of a group are zero."""
    blocks: torch.Tensor
    """(E, ceil(N / 128), ceil(K / 128)) int16."""


def plan_fold(name: str, packed: torch.Tensor, scale: torch.Tensor) -> Fold:
    """Find the exponent of each block, an expert at a time, without writing anything but the plan. Waits for the device.

    Args:
        name: of the weight, for refusals.
        packed: (E, N, K / 2) int8, two e2m1 values a byte, the lower four bits first.
        scale: (E, N, ceil(K / 32)) UE8M0 bytes without NaN, or float32 that are powers of two or zero.

    Raises:
        UnsupportedError: scales inside of a block span more than 14 binades; the first such expert and block are named.
    """
    count, n, _ = packed.shape
    group_count = scale.shape[-1]
    blocks_shape = (count, ceil_div(n, SCALE_BLOCK), ceil_div(group_count, _BLOCK_GROUPS))
    groups = torch.empty((count, n, group_count), dtype=torch.int16, device=packed.device)
    blocks, spans = (torch.empty(blocks_shape, dtype=torch.int16, device=packed.device) for _ in range(2))
    for expert in range(count):
        groups[expert] = _groups(packed[expert], scale[expert])
        tiled = _tile(groups[expert], *blocks_shape[1:])
        highest = tiled.amax((1, 3))
        lowest = tiled.masked_fill(tiled == _UNUSED, torch.iinfo(torch.int16).max).amin((1, 3))
        empty = highest == _UNUSED
        spans[expert] = (highest - lowest).masked_fill(empty, 0)
        # Values keep their size where they can: the block takes its highest exponent while the lowest is within 8 of it.
        blocks[expert] = torch.minimum(highest, lowest.clamp(max=BIAS * 2) - _LOWEST_SHIFT).masked_fill(empty, BIAS)
    _refuse_wide(name, spans)
    return Fold(groups, blocks)


def fold(packed: torch.Tensor, plan: Fold) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E, N, K) float8_e4m3fn and (E, ceil(N / 128), ceil(K / 128)) float32 powers of two that equal the FP4 weight.

    The sign of every zero is kept.
    """
    count, n, k_bytes = packed.shape
    table = _table(packed.device)
    values = torch.empty((count, n, 2 * k_bytes), dtype=torch.float8_e4m3fn, device=packed.device)
    for expert in range(count):
        groups = plan.groups[expert].int()
        wide = plan.blocks[expert].int().repeat_interleave(SCALE_BLOCK, 0)[:n]
        wide = wide.repeat_interleave(_BLOCK_GROUPS, 1)[:, : groups.shape[1]]
        rows = (groups - wide - _LOWEST_SHIFT).masked_fill(groups == _UNUSED, _ZEROS)
        index = (rows << 8).repeat_interleave(_GROUP_BYTES, 1)[:, :k_bytes] + packed[expert].view(torch.uint8)
        pairs = table.index_select(0, index.flatten())
        values[expert].view(torch.uint8).copy_(pairs.view(torch.uint8).view(n, 2 * k_bytes))
    return values, float_from_ue8m0(plan.blocks.to(torch.uint8))


def try_beyond_fragments(plan: Fold) -> tuple[int, ...] | None:
    """Return the index of the first group whose power of two is too large for fragments, or None. Waits for the device."""
    return try_first(plan.groups > BIAS + MAX_FRAGMENT_EXPONENT)


def fit_fragments(scale: torch.Tensor) -> bool:
    """Return whether no power of two of UE8M0 bytes or float32 is too large for fragments. Waits for the device."""
    codes, nonzero = _codes(scale)
    return not bool(((codes > BIAS + MAX_FRAGMENT_EXPONENT) & nonzero).any())


def fragments_shape(count: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Return the shape of the fragments of (E, N, K) weights: rows are filled up to multiples of 128, columns too."""
    rows, columns = FRAGMENT
    return count, SCALE_BLOCK // rows * ceil_div(n, SCALE_BLOCK), ceil_div(k, columns), FRAGMENT_BYTES


def pack_fragments(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return FP4 weights in the order in which the FP4 GEMM reads them, an expert at a time.

    A fragment is 64 rows x 128 columns. Its bytes are [half][thread][group][columns 16][column], then [row of 8][rows 8][group]
    with the powers of two: a warp has 16 rows, a thread rows ``lane / 4`` and that + 8, of each 16 columns the four from
    ``lane % 4 * 4`` on. A byte has both rows of a column, the first in the bits in which E4M3 wants it.

    Args:
        packed: (E, N, K / 2) int8, two e2m1 values a byte, the lower four bits first.
        scale: (E, N, ceil(K / 32)) UE8M0 bytes up to that of 2^114, or float32 that are powers of two or zero.

    Returns:
        (E, 2 * ceil(N / 128), ceil(K / 128), 4352) uint8. A power of two is stored as its UE8M0 byte + 1, and 0 stands for zero.
    """
    count, n, k_bytes = packed.shape
    shape = fragments_shape(count, n, 2 * k_bytes)
    _, row_blocks, k_blocks, _ = shape
    fragments = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    more_rows, more_bytes = row_blocks * FRAGMENT[0] - n, k_blocks * FRAGMENT[1] // 2 - k_bytes
    values_end = FRAGMENT[0] * FRAGMENT[1] // 2
    for expert in range(count):
        pairs = torch.nn.functional.pad(packed[expert].view(torch.uint8), (0, more_bytes, 0, more_rows))
        codes = torch.stack([pairs & 0xF, pairs >> 4], -1)
        # (row blocks, warps, halves of 8 rows, rows, k-blocks, halves, groups, columns 16, threads of a row, columns)
        codes = codes.view(row_blocks, 4, 2, 8, k_blocks, 2, 2, 2, 4, 4)
        words = _interleave(codes[:, :, 0], codes[:, :, 1]).permute(0, 3, 4, 1, 2, 7, 5, 6, 8)
        powers = (_groups(packed[expert], scale[expert]) + 1).to(torch.uint8)
        powers = torch.nn.functional.pad(powers, (0, k_blocks * _BLOCK_GROUPS - powers.shape[1], 0, more_rows))
        powers = powers.view(row_blocks, 4, 2, 8, k_blocks, _BLOCK_GROUPS).permute(0, 4, 1, 3, 2, 5)
        fragments[expert, :, :, :values_end] = words.reshape(row_blocks, k_blocks, -1)
        fragments[expert, :, :, values_end:] = powers.reshape(row_blocks, k_blocks, -1)
    return fragments


def try_inexact(scale: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first float32 scale that is neither a power of two nor zero, or None. Waits for the device."""
    _, exact = codes_of(scale)
    return try_first(~(exact | (scale == 0)))


def _interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a byte for each pair of e2m1 codes; the kernel takes them apart again (``unpack``)."""
    # E4M3 has the sign in bit 7, and the value's other bits go to bits 4 to 2: the first code lies there, the second between.
    ours = (first & 8) << 4 | (first & 7) << 2
    return ours | (second & 8) << 2 | (second & 4) << 4 | (second & 3)


def _groups(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the UE8M0 bytes of an expert's groups as (N, ceil(K / 32)) int16, -1 where all values of a group are zero."""
    (n, k_bytes), group_count = packed.shape, scale.shape[-1]
    codes, nonzero = _codes(scale)
    magnitudes = packed.view(torch.uint8) & _MAGNITUDE_BITS
    magnitudes = torch.nn.functional.pad(magnitudes, (0, group_count * _GROUP_BYTES - k_bytes))
    used = (magnitudes.view(n, group_count, _GROUP_BYTES) != 0).any(-1) & nonzero
    return codes.short().masked_fill(~used, _UNUSED)


def _codes(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return UE8M0 bytes, and which scales are not zero."""
    if scale.dtype == torch.float32:
        return codes_of(scale)[0], scale != 0
    codes = scale.view(torch.uint8)
    return codes, torch.ones_like(codes, dtype=torch.bool)


def _tile(groups: torch.Tensor, row_blocks: int, column_blocks: int) -> torch.Tensor:
    """Return (N, groups) as (row blocks, 128, column blocks, 4), ragged ends filled up with unused groups."""
    n, group_count = groups.shape
    padding = (0, column_blocks * _BLOCK_GROUPS - group_count, 0, row_blocks * SCALE_BLOCK - n)
    padded = torch.nn.functional.pad(groups, padding, value=_UNUSED)
    return padded.view(row_blocks, SCALE_BLOCK, column_blocks, _BLOCK_GROUPS)


def _table(device: torch.device) -> torch.Tensor:
    """Return the two E4M3 bytes, as int16, of each byte of two e2m1 values under each shift: entry ``row * 256 + byte``."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32)
    shifts = torch.arange(_LOWEST_SHIFT, _HIGHEST_SHIFT + 1, dtype=torch.float32).exp2()
    factors = torch.cat([shifts, torch.zeros(1)])  # the last row: zeros
    values = torch.cat([magnitudes, -magnitudes]) * factors[:, None]
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    byte = torch.arange(256)
    pairs = torch.stack([codes[:, byte & 0xF], codes[:, byte >> 4]], -1)
    return pairs.view(torch.int16).flatten().to(device)


def _refuse_wide(name: str, spans: torch.Tensor) -> None:
    index = try_first(spans > MAX_SPAN)
    if index is None:
        return
    expert, row, column = index
    raise UnsupportedError(
        given=(
            f"{name}: the FP4 scales of expert {expert} span {int(spans[index])} binades inside block ({row}, {column}), which "
            f"starts at row {row * SCALE_BLOCK}, column {column * SCALE_BLOCK}"
        ),
        supported=f"at most {MAX_SPAN} binades inside a block of 128 x 128, which E4M3 holds exactly; nothing was changed",
        advice="Dequantize these experts to bfloat16 and run them without quantization",
    )

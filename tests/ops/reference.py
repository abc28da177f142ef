"""Operands drawn at random, the float64 result they stand for, the tolerance, and memory in which stray writes show.

Dequantized value = stored value x scale. Sizes: A is (M, K) with scales per row and 128 columns, B is (N, K) with scales per
block of 128 x 128, D = A @ B.T is (M, N) bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_MAGNITUDE = 1e-4
SCALE_BLOCK = 128

FROBENIUS_LIMIT = 2e-3
FROBENIUS_ELEMENTS = 512
"""Rounding to bfloat16 alone gives 1.7e-3 on the average, and more than the limit where few elements are averaged. They count by
what they weigh: of rows whose scales differ widely, few make the norm."""
ELEMENT_LIMIT = 2.0**-7
ROW_LIMIT = 2.0**-9

SENTINEL = 0x7FA5
"""A bfloat16 NaN that no kernel of ours makes: results are rounded sums, whose NaN is canonical."""
GUARD_ROWS = 16


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


# --- casts


def cast_rows(x: torch.Tensor, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast (..., M, K) to FP8 with one float32 scale per row and 128 columns; row-major scales (..., M, ceil(K / 128))."""
    k = x.shape[-1]
    blocks = ceil_div(k, SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * SCALE_BLOCK - k)).unflatten(-1, (blocks, SCALE_BLOCK))
    scales = scales_for(padded.abs().amax(-1), use_ue8m0)
    values = (padded / scales[..., None]).flatten(-2)[..., :k]
    return values.to(E4M3).contiguous(), scales


def cast_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast (..., N, K) to FP8 with one float32 scale per 128 x 128; scales (..., ceil(N / 128), ceil(K / 128))."""
    n, k = x.shape[-2:]
    rows, columns = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, columns * SCALE_BLOCK - k, 0, rows * SCALE_BLOCK - n))
    tiled = padded.unflatten(-1, (columns, SCALE_BLOCK)).unflatten(-3, (rows, SCALE_BLOCK))
    scales = scales_for(tiled.abs().amax((-3, -1)), use_ue8m0=False)
    values = (tiled / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    return values[..., :n, :k].to(E4M3).contiguous(), scales


def scales_for(largest: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """Return the scales of blocks of the given largest magnitudes: clamped first, then rounded up to powers of two if asked."""
    clamped = torch.where(largest < SMALLEST_MAGNITUDE, torch.full_like(largest, SMALLEST_MAGNITUDE), largest)
    # By a tensor: torch turns a division by a number into a product with its reciprocal on a GPU, which rounds otherwise.
    scales = clamped / torch.full_like(clamped, E4M3_MAX)
    if not use_ue8m0:
        return scales
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return torch.where(scales.isfinite(), (exponents << 23).view(torch.float32), scales)


def m_major(scales: torch.Tensor) -> torch.Tensor:
    """Return (..., M, K blocks) scales M-major, columns padded to 16 bytes; the padding holds NaN."""
    *groups, m, columns = scales.shape
    pitch = round_up(max(m, 1), 4)
    storage = scales.new_full((*groups, columns, pitch), torch.nan)
    turned = storage.transpose(-1, -2)[..., :m, :]
    turned.copy_(scales)
    return turned


# --- operands


@dataclass(frozen=True, slots=True)
class Scaled:
    """FP8 values and their float32 scales; an index takes a part of both: rows of A, or a group."""

    values: torch.Tensor
    scales: torch.Tensor

    def __getitem__(self, part: int | slice) -> Scaled:
        return Scaled(self.values[part], self.scales[part])

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scales


def random_a(*shape: int, device: torch.device | str = "cuda") -> Scaled:
    """Draw (..., M, K) activations, cast per row and 128 columns; row-major scales.

    Rows differ in size, so that a scale of another row shows, but by a factor of three at most: a few large rows would decide
    the Frobenius norm of a group, and rounding would no longer average out.
    """
    x = torch.randn(shape, device=device)
    return Scaled(*cast_rows(x * (0.5 + torch.rand((*shape[:-1], 1), device=device))))


def random_b(*shape: int, device: torch.device | str = "cuda") -> Scaled:
    """Draw (..., N, K) weights, cast per 128 x 128 block."""
    return Scaled(*cast_blocks(torch.randn(shape, device=device) * 0.05))


def poison_rows(a: Scaled, valid: torch.Tensor) -> Scaled:
    """Return A with every row that is not valid filled with 0xFF bytes (an E4M3 NaN) and NaN scales."""
    values, scales = a.values.clone(), a.scales.clone()
    values.view(torch.uint8)[~valid] = 0xFF
    scales[~valid] = torch.nan
    return Scaled(values, scales)


def clean_rows(a: Scaled, valid: torch.Tensor) -> Scaled:
    """Return A with every row that is not valid filled with zeros, scales included."""
    values, scales = a.values.clone(), a.scales.clone()
    values.view(torch.uint8)[~valid] = 0
    scales[~valid] = 0
    return Scaled(values, scales)


# --- float64 reference


def dequantize(values: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Return (rows, K) FP8 values times their scales in float64."""
    rows, k = values.shape
    wide = scales.double().repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return values.double() * (wide if block_rows == 1 else wide.repeat_interleave(block_rows, 0)[:rows])


def product(a: Scaled, b: Scaled, rows_at_once: int = 4096) -> torch.Tensor:
    """Return A @ B.T of one group in float64, computed where the operands are."""
    right = dequantize(b.values, b.scales, SCALE_BLOCK).T
    out = torch.empty((a.values.shape[0], b.values.shape[0]), dtype=torch.float64, device=a.values.device)
    for first in range(0, out.shape[0], rows_at_once):
        rows = slice(first, first + rows_at_once)
        torch.mm(dequantize(a.values[rows], a.scales[rows], 1), right, out=out[rows])
    return out


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of the reference."""
    return float((out.double() - reference).norm() / reference.norm())


def assert_close(out: torch.Tensor, reference: torch.Tensor, what: str = "") -> None:
    """Fail unless one group's (rows, N) output is within the tolerance of its float64 reference.

    A group that weighs as much as 512 normal elements may differ by 2e-3 in the Frobenius norm; every element of any group by
    2^-7 of its own magnitude plus 2^-9 of the largest magnitude of its row.
    """
    assert out.shape == reference.shape, f"{what}: shape {tuple(out.shape)}, not {tuple(reference.shape)}"
    if reference.numel() == 0:
        return
    assert reference.isfinite().all() and reference.any(), f"{what}: a reference that tests nothing"
    magnitude = reference.abs()
    bound = ELEMENT_LIMIT * magnitude + ROW_LIMIT * magnitude.amax(-1, keepdim=True)
    wrong = ~((out.double() - reference).abs() <= bound)  # also where out is NaN
    if wrong.any():
        rows, columns = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off, in {len(rows)} rows ({int(rows[0])} to "
            f"{int(rows[-1])}) and {len(columns)} columns ({int(columns[0])} to {int(columns[-1])}); the first, "
            f"[{row}, {column}], is {float(out[row, column])!r} where {float(reference[row, column])!r} is right"
        )
    squares = (reference / magnitude.amax()) ** 2
    # The same as their number where elements are normally distributed, whose fourth moment is three times the variance squared.
    if 3 * squares.sum() ** 2 / (squares**2).sum() >= FROBENIUS_ELEMENTS:
        error = relative_error(out, reference)
        assert error <= FROBENIUS_LIMIT, f"{what}: relative error {error:.3e} of {reference.numel()} elements"


# --- groups


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows of all groups one after another, each group starting at a multiple of the alignment."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    total: int

    @property
    def slices(self) -> list[slice]:
        return [slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True)]

    def m_indices(self, device: torch.device | str = "cuda") -> torch.Tensor:
        """Return the group of each row, -1 for padding."""
        indices = torch.full((self.total,), -1, dtype=torch.int32)
        for group, rows in enumerate(self.slices):
            indices[rows] = group
        return indices.to(device)

    def ends(self, device: torch.device | str = "cuda") -> torch.Tensor:
        """Return the end row of each group."""
        return torch.tensor([rows.stop for rows in self.slices], dtype=torch.int32, device=device)

    def tails(self, tile_rows: int, device: torch.device | str = "cuda") -> torch.Tensor:
        """Return which rows lie after a group's end but in its last tile: those that may hold anything after a call."""
        tails = torch.zeros(self.total, dtype=torch.bool)
        for rows in self.slices:
            tails[rows.stop : rows.start + round_up(rows.stop - rows.start, tile_rows)] = True
        return tails.to(device)

    def valid(self, device: torch.device | str = "cuda") -> torch.Tensor:
        """Return which rows belong to a group."""
        return self.m_indices(device) >= 0


def group_rows(sizes: Sequence[int], alignment: int = 128, *, extra_rows: int = 0, ragged_end: bool = False) -> GroupedRows:
    """Place groups of the given sizes.

    Args:
        sizes: rows of each group; 0 is an empty group.
        alignment: multiple of rows at which groups start.
        extra_rows: rows of no group after the last one's padding.
        ragged_end: leave out the padding of the last group.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(round_up(end, alignment))
        end = starts[-1] + size
    return GroupedRows(tuple(sizes), tuple(starts), (end if ragged_end else round_up(end, alignment)) + extra_rows)


def every_third_block_idle(block_m: int) -> GroupedRows:
    """Place groups of one row block each, and rows of no group in every third block: more blocks than any GPU has SMs."""
    starts = tuple(block_m * at for at in range(180) if at % 3)
    return GroupedRows((block_m,) * len(starts), starts, 180 * block_m)


def used_rows(counts: Sequence[int], max_m: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """Return (groups, max_m) flags: which rows of each group a mask uses."""
    return torch.arange(max_m, device=device) < torch.tensor(counts, device=device)[:, None]


# --- outputs


class Output:
    """A bfloat16 output, (..., rows, N), in the middle of memory filled with a pattern.

    Args:
        shape: of the output.
        row_gap: elements between the end of a row and the start of the next, a multiple of 8.
    """

    def __init__(self, *shape: int, row_gap: int = 0, device: torch.device | str = "cuda") -> None:
        pitch = shape[-1] + row_gap
        rows = 1
        for size in shape[:-1]:
            rows *= size
        self._memory = torch.full(((rows + 2 * GUARD_ROWS) * pitch,), SENTINEL, dtype=torch.int16, device=device)
        self._offset = GUARD_ROWS * pitch
        self._shape = shape
        strides = [1, pitch]
        for size in reversed(shape[1:-1]):
            strides.append(strides[-1] * size)
        self._strides = tuple(reversed(strides))
        self.tensor = self._view(self._memory).view(torch.bfloat16)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(self._shape, self._strides, self._offset)

    def bits(self) -> torch.Tensor:
        """Return the output as int16, a copy."""
        return self._view(self._memory).clone()

    def assert_written(self, must: torch.Tensor | None = None, may: torch.Tensor | None = None) -> None:
        """Fail unless every element of the rows ``must`` was written and none outside ``must`` and ``may``; default: all rows."""
        untouched = self._memory == SENTINEL
        if must is None:
            must = torch.ones(self._shape[:-1], dtype=torch.bool, device=self._memory.device)
        left = self._view(untouched)[must]
        assert not left.any(), f"{int(left.any(-1).sum())} rows were not written in full"
        self._view(untouched)[must if may is None else must | may] = True
        if not untouched.all():
            rows = (~untouched).view(-1, self._strides[-2]).any(1).nonzero().flatten() - GUARD_ROWS
            raise AssertionError(
                f"elements were written that must not be, in {len(rows)} rows from {int(rows[0])} to {int(rows[-1])} of an "
                f"output of shape {self._shape}; they lie outside of it, or are rows of no group"
            )

    def assert_untouched(self) -> None:
        """Fail if anything was written."""
        self.assert_written(must=torch.zeros(self._shape[:-1], dtype=torch.bool, device=self._memory.device))

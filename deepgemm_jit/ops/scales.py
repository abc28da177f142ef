"""The forms in which checkpoints keep weight scales, and the two in which the GEMMs read them: per block and per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deepgemm_jit.ops import fp4, ue8m0
from deepgemm_jit.ops.checks import SCALE_BLOCK, ceil_div

ScaleKind = Literal["block", "row"]
ScaleBlock = tuple[int, int] | None
"""Rows and columns that share a weight scale; None: a scale per tensor."""

PER_BLOCK, PER_ROW = (SCALE_BLOCK, SCALE_BLOCK), (1, SCALE_BLOCK)
FP4_BLOCK = (1, fp4.GROUP)


@dataclass(frozen=True, slots=True)
class StackShape:
    """The sizes of one stack of expert matrices, K-major and unpacked."""

    count: int
    n: int
    k: int
    halves: bool
    """The rows are those of two matrices of the same size, gate and up."""

    @property
    def n_blocks(self) -> int:
        """Blocks of 128 rows."""
        return ceil_div(self.n, SCALE_BLOCK)

    @property
    def k_blocks(self) -> int:
        """Blocks of 128 columns."""
        return ceil_div(self.k, SCALE_BLOCK)


def scale_shapes(stack: StackShape, block: ScaleBlock) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the scale of a stack may have, by their spelling."""
    count, n, k = stack.count, stack.n, stack.k
    if block == FP4_BLOCK:
        return {"(E, N, ceil(K / 32))": (count, n, ceil_div(k, fp4.GROUP))}
    if block == PER_ROW:
        return {"(E, N, ceil(K / 128))": (count, n, stack.k_blocks)}
    if block == PER_BLOCK:
        shapes: dict[str, tuple[int, ...]] = {"(E, ceil(N / 128), ceil(K / 128))": (count, stack.n_blocks, stack.k_blocks)}
        halves = 2 * ceil_div(n // 2, SCALE_BLOCK)
        if stack.halves and halves != stack.n_blocks:
            shapes["(E, 2 * ceil(I / 128), ceil(K / 128))"] = (count, halves, stack.k_blocks)
        return shapes
    per_tensor: dict[str, tuple[int, ...]] = {"(E, 1, 1)": (count, 1, 1), "(E, 1)": (count, 1), "(E,)": (count,), "()": ()}
    return {"(E, 2, 1)": (count, 2, 1), **per_tensor} if stack.halves else per_tensor


def scale_faults(name: str, scale: torch.Tensor, stack: StackShape, block: ScaleBlock) -> list[str]:
    """Return what is wrong with the dtype and the shape of a weight scale."""
    faults = []
    if scale.dtype != torch.float32 and scale.dtype not in ue8m0.DTYPES:
        faults.append(
            f"{name} must be {torch.float32} or UE8M0 ({torch.float8_e8m0fnu}, or {torch.uint8} with its bits), not {scale.dtype}"
        )
    shapes = scale_shapes(stack, block)
    if tuple(scale.shape) not in shapes.values():
        allowed = " or ".join(f"{meaning} = {shape}" for meaning, shape in shapes.items())
        faults.append(f"{name} must have shape {allowed}, not {tuple(scale.shape)}")
    return faults


def value_faults(name: str, scale: torch.Tensor, block: ScaleBlock) -> list[str]:
    """Return the first scale that no weight can have: not finite, or no power of two over FP4. Waits for the device."""
    if scale.dtype in ue8m0.DTYPES:
        index = ue8m0.try_first(scale.view(torch.uint8) == ue8m0.NAN)
        return [] if index is None else [f"{name} is NaN (UE8M0 byte 255){_place(index)}"]
    index = ue8m0.try_first(~scale.isfinite())
    if index is not None:
        return [f"{name} is {float(scale[index])}{_place(index)}; scales must be finite"]
    if block == FP4_BLOCK:
        index = fp4.try_inexact(scale)
        if index is not None:
            given = f"{name} is {float(scale[index])!r}{_place(index)}"
            return [f"{given}; scales of FP4 weights must be powers of two from 2^-127 to 2^127, or zero"]
    return []


def scale_for_gemm(
    scale: torch.Tensor, stack: StackShape, block: ScaleBlock, halves_apart: bool
) -> tuple[torch.Tensor, ScaleKind]:
    """Return a weight scale of one of its shapes as the GEMMs read it, and which way that is.

    Scales of 128 x 128 blocks in contiguous float32 are returned as they are. ``halves_apart`` says that blocks of gate and up
    were counted apart where the shape does not tell.
    """
    if scale.dtype != torch.float32:
        scale = ue8m0.float_from_ue8m0(scale)
    if block == PER_ROW:
        return _by_rows(scale, stack), "row"
    half = stack.n // 2
    apart_but_equal = halves_apart and half % SCALE_BLOCK > 0 and scale.shape[1] == 2 * -(-half // SCALE_BLOCK)
    if block == PER_BLOCK and scale.shape[1] == stack.n_blocks and not apart_but_equal:
        return scale.contiguous(), "block"
    if block is None and scale.shape[1:2] != (2,):
        return scale.reshape(-1, 1, 1).expand(stack.count, stack.n_blocks, stack.k_blocks).contiguous(), "block"
    # Gate and up have scales of their own, and a block may hold rows of both.
    if half % SCALE_BLOCK == 0:
        blocks = scale.repeat_interleave(half // SCALE_BLOCK, 1)
        return blocks.expand(stack.count, stack.n_blocks, stack.k_blocks).contiguous(), "block"
    rows = [part.repeat_interleave(SCALE_BLOCK if block else half, 1)[:, :half] for part in scale.chunk(2, 1)]
    return _by_rows(torch.cat(rows, 1), stack), "row"


def _by_rows(scale: torch.Tensor, stack: StackShape) -> torch.Tensor:
    # N is a multiple of 16 here, so that columns start at the multiples of 16 bytes that the copy engine needs.
    columns = torch.empty((stack.count, stack.k_blocks, stack.n), dtype=torch.float32, device=scale.device)
    return columns.transpose(1, 2).copy_(scale)


def _place(index: tuple[int, ...]) -> str:
    if not index:
        return ""
    return f" at expert {index[0]}" + (f", block {index[1:]}" if len(index) > 2 else "")

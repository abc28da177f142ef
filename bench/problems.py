"""The GEMM shapes that are measured, random operands for them, and the float64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Kind = Literal["dense", "contiguous", "masked"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What one H200 reaches: a copy of 4 GiB (read + written), and cuBLASLt FP8 with one scale per tensor at 8192^3.
PEAK_BYTES_PER_S = 4.29e12
PEAK_FLOPS_PER_S = 1285e12

SCALE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem: ``rows`` of the ``max_m`` rows of each group are multiplied by that group's (n, k) matrix."""

    kind: Kind
    groups: int
    max_m: int
    rows: int
    n: int
    k: int

    @property
    def label(self) -> str:
        """Name the shape in a table."""
        if self.kind == "dense":
            return f"M={self.rows} {self.n} x {self.k}"
        of = f" of {self.max_m}" if self.kind == "masked" else ""
        return f"{self.groups} x {self.rows}{of}, {self.n} x {self.k}"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.groups * self.rows * self.n * self.k

    @property
    def operand_bytes(self) -> int:
        """Bytes of A, B, their float32 scales and D, each counted once."""
        k_blocks, n_blocks = -(-self.k // SCALE_BLOCK), -(-self.n // SCALE_BLOCK)
        a, b = self.rows * (self.k + 4 * k_blocks), self.n * self.k + 4 * n_blocks * k_blocks
        return self.groups * (a + b + 2 * self.rows * self.n)

    @property
    def bytes_floor_us(self) -> float:
        """Shortest time in which the operands can be moved."""
        return self.operand_bytes / PEAK_BYTES_PER_S * 1e6

    @property
    def flops_floor_us(self) -> float:
        """Shortest time in which the products can be computed."""
        return self.flops / PEAK_FLOPS_PER_S * 1e6


def shapes(kind: Kind) -> Iterator[Shape]:
    """Yield the shapes of DeepSeek-V3 and Qwen3-30B-A3B layers for which figures of DeepGEMM are on record."""
    if kind == "dense":
        for m in (1, 16, 64, 128, 512, 4096):
            for n, k in ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)):
                yield Shape(kind, 1, m, m, n, k)
    elif kind == "contiguous":
        for groups, rows, sizes in (
            (4, 8192, ((4096, 7168), (7168, 2048))),
            (8, 4096, ((4096, 7168), (7168, 2048))),
            (32, 256, ((4096, 7168), (7168, 2048))),
            (128, 512, ((1536, 2048), (2048, 768))),
            (128, 128, ((1536, 2048), (2048, 768))),
        ):
            for n, k in sizes:
                yield Shape(kind, groups, rows, rows, n, k)
    else:
        yield Shape(kind, 6, 1024, 16, 4096, 7168)
        yield Shape(kind, 6, 1024, 128, 4096, 7168)
        yield Shape(kind, 6, 1024, 128, 7168, 2048)
        yield Shape(kind, 32, 256, 8, 4096, 7168)
        yield Shape(kind, 32, 256, 32, 7168, 2048)
        yield Shape(kind, 128, 64, 4, 1536, 2048)


def sample(count: int, seed: int = 0) -> Iterator[Shape]:
    """Yield shapes that nobody chose, of each kind in turn: sizes from small to those of large models, the small as often.

    N is a multiple of 8, K of 128 as in every checkpoint with block scales.
    """
    draw = random.Random(seed)

    def size(smallest: int, largest: int, step: int) -> int:
        return step * round(smallest / step * (largest / smallest) ** draw.random())

    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        n, k = size(512, 16384, 8), size(512, 8192, 128)
        if kind == "dense":
            m = size(1, 8192, 1)
            yield Shape(kind, 1, m, m, n, k)
            continue
        groups, rows = size(2, 64, 1), size(1, 64, 1)
        if kind == "contiguous":
            yield Shape(kind, groups, 128 * -(-rows // 8), 128 * -(-rows // 8), n, k)
        else:
            yield Shape(kind, groups, 128, 2 * rows, n, k)


@dataclass(frozen=True, slots=True)
class Operands:
    """Random operands of one shape.

    Attributes:
        a16: A in bf16, for torch: (M, K), or (G, max_m, K) when masked.
        a: its float8_e4m3fn cast.
        a_scale: (M, ceil(K / 128)) or (G, max_m, ceil(K / 128)) float32, row-major.
        b16: B in bf16: (N, K), or (G, N, K) when grouped.
        b: its float8_e4m3fn cast.
        b_scale: (ceil(N / 128), ceil(K / 128)) float32, with a leading G when grouped.
        group_data: int32, the group of each row (contiguous) or the rows of each group (masked).
    """

    a16: torch.Tensor
    a: torch.Tensor
    a_scale: torch.Tensor
    b16: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    group_data: torch.Tensor | None


def random_operands(shape: Shape, device: torch.device) -> Operands:
    """Draw the operands of ``shape``: normal values, and scales that differ from block to block so that a mix-up shows."""
    k_blocks, n_blocks = -(-shape.k // SCALE_BLOCK), -(-shape.n // SCALE_BLOCK)
    rows = (shape.groups, shape.max_m) if shape.kind == "masked" else (shape.groups * shape.max_m,)
    lead = () if shape.kind == "dense" else (shape.groups,)
    a16 = torch.randn((*rows, shape.k), dtype=torch.bfloat16, device=device)
    b16 = torch.randn((*lead, shape.n, shape.k), dtype=torch.bfloat16, device=device)
    group_data: torch.Tensor | None = None
    if shape.kind == "contiguous":
        group_data = torch.arange(shape.groups, dtype=torch.int32, device=device).repeat_interleave(shape.rows)
    elif shape.kind == "masked":
        group_data = torch.full((shape.groups,), shape.rows, dtype=torch.int32, device=device)
    return Operands(
        a16,
        a16.to(torch.float8_e4m3fn),
        torch.rand((*rows, k_blocks), device=device) + 0.5,
        b16,
        b16.to(torch.float8_e4m3fn),
        torch.rand((*lead, n_blocks, k_blocks), device=device) + 0.5,
        group_data,
    )


def empty_output(shape: Shape, operands: Operands) -> torch.Tensor:
    """Return an output full of NaN, so that a row which nobody writes is seen."""
    sizes = (*operands.a.shape[:-1], shape.n)
    return torch.full(sizes, math.nan, dtype=torch.bfloat16, device=operands.a.device)


def relative_errors(shape: Shape, operands: Operands, outputs: Sequence[torch.Tensor]) -> list[float]:
    """Return for each output its worst error over the groups against the float64 product of the dequantized operands."""
    a = operands.a.view(shape.groups, shape.max_m, shape.k)
    a_scale = operands.a_scale.view(shape.groups, shape.max_m, -1)
    b = operands.b.view(shape.groups, shape.n, shape.k)
    b_scale = operands.b_scale.view(shape.groups, -1, operands.b_scale.size(-1))
    results = [output.view(shape.groups, shape.max_m, shape.n) for output in outputs]
    errors = []
    for group in range(shape.groups):
        left = _dequantized(a[group, : shape.rows], a_scale[group, : shape.rows], 1)
        reference = left @ _dequantized(b[group], b_scale[group], SCALE_BLOCK).T
        size = torch.linalg.vector_norm(reference)
        errors.append(
            torch.stack([torch.linalg.vector_norm(d[group, : shape.rows].double() - reference) / size for d in results])
        )
    return [float(error) for error in torch.stack(errors).amax(0)]  # amax, not max(): a NaN must come through


def _dequantized(values: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    rows, columns = values.shape
    by_row = scales.double().repeat_interleave(block_rows, 0)[:rows]
    return values.float().double() * by_row.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]

"""What a plan needs to know of a model, however it was read: sizes of experts and linears, and the parts that have no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

SCALE_BLOCK = 128
"""Rows and columns of a weight that share one scale."""


class Scheme(Enum):
    """How weights are kept; the value is for messages."""

    BLOCKS = "FP8 with a scale per 128 x 128 block"
    ROWS = "FP8 with a scale per row and 128 columns"
    TENSOR = "FP8 with a scale per tensor"
    FP4 = "FP4 with a scale per row and 32 columns"
    BF16 = "bfloat16"

    @property
    def width_step(self) -> int:
        """What the width of a shard must be a multiple of.

        A shard that begins inside of a block of scales would need that block's scale for a part of a block of its own, which
        the scales of a checkpoint cannot express. Without blocks it is the 16 bytes of the copy engine.
        """
        return {Scheme.BLOCKS: SCALE_BLOCK, Scheme.ROWS: SCALE_BLOCK, Scheme.TENSOR: 16, Scheme.FP4: 32, Scheme.BF16: 8}[self]


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A part of a model that a plan holds no kernels for, why, and what runs instead."""

    what: str
    reason: str
    instead: str


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """The experts of one layer, which stands for all layers like it.

    Attributes:
        hidden_size: columns of the activations.
        width: columns between the two GEMMs, and ``width_name`` what refusals call it.
        experts: routed experts, and ``experts_name`` what refusals call them.
        per_token: most experts that a token visits.
        scheme: how the weights are kept.
        gated: the first GEMM gives gate and up.
        n_major: bfloat16 weights lie (E, K, N).
        modules: names of the modules, ``*`` for numbers; none where they are not known.
    """

    hidden_size: int
    width: int
    width_name: str
    experts: int
    experts_name: str
    per_token: int
    scheme: Scheme
    gated: bool = True
    n_major: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Linear:
    """FP8 linears of one size.

    Attributes:
        n: rows of the weight.
        k: columns of the weight.
        scheme: how the weight is kept.
        split: which of the two tensor parallelism shares among ranks; None: each has the whole.
        modules: names of the modules, ``*`` for numbers.
    """

    n: int
    k: int
    scheme: Scheme
    split: Literal["n", "k"] | None
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a plan sees it.

    Attributes:
        path: the config that was read.
        reader: what read it.
        experts: its experts layers, one of each kind.
        linears: its FP8 linears, one of each size.
        uncovered: the parts without a plan.
    """

    path: Path
    reader: str
    experts: tuple[ExpertsLayer, ...]
    linears: tuple[Linear, ...]
    uncovered: tuple[Uncovered, ...]

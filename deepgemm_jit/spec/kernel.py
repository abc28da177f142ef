"""What a kernel is: its spec, the spec's text form and its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec.shown import shown

FP8_GEMM = "fp8_gemm_1d2d"
FP8_GEMM_SWAP_AB = "fp8_gemm_swap_ab"
FP4_GEMM_SWAP_AB = "fp4_gemm_swap_ab"
BF16_GEMM = "bf16_gemm"
CAST_TO_FP8 = "per_token_cast_to_fp8"
SCALE_LAYOUT = "scale_layout"
TRANSPOSE = "transpose"
ROUTE = "route"
GATHER = "gather"
ACTIVATE = "activate"
COMBINE = "combine"

ROW_SCALES = "row_scales"
"""Flag of FP8 GEMMs: a scale per row and 128 columns of B instead of one per 128 x 128 block."""
N_MAJOR = "n_major"
"""Flag of BF16 GEMMs: B lies (K, N)."""

SWAPPED = (FP8_GEMM_SWAP_AB, FP4_GEMM_SWAP_AB)
"""Families in whose products weights are the rows and tokens the columns."""

_BLOCK_SIZES = {
    FP8_GEMM: 3,
    FP8_GEMM_SWAP_AB: 3,
    FP4_GEMM_SWAP_AB: 3,
    BF16_GEMM: 3,
    CAST_TO_FP8: 1,
    SCALE_LAYOUT: 2,
    TRANSPOSE: 2,
    ROUTE: 1,
    GATHER: 1,
    ACTIVATE: 1,
    COMBINE: 1,
}
_WORD = re.compile(r"[a-z][a-z0-9_]*\Z")
_NUMBER_LIMIT = 2**31
_MOST_TEXT = 400
"""Characters of a wrong spec text that a message shows: more than any right one has."""


@dataclass(frozen=True, slots=True, order=True)
class KernelSpec:
    """One kernel: what it computes with, never the size of what it computes.

    M, N, K, group counts, layouts and SM counts are arguments of a launch, so that the set of specs is closed and small.

    Attributes:
        family: the template that renders it, for example ``fp8_gemm_1d2d``.
        arch: the compiler's target, for example ``sm_90a``.
        dtypes: operand dtypes in the order of the family, for example ``("e4m3", "e4m3", "bf16")`` for A, B, D.
        block: block sizes; ``(block_m, block_n, block_k)`` for a GEMM, elements per step for the small kernels.
        stages: shared-memory stages of the main loop; 0 where there is none.
        cluster: thread blocks per cluster.
        flags: variant flags, sorted.
    """

    family: str
    arch: str
    dtypes: tuple[str, ...]
    block: tuple[int, ...]
    stages: int = 0
    cluster: int = 1
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = [
            f"{what} {shown(word)} must be lower-case letters, digits and underscores"
            for what, words in (("family", (self.family,)), ("arch", (self.arch,)), ("dtype", self.dtypes), ("flag", self.flags))
            for word in (words if isinstance(words, tuple) else ())
            if not isinstance(word, str) or not _WORD.match(word)
        ]
        tuples = {"dtypes": self.dtypes, "block": self.block, "flags": self.flags}
        faults.extend(f"{what} {shown(parts)} must be a tuple" for what, parts in tuples.items() if not isinstance(parts, tuple))
        faults.extend(f"{what} must not be empty" for what in ("dtypes", "block") if tuples[what] == ())
        block = self.block if isinstance(self.block, tuple) else ()
        for what, number, least in (
            ("stages", self.stages, 0),
            ("cluster", self.cluster, 1),
            *(("block", size, 1) for size in block),
        ):
            if type(number) is not int or not least <= number < _NUMBER_LIMIT:
                faults.append(f"{what} {shown(number)} must be a whole number of at least {least} and below 2^31")
        if not faults:
            if list(self.flags) != sorted(set(self.flags)):
                faults.append(f"flags {shown(self.flags)} must be sorted and different")
            sizes = _BLOCK_SIZES.get(self.family, len(block))
            if len(block) != sizes:
                faults.append(f"block {shown(block)} must have {sizes} sizes, as those of {self.family} have")
        if faults:
            raise OperandError(operation="KernelSpec", faults=faults)

    @property
    def name(self) -> str:
        """A readable name that is also the kernel's entry: a C identifier, different for different specs."""
        parts = [self.arch, self.family, *self.dtypes, "x".join(str(size) for size in self.block)]
        if self.stages:
            parts.append(f"s{self.stages}")
        if self.cluster > 1:
            parts.append(f"c{self.cluster}")
        return "_".join([*parts, *self.flags])

    @property
    def text(self) -> str:
        """The canonical text form; :meth:`from_text` reads it back."""
        return ";".join(
            (
                f"family={self.family}",
                f"arch={self.arch}",
                f"dtypes={','.join(self.dtypes)}",
                f"block={'x'.join(str(size) for size in self.block)}",
                f"stages={self.stages}",
                f"cluster={self.cluster}",
                f"flags={','.join(self.flags)}",
            )
        )

    @classmethod
    def from_text(cls, text: str) -> KernelSpec:
        """Read the canonical text form.

        Raises:
            OperandError: the text is not one that :attr:`text` gives.
        """
        faults = [f"{shown(text, _MOST_TEXT)} is not the canonical text of a spec"]
        if not isinstance(text, str):
            raise OperandError(operation="KernelSpec.from_text", faults=faults)
        try:
            _, values = zip(*(part.split("=", 1) for part in text.split(";")), strict=True)
            family, arch, dtypes, block, stages, cluster, flags = values
            spec = cls(
                family=family,
                arch=arch,
                dtypes=tuple(dtypes.split(",")),
                block=tuple(int(size) for size in block.split("x")),
                stages=int(stages),
                cluster=int(cluster),
                flags=tuple(flags.split(",")) if flags else (),
            )
            if spec.text == text:
                return spec
        except ValueError:
            pass
        raise OperandError(operation="KernelSpec.from_text", faults=faults)

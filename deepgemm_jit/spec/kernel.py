"""What a kernel is: its spec, the spec's text form and its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepgemm_jit.errors import OperandError

FP8_GEMM = "fp8_gemm_1d2d"
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

_WORD = re.compile(r"[a-z][a-z0-9_]*\Z")


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
            f"{what} {word!r} must be lower-case letters, digits and underscores"
            for what, words in (("family", (self.family,)), ("arch", (self.arch,)), ("dtype", self.dtypes), ("flag", self.flags))
            for word in words
            if not isinstance(word, str) or not _WORD.match(word)
        ]
        faults.extend(f"{what} must not be empty" for what in ("dtypes", "block") if not getattr(self, what))
        if list(self.flags) != sorted(set(self.flags)):
            faults.append(f"flags {self.flags!r} must be sorted and different")
        for what, number, least in (
            ("stages", self.stages, 0),
            ("cluster", self.cluster, 1),
            *(("block", b, 1) for b in self.block),
        ):
            if type(number) is not int or number < least:
                faults.append(f"{what} {number!r} must be a whole number of at least {least}")
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
        except (ValueError, AttributeError):
            pass
        raise OperandError(operation="KernelSpec.from_text", faults=[f"{text!r} is not the canonical text of a spec"])

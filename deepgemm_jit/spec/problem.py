"""What a call asks for (a problem) and what the device allows (its limits)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepgemm_jit.spec.arch import arch_named


class Layout(Enum):
    """How the rows of A are spread over the groups of B; the value is what the device code is given."""

    DENSE = 0
    CONTIGUOUS = 1
    """One A of all groups; int32 group index per row, -1 for rows that belong to none."""
    PREFIX_SUMS = 2
    """One A of all groups; int32 end row per group, each group starting at the next multiple of the alignment."""
    MASKED = 3
    """One A per group of max_m rows; int32 row count per group."""


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """One call of ``D = A @ B.T``.

    Attributes:
        m: rows of A; for ``MASKED`` the rows expected in a group (a hint, never a bound).
        n: rows of B and columns of D, a multiple of 8.
        k: columns of A and B, a multiple of 16.
        groups: number of B matrices, 1 when dense.
        layout: how rows map to groups.
        alignment: multiple of rows at which groups start in the contiguous layouts.
        dtypes: of A, B and D.
        variant: flags of the kernels that serve it: ``row_scales`` (FP8) or ``n_major`` (BF16), or none.
    """

    m: int
    n: int
    k: int
    groups: int = 1
    layout: Layout = Layout.DENSE
    alignment: int = 128
    dtypes: tuple[str, str, str] = ("e4m3", "e4m3", "bf16")
    variant: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepProblem:
    """One call of a kernel without tiles: a cast, a layout, a step of the experts forward. Its size never matters to selection.

    Attributes:
        family: of the kernel.
        dtypes: in and out.
    """

    family: str
    dtypes: tuple[str, ...]


Problem = GemmProblem | StepProblem


class Overlap(Enum):
    """What GEMMs do while the kernels in front of them end (programmatic dependent launch): nothing, start, or read weights.

    It tells apart which of two kernels, or splits of K, is the faster one; each is right in any case.
    """

    NONE = "none"
    START = "start"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device, or a part of one, offers, and how launches on it follow each other.

    Attributes:
        arch: compiler target, for example ``sm_90a``.
        sms: SMs that the context may use.
        shared_memory_bytes: dynamic shared memory a block may ask for.
        whole: these are all SMs that there are. Otherwise two blocks that may share an SM may as well take two, so that only one
            block per SM keeps to the limit.
        overlap: with the kernels in front.
    """

    arch: str
    sms: int
    shared_memory_bytes: int
    whole: bool = True
    overlap: Overlap = Overlap.NONE

    def blocks(self, per_sm: int) -> int:
        """Return how many persistent blocks may run, of a kernel whose blocks share an SM by ``per_sm``."""
        return self.sms * (per_sm if self.whole else 1)


def limits_of(arch: str, sms: int | None = None) -> Limits:
    """Return the limits of a device of ``arch`` with ``sms`` SMs (default: the largest one), without a GPU."""
    known = arch_named(arch)
    return Limits(arch, known.max_sms if sms is None else sms, known.shared_memory_bytes)

"""Kernel specs, the closed kernel sets and selection. Pure: no files, no compiler, no driver."""

from deepgemm_jit.spec.arch import ARCHES, Support, arch_named, arch_of, is_supported
from deepgemm_jit.spec.cost import SCATTERED_ALIGNMENT, scattered_rows
from deepgemm_jit.spec.kernel import (
    ACTIVATE,
    BF16_GEMM,
    CAST_TO_FP8,
    COMBINE,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    GATHER,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCALE_LAYOUT,
    SWAPPED,
    TRANSPOSE,
    KernelSpec,
)
from deepgemm_jit.spec.kernel_set import MAX_EXPERTS, MAX_GROUPS, is_gemm, kernel_set, kernels_by_name, require_member
from deepgemm_jit.spec.problem import GemmProblem, Layout, Limits, Problem, StepProblem, limits_of
from deepgemm_jit.spec.reach import Gap, reachable, try_gap
from deepgemm_jit.spec.selection import MOST_FP4_ROWS, Selected, select, selected

__all__ = [
    "ACTIVATE",
    "ARCHES",
    "BF16_GEMM",
    "CAST_TO_FP8",
    "COMBINE",
    "FP4_GEMM_SWAP_AB",
    "FP8_GEMM",
    "FP8_GEMM_SWAP_AB",
    "GATHER",
    "MAX_EXPERTS",
    "MAX_GROUPS",
    "MOST_FP4_ROWS",
    "N_MAJOR",
    "ROUTE",
    "ROW_SCALES",
    "SCALE_LAYOUT",
    "SCATTERED_ALIGNMENT",
    "SWAPPED",
    "TRANSPOSE",
    "Gap",
    "GemmProblem",
    "KernelSpec",
    "Layout",
    "Limits",
    "Problem",
    "Selected",
    "StepProblem",
    "Support",
    "arch_named",
    "arch_of",
    "is_gemm",
    "is_supported",
    "kernel_set",
    "kernels_by_name",
    "limits_of",
    "reachable",
    "require_member",
    "scattered_rows",
    "select",
    "selected",
    "try_gap",
]

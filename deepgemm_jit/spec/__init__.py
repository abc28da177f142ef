"""Kernel specs, the closed kernel sets and selection. Pure: no files, no compiler, no driver."""

from deepgemm_jit.spec.kernel import CAST_TO_FP8, FP8_GEMM, SCALE_LAYOUT, KernelSpec
from deepgemm_jit.spec.kernel_set import MAX_GROUPS, kernel_set, kernels_by_name
from deepgemm_jit.spec.problem import (
    ARCHES,
    CastProblem,
    GemmProblem,
    Layout,
    Limits,
    Problem,
    ScaleLayoutProblem,
    arch_named,
    arch_of,
    limits_of,
)
from deepgemm_jit.spec.selection import reachable, select

__all__ = [
    "ARCHES",
    "CAST_TO_FP8",
    "FP8_GEMM",
    "MAX_GROUPS",
    "SCALE_LAYOUT",
    "CastProblem",
    "GemmProblem",
    "KernelSpec",
    "Layout",
    "Limits",
    "Problem",
    "ScaleLayoutProblem",
    "arch_named",
    "arch_of",
    "kernel_set",
    "kernels_by_name",
    "limits_of",
    "reachable",
    "select",
]

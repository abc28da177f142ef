"""What modules ask of the kernels, read off the shapes and dtypes of their parameters, which may be on any device, also meta."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepgemm_jit.integrations import experts
from deepgemm_jit.integrations.prepared import local
from deepgemm_jit.ops.checks import MAX_TOP_K, SCALE_BLOCK, ceil_div
from deepgemm_jit.ops.pipeline import WIDE_ALIGNMENTS
from deepgemm_jit.spec import (
    ACTIVATE,
    CAST_TO_FP8,
    COMBINE,
    GATHER,
    MOST_FP4_ROWS,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCATTERED_ALIGNMENT,
    GemmProblem,
    KernelSpec,
    Layout,
    StepProblem,
    limits_of,
    reachable,
    select,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the forward of one module asks for.

    Attributes:
        gemms: each with the largest M; it asks for any M up to that.
        steps: the kernels around them.
    """

    gemms: tuple[GemmProblem, ...]
    steps: tuple[StepProblem, ...]


def linear_needs(module: Any, max_tokens: int) -> Needs:
    """Return what an FP8 linear asks for that :func:`linears.reason_against` has nothing against."""
    n, k = local(module.weight).shape
    casts = () if module.activation_scheme == "static" else (StepProblem(CAST_TO_FP8, ("bf16", "e4m3")),)
    return Needs((GemmProblem(max_tokens, n, k),), casts)


def experts_needs(module: Any, max_tokens: int) -> Needs:
    """Return what an experts module asks for.

    How many experts a token visits is not in its shapes: as many as the operation takes are reckoned with.

    Raises:
        UnsupportedError: a scheme without kernel.
    """
    experts.refuse_what_has_no_kernel(module)
    fp8 = experts.is_fp8(module)
    transposed = getattr(module, "is_transposed", False)
    weights = {"down_proj": module.down_proj, "gate_up_proj" if module.has_gate else "up_proj": experts.first_projection(module)}
    dtypes = ("e4m3", "e4m3", "bf16") if fp8 else ("bf16", "bf16", "bf16")
    sizes, variants = [], []
    for name, parameter in weights.items():
        weight = local(parameter)
        groups, n, k = weight.shape if not transposed else (weight.shape[0], weight.shape[2], weight.shape[1])
        sizes.append((n, 2 * k if weight.dtype == torch.int8 else k, groups))
        by_rows = fp8 and weight.dtype != torch.int8 and _has_row_scales(module, name, n)
        variants.append((ROW_SCALES,) if by_rows else (N_MAJOR,) if transposed and not fp8 else ())
    alignments: tuple[int, ...] = (SCATTERED_ALIGNMENT,) if fp8 and not any(variants) else WIDE_ALIGNMENTS
    gemms = tuple(
        GemmProblem(max_tokens * MAX_TOP_K + groups * alignment, n, k, groups, Layout.PREFIX_SUMS, alignment, dtypes, variant)
        for (n, k, groups), variant in zip(sizes, variants, strict=True)
        for alignment in alignments
    )
    if not any(variants):
        # Whether fragments are kept is a matter of memory.
        gemms += tuple(
            GemmProblem(MOST_FP4_ROWS * groups, n, k, groups, Layout.PREFIX_SUMS, SCATTERED_ALIGNMENT, ("e4m3", "e2m1", "bf16"))
            for (n, k, groups), parameter in zip(sizes, weights.values(), strict=True)
            if parameter.dtype == torch.int8
        )
    to = dtypes[0]
    steps = (
        StepProblem(ROUTE, ("i32",)),
        StepProblem(GATHER, ("bf16", to)),
        StepProblem(ACTIVATE, ("bf16", to)),
        StepProblem(COMBINE, ("bf16",)),
    )
    return Needs(gemms, steps)


def kernels_for(needs: Iterable[Needs], arch: str, sms: Iterable[int]) -> tuple[KernelSpec, ...]:
    """Return the kernels that serve all needs on devices, or parts of them, with these SM counts; sorted.

    Raises:
        UnsupportedError: no kernel serves a size.
    """
    distinct, sms, limits = set(needs), tuple(sms), limits_of(arch)
    gemms = {gemm for need in distinct for gemm in need.gemms}
    steps = {step for need in distinct for step in need.steps}
    found = {spec for gemm in gemms for spec in reachable(gemm, gemm.m, arch, sms)}
    return tuple(sorted(found | {select(step, limits) for step in steps}))


def _has_row_scales(module: Any, name: str, n: int) -> bool:
    """Return whether the weight scales are read one per row: given so, or for gate and up apart in blocks that hold both."""
    block, shape = module.block_size, local(getattr(module, f"{name}_scale_inv")).shape
    if block is not None and tuple(block) == (1, SCALE_BLOCK):
        return True
    apart = len(shape) > 1 and shape[1] != (1 if block is None else ceil_div(n, SCALE_BLOCK))
    return apart and n // 2 % SCALE_BLOCK != 0

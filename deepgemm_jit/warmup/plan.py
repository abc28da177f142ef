"""The plan: which kernels a warm-up builds, and why. Pure but for reading the model's config; no compiler, no GPU.

What run time can ask for is in a plan because both ask :func:`deepgemm_jit.spec.select`: run time for one problem, the plan for
every M up to a largest one and every SM count a device of the arch may have.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
    ACTIVATE,
    COMBINE,
    GATHER,
    ROUTE,
    ROW_SCALES,
    GemmProblem,
    KernelSpec,
    Layout,
    StepProblem,
    arch_named,
    kernel_set,
    limits_of,
    reachable,
    select,
)
from deepgemm_jit.spec.kernel_set import STEP_KERNELS
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup.models import COUNT_NEEDED, SCALE_BLOCK, SIZE_LIMIT, Model, Scheme, Uncovered, read_model

DEFAULT_MAX_TOKENS = 16384
# Callers may align groups as they like: what matters is which tiles divide the alignment, and these tell all apart. The first two
# are for FP8 with a scale per block only.
_NARROW = (16, 32)
GROUPED_LAYOUTS = (
    *((layout, alignment) for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) for alignment in (*_NARROW, 64, 128, 256)),
    (Layout.MASKED, 128),
)
_MOST_SUGGESTED = 16
_FP8, _BF16 = ("e4m3", "e4m3", "bf16"), ("bf16", "bf16", "bf16")


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A GEMM that run time will ask for with any M from 1 up to that of ``largest``, and the kernels that can serve it."""

    what: str
    largest: GemmProblem
    kernels: tuple[KernelSpec, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels a warm-up builds.

    Attributes:
        arch: compiler target.
        model: the config that was read; None when the plan is the whole kernel set.
        problems: the GEMMs the kernels are for; empty when the plan is the whole kernel set.
        kernels: the kernels, in the order of the kernel set.
        uncovered: the parts of the model that no kernel of the plan is for.
    """

    arch: str
    model: str | None
    problems: tuple[PlannedProblem, ...]
    kernels: tuple[KernelSpec, ...]
    uncovered: tuple[Uncovered, ...]


def plan_for(
    arch: str,
    model: str | os.PathLike[str] | None = None,
    *,
    tp: int = 1,
    ep: int = 1,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sms: int | None = None,
) -> Plan:
    """Return the plan for a model's experts, or for the whole kernel set when no model is given.

    Args:
        arch: compiler target, for example ``sm_90a``.
        model: a config.json or the folder that holds one.
        tp: tensor parallel size: ranks that share the width of every expert.
        ep: expert parallel size: ranks that share the experts.
        max_tokens: most tokens that one forward brings to a rank.
        sms: SMs of the device, when known; default: every count up to the arch's largest.

    Raises:
        OperandError: the config or an argument is wrong, or the sizes do not split that way.
        UnsupportedError: there are no kernels for the arch, the quantization or the sizes.
    """
    known = arch_named(arch)
    faults = [
        f"{name} = {shown(value)}, needed: {COUNT_NEEDED}"
        for name, value in (("tp", tp), ("ep", ep), ("max_tokens", max_tokens), ("sms", 1 if sms is None else sms))
        if type(value) is not int or not 1 <= value < SIZE_LIMIT
    ]
    if faults:
        raise OperandError(operation="plan", faults=faults)
    if model is None:
        return Plan(arch, None, (), kernel_set(arch), ())
    read = read_model(model)
    sm_counts = range(1, known.max_sms + 1) if sms is None else (sms,)
    problems = tuple(
        PlannedProblem(what, largest, reachable(largest, largest.m, arch, sm_counts))
        for what, largest in _expert_gemms(arch, read, tp, ep, max_tokens)
    )
    needed = {spec for problem in problems for spec in problem.kernels} | _step_kernels(arch, read.scheme)
    kernels = tuple(spec for spec in kernel_set(arch) if spec in needed)
    return Plan(arch, str(read.path), problems, kernels, read.uncovered)


def _step_kernels(arch: str, scheme: Scheme) -> set[KernelSpec]:
    """Return the kernels that stand around the GEMMs: the steps of the forward and, for FP8, casts and layouts."""
    limits = limits_of(arch)
    steps = (StepProblem(family, dtypes) for family, (variants, _) in STEP_KERNELS.items() for dtypes in variants)
    if scheme is Scheme.BF16:
        forward = (ROUTE, GATHER, ACTIVATE, COMBINE)
        return {select(step, limits) for step in steps if step.family in forward and "e4m3" not in step.dtypes}
    return {select(step, limits) for step in steps}


def _expert_gemms(arch: str, model: Model, tp: int, ep: int, max_tokens: int) -> Iterator[tuple[str, GemmProblem]]:
    """Yield the GEMMs of one experts layer, each with the largest M that ``max_tokens`` can bring."""
    _check_split(model, tp, ep)
    groups, width = model.experts // ep, model.intermediate_size // tp
    dtypes = _BF16 if model.scheme is Scheme.BF16 else _FP8
    for what, n, k, variants in (
        ("experts gate_up", 2 * width, model.hidden_size, _gate_up_variants(model.scheme, width)),
        ("experts down", model.hidden_size, width, ((ROW_SCALES,),) if model.scheme is Scheme.ROWS else ((),)),
    ):
        for variant, (layout, alignment) in itertools.product(variants, GROUPED_LAYOUTS):
            if alignment in _NARROW and (variant or dtypes == _BF16):
                continue
            problem = GemmProblem(max_tokens, n, k, groups, layout, alignment, dtypes, variant)
            if layout is not Layout.MASKED:
                # Every group may end in a tile that is all padding but for one row.
                padding = groups * alignment
                problem = replace(problem, m=max_tokens * model.experts_per_token + padding)
            try:
                select(problem, limits_of(arch))
            except UnsupportedError as refusal:
                sizes = (
                    f"hidden_size = {model.hidden_size}, {model.intermediate_key} = {model.intermediate_size}, "
                    f"{model.experts_key} = {model.experts}, num_experts_per_tok = {model.experts_per_token}, "
                    f"tp {tp}, ep {ep}, max_tokens {max_tokens}"
                )
                raise UnsupportedError(
                    given=f"{what} of {model.path} ({sizes}): {refusal.given}",
                    supported=refusal.supported,
                    advice=refusal.advice,
                ) from None
            yield (f"{what}, {' '.join(variant).replace('_', ' ')}" if variant else what), problem


def _gate_up_variants(scheme: Scheme, width: int) -> tuple[tuple[str, ...], ...]:
    """Return the kernels that the first GEMM can ask for: gate and up lie in one matrix and may have scales of their own."""
    if scheme is Scheme.ROWS:
        return ((ROW_SCALES,),)
    # A block across the border of gate and up has two scales, and only a scale per row can say so. Whether it has two is in the
    # shape of the checkpoint's scales, not in the config: both ways are planned.
    blocks_apart = 2 * -(-width // SCALE_BLOCK) != -(-2 * width // SCALE_BLOCK)
    if (scheme is Scheme.TENSOR and width % SCALE_BLOCK) or (scheme is Scheme.BLOCKS and blocks_apart):
        return ((), (ROW_SCALES,))
    return ((),)


def _check_split(model: Model, tp: int, ep: int) -> None:
    """Refuse sizes that do not split into equal shards that have scales of their own."""
    width, experts, step = model.intermediate_size, model.experts, model.scheme.width_step
    faults = []
    if tp > 1 and width % (tp * step):
        fitting = _some_divisors(width // step) if width % step == 0 else "1"
        faults.append(
            f"{model.intermediate_key} = {width} does not split over tp = {tp} into multiples of {step}, needed for weights in "
            f"{model.scheme.value}; tp that fit: {fitting}; ep splits the experts instead"
        )
    if experts % ep:
        faults.append(f"{model.experts_key} = {experts} does not split over ep = {ep}; ep that fit: {_some_divisors(experts)}")
    if faults:
        raise OperandError(operation=f"plan for {model.path}", faults=faults)


def _some_divisors(number: int) -> str:
    """Name the smallest divisors: those are the sizes that people have GPUs for."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    all_of_them = sorted({*low, *(number // size for size in low)})
    more = len(all_of_them) - _MOST_SUGGESTED
    return ", ".join(map(str, all_of_them[:_MOST_SUGGESTED])) + (f" and {more} more" if more > 0 else "")

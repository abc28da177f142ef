"""The plan: which kernels a warm-up builds, and why. Pure but for reading the model's config; no compiler, no GPU.

What run time can ask for is in a plan because both ask :func:`deepgemm_jit.spec.select`: run time for one problem, the plan for
every M up to a largest one and every SM count a device of the arch may have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
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
from deepgemm_jit.warmup.models import SCALE_BLOCK, Model, Uncovered, read_model

DEFAULT_MAX_TOKENS = 16384
# Callers may align groups as they like: what matters is which tiles divide the alignment, and these three tell all apart.
GROUPED_LAYOUTS = (
    *((layout, alignment) for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) for alignment in (64, 128, 256)),
    (Layout.MASKED, 128),
)


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
    if model is None:
        return Plan(arch, None, (), kernel_set(arch), ())
    faults = [
        f"{name} = {value!r}, needed: a whole number of at least 1"
        for name, value in (("tp", tp), ("ep", ep), ("max_tokens", max_tokens), ("sms", 1 if sms is None else sms))
        if type(value) is not int or value < 1
    ]
    if faults:
        raise OperandError(operation="plan", faults=faults)
    read = read_model(model)
    sm_counts = range(1, known.max_sms + 1) if sms is None else (sms,)
    problems = tuple(
        PlannedProblem(what, largest, reachable(largest, largest.m, arch, sm_counts))
        for what, largest in _expert_gemms(arch, read, tp, ep, max_tokens)
    )
    needed = {spec for problem in problems for spec in problem.kernels} | (_operand_kernels(arch) if problems else set())
    kernels = tuple(spec for spec in kernel_set(arch) if spec in needed)
    return Plan(arch, str(read.path), problems, kernels, read.uncovered)


def _operand_kernels(arch: str) -> set[KernelSpec]:
    """Return the kernels that stand around every GEMM of quantized activations: casts, layouts, the steps of the forward."""
    limits = limits_of(arch)
    steps = (StepProblem(family, dtypes) for family, (variants, _) in STEP_KERNELS.items() for dtypes in variants)
    return {select(step, limits) for step in steps}


def _expert_gemms(arch: str, model: Model, tp: int, ep: int, max_tokens: int) -> Iterator[tuple[str, GemmProblem]]:
    """Yield the GEMMs of one experts layer, each with the largest M that ``max_tokens`` can bring."""
    _check_split(model, tp, ep)
    if not model.experts_covered:
        return
    groups, width = model.experts // ep, model.intermediate_size // tp
    for what, n, k in (("experts gate_up", 2 * width, model.hidden_size), ("experts down", model.hidden_size, width)):
        for layout, alignment in GROUPED_LAYOUTS:
            problem = GemmProblem(max_tokens, n, k, groups, layout, alignment)
            if layout is not Layout.MASKED:
                # Every group may end in a tile that is all padding but for one row.
                padding = groups * alignment
                problem = replace(problem, m=max_tokens * model.experts_per_token + padding)
            try:
                select(problem, limits_of(arch))
            except UnsupportedError as refusal:
                sizes = (
                    f"hidden_size = {model.hidden_size}, {model.intermediate_key} = {model.intermediate_size}, "
                    f"{model.experts_key} = {model.experts}, tp {tp}, ep {ep}"
                )
                raise UnsupportedError(
                    given=f"{what} of {model.path} ({sizes}): {refusal.given}",
                    supported=refusal.supported,
                    advice=refusal.advice,
                ) from None
            yield what, problem


def _check_split(model: Model, tp: int, ep: int) -> None:
    """Refuse sizes that do not split into equal shards of whole scale blocks.

    A shard that begins inside a 128-wide block would need the block's scale for a part of the kernel's own block, which the
    scales of a checkpoint cannot express.
    """
    width, experts = model.intermediate_size, model.experts
    tp_that_fit = [1, *(size for size in _divisors(width) if size > 1 and width // size % SCALE_BLOCK == 0)]
    ep_that_fit = _divisors(experts)
    faults = []
    if tp not in tp_that_fit:
        faults.append(
            f"{model.intermediate_key} = {width} does not split over tp = {tp} into whole {SCALE_BLOCK}-wide scale blocks; "
            f"tp that fit: {', '.join(map(str, tp_that_fit))}; ep splits the experts instead"
        )
    if ep not in ep_that_fit:
        faults.append(
            f"{model.experts_key} = {experts} does not split over ep = {ep}; ep that fit: {', '.join(map(str, ep_that_fit))}"
        )
    if faults:
        raise OperandError(operation=f"plan for {model.path}", faults=faults)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

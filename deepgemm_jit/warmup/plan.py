"""The plan: which kernels a warm-up builds, and why. Pure but for reading the model's config; no compiler, no GPU.

What run time can ask for is in a plan because both ask :func:`deepgemm_jit.spec.select`: run time for one problem, the plan for
every M up to a largest one and every SM count a device of the arch may have. :func:`prove` shows it of a plan that is made.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
    ACTIVATE,
    CAST_TO_FP8,
    COMBINE,
    GATHER,
    MOST_FP4_ROWS,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCALE_LAYOUT,
    SCATTERED_ALIGNMENT,
    TRANSPOSE,
    Gap,
    GemmProblem,
    KernelSpec,
    Layout,
    StepProblem,
    arch_named,
    kernel_set,
    limits_of,
    reachable,
    select,
    try_gap,
)
from deepgemm_jit.spec.kernel_set import STEP_KERNELS
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup.config import COUNT_NEEDED, SIZE_LIMIT
from deepgemm_jit.warmup.models import SCALE_BLOCK, ExpertsLayer, Linear, Model, Scheme, Uncovered
from deepgemm_jit.warmup.moe_config import read_model

DEFAULT_MAX_TOKENS = 16384
MOST_SMS = 1024
"""Several times what any GPU has; one with more than the arch's largest, which may be sold some day, is planned for."""
# Callers may align groups as they like: what matters is which tiles divide the alignment, and these tell all apart. The first two
# are for FP8 with a scale per block only.
_NARROW = (16, 32)
GROUPED_LAYOUTS = (
    *((layout, alignment) for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) for alignment in (*_NARROW, 64, 128, 256)),
    (Layout.MASKED, 128),
)
_MOST_SUGGESTED = 16
_FP8, _FP4, _BF16 = ("e4m3", "e4m3", "bf16"), ("e4m3", "e2m1", "bf16"), ("bf16", "bf16", "bf16")
_FORWARD_STEPS = (ROUTE, GATHER, ACTIVATE, COMBINE)
_OPERAND_STEPS = (CAST_TO_FP8, SCALE_LAYOUT, TRANSPOSE)
_FRAMEWORK = "the framework's own linear"


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A GEMM that run time will ask for with any M from 1 up to that of ``largest``, and the kernels that can serve it.

    Attributes:
        what: the GEMM, for people.
        largest: the problem with the largest M.
        kernels: what selection can give for it.
        modules: names of the modules it comes from, ``*`` for numbers; none where they are not known.
    """

    what: str
    largest: GemmProblem
    kernels: tuple[KernelSpec, ...]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels a warm-up builds.

    Attributes:
        arch: compiler target.
        model: the config that was read; None when the plan is the whole kernel set.
        reader: what read it; None when the plan is the whole kernel set.
        sm_counts: SM counts the plan is for.
        problems: the GEMMs the kernels are for; empty when the plan is the whole kernel set.
        kernels: the kernels, in the order of the kernel set.
        uncovered: the parts of the model that no kernel of the plan is for.
    """

    arch: str
    model: str | None
    reader: str | None
    sm_counts: tuple[int, ...]
    problems: tuple[PlannedProblem, ...]
    kernels: tuple[KernelSpec, ...]
    uncovered: tuple[Uncovered, ...]


def plan_for(
    arch: str,
    model: str | os.PathLike[str] | Model | None = None,
    *,
    tp: int = 1,
    ep: int = 1,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sms: int | None = None,
) -> Plan:
    """Return the plan for a model, or for the whole kernel set when no model is given.

    Args:
        arch: compiler target, for example ``sm_90a``.
        model: a config.json or the folder that holds one, of which the experts are planned; or a model that was read, for example
            by ``integrations.architectures``, which finds linears too.
        tp: tensor parallel size: ranks that share the width of every expert, and linears as the model splits them.
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
        for name, value in (("tp", tp), ("ep", ep), ("max_tokens", max_tokens))
        if type(value) is not int or not 1 <= value < SIZE_LIMIT
    ]
    faults += sms_faults(arch, () if sms is None else (sms,))
    if faults:
        raise OperandError(operation="plan", faults=faults)
    sm_counts = tuple(range(1, known.max_sms + 1)) if sms is None else (sms,)
    if model is None:
        return Plan(arch, None, None, sm_counts, (), kernel_set(arch), ())
    read = model if isinstance(model, Model) else read_model(model)
    linears, unsplit = _split_linears(read.linears, tp)
    wanted = itertools.chain(
        *(_expert_gemms(arch, read, layer, tp, ep, max_tokens) for layer in read.experts),
        (("linear", GemmProblem(max_tokens, linear.n, linear.k), linear.modules) for linear in linears),
    )
    problems = tuple(
        PlannedProblem(what, largest, reachable(largest, largest.m, arch, sm_counts), modules)
        for what, largest, modules in wanted
    )
    needed = {spec for problem in problems for spec in problem.kernels} | _step_kernels(arch, read.experts, linears)
    kernels = tuple(spec for spec in kernel_set(arch) if spec in needed)
    return Plan(arch, str(read.path), read.reader, sm_counts, problems, kernels, (*read.uncovered, *unsplit))


def require_kernels(plan: Plan) -> None:
    """Refuse a plan without kernels: nothing of the model runs with us, and an empty plan would pass every check.

    Raises:
        UnsupportedError: with the reason of each part of the model.
    """
    if not plan.kernels:
        reasons = "; ".join(f"{part.what}: {part.reason}" for part in plan.uncovered)
        raise UnsupportedError(
            given=f"{plan.model}, whose plan is empty ({reasons or 'it has no layers'})",
            supported="FP8 linears, and experts in FP8, FP4 or bfloat16",
        )


def sms_faults(arch: str | None, sms: Iterable[object]) -> list[str]:
    """Return what is wrong with SM counts of devices, or parts of them."""
    largest = "" if arch is None else f"; the largest GPU of {arch} has {arch_named(arch).max_sms}"
    needed = f"a whole number from 1 to {MOST_SMS}{largest}"
    return [f"sms = {shown(count)}, needed: {needed}" for count in sms if type(count) is not int or not 1 <= count <= MOST_SMS]


def prove(plan: Plan) -> tuple[tuple[PlannedProblem, Gap], ...]:
    """Return the problems of a plan for which selection can give a kernel that the plan lacks, with a case of each.

    An empty answer proves the plan complete: what run time selects for any of its problems, with any M from 1 to the largest and
    on any of its SM counts, is planned.
    """
    planned = frozenset(plan.kernels)
    gaps = ((each, try_gap(each.largest, planned, each.largest.m, plan.arch, plan.sm_counts)) for each in plan.problems)
    return tuple((problem, gap) for problem, gap in gaps if gap is not None)


def _step_kernels(arch: str, experts: tuple[ExpertsLayer, ...], linears: list[Linear]) -> set[KernelSpec]:
    """Return the kernels that stand around the GEMMs: the steps of the forward and, for FP8, casts and layouts."""
    limits = limits_of(arch)
    quantized = any(layer.scheme is not Scheme.BF16 for layer in experts)
    families = (*(_FORWARD_STEPS if experts else ()), *(_OPERAND_STEPS if quantized or linears else ()))
    steps = (StepProblem(family, dtypes) for family in families for dtypes in STEP_KERNELS[family][0])
    # Experts in bfloat16 alone need no step of a forward that quantizes.
    return {select(step, limits) for step in steps if step.family in _OPERAND_STEPS or quantized or "e4m3" not in step.dtypes}


def _expert_gemms(
    arch: str, model: Model, layer: ExpertsLayer, tp: int, ep: int, max_tokens: int
) -> Iterator[tuple[str, GemmProblem, tuple[str, ...]]]:
    """Yield the GEMMs of one experts layer, each with the largest M that ``max_tokens`` can bring, and its modules."""
    _check_split(model, layer, tp, ep)
    groups, width = layer.experts // ep, layer.width // tp
    dtypes = _BF16 if layer.scheme is Scheme.BF16 else _FP8
    for what, n, k, variants in (
        ("experts gate_up", (2 if layer.gated else 1) * width, layer.hidden_size, _gate_up_variants(layer, width)),
        ("experts down", layer.hidden_size, width, _down_variants(layer)),
    ):
        for variant, (layout, alignment) in itertools.product(variants, GROUPED_LAYOUTS):
            if alignment in _NARROW and (variant or dtypes == _BF16):
                continue
            problem = GemmProblem(max_tokens, n, k, groups, layout, alignment, dtypes, variant)
            if layout is not Layout.MASKED:
                # Every group may end in a tile that is all padding but for one row.
                padding = groups * alignment
                problem = replace(problem, m=max_tokens * layer.per_token + padding)
            try:
                select(problem, limits_of(arch))
            except UnsupportedError as refusal:
                sizes = (
                    f"hidden_size = {layer.hidden_size}, {layer.width_name} = {layer.width}, "
                    f"{layer.experts_name} = {layer.experts}, num_experts_per_tok = {layer.per_token}, "
                    f"tp {tp}, ep {ep}, max_tokens {max_tokens}"
                )
                raise UnsupportedError(
                    given=f"{what} of {model.path} ({sizes}): {refusal.given}",
                    supported=refusal.supported,
                    advice=refusal.advice,
                ) from None
            yield (f"{what}, {' '.join(variant).replace('_', ' ')}" if variant else what), problem, layer.modules
        if layer.scheme is Scheme.FP4:
            few = GemmProblem(MOST_FP4_ROWS * groups, n, k, groups, Layout.PREFIX_SUMS, SCATTERED_ALIGNMENT, _FP4)
            yield f"{what}, few tokens", few, layer.modules


def _gate_up_variants(layer: ExpertsLayer, width: int) -> tuple[tuple[str, ...], ...]:
    """Return the kernels that the first GEMM can ask for: gate and up lie in one matrix and may have scales of their own."""
    # A block across the border of gate and up has two scales, and only a scale per row can say so. Whether it has two is in the
    # shape of the checkpoint's scales, not in the config: both ways are planned.
    blocks_apart = 2 * -(-width // SCALE_BLOCK) != -(-2 * width // SCALE_BLOCK)
    across = (layer.scheme is Scheme.TENSOR and width % SCALE_BLOCK) or (layer.scheme is Scheme.BLOCKS and blocks_apart)
    return ((), (ROW_SCALES,)) if layer.gated and across else _down_variants(layer)


def _down_variants(layer: ExpertsLayer) -> tuple[tuple[str, ...], ...]:
    return ((ROW_SCALES,),) if layer.scheme is Scheme.ROWS else ((N_MAJOR,),) if layer.n_major else ((),)


def _split_linears(linears: tuple[Linear, ...], tp: int) -> tuple[list[Linear], list[Uncovered]]:
    """Return the part of each linear that a rank has, and those that do not split so."""
    parts: dict[tuple[int, int], Linear] = {}
    unsplit = []
    for linear in linears:
        ranks_n, ranks_k = tp if linear.split == "n" else 1, tp if linear.split == "k" else 1
        step = linear.scheme.width_step
        shared = linear.k if linear.split == "k" else linear.n
        if tp > 1 and linear.split and shared % (tp * step):
            name = linear.split.upper()
            reason = f"{name} = {shared} does not split over tp = {tp} into multiples of {step}, for {linear.scheme.value}"
            what = f"FP8 linears of {linear.n} x {linear.k}: {', '.join(linear.modules)}"
            unsplit.append(Uncovered(what, reason, _FRAMEWORK))
            continue
        part = replace(linear, n=linear.n // ranks_n, k=linear.k // ranks_k)
        like = parts.get((part.n, part.k))
        parts[part.n, part.k] = replace(part, modules=(*like.modules, *part.modules)) if like else part
    return list(parts.values()), unsplit


def _check_split(model: Model, layer: ExpertsLayer, tp: int, ep: int) -> None:
    """Refuse sizes that do not split into equal shards that have scales of their own."""
    width, experts, step = layer.width, layer.experts, layer.scheme.width_step
    faults = []
    if tp > 1 and width % (tp * step):
        fitting = _some_divisors(width // step) if width % step == 0 else "1"
        faults.append(
            f"{layer.width_name} = {width} does not split over tp = {tp} into multiples of {step}, needed for weights in "
            f"{layer.scheme.value}; tp that fit: {fitting}; ep splits the experts instead"
        )
    if experts % ep:
        faults.append(f"{layer.experts_name} = {experts} does not split over ep = {ep}; ep that fit: {_some_divisors(experts)}")
    if faults:
        raise OperandError(operation=f"plan for {model.path}", faults=faults)


def _some_divisors(number: int) -> str:
    """Name the smallest divisors: those are the sizes that people have GPUs for."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    all_of_them = sorted({*low, *(number // size for size in low)})
    more = len(all_of_them) - _MOST_SUGGESTED
    return ", ".join(map(str, all_of_them[:_MOST_SUGGESTED])) + (f" and {more} more" if more > 0 else "")

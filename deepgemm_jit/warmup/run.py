"""Warming up: build all kernels of a plan into the store, those that are missing side by side."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from deepgemm_jit.builder import Builder
from deepgemm_jit.errors import OperandError, StoreError
from deepgemm_jit.settings import PREFIX, Settings, read_settings
from deepgemm_jit.store.location import NAME_ANOTHER, locate
from deepgemm_jit.warmup.models import Model
from deepgemm_jit.warmup.plan import DEFAULT_MAX_TOKENS, Plan, plan_for, require_kernels
from deepgemm_jit.warmup.pool import KernelOutcome, build_in_workers

_log = logging.getLogger("deepgemm_jit.warmup")

DEFAULT_TIMEOUT_S = 300.0
"""Longer than the wait for another process's compile of the same kernel, which comes before ours."""


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up did.

    Attributes:
        arch: compiler target.
        outcomes: one per kernel of the plan, in the order in which they ended.
        seconds: wall time of the whole.
        store: root of the store that now holds the kernels.
    """

    arch: str
    outcomes: tuple[KernelOutcome, ...]
    seconds: float
    store: str

    @property
    def kernels(self) -> int:
        """Kernels of the plan."""
        return len(self.outcomes)

    @property
    def compiled(self) -> int:
        """Kernels that this warm-up compiled."""
        return sum(outcome.outcome == "compiled" for outcome in self.outcomes)

    @property
    def cached(self) -> int:
        """Kernels that the store had, or that another process brought there meanwhile."""
        return sum(outcome.outcome == "cached" for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[KernelOutcome, ...]:
        """Kernels that the store still lacks."""
        return tuple(outcome for outcome in self.outcomes if outcome.outcome == "failed")

    @property
    def worker_peak_bytes(self) -> int:
        """Most memory that any one worker had resident; 0 when none was needed."""
        return max((outcome.worker_peak_bytes for outcome in self.outcomes), default=0)


def warm_up(
    arch: str,
    model: str | os.PathLike[str] | Model | None = None,
    jobs: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tp: int = 1,
    ep: int = 1,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sms: int | None = None,
    settings: Settings | None = None,
) -> WarmupReport:
    """Build the whole kernel set of ``arch`` into the store, or the kernels that a model needs. No GPU is needed.

    It compiles what is missing whatever the compile policy says: the policy is about kernels that nobody asked to have built.

    Args:
        arch: compiler target, for example ``sm_90a``.
        model: a config.json or the folder that holds one, of which the experts are planned, or a model that was read; see
            :func:`~deepgemm_jit.warmup.plan.plan_for`, also for ``tp``, ``ep``, ``max_tokens`` and ``sms``.
        jobs: compile processes; default: the setting, or the CPUs of this process.
        timeout_s: longest time for one kernel in a worker.
        tp: tensor parallel size.
        ep: expert parallel size.
        max_tokens: most tokens that one forward brings to a rank.
        sms: SMs of the device, when known.
        settings: default: those of this moment.

    Returns:
        What became of every kernel. A kernel that fails is reported there and does not raise.

    Raises:
        OperandError, UnsupportedError: as of :func:`~deepgemm_jit.warmup.plan.plan_for`, or sizes of a model without a model.
        StoreError: the store cannot be used, or kernels are missing and it cannot be written.
        ToolchainError: a package that the sources of the kernels come from is missing.
    """
    if model is None and (tp, ep, max_tokens, sms) != (1, 1, DEFAULT_MAX_TOKENS, None):
        sizes = f"tp = {tp!r}, ep = {ep!r}, max_tokens = {max_tokens!r}, sms = {sms!r}"
        fault = f"{sizes}, needed: a model, as the whole kernel set is the same for all sizes"
        raise OperandError(operation="warm_up", faults=[fault])
    plan = plan_for(arch, model, tp=tp, ep=ep, max_tokens=max_tokens, sms=sms)
    return build_plan(plan, jobs, timeout_s=timeout_s, settings=settings)


def build_plan(
    plan: Plan,
    jobs: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Settings | None = None,
    on_outcome: Callable[[KernelOutcome], None] | None = None,
) -> WarmupReport:
    """Build the kernels of a plan; as :func:`warm_up`, which makes the plan too.

    Args:
        plan: what to build.
        jobs: compile processes.
        timeout_s: longest time for one kernel in a worker.
        settings: default: those of this moment.
        on_outcome: called in this process for each kernel as it ends.
    """
    started = time.monotonic()
    settings = settings or read_settings()
    jobs = jobs if jobs is not None else settings.jobs or len(os.sched_getaffinity(0))
    faults = [f"jobs = {jobs!r}, needed: a whole number of at least 1"] if type(jobs) is not int or jobs < 1 else []
    if not 0 < timeout_s < math.inf:
        faults.append(f"timeout_s = {timeout_s!r}, needed: seconds above 0")
    if faults:
        raise OperandError(operation="warm_up", faults=faults)
    require_kernels(plan)
    outcomes: list[KernelOutcome] = []

    def note(outcome: KernelOutcome) -> None:
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)

    place = locate(settings)
    if place.root is None:
        raise place.error()
    builder = Builder(settings)
    missing = []
    for spec in plan.kernels:
        if builder.try_cached(spec) is None:
            missing.append(spec)
        else:
            note(KernelOutcome(spec.name, "cached"))
    _log.info("looked up: the store has %d of %d kernels for %s", len(outcomes), len(plan.kernels), plan.arch)
    if missing:
        # Before any worker starts: what it builds could not stay.
        failure = builder.store.write_failure()
        if failure is not None:
            path = str(place.root)
            raise StoreError(path=path, reason=failure.removeprefix(f"store {path} "), fix=NAME_ANOTHER)
        _log.info("building: %d kernels, %d at a time", len(missing), min(jobs, len(missing)))
        # By its path, so that a worker does not look for the place, and tell of it, once more.
        build_in_workers(missing, replace(settings, cache_dir=place.root), jobs, timeout_s, note)
        gone = {spec.name for spec in plan.kernels if builder.try_cached(spec) is None}
        outcomes = [_removed(each, settings) if each.name in gone and each.outcome != "failed" else each for each in outcomes]
    return WarmupReport(plan.arch, tuple(outcomes), time.monotonic() - started, str(place.root))


def _removed(outcome: KernelOutcome, settings: Settings) -> KernelOutcome:
    """Return what became of a kernel that was stored and is there no longer."""
    if settings.cache_max_bytes is None:
        error = "it was stored, and another process has removed it since; run the warm-up again"
    else:
        error = (
            f"it was stored and removed again, as the store may hold {settings.cache_max_bytes} bytes only, and the kernels of "
            f"this warm-up have more: raise or unset {PREFIX}CACHE_MAX_BYTES"
        )
    return replace(outcome, outcome="failed", error=error)

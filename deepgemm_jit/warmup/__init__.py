"""Warm-up: a model's config becomes a plan, and a plan is built by worker processes. No GPU, no torch."""

from deepgemm_jit.warmup.models import ExpertsLayer, Linear, Model, Scheme, Uncovered
from deepgemm_jit.warmup.moe_config import read_model
from deepgemm_jit.warmup.plan import (
    DEFAULT_MAX_TOKENS,
    MOST_SMS,
    Plan,
    PlannedProblem,
    plan_for,
    prove,
    require_kernels,
    sms_faults,
)
from deepgemm_jit.warmup.pool import KernelOutcome
from deepgemm_jit.warmup.run import DEFAULT_TIMEOUT_S, WarmupReport, build_plan, warm_up

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "DEFAULT_TIMEOUT_S",
    "MOST_SMS",
    "ExpertsLayer",
    "KernelOutcome",
    "Linear",
    "Model",
    "Plan",
    "PlannedProblem",
    "Scheme",
    "Uncovered",
    "WarmupReport",
    "build_plan",
    "plan_for",
    "prove",
    "read_model",
    "require_kernels",
    "sms_faults",
    "warm_up",
]

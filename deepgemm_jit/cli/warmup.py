"""``warmup``: build what a plan names into the store."""

from __future__ import annotations

import math
from typing import Any

import click

from deepgemm_jit.cli.output import Reply, Session, command, count
from deepgemm_jit.cli.planning import PlanOptions, arch_option, model_options
from deepgemm_jit.cli.progress import progress
from deepgemm_jit.cli.terminal import say
from deepgemm_jit.warmup import DEFAULT_TIMEOUT_S, WarmupReport, build_plan

_NAMES_SHOWN = 3


class _Seconds(click.FloatRange):
    """A time above 0 that ends: a range alone lets nan through, which is neither above nor below anything."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no time that ends.", param, ctx)
        return seconds


@click.command()
@arch_option(required=True)
@model_options(required=False)
@click.option("--jobs", type=click.IntRange(min=1), help="Compile processes.  [default: DEEPGEMM_JIT_JOBS, or the CPUs at hand]")
@click.option(
    "--timeout",
    "timeout_s",
    type=_Seconds(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for one kernel.",
)
@command
def warmup(session: Session, jobs: int | None, timeout_s: float, **options: Any) -> Reply:
    """Build the whole kernel set of an arch, or the kernels of one model, into the store."""
    plan = PlanOptions(**options).plan()
    settings = session.settings()
    with progress(len(plan.kernels), quiet=session.as_json) as on_outcome:
        report = build_plan(plan, jobs, timeout_s=timeout_s, settings=settings, on_outcome=on_outcome)
    failed = [{"name": outcome.name, "error": outcome.error} for outcome in report.failed]
    payload = {
        "arch": report.arch,
        "kernels": report.kernels,
        "compiled": report.compiled,
        "cached": report.cached,
        "failed": failed,
        "seconds": round(report.seconds, 3),
        "store": report.store,
        "worker_peak_bytes": report.worker_peak_bytes,
    }
    for error, names in _failures(report).items():
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        say(f"Error: {error}\n{count(len(names), 'kernel')} failed so: {', '.join(names[:_NAMES_SHOWN])}{more}", err=True)
    summary = (
        f"{report.arch}: {count(report.kernels, 'kernel')} in {report.seconds:.1f} s: "
        f"{report.compiled} compiled, {report.cached} cached, {len(failed)} failed"
    )
    parts = [summary, f"store: {report.store}"]
    if plan.uncovered:
        parts.append(f"not covered: {count(len(plan.uncovered), 'part')} of the model (deepgemm-jit plan says which and why)")
    return Reply(payload, parts, ok=not failed)


def _failures(report: WarmupReport) -> dict[str, list[str]]:
    """Return the failed kernels by error: what they all met is said once."""
    grouped: dict[str, list[str]] = {}
    for outcome in report.failed:
        grouped.setdefault(outcome.error, []).append(outcome.name)
    return grouped

"""``kernels`` and ``plan``, and the options that name a plan: they read no store and compile nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from deepgemm_jit.cli.output import Reply, Session, Table, command, count
from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec import ARCHES, KernelSpec, arch_named, kernel_set
from deepgemm_jit.warmup.plan import DEFAULT_MAX_TOKENS, Plan, PlannedProblem, plan_for

_SIZE = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that name a plan; None where one was not given."""

    arch: str
    model: str | None
    tp: int | None
    ep: int | None
    max_tokens: int | None
    sms: int | None

    def plan(self) -> Plan:
        """Make the plan.

        Raises:
            click.UsageError: sizes of a model without a model.
        """
        sizes = {name: value for name, value in self._sizes().items() if value is not None}
        if self.model is None and sizes:
            given = ", ".join("--" + name.replace("_", "-") for name in sizes)
            raise click.UsageError(f"{given}: needs --model, as the whole kernel set is the same for all sizes.")
        return plan_for(self.arch, self.model, **sizes)

    def warmup_command(self, session: Session) -> str:
        """Return the command that builds this plan."""
        words = ["deepgemm-jit", "warmup", "--arch", self.arch]
        for name, value in {"model": self.model, **self._sizes(), "cache_dir": session.cache_dir}.items():
            if value is not None:
                words += ["--" + name.replace("_", "-"), str(value)]
        return shlex.join(words)

    def _sizes(self) -> dict[str, int | None]:
        return {"tp": self.tp, "ep": self.ep, "max_tokens": self.max_tokens, "sms": self.sms}


def _known_arch(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return value if value is None else arch_named(value).name
    except UnsupportedError as error:
        raise click.BadParameter(str(error)) from error


def arch_option(*, required: bool) -> Callable[[Any], Any]:
    """Return the option ``--arch``."""
    return click.option(
        "--arch", required=required, callback=_known_arch, help=f"Target of the compiler: {', '.join(ARCHES)}.", metavar="ARCH"
    )


def model_options(*, required: bool) -> Callable[[Any], Any]:
    """Return the options ``--model`` and those of its sizes."""
    options = (
        click.option(
            "--model",
            required=required,
            type=click.Path(exists=True),
            metavar="PATH",
            help="A config.json, or the folder of one.",
        ),
        click.option("--tp", type=_SIZE, help="Tensor parallel size: ranks that share each expert's width.  [default: 1]"),
        click.option("--ep", type=_SIZE, help="Expert parallel size: ranks that share the experts.  [default: 1]"),
        click.option(
            "--max-tokens", type=_SIZE, help=f"Most tokens one forward brings to a rank.  [default: {DEFAULT_MAX_TOKENS}]"
        ),
        click.option("--sms", type=_SIZE, help="SMs of the device.  [default: all counts the arch has]"),
    )

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def kernel_payload(spec: KernelSpec) -> dict[str, str]:
    """Return how JSON shows a spec."""
    return {"name": spec.name, "family": spec.family, "spec": spec.text}


def problem_payload(problem: PlannedProblem) -> dict[str, Any]:
    """Return how JSON shows a planned problem."""
    largest = problem.largest
    return {
        "what": problem.what,
        "layout": largest.layout.name.lower(),
        "max_m": largest.m,
        "n": largest.n,
        "k": largest.k,
        "groups": largest.groups,
        "alignment": largest.alignment,
        "dtypes": list(largest.dtypes),
        "kernels": [spec.name for spec in problem.kernels],
    }


@click.command()
@arch_option(required=True)
@command
def kernels(session: Session, arch: str) -> Reply:
    """List the closed kernel set of an arch."""
    session.settings()  # read for nothing but the refusal of a bad one
    specs = kernel_set(arch)
    return Reply(
        {"arch": arch, "kernels": [kernel_payload(spec) for spec in specs]},
        [Table(("kernel", "family"), [(spec.name, spec.family) for spec in specs]), f"{arch}: {count(len(specs), 'kernel')}"],
    )


@click.command()
@arch_option(required=True)
@model_options(required=True)
@command
def plan(session: Session, **options: Any) -> Reply:
    """Map a model's config.json to the kernels its experts need."""
    session.settings()  # read for nothing but the refusal of a bad one
    made = PlanOptions(**options).plan()
    return Reply(
        {
            "arch": made.arch,
            "model": made.model,
            "problems": [problem_payload(problem) for problem in made.problems],
            "kernels": [kernel_payload(spec) for spec in made.kernels],
            "uncovered": [{"what": part.what, "reason": part.reason} for part in made.uncovered],
        },
        [
            Table(
                ("problem", "layout", "M up to", "N", "K", "groups", "kernels"),
                [
                    (
                        p.what,
                        p.largest.layout.name.lower(),
                        p.largest.m,
                        p.largest.n,
                        p.largest.k,
                        p.largest.groups,
                        len(p.kernels),
                    )
                    for p in made.problems
                ],
            ),
            Table(("kernel",), [(spec.name,) for spec in made.kernels]),
            Table(("not covered", "reason"), [(part.what, part.reason) for part in made.uncovered]),
            f"{made.arch}: {count(len(made.kernels), 'kernel')} for {made.model}",
        ],
    )

"""``kernels`` and ``plan``, and the options that name a plan: they read no store and compile nothing."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from deepgemm_jit.cli.output import Reply, Session, Table, command, count
from deepgemm_jit.cli.terminal import say
from deepgemm_jit.errors import ToolchainError, UnsupportedError
from deepgemm_jit.spec import ARCHES, KernelSpec, Layout, arch_named, kernel_set
from deepgemm_jit.warmup import (
    DEFAULT_MAX_TOKENS,
    MOST_SMS,
    Model,
    Plan,
    PlannedProblem,
    plan_for,
    prove,
    read_model,
    require_kernels,
)

_SIZE = click.IntRange(min=1)
_READERS = ("auto", "builtin", "transformers")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that name a plan; None where one was not given."""

    arch: str
    model: str | None = None
    reader: str | None = None
    tp: int | None = None
    ep: int | None = None
    max_tokens: int | None = None
    sms: int | None = None

    def plan(self) -> Plan:
        """Make the plan.

        Raises:
            click.UsageError: sizes of a model without a model.
            UnsupportedError: nothing of the model has kernels.
        """
        sizes = {name: value for name, value in self._sizes().items() if value is not None}
        if self.model is None:
            given = ["--" + name.replace("_", "-") for name in (*(("reader",) if self.reader else ()), *sizes)]
            if given:
                raise click.UsageError(f"{', '.join(given)}: needs --model, as the whole kernel set is the same for all sizes.")
            return plan_for(self.arch)
        plan = plan_for(self.arch, read_with(self.reader or "auto", self.model), **sizes)
        require_kernels(plan)
        return plan

    def warmup_command(self, session: Session, plan: Plan | None = None) -> str:
        """Return the command that builds this plan, with the reader that made it: where it is run, "auto" may be another one."""
        words = ["deepgemm-jit", "warmup", "--arch", self.arch]
        reader = None if plan is None or plan.reader is None else plan.reader.partition(" ")[0]
        given = {"model": self.model, "reader": reader, **self._sizes(), "cache_dir": session.settings().cache_dir}
        for name, value in given.items():
            if value is not None:
                words += ["--" + name.replace("_", "-"), str(value)]
        return shlex.join(words)

    def _sizes(self) -> dict[str, int | None]:
        return {"tp": self.tp, "ep": self.ep, "max_tokens": self.max_tokens, "sms": self.sms}


def read_with(reader: str, path: str) -> Model:
    """Read a model: by itself, through transformers, or ("auto") through transformers where it is installed and knows the model.

    Raises:
        ToolchainError: there is no transformers, or no torch, and no other reader may be taken.
    """
    missing = [name for name in ("transformers", "torch") if importlib.util.find_spec(name) is None]
    if reader == "builtin" or (reader == "auto" and missing):
        return read_model(path)
    if missing:
        fix = "Install it with: pip install 'deepgemm-jit[transformers]'; --reader builtin does without"
        raise ToolchainError(missing=" and ".join(missing), looked_for="the architecture of a config", fix=fix)
    from deepgemm_jit.integrations.architectures import read_model as read_architecture

    try:
        return read_architecture(path)
    except UnsupportedError as refusal:
        if reader != "auto":
            raise
        model = read_model(path)
        say(f"Only the experts are planned: {refusal.given}", err=True)
        return model


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
        click.option(
            "--reader",
            type=click.Choice(_READERS),
            help="What reads the config: transformers finds linears and experts of all its architectures, the built-in one "
            "experts.  [default: auto, which is transformers where it is installed]",
        ),
        click.option("--tp", type=_SIZE, help="Tensor parallel size: ranks that share each expert's width.  [default: 1]"),
        click.option("--ep", type=_SIZE, help="Expert parallel size: ranks that share the experts.  [default: 1]"),
        click.option(
            "--max-tokens", type=_SIZE, help=f"Most tokens one forward brings to a rank.  [default: {DEFAULT_MAX_TOKENS}]"
        ),
        click.option("--sms", type=click.IntRange(1, MOST_SMS), help="SMs of the device.  [default: all counts the arch has]"),
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
        **_problem_key(problem),
        "max_m": largest.m,
        "groups": largest.groups,
        "alignment": largest.alignment,
        "dtypes": list(largest.dtypes),
        "kernels": [spec.name for spec in problem.kernels],
        "modules": list(problem.modules),
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
    """Map a model's config.json to the kernels it needs, and prove that no other can be asked for."""
    session.settings()  # read for nothing but the refusal of a bad one
    made = PlanOptions(**options).plan()
    started = time.monotonic()
    gaps = [{**_problem_key(problem), "m": gap.m, "reason": gap.reason} for problem, gap in prove(made)]
    seconds = time.monotonic() - started
    sms = f"{made.sm_counts[0]} to {made.sm_counts[-1]}" if len(made.sm_counts) > 1 else f"{made.sm_counts[0]}"
    proof = f"not complete: {count(len(gaps), 'gap')}" if gaps else "complete"
    return Reply(
        {
            "arch": made.arch,
            "model": made.model,
            "reader": made.reader,
            "problems": [problem_payload(problem) for problem in made.problems],
            "kernels": [kernel_payload(spec) for spec in made.kernels],
            "uncovered": [{"what": part.what, "reason": part.reason, "instead": part.instead} for part in made.uncovered],
            "complete": {"ok": not gaps, "seconds": round(seconds, 3), "gaps": gaps},
        },
        [
            _problem_table(made.problems),
            Table(("kernel",), [(spec.name,) for spec in made.kernels]),
            Table(
                ("not covered", "reason", "what runs instead"),
                [(part.what, part.reason, part.instead) for part in made.uncovered],
            ),
            Table(("gap in", "layout", "reason"), [(gap["what"], gap["layout"], gap["reason"]) for gap in gaps]),
            f"{made.arch}: {count(len(made.kernels), 'kernel')} for {made.model}, read by {made.reader}",
            f"{proof} for every M up to that of each problem, on {sms} SMs (proven in {seconds:.2f} s)",
        ],
        ok=not gaps,
    )


def _problem_table(problems: Sequence[PlannedProblem]) -> Table:
    """Return the problems for people; the built-in reader knows no modules, and gets no column for them."""
    has_modules = any(p.modules for p in problems)
    headings = (
        "problem",
        "layout",
        "alignment",
        "M up to",
        "N",
        "K",
        "groups",
        "kernels",
        *(("modules",) if has_modules else ()),
    )
    rows = [
        (
            p.what,
            p.largest.layout.name.lower(),
            "" if p.largest.layout is Layout.DENSE else p.largest.alignment,
            p.largest.m,
            p.largest.n,
            p.largest.k,
            p.largest.groups,
            len(p.kernels),
            *((", ".join(p.modules),) if has_modules else ()),
        )
        for p in problems
    ]
    return Table(headings, rows)


def _problem_key(problem: PlannedProblem) -> dict[str, Any]:
    largest = problem.largest
    return {"what": problem.what, "layout": largest.layout.name.lower(), "n": largest.n, "k": largest.k}

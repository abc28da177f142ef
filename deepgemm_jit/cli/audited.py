"""What run time had to do without, by its audit file, compared with a plan and with the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deepgemm_jit.cli.output import Session, Table, count
from deepgemm_jit.cli.planning import PlanOptions
from deepgemm_jit.service.audit import Asked, read_audit
from deepgemm_jit.spec import ARCHES, KernelSpec, kernels_by_name


@dataclass(frozen=True, slots=True)
class Audited:
    """What an audit file shows.

    Attributes:
        missing: kernels that no warm-up builds yet, each with the command that does.
        bad: lines that nothing can be read from.
        parts: the same in words.
    """

    missing: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    parts: list[str | Table]


def compare_audit(
    session: Session, path: Path, planned: Collection[KernelSpec] | None, is_built: Callable[[KernelSpec], bool]
) -> Audited:
    """Compare an audit file with a plan and a store.

    A kernel of the file is missing when the store lacks it, and also when the plan does not name it: then it is in the store
    because run time compiled it, and the next empty store would lack it again.

    Args:
        session: of the command.
        path: the audit file.
        planned: the kernels of the plan; None where none was named, and the store alone decides.
        is_built: whether the store has a kernel, sound and of the sources at hand.
    """
    asked: dict[str, Asked] = {}
    times: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    try:
        for line in read_audit(path):
            if isinstance(line, Asked):
                asked.setdefault(line.kernel, line)
                times[line.kernel] += 1
            else:
                bad.append({"path": str(path), "reason": line})
    except OSError as failure:
        raise click.ClickException(f"{path} cannot be read: {failure.strerror}") from failure
    known = {name: spec for arch in ARCHES for name, spec in kernels_by_name(arch).items()}
    missing: list[dict[str, Any]] = []
    rows = []
    for name, first in sorted(asked.items()):
        spec = known.get(name)
        if spec is None:
            bad.append({"path": str(path), "reason": f"no kernel is called {name!r} in this version; begin a new audit file"})
            continue
        outside = planned is not None and spec not in planned
        if not outside and is_built(spec):
            continue
        # The plan that was named does not build what it does not name: the whole set does.
        fix = PlanOptions(spec.arch).warmup_command(session)
        missing.append({"name": name, "command": fix, "caller": first.caller})
        rows.append((name, "not in the plan" if outside else "not built", times[name], first.caller))
    parts: list[str | Table] = [f"audit: {count(len(asked), 'kernel')} asked for by run time, {len(missing)} still missing"]
    if rows:
        parts.append(Table(("asked for", "and", "times", "first by"), rows))
        parts += [f"build them with: {command}" for command in sorted({kernel["command"] for kernel in missing})]
    if bad:
        parts.append(Table(("bad", "reason"), [(fault["path"], fault["reason"]) for fault in bad]))
    return Audited(missing, bad, parts)

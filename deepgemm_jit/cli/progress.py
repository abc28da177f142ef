"""How a warm-up shows that it goes on: a bar on a terminal, a line a phase and now and then in a log, nothing for programs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from deepgemm_jit.cli.terminal import said_above_bar, say
from deepgemm_jit.warmup import KernelOutcome

LOG_EVERY_S = 10.0


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[KernelOutcome], None]]:
    """Yield the function to call with each outcome; shows progress on stderr until the block is left."""
    if quiet:
        yield lambda _outcome: None
    elif sys.stderr.isatty():
        with _bar(total) as note:
            yield note
    else:
        with _log_lines(total) as note:
            yield note


@contextmanager
def _bar(total: int) -> Iterator[Callable[[KernelOutcome], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    with bar, said_above_bar(console.print):
        task = bar.add_task("", total=total)
        yield lambda outcome: bar.update(task, advance=1, description=f"{outcome.name} {outcome.outcome}")


@contextmanager
def _log_lines(total: int) -> Iterator[Callable[[KernelOutcome], None]]:
    done: Counter[str] = Counter()
    started = time.monotonic()
    left = threading.Event()

    def report() -> None:
        while not left.wait(LOG_EVERY_S):
            parts = ", ".join(f"{done[outcome]} {outcome}" for outcome in ("compiled", "cached", "failed"))
            # A log that cannot be written must not keep kernels from being built.
            with suppress(OSError):
                say(f"{done.total()} of {total} kernels after {time.monotonic() - started:.0f} s: {parts}", err=True)

    phases = logging.getLogger("deepgemm_jit.warmup")
    level = phases.level
    phases.setLevel(logging.INFO)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield lambda outcome: done.update([outcome.outcome])
    finally:
        left.set()
        thread.join()
        phases.setLevel(level)

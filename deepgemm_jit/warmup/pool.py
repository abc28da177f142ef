"""Worker processes that compile kernels side by side, and what becomes of those that hang or die.

Workers are plain ``python -m`` processes that talk over pipes: nothing is forked, so no lock or CUDA state of the caller is
inherited, and no script of the caller is imported again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from deepgemm_jit.settings import PREFIX, Settings, setting_names, setting_text
from deepgemm_jit.spec import KernelSpec

WORKER_COMMAND = ("-P", "-m", "deepgemm_jit.warmup.worker")
"""Arguments of the interpreter. ``-P``: a file in the working directory must not pass for a module."""

_STOP_S = 1.0
"""Time that workers are given to remove their temporary files before they are killed."""
_LAST_WORDS_LINES = 10
_RANDOM_NAME = re.compile(r"[0-9a-f]{16,}")
"""Names of temporary files and of keys: what differs between messages about one trouble."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelOutcome:
    """What became of one kernel of a warm-up."""

    name: str
    outcome: Literal["compiled", "cached", "failed"]
    seconds: float = 0.0
    """Time of the build in its worker; when failed, until the end; 0 when the store had it."""
    error: str = ""
    worker_peak_bytes: int = 0
    """Most memory that its worker had resident until then; 0 when none answered."""


def build_in_workers(
    specs: Sequence[KernelSpec],
    settings: Settings,
    jobs: int,
    timeout_s: float,
    on_outcome: Callable[[KernelOutcome], None],
) -> None:
    """Build every spec in one of ``jobs`` processes and report each as it ends, in the order in which they end.

    A worker that dies, or is at one kernel for longer than ``timeout_s``, fails that kernel only; another worker takes its place.
    However this function is left, no worker stays behind.
    """
    waiting = deque(specs)
    busy: list[_Worker] = []
    told: set[str] = set()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    spec = waiting.popleft()
                    try:
                        busy.append(_Worker(selector, settings, told))
                    except OSError as error:
                        on_outcome(KernelOutcome(spec.name, "failed", error=f"no worker process could be started: {error}"))
                    else:
                        busy[-1].give(spec, timeout_s)
                if busy:
                    nearest = min(worker.deadline for worker in busy)
                    for key, _ in selector.select(max(0.0, nearest - time.monotonic())):
                        key.data()
                for worker in list(busy):
                    outcome = worker.try_outcome()
                    if outcome is None:
                        continue
                    if waiting and worker.is_sound:
                        worker.give(waiting.popleft(), timeout_s)
                    else:
                        _stop([worker])
                        busy.remove(worker)
                    on_outcome(outcome)
        finally:
            _stop(busy)


class _Worker:
    """One process, the kernel it is at, and what it has said."""

    def __init__(self, selector: selectors.BaseSelector, settings: Settings, told: set[str]) -> None:
        self._told = told
        self.process = subprocess.Popen(
            [sys.executable, *WORKER_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(settings),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.is_sound = True
        """False once it has died or is too late: it can take no other kernel."""
        self._jobs = self.process.stdin
        self._answers = _Lines(self.process.stdout, selector)
        self._messages = _Lines(self.process.stderr, selector)
        self._last_messages: deque[str] = deque(maxlen=_LAST_WORDS_LINES)

    def give(self, spec: KernelSpec, timeout_s: float) -> None:
        """Hand the worker its next kernel."""
        self._name = spec.name
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self.deadline = self._started + timeout_s
        # When it has died, the end of its answers tells.
        with contextlib.suppress(BrokenPipeError):
            self._jobs.write(json.dumps({"spec": spec.text}).encode() + b"\n")
            self._jobs.flush()

    def try_outcome(self) -> KernelOutcome | None:
        """Return what became of the worker's kernel, or None while that is open."""
        self._pass_on_messages()
        if self._answers.lines:
            return self._outcome_of(self._answers.lines.popleft())
        if self._answers.ended:
            return self._given_up(self._cause_of_death())
        if time.monotonic() >= self.deadline:
            return self._given_up(f"not built within {self._timeout_s:g} s; its worker was stopped")
        return None

    def close(self) -> None:
        """Let go of the pipes of a process that has ended, and pass on what it said last."""
        self._messages.read()
        self._pass_on_messages()
        self._answers.close()
        self._messages.close()
        with contextlib.suppress(BrokenPipeError):  # a kernel it never read
            self._jobs.close()

    def _outcome_of(self, line: str) -> KernelOutcome:
        answer = json.loads(line)
        error = answer.get("error", "")
        if not error and not answer["stored"]:
            error = "compiled, but the store could not be written"
        if error:
            return KernelOutcome(self._name, "failed", time.monotonic() - self._started, error, answer["peak_bytes"])
        return KernelOutcome(self._name, answer["outcome"], answer["seconds"], worker_peak_bytes=answer["peak_bytes"])

    def _given_up(self, error: str) -> KernelOutcome:
        self.is_sound = False
        return KernelOutcome(self._name, "failed", time.monotonic() - self._started, error)

    def _cause_of_death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        self._messages.read()
        self._pass_on_messages()
        status = self.process.returncode
        if status is None:
            how = "its worker closed its answers"
        elif status < 0:
            how = f"its worker was ended by {signal.Signals(-status).name}"
            how += " (out of memory?)" if status == -signal.SIGKILL else ""
        else:
            how = f"its worker ended with status {status}"
        return "\n".join([how, *self._last_messages])

    def _pass_on_messages(self) -> None:
        while self._messages.lines:
            line = self._messages.lines.popleft()
            self._last_messages.append(line)
            # Every worker meets an unusable folder or a full disk, at every kernel; it is told once.
            about = _RANDOM_NAME.sub("*", line)
            if about in self._told:
                continue
            self._told.add(about)
            _log.warning("warm-up worker %d: %s", self.process.pid, line)


class _Lines:
    """The lines that have come through a pipe, read whenever the selector sees some."""

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector) -> None:
        self.lines: deque[str] = deque()
        self.ended = False
        self._pipe = pipe
        self._partial = b""
        self._selector = selector
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Take all that is there."""
        while not self.ended:
            try:
                some = os.read(self._pipe.fileno(), 65536)
            except BlockingIOError:
                return
            *lines, self._partial = (self._partial + some).split(b"\n")
            self.lines.extend(line.decode(errors="replace") for line in lines)
            if not some:
                self.ended = True
                self._selector.unregister(self._pipe)

    def close(self) -> None:
        if not self.ended:
            self._selector.unregister(self._pipe)
        self._pipe.close()


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a worker: ours, with the effective settings and our own import path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # Compiles of a warm-up are wanted: a policy that reports who caused them, or forbids those that nobody planned, has
    # nothing to say.
    settings = replace(settings, compile="auto")
    for name in setting_names():
        text = setting_text(getattr(settings, name))
        if text is not None:
            environment[PREFIX + name.upper()] = text
    # The worker must import the package that runs here, wherever the caller has it from.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path or _working_dir() for path in sys.path)))
    return environment


def _working_dir() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed: nothing can be imported from there
        return ""


def _stop(workers: Sequence[_Worker]) -> None:
    """End processes, politely first, and wait until they are gone."""
    try:
        for worker in workers:
            worker.process.terminate()
        until = time.monotonic() + _STOP_S
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            worker.close()

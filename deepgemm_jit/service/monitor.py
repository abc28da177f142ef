"""What a service does for its kernels: told as events, counted, and kept as the state of each kernel.

All of it happens on the way of a first call. A launch of a kernel that is loaded comes nowhere near this module.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import Literal

from deepgemm_jit.errors import KernelNotBuiltError, OperandError
from deepgemm_jit.spec import KernelSpec

logger = logging.getLogger("deepgemm_jit.service")

Phase = Literal["hit", "compile", "load", "refusal", "failure"]
"""``hit``: the store or a pack had the cubin. ``refusal``: the policy forbade the compile. ``failure``: any other error."""

KernelState = Literal["cold", "building", "ready", "failed"]
"""``cold``: not loaded here, whatever the store holds. ``building``: looked up, compiled or loaded now. ``failed``: the last
attempt raised; the next call of the kernel tries again, unless NVRTC refused its source."""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """Something that was done for a kernel, and the time it took."""

    kernel: str
    """Name of its spec."""
    phase: Phase
    seconds: float
    """A compile: with the look-ups before it, and the wait for another process that was at the same kernel."""
    error: str = ""
    """Of a refusal or a failure."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each phase came to its end since the service was made."""

    hits: int
    compiles: int
    loads: int
    refusals: int
    failures: int


class Monitor:
    """Counts, tells and remembers what becomes of kernels; for several threads."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[KernelEvent], None], ...] = ()
        self._counts: Counter[Phase] = Counter()
        self._failed: set[KernelSpec] = set()
        # By process: a fork inherits neither the threads that build nor the one that may hold the lock.
        self._building: set[tuple[int, KernelSpec]] = set()
        self._locks: dict[int, Lock] = {}
        self._thread = local()

    def listen(self, on_event: Callable[[KernelEvent], None]) -> None:
        """Call ``on_event`` with each event from now on."""
        self._listeners = (*self._listeners, on_event)

    def refuse_listeners(self, asked: str) -> None:
        """Refuse what is asked by a listener: it is called with a kernel's lock held, which it would wait for without end.

        Raises:
            OperandError: this thread is calling one.
        """
        listener = getattr(self._thread, "listener", None)
        if listener is not None:
            name = getattr(listener, "__qualname__", type(listener).__qualname__)
            fault = f"the listener {name} asks the service for {asked} while others wait for the kernel that it is told of; "
            raise OperandError(operation="on_event", faults=[f"{fault}do it in another thread, and do not wait for that"])

    @property
    def counts(self) -> Counts:
        """What has been counted so far."""
        counts = self._counts
        return Counts(counts["hit"], counts["compile"], counts["load"], counts["refusal"], counts["failure"])

    def state(self, spec: KernelSpec) -> KernelState:
        """Return the state of a kernel that is not loaded."""
        if (os.getpid(), spec) in self._building:
            return "building"
        return "failed" if spec in self._failed else "cold"

    @contextmanager
    def building(self, spec: KernelSpec) -> Iterator[None]:
        """Mark a kernel as building until the block is left; one that raises is told, and makes the kernel a failed one.

        One thread at a time may be at a kernel.
        """
        mark, started = (os.getpid(), spec), time.perf_counter()
        self._building.add(mark)
        try:
            yield
        except Exception as error:
            self._failed.add(spec)
            phase: Phase = "refusal" if isinstance(error, KernelNotBuiltError) else "failure"
            self.tell(spec, phase, started, str(error))
            raise
        else:
            self._failed.discard(spec)
        finally:
            self._building.discard(mark)

    def tell(self, spec: KernelSpec, phase: Phase, started: float, error: str = "") -> None:
        """Count and pass on an event that began at ``started`` of :func:`time.perf_counter`."""
        event = KernelEvent(spec.name, phase, time.perf_counter() - started, error)
        with self._locks.setdefault(os.getpid(), Lock()):
            self._counts[phase] += 1
        for listener in self._listeners:
            self._thread.listener = listener
            try:
                listener(event)
            except Exception:
                # Metrics that break must not keep a kernel from being launched.
                logger.exception("an on_event function failed on %s of %s", phase, spec.name)
            finally:
                self._thread.listener = None

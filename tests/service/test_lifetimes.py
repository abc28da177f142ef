"""Random lives of a process: loads, launches, resets, switches, forks and unloads in any order, against the driver's double.

Whatever is asked for, in whatever state, no launch with a foreign or stale handle ever reaches the driver: what belongs there is
launched, or the error says why not. The nightly profile tries 100,000 lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from deepgemm_jit.errors import (
    CaptureError,
    ContextMismatchError,
    ForkedProcessError,
    StaleContextError,
    UnloadedKernelError,
)
from deepgemm_jit.runtime import Launch, LoadedKernel
from deepgemm_jit.runtime.context import _FORKS
from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

pytestmark = pytest.mark.none

LARGE = max((spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM), key=dynamic_shared_memory_bytes)
SMALL = next(spec for spec in kernel_set("sm_90a") if dynamic_shared_memory_bytes(spec) == 0)
GPUS = 2
QUICK = settings.default.max_examples <= settings.get_profile("quick").max_examples
LIVES = 500 if QUICK else 100_000

gpus = st.integers(0, GPUS - 1)
specs = st.sampled_from([LARGE, SMALL])
indices = st.integers(0, 7)
now_and_then = st.integers(0, 15).map(lambda number: number == 15)


class Process(RuleBasedStateMachine):
    """One thread of a process with two GPUs, and what its application may do to the driver behind our back."""

    kernels: Bundle[LoadedKernel] = Bundle("kernels")

    def __init__(self) -> None:
        super().__init__()
        self.parent = self.pid = os.getpid()
        self.getpid = patch("os.getpid", lambda: self.pid)
        self.getpid.start()
        self.driver = DriverDouble(gpus=GPUS)
        self.service = KernelService(builder=InstantBuilder(), driver=self.driver)  # type: ignore[arg-type]
        self.own: list[int] = []
        """Living contexts of the application, green ones too."""
        self.streams: list[int] = []
        """Streams of living contexts."""

    def teardown(self) -> None:
        self.getpid.stop()

    @initialize(gpu=gpus)
    def start(self, gpu: int) -> None:
        primaries = [self.driver.retain_primary(gpu) for gpu in range(GPUS)]
        self.own = [self.driver.create_context(0), self.driver.create_green_context(gpu, sms=16)]
        self.streams = [self.driver.create_stream(context) for context in (*primaries, *self.own)]
        self.driver.push_context(primaries[gpu])

    # What the application does to the driver.

    def _forget(self, handle: int) -> None:
        """Drop the streams of a context that dies: using one later is the application's fault and no driver survives it."""
        self.streams = [stream for stream in self.streams if self.driver._streams[stream] != handle]

    @rule(gpu=gpus, retained=st.booleans())
    def reset(self, gpu: int, retained: bool) -> None:
        if self.driver.primary_is_active(gpu):
            self.driver.reset_primary(gpu)
            self._forget(self.driver._primaries[gpu].handle)
            for handle in [h for h in self.own if self.driver._contexts[h].kind == "green"]:
                if self.driver._contexts[handle].device == gpu:
                    self._destroy(handle)
        if retained:
            self.driver.retain_primary(gpu)

    @rule(gpu=gpus, sms=st.sampled_from([None, 8, 16]))
    def create_context(self, gpu: int, sms: int | None) -> None:
        if sms is not None:
            self.driver.retain_primary(gpu)
        self.own.append(self.driver.create_context(gpu) if sms is None else self.driver.create_green_context(gpu, sms))

    def _destroy(self, handle: int) -> None:
        self.driver.destroy_context(handle)
        self.own.remove(handle)
        self._forget(handle)

    @precondition(lambda self: self.own)
    @rule(index=indices)
    def destroy_context(self, index: int) -> None:
        self._destroy(self.own[index % len(self.own)])

    def _living(self) -> list[int]:
        primaries = [primary.handle for primary in self.driver._primaries if primary.context_id is not None]
        return [*primaries, *self.own]

    @precondition(lambda self: self._living())
    @rule(index=indices)
    def create_stream(self, index: int) -> None:
        living = self._living()
        self.streams.append(self.driver.create_stream(living[index % len(living)]))

    @precondition(lambda self: self._living())
    @rule(index=indices)
    def switch(self, index: int) -> None:
        living = self._living()
        self.driver._thread.stack[:] = [living[index % len(living)]]

    @rule()
    def leave_all_contexts(self) -> None:
        self.driver._thread.stack.clear()

    @precondition(lambda self: self.streams)
    @rule(index=indices, refuses=st.booleans())
    def capture(self, index: int, refuses: bool) -> None:
        self.driver.refuses_load_in_capture = refuses
        self.driver.begin_capture(self.streams[index % len(self.streams)])

    @rule()
    def end_captures(self) -> None:
        self.driver._capturing.clear()

    @contextmanager
    def process(self, forked: bool) -> Iterator[None]:
        """Be a fork for a moment: the same memory in a process of another id, in which the driver does nothing."""
        self.pid += forked
        _FORKS.count += forked
        try:
            yield
        finally:
            self.pid = self.parent
            _FORKS.count -= forked

    # What it asks of us.

    def _stream(self, index: int) -> int:
        return [0, 1, 2, *self.streams][index % (3 + len(self.streams))]

    @rule(target=kernels, gpu=gpus, index=indices, spec=specs)
    def load(self, gpu: int, index: int, spec: KernelSpec) -> Any:
        try:
            with self.service.call(gpu, self._stream(index)) as call:
                return call.kernel(spec)
        except (ContextMismatchError, CaptureError) as error:
            self.explain(error, index)
            return multiple()

    @rule(kernel=kernels, index=indices, forked=now_and_then)
    def launch_a_held_kernel(self, kernel: LoadedKernel, index: int, forked: bool) -> None:
        before = len(self.driver.launches)
        refusals: Any = ForkedProcessError if forked else (ContextMismatchError, StaleContextError, UnloadedKernelError)
        with self.process(forked), suppress(refusals):
            kernel.launch((kernel.sms, 1, 1), (128, 1, 1), self._stream(index), 0)
            assert not forked
        for done in self.driver.launches[before:]:
            assert done.context_id == kernel.identity.context_id

    @rule(gpu=gpus, index=indices, spec=specs, forked=now_and_then)
    def call(self, gpu: int, index: int, spec: KernelSpec, forked: bool) -> None:
        """Do what an operation does: again what was done before, or else everything."""
        stack, launched = list(self.driver._thread.stack), len(self.driver.launches)
        stream = self._stream(index)
        try:
            with self.process(forked):
                if not self._again(gpu, stream, spec):
                    with self.service.call(gpu, stream) as call:
                        kernel = call.kernel(spec)
                        kernel.launch((call.limits.sms, 1, 1), (128, 1, 1), stream, 0)
                        call.prepared[spec] = kernel
        except ForkedProcessError:
            assert forked
        except (ContextMismatchError, CaptureError) as error:
            self.explain(error, index)
        else:
            done = self.driver.launches[-1]
            owner = next(c for c in self.driver._contexts.values() if c.context_id == done.context_id)
            assert (owner.device, done.grid[0]) == (gpu, owner.sms)
            assert owner.kind != "own"
            assert len(self.driver.launches) == launched + 1
        assert self.driver._thread.stack == stack

    def _again(self, gpu: int, stream: int, spec: KernelSpec) -> bool:
        contexts = self.service.contexts
        context, pushed = contexts.enter(gpu, stream)
        try:
            kernel = self.service.prepared(context).get(spec)
            if kernel is None:
                return False
            config = kernel.config_for(Launch((context.sms, 1, 1), (128, 1, 1), 0), stream)
            kernel.launch_entered(context, config.getPtr(), 0)
            return True
        finally:
            contexts.leave(pushed)

    @rule(gpu=gpus, index=indices, spec=st.sampled_from([None, LARGE, SMALL]))
    def unload(self, gpu: int, index: int, spec: KernelSpec | None) -> None:
        try:
            with self.service.call(gpu, self._stream(index)):
                self.service.unload(spec)
        except ContextMismatchError as error:
            self.explain(error, index)
        except CaptureError:
            assert self.driver._capturing

    def explain(self, error: Exception, index: int) -> None:
        """Fail unless a call had a reason to be refused."""
        if isinstance(error, CaptureError):
            assert self.driver._capturing and self.driver.refuses_load_in_capture
        else:
            assert self._stream(index) in self.streams, error

    @invariant()
    def every_launch_that_reached_the_driver_was_right(self) -> None:
        assert self.driver.calls["launch"] == len(self.driver.launches)


TestProcess = Process.TestCase
TestProcess.settings = settings(max_examples=LIVES, stateful_step_count=40, deadline=None)

"""Which CUDA context a call means, and what is known about it.

A context is known by its id. Its address is no identity: after a reset of a primary context the same address names a new
context, in which everything loaded before is gone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepgemm_jit.errors import ContextMismatchError, DriverError
from deepgemm_jit.runtime.driver import LAST_SPECIAL_STREAM, Driver

NO_CONTEXT = "a thread without a CUDA context"


class ContextIdentity(NamedTuple):
    """What tells one context from every other; a tuple, because each launch hashes it."""

    pid: int
    context_id: int
    """The driver's id, unique for the life of the process."""
    device_uuid: str


class _Forks:
    """How many forks this process has come through: the mark by which state knows that it was carried over one.

    Costs less to look at than the process id, which each launch would ask the kernel for.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watched = False

    def watched(self) -> int:
        """Return the count, which is kept from the first call on."""
        if not self._watched:  # two threads that come first at once make each fork count twice, which is as good
            self._watched = True
            os.register_at_fork(after_in_child=self._count)
        return self.count

    def _count(self) -> None:
        self.count += 1


_FORKS = _Forks()


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One CUDA context as it was when first seen; there is one object per context and process, equal to no other.

    Attributes:
        identity: what tells it from others.
        handle: its address, which a later context may share.
        device_ordinal: of its GPU.
        device_name: product name of its GPU.
        compute_capability: of its GPU.
        sms: SMs it may use, fewer than its GPU has for a green context.
        shared_memory_bytes: dynamic shared memory that a block may ask for.
        kind: "primary" of its GPU, a "green" part of that one, or one of the application's "own".
    """

    identity: ContextIdentity
    handle: int
    device_ordinal: int
    device_name: str
    compute_capability: tuple[int, int]
    sms: int
    shared_memory_bytes: int
    kind: Literal["primary", "green", "own"]

    def describe(self) -> str:
        """Return the words by which errors name this context."""
        kind = "" if self.kind == "primary" else f", {self.kind}"
        return (
            f"context {self.identity.context_id} of GPU {self.device_ordinal} "
            f"({self.device_name}, uuid {self.identity.device_uuid}{kind})"
        )


class Contexts:
    """The contexts of this process that were seen so far, and the rule that picks the one a call means.

    Safe to use from several threads: each has its own current context, and two that meet a new one at once agree on its object.
    After a fork it starts afresh, if the parent had not started CUDA.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._pid = os.getpid()
        self._forks = _FORKS.watched()
        self._seen: dict[int, Context] = {}
        self._primaries: dict[int, int] = {}

    def current(self) -> Context:
        """Return the context that is current in this thread.

        Raises:
            DriverError: none is.
        """
        context = self.try_current()
        if context is None:
            raise DriverError(
                call="cuCtxGetId",
                result="CUDA_ERROR_INVALID_CONTEXT",
                detail="no CUDA context is current in this thread; make one current (torch: torch.cuda.set_device and any "
                "CUDA tensor), or use KernelService.call with a device, which needs none",
            )
        return context

    def try_current(self) -> Context | None:
        """Return the context that is current in this thread, or None."""
        if self._forks != _FORKS.count:
            self._start_afresh()
        context_id = self.driver.try_current_context_id()
        if context_id is None:
            return None
        return self._seen.get(context_id) or self._look_at_current(context_id)

    def enter(self, device_ordinal: int, stream: int) -> tuple[Context, int]:
        """Make the context current that a call on a device and a stream means.

        It is the primary context of the device, whatever was current before, or the green context of that device which was
        current or which the stream belongs to. Handles 0, 1 and 2 name streams of the current context.

        Costs, where nothing has to change: one driver call (the id of the current context) and one for a stream that is not
        one of the special ones.

        Returns:
            The context, and how many contexts were pushed: :meth:`leave` takes the number and restores the caller's.

        Raises:
            ContextMismatchError: the stream belongs to another device, or to a context of the application's own.
        """
        # The lines of try_current without its call: every launch comes here.
        if self._forks != _FORKS.count:
            self._start_afresh()
        context_id = self.driver.try_current_context_id()
        context = None if context_id is None else self._seen.get(context_id) or self._look_at_current(context_id)
        pushed = 0
        if context is None or context.device_ordinal != device_ordinal or context.kind == "own":
            context = self._push_primary(device_ordinal)
            pushed = 1
        if stream > LAST_SPECIAL_STREAM:
            try:
                handle = self.driver.stream_context(stream)
                if handle != context.handle:
                    context = self._push_stream_context(context, stream, handle)
                    pushed += 1
            except BaseException:
                self.leave(pushed)
                raise
        return context, pushed

    def leave(self, pushed: int) -> None:
        """Restore the context that was current before :meth:`enter`."""
        while pushed:
            self.driver.pop_context()
            pushed -= 1

    def with_handle(self, handle: int) -> Context | None:
        """Return the living context at an address, or None."""
        self.driver.push_context(handle)
        try:
            return self.try_current()
        finally:
            self.driver.pop_context()

    def is_gone(self, context: Context) -> bool:
        """Return whether a context of this process was reset or destroyed."""
        return self.driver.try_context_id(context.handle) != context.identity.context_id

    def _start_afresh(self) -> None:
        self.driver.refuse_fork()
        self._seen = {}
        self._primaries = {}
        self._pid = os.getpid()
        self._forks = _FORKS.count

    def _push_primary(self, device_ordinal: int) -> Context:
        handle = self._primary(device_ordinal)
        self.driver.push_context(handle)
        try:
            context = self.try_current()
            if context is None:
                # A reset leaves the retained address without a living context; retaining it once more starts the next one.
                self.driver.retain_primary(device_ordinal)
                context = self.current()
        except BaseException:
            self.driver.pop_context()
            raise
        return context

    def _push_stream_context(self, expected: Context, stream: int, handle: int) -> Context:
        self.driver.push_context(handle)
        try:
            context = self.current()
            if context.kind == "own" or context.device_ordinal != expected.device_ordinal:
                raise ContextMismatchError(
                    what=f"stream {stream:#x}", belongs_to=context.describe(), used_in=f"a call in {expected.describe()}"
                )
        except BaseException:
            self.driver.pop_context()
            raise
        return context

    def _primary(self, device_ordinal: int) -> int:
        """Return the address of a device's primary context, retained once and kept to the end of the process."""
        handle = self._primaries.get(device_ordinal)
        if handle is None:
            with self.driver.relaxed_capture():
                handle = self._primaries[device_ordinal] = self.driver.retain_primary(device_ordinal)
        return handle

    def _look_at_current(self, context_id: int) -> Context:
        # The first call of all may be made under a capture, which must not mind these questions.
        with self.driver.relaxed_capture():
            context = self._current_as_seen(context_id)
        return self._seen.setdefault(context_id, context)

    def _current_as_seen(self, context_id: int) -> Context:
        driver = self.driver
        handle = driver.current_context()
        ordinal = driver.context_device()
        kind: Literal["primary", "green", "own"] = "own"
        if driver.primary_is_active(ordinal) and handle == self._primary(ordinal):
            kind = "primary"
        elif driver.stream_is_green(0):
            kind = "green"
        return Context(
            identity=ContextIdentity(self._pid, context_id, driver.device_uuid(ordinal)),
            handle=handle,
            device_ordinal=ordinal,
            device_name=driver.device_name(ordinal),
            compute_capability=driver.compute_capability(ordinal),
            sms=driver.context_sms(handle, ordinal),
            shared_memory_bytes=driver.device_attribute(ordinal, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            kind=kind,
        )

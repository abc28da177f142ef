"""The errors of deepgemm_jit, one tree.

::

    DeepGemmJitError
    ├── UnsupportedError (also NotImplementedError)
    ├── OperandError (also ValueError)
    ├── SettingError (also ValueError)
    ├── CompileError (also RuntimeError)
    ├── ToolchainError (also ImportError)
    ├── StoreError (also RuntimeError)
    ├── DriverError (also RuntimeError)
    ├── KernelNotBuiltError (also RuntimeError)
    └── ContextError (also RuntimeError)
        ├── ContextMismatchError
        ├── StaleContextError
        ├── UnloadedKernelError
        ├── ForkedProcessError
        └── CaptureError

Each error keeps its facts as attributes, builds its text from them and survives pickling, so that one raised in a warm-up
worker reads the same in the parent. Every text says what was given, what is needed and what to do.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Self

_LINES_AROUND = 3
"""Source lines that a compile error shows before and after the first one that NVRTC refused."""


class DeepGemmJitError(Exception):
    """Base of every error this package raises on purpose.

    A subclass takes its facts as keyword arguments only and hands them to this constructor, which keeps them as attributes.
    """

    def __init__(self, **facts: Any) -> None:
        self._facts = facts
        for name, value in facts.items():
            setattr(self, name, value)
        super().__init__(self._text())

    def _text(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} must build its text")

    def afresh(self) -> Self:
        """Return the same error with the same cause, to be raised once more: a traceback belongs to one raise."""
        fresh = copy.copy(self)
        fresh.__cause__ = self.__cause__
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._facts)


def _rebuild(cls: type[DeepGemmJitError], facts: dict[str, Any]) -> DeepGemmJitError:
    return cls(**facts)


class UnsupportedError(DeepGemmJitError, NotImplementedError):
    """There is no kernel for an arch, dtype, scheme or size; the text says which would work."""

    given: str
    supported: str
    advice: str

    def __init__(self, *, given: str, supported: str, advice: str = "") -> None:
        super().__init__(given=given, supported=supported, advice=advice)

    def _text(self) -> str:
        text = f"not supported: {self.given}; supported: {self.supported}"
        return f"{text}. {self.advice}" if self.advice else text


class OperandError(DeepGemmJitError, ValueError):
    """What the caller passed is wrong; all faults of the call are listed at once."""

    operation: str
    faults: tuple[str, ...]

    def __init__(self, *, operation: str, faults: Sequence[str]) -> None:
        super().__init__(operation=operation, faults=tuple(faults))

    def _text(self) -> str:
        if len(self.faults) == 1:
            return f"{self.operation}: {self.faults[0]}"
        lines = "".join(f"\n  - {fault}" for fault in self.faults)
        return f"{self.operation}: {len(self.faults)} faults{lines}"


class SettingError(DeepGemmJitError, ValueError):
    """A setting has a value that means nothing; it is never read as its opposite."""

    name: str
    value: str
    origin: str
    needed: str

    def __init__(self, *, name: str, value: str, origin: str, needed: str) -> None:
        super().__init__(name=name, value=value, origin=origin, needed=needed)

    def _text(self) -> str:
        return f"setting {self.name} from {self.origin} is {self.value!r}; needed: {self.needed}"


class CompileError(DeepGemmJitError, RuntimeError):
    """NVRTC refused a source; the log and the numbered source are attached."""

    kernel: str
    options: tuple[str, ...]
    log: str
    source: str

    def __init__(self, *, kernel: str, options: Sequence[str], log: str, source: str) -> None:
        super().__init__(kernel=kernel, options=tuple(options), log=log, source=source)

    def _text(self) -> str:
        text = f"NVRTC could not compile {self.kernel}\noptions: {' '.join(self.options)}\nlog:\n{self.log.rstrip()}"
        first = re.search(rf"^{re.escape(self.kernel)}\.cu\(([0-9]+)\): .*error", self.log, re.MULTILINE)
        if first is None:
            return text
        line = int(first[1])
        around = self.listing.splitlines()[max(0, line - 1 - _LINES_AROUND) : line + _LINES_AROUND]
        return "\n".join([text, f"source around line {line}:", *around])

    @property
    def listing(self) -> str:
        """The source with line numbers, as the log counts them."""
        return "\n".join(f"{number:5d}  {line}" for number, line in enumerate(self.source.splitlines(), 1))


class ToolchainError(DeepGemmJitError, ImportError):
    """NVRTC or a package it needs is missing or broken; the loader's own error is chained."""

    missing: str
    looked_for: str
    fix: str

    def __init__(self, *, missing: str, looked_for: str, fix: str) -> None:
        super().__init__(missing=missing, looked_for=looked_for, fix=fix)

    def _text(self) -> str:
        return f"{self.missing} cannot be used; looked for: {self.looked_for}. {self.fix}"


class StoreError(DeepGemmJitError, RuntimeError):
    """The store directory is unsafe or unusable."""

    path: str
    reason: str
    fix: str

    def __init__(self, *, path: str, reason: str, fix: str) -> None:
        super().__init__(path=path, reason=reason, fix=fix)

    def _text(self) -> str:
        return f"store {self.path}: {self.reason}. {self.fix}"


class DriverError(DeepGemmJitError, RuntimeError):
    """The CUDA driver is missing or returned an error from a call that should have worked."""

    call: str
    result: str
    detail: str

    def __init__(self, *, call: str, result: str, detail: str = "") -> None:
        super().__init__(call=call, result=result, detail=detail)

    def _text(self) -> str:
        text = f"CUDA driver: {self.call} returned {self.result}"
        return f"{text} ({self.detail})" if self.detail else text


class KernelNotBuiltError(DeepGemmJitError, RuntimeError):
    """The compile policy is "never" and no cubin of the kernel is to be had."""

    kernel: str
    store: str
    command: str
    policy_origin: str
    caller: str

    def __init__(self, *, kernel: str, store: str, command: str, policy_origin: str = "", caller: str = "") -> None:
        super().__init__(kernel=kernel, store=store, command=command, policy_origin=policy_origin, caller=caller)

    def _text(self) -> str:
        origin = f" (set by {self.policy_origin})" if self.policy_origin else ""
        asked = f" Asked for by {self.caller}." if self.caller else ""
        return (
            f"kernel {self.kernel} is not built and the compile policy is 'never'{origin}; looked in {self.store}.{asked} "
            f"Build it with: {self.command}"
        )


class ContextError(DeepGemmJitError, RuntimeError):
    """A loaded kernel cannot be used in the context of this call."""


class _UsedElsewhereError(ContextError):
    what: str
    belongs_to: str
    used_in: str

    def __init__(self, *, what: str, belongs_to: str, used_in: str) -> None:
        super().__init__(what=what, belongs_to=belongs_to, used_in=used_in)


class ContextMismatchError(_UsedElsewhereError):
    """A kernel, stream or operand of one context or device was used in another; nothing was launched."""

    def _text(self) -> str:
        return (
            f"{self.what} belongs to {self.belongs_to} and was used in {self.used_in}; nothing was launched. "
            "Ask the service for the kernel of the context you launch in, and keep all operands on one device"
        )


class StaleContextError(_UsedElsewhereError):
    """The context a kernel was loaded in was reset or destroyed."""

    def _text(self) -> str:
        return (
            f"{self.what} was loaded in {self.belongs_to}, which has been reset or destroyed (now: {self.used_in}); "
            "nothing was launched. Ask the service for the kernel again"
        )


class UnloadedKernelError(ContextError):
    """A kernel was used after it had been unloaded on request."""

    what: str

    def __init__(self, *, what: str) -> None:
        super().__init__(what=what)

    def _text(self) -> str:
        return f"{self.what} has been unloaded; nothing was launched. Ask the service for the kernel again"


class ForkedProcessError(ContextError):
    """A loaded kernel was carried over a fork; CUDA handles do not survive one."""

    what: str
    loaded_pid: int
    pid: int

    def __init__(self, *, what: str, loaded_pid: int, pid: int) -> None:
        super().__init__(what=what, loaded_pid=loaded_pid, pid=pid)

    def _text(self) -> str:
        return (
            f"{self.what} was loaded in process {self.loaded_pid} and used in its fork {self.pid}; nothing was launched. "
            "Start workers with the spawn or forkserver method, or load the kernel after the fork"
        )


class CaptureError(ContextError):
    """The driver refused to load a kernel while a stream is capturing."""

    kernel: str
    result: str

    def __init__(self, *, kernel: str, result: str) -> None:
        super().__init__(kernel=kernel, result=result)

    def _text(self) -> str:
        return (
            f"kernel {self.kernel} could not be loaded or unloaded while a stream is capturing ({self.result}); "
            "call the operation once before the capture, or load it with KernelService.kernel; unload after it"
        )

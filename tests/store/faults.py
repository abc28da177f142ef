"""Makes the system calls of a store fail: each in turn, by number, with any errno."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

CALLS = (
    (
        os,
        ("open", "mkdir", "stat", "lstat", "fstat", "scandir", "rename", "replace", "unlink", "link", "fsync", "close", "pread"),
    ),
    (fcntl, ("flock",)),
)
"""All that the store asks of the system; pathlib calls these too."""


@dataclass
class Faults:
    """Counts the calls of a store and fails the one with number ``at``, or all from it on.

    A close that fails has closed all the same, as the system's own does.
    """

    root: str
    at: int = -1
    failure: int = errno.EIO
    lasting: bool = False
    calls: list[str] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)
    descriptors: set[int] = field(default_factory=set)

    def meet(self, name: str, subject: Any) -> None:
        """Note a call and raise when it is its turn."""
        number = len(self.calls)
        self.calls.append(name)
        if number == self.at or (self.lasting and 0 <= self.at <= number):
            self.injected.append(name)
            raise OSError(self.failure, os.strerror(self.failure), *([str(subject)] if not isinstance(subject, int) else []))

    def concerns(self, subject: Any) -> bool:
        """Say whether a call is about the root or a file of it that is open."""
        if isinstance(subject, int):
            return subject in self.descriptors
        return str(subject).startswith(self.root)


class _Writer:
    """What ``os.fdopen`` returns, with writes that can fail."""

    def __init__(self, file: Any, faults: Faults, descriptor: int) -> None:
        self._file, self._faults, self._descriptor = file, faults, descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "write", "flush"):
            self._faults.meet(name, self._descriptor)
        return getattr(self._file, name)


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Let the calls of this process that concern the root pass through ``faults``."""
    real = {(module, name): getattr(module, name) for module, names in CALLS for name in names}
    fdopen = os.fdopen

    def wrapped(module: Any, name: str) -> Callable[..., Any]:
        call = real[module, name]

        def run(subject: Any, *args: Any, **kwargs: Any) -> Any:
            if not faults.concerns(subject):
                return call(subject, *args, **kwargs)
            if name == "close":
                faults.descriptors.discard(subject)
                call(subject)
                faults.meet(name, subject)
                return None
            faults.meet(name, subject)
            result = call(subject, *args, **kwargs)
            if name == "open":
                faults.descriptors.add(result)
            return result

        return run

    def open_file(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        file = fdopen(descriptor, *args, **kwargs)
        return _Writer(file, faults, descriptor) if faults.concerns(descriptor) else file

    for module, name in real:
        setattr(module, name, wrapped(module, name))
    os.fdopen = open_file  # type: ignore[assignment]
    try:
        yield faults
    finally:
        os.fdopen = fdopen
        for (module, name), call in real.items():
            setattr(module, name, call)

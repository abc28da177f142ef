"""The audit file: which kernels run time asked for that no warm-up had built, and who asked.

One JSON object a line, only ever appended, each by a single write: any number of processes may share the file on a local disk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

logger = logging.getLogger("deepgemm_jit.audit")

# Never waits: what is no plain file, a pipe without a reader for one, is an error at once.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NOT_CALLERS = ("deepgemm_jit", "torch")
"""torch stands between a caller and us, and between our own functions."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One kernel that was asked for and not there."""

    time: str
    """UTC, ISO 8601."""
    pid: int
    kernel: str
    """Name of its spec."""
    key: str
    """Request key of the sources at hand."""
    caller: str
    """File, line and function of the nearest frame that is neither ours nor torch's."""


class Audit:
    """Appends to one file, or to none. What goes wrong there is logged once and never fails a call."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._warned = False
        self._noted: set[str] = set()

    def begin(self) -> None:
        """Create the file, so that an empty one says that nothing was missing."""
        self._append("")

    def note(self, kernel: str, key: str, caller: str | None = None) -> None:
        """Append a line on a kernel that is being asked for now, by default by the call that is on its way; once for each."""
        if self._path is not None and kernel not in self._noted:
            self._noted.add(kernel)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            asked = Asked(now, os.getpid(), kernel, key, caller or caller_of_ours())
            self._append(json.dumps(asdict(asked)) + "\n")

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        data = line.encode()
        try:
            file = os.open(self._path, _FLAGS, 0o600)
            try:
                written = os.write(file, data) if data else 0
            finally:
                os.close(file)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as failure:
            if not self._warned:
                self._warned = True
                logger.warning("the audit file %s cannot be written, kernels go unaudited: %s", self._path, failure)


def caller_of_ours() -> str:
    """Return file, line and function of the nearest frame that is neither ours nor torch's, as ``file:line in function``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_CALLERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "unknown"


def read_audit(path: Path) -> Iterator[Asked | str]:
    """Yield the lines of an audit file; one that cannot be read, as a full disk may leave it, as what is wrong with it.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                asked = Asked(**json.loads(line))
                if not all(type(getattr(asked, field.name)) is (int if field.name == "pid" else str) for field in fields(asked)):
                    raise TypeError(line)
                yield asked
            except (ValueError, TypeError, RecursionError):
                yield f"line {number} is no audit line"

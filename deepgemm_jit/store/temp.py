"""Files being written: in ``tmp/``, under names that say who writes them, and swept once that process is dead.

No lock tells the living from the dead: one in the store is one on whatever file system that is, and may be waited for for ever.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from deepgemm_jit.store.folders import entered, names_in

_NAME = re.compile(r"(?P<machine>[0-9a-f]{16})-(?P<pid>[0-9]{1,10})-(?P<started>[0-9]{1,20})-[0-9a-f]{16}")
_OLD_S = 24 * 3600.0
"""Age at which a file of a process that cannot be asked for is a leftover; no write takes so long."""
_ENDED = -1
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system that knows no fsync answers; there is nothing then that one could do."""


@contextmanager
def written(folder: Path, data: bytes, mode: int = 0o644) -> Iterator[Path]:
    """Write ``data`` to a new file, flushed to disk, and give its path; it is gone after the block unless that moves it away.

    Args:
        folder: where it is written.
        data: its content.
        mode: its mode, less the umask.

    Raises:
        OSError: it could not be written.
    """
    pid = os.getpid()
    temp = folder / f"{_machine()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(8)}"
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            _flush_to_disk(descriptor)
        yield temp
    finally:
        # Best effort, both: a busy file of a network file system must not undo what is done or hide what went wrong.
        with suppress(OSError):
            temp.unlink()
        with suppress(OSError):
            os.close(descriptor)


def sweep(folder: Path, now_s: float) -> int:
    """Remove what dead writers left in ``folder`` and return how many bytes that was.

    Args:
        folder: where files are written.
        now_s: the time by the file system's own clock, which may be another host's.

    Raises:
        OSError: the folder cannot be read; a file that cannot be looked at or removed is left.
    """
    freed_bytes = 0
    # Not through a link: what lies elsewhere is not ours to remove.
    with suppress(FileNotFoundError, NotADirectoryError), entered(folder) as descriptor:
        for match in filter(None, map(_NAME.fullmatch, names_in(descriptor))):
            with suppress(OSError):
                status = os.stat(match.string, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and (_is_dead(match) or now_s - status.st_mtime > _OLD_S):
                    os.unlink(match.string, dir_fd=descriptor)
                    freed_bytes += status.st_size
    return freed_bytes


def _flush_to_disk(descriptor: int) -> None:
    # Without this a power cut can leave the new name with none of the bytes.
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _is_dead(writer: re.Match[str]) -> bool:
    """Say whether a writer has certainly ended; False of one on another machine, or of another user."""
    if writer["machine"] != _machine() or not _machine().strip("0"):
        return False
    pid = int(writer["pid"])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    # A process of the same number that started at another time is another one.
    started = _started(pid)
    return started == _ENDED or (started is not None and started != int(writer["started"]) != 0)


@cache
def _machine() -> str:
    """Return a name for all processes whose numbers are ours: this boot of the kernel and this namespace; zeros if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = bytes(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "0" * 16
    return hashlib.sha256(boot + namespace).hexdigest()[:16]


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since the boot; -1 when it has ended, and None when that cannot be known."""
    try:
        # The second field, the program's name, may hold anything but is the last in parentheses.
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # One that was killed is there until its parent has noticed.
        return _ENDED if state in (b"Z", b"X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None

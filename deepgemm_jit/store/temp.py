"""Files being written: each under a random name in ``tmp/``, locked by its writer, swept once the writer is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]{32}")
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system that knows no fsync answers; there is nothing then that one could do."""
_OLD_S = 24 * 3600.0
"""Age at which a file is a leftover where locks cannot tell; no write takes so long."""


@contextmanager
def written(folder: Path, data: bytes) -> Iterator[Path]:
    """Write ``data`` to a new file, flushed to disk, and give its path; it is locked as long as the block lasts.

    The kernel drops the lock with the process, so that whoever sweeps can tell what the dead left from what the living are at.
    Unless the block moves the file away, it is removed.

    Raises:
        OSError: it could not be written.
    """
    temp = folder / secrets.token_hex(16)
    # 0644 inside a root of 0700: a root that its owner opens with one chmod then serves other users.
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        # Where locks do not work, sweeping goes by age.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    freed_bytes, names = 0, []
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        names = [entry.name for entry in found if _NAME.fullmatch(entry.name)]
    for name in names:
        with suppress(OSError):
            freed_bytes += _remove_if_left(folder / name, now_s)
    return freed_bytes


def _flush_to_disk(descriptor: int) -> None:
    # Without this a power cut can leave the new name with none of the bytes.
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _remove_if_left(path: Path, now_s: float) -> int:
    # To write: a lock of NFS is one on bytes, which asks for that.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or now_s - status.st_mtime < _OLD_S:
                return 0
        path.unlink()
        return status.st_size
    finally:
        os.close(descriptor)

"""Which files and folders may be believed, and how a file is read without believing it first."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


class DamagedError(Exception):
    """A file of the store must not be used; it is set aside, never raised to the caller of the store.

    ``identity`` is (device, inode) of the file that was looked at, as another may have taken its name since.
    """

    def __init__(self, path: Path, reason: str, status: os.stat_result) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason
        self.identity = (status.st_dev, status.st_ino)


def distrust(status: os.stat_result) -> str | None:
    """Return why a file or folder with this status must not be believed, or None.

    Trusted owners are the user of this process and uid 0, so that a store baked into an image serves any user.
    """
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid not in (user, 0):
        return f"is owned by uid {status.st_uid}, who is neither this user (uid {user}) nor root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by its group or by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def read_file(path: Path, limit_bytes: int, *, trusted: bool) -> tuple[bytes, os.stat_result]:
    """Return the content of ``path`` and its status, checked on the open file so that no swap comes between.

    Args:
        path: the file; a symbolic link is followed only when ``trusted``.
        limit_bytes: the most that will be read.
        trusted: skip the checks of owner, mode and links (the user named this root in ``TRUST_ROOT``).

    Raises:
        DamagedError: not a regular file, too large, or not to be trusted.
        OSError: not there, or not readable.
    """
    # O_NONBLOCK: opening a planted FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if trusted else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(path, "is a symbolic link", path.lstat()) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(path, "is not a regular file", status)
        if not trusted and (reason := distrust(status)):
            raise DamagedError(path, reason, status)
        if status.st_size > limit_bytes:
            raise DamagedError(path, f"has {status.st_size} bytes, more than the {limit_bytes} expected", status)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes + 1), status
    finally:
        os.close(descriptor)


def make_private_dir(path: Path) -> None:
    """Create ``path`` and its missing parents with mode 0700; a folder that exists is left as it is.

    Raises:
        OSError: it cannot be created.
    """
    # os.makedirs gives its mode to the last folder only; the parents we create should be no more open than that one.
    missing = [path, *path.parents]
    missing = missing[: next((i for i, folder in enumerate(missing) if os.path.lexists(folder)), len(missing))]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process was faster; the caller checks what lies there
            folder.mkdir(0o700)

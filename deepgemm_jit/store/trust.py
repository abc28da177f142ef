"""Which files and folders may be believed, and how a file is read without believing it first."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    return open_to_others(status)


def open_to_others(status: os.stat_result) -> str | None:
    """Return why the mode of a file or folder lets others change it, or None."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by its group or by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def believe(_status: os.stat_result) -> None:
    """Find no fault: the user named this file or its root as trusted."""


@contextmanager
def opened(
    path: Path, *, follow: bool, distrust: Callable[[os.stat_result], str | None], extra_flags: int = 0
) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file to read and give its descriptor and status, checked on the open file: no swap comes between.

    Args:
        path: the file.
        follow: whether it may be a symbolic link.
        distrust: returns why a file with this status must not be read, or None.
        extra_flags: further flags of the open.

    Raises:
        DamagedError: not a regular file, a link that must not be followed, or not to be trusted.
        OSError: not there, or not readable.
    """
    # O_NONBLOCK: opening a planted FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW) | extra_flags
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        # A link that is not followed, a socket, a device without a driver.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV) and not stat.S_ISREG((status := path.lstat()).st_mode):
            what = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
            raise DamagedError(path, what, status) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(path, "is not a regular file", status)
        if reason := distrust(status):
            raise DamagedError(path, reason, status)
        yield descriptor, status
    finally:
        # What was read is read, whatever a close of a network file system says.
        with suppress(OSError):
            os.close(descriptor)


def read_file(path: Path, limit_bytes: int, *, trusted: bool, extra_flags: int = 0) -> tuple[bytes, os.stat_result]:
    """Return the content of ``path`` and its status.

    Args:
        path: the file; a symbolic link is followed only when ``trusted``.
        limit_bytes: the most that will be read.
        trusted: skip the checks of owner, mode and links (the user named this root in ``TRUST_ROOT``).
        extra_flags: further flags of the open.

    Raises:
        DamagedError: not a regular file, too large, or not to be trusted.
        OSError: not there, or not readable.
    """
    doubt = believe if trusted else distrust
    with opened(path, follow=trusted, distrust=doubt, extra_flags=extra_flags) as (descriptor, status):
        if status.st_size > limit_bytes:
            raise DamagedError(path, f"has {status.st_size} bytes, more than the {limit_bytes} expected", status)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes + 1), status


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

"""Look into folders and remove them through open descriptors: no link is followed, and no depth is too much."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS = 5
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


@contextmanager
def entered(folder: Path | str, within: int | None = None) -> Iterator[int]:
    """Open a folder and give its descriptor, which stays with it whatever is put in its place.

    Args:
        folder: its path.
        within: descriptor of the folder that a relative path starts at.

    Raises:
        NotADirectoryError: it is no folder, or a link to one.
        OSError: it is not there, or cannot be read.
    """
    try:
        descriptor = os.open(folder, _FLAGS, dir_fd=within)
    except OSError as error:
        if error.errno == errno.ELOOP:  # what some systems say of a link
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        raise
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.close(descriptor)


def names_in(descriptor: int) -> list[str]:
    """Return the names of what lies in an open folder, sorted."""
    with os.scandir(descriptor) as files:
        return sorted(file.name for file in files)


def files_in(folder: Path) -> list[Path]:
    """Return what lies in a folder, sorted; nothing where there is none, as another process may have cleared it away."""
    try:
        with entered(folder) as descriptor:
            return [folder / name for name in names_in(descriptor)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: Path | str, within: int | None = None) -> int:
    """Remove a file, or a folder with all that lies in it, and return how many bytes the files had.

    Args:
        path: what goes; a link goes itself.
        within: descriptor of the folder that a relative path starts at.

    Raises:
        OSError: it is not there, or something of it stays.
    """
    status = os.stat(path, dir_fd=within, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path, dir_fd=within)
        return status.st_size
    freed_bytes = 0
    for attempt in range(_ATTEMPTS):
        with entered(path, within) as top:
            freed_bytes += _emptied(top)
        try:
            os.rmdir(path, dir_fd=within)
            break
        except OSError as error:
            # A write that was under way may have landed in it.
            if error.errno not in _NOT_EMPTY or attempt == _ATTEMPTS - 1:
                raise
    return freed_bytes


def empty(folder: Path) -> int:
    """Remove what lies in a folder, as far as that goes, and return how many bytes that was; what is no folder goes itself."""
    freed_bytes = 0
    try:
        with entered(folder) as descriptor:
            for name in names_in(descriptor):
                with suppress(OSError):
                    freed_bytes += remove(name, descriptor)
    except NotADirectoryError:
        with suppress(OSError):
            freed_bytes += remove(folder)
    except OSError:  # not there, or not ours to read
        pass
    return freed_bytes


def _emptied(top: int) -> int:
    # Folders in folders are moved up first, so that two descriptors and short names do for any depth.
    freed_bytes, folders = _flattened(top, top)
    while folders:
        name = folders.pop()
        try:
            with entered(name, top) as folder:
                freed, moved = _flattened(folder, top)
            freed_bytes += freed
            folders += moved
            os.rmdir(name, dir_fd=top)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_NOT_EMPTY):  # the caller looks again
                raise
    return freed_bytes


def _flattened(folder: int, top: int) -> tuple[int, list[str]]:
    """Remove the files of a folder and move its folders to the top; return how many bytes went, and the folders' names there."""
    freed_bytes, moved = 0, []
    for name in names_in(folder):
        with suppress(FileNotFoundError):  # another process removes it as well
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=folder)
                freed_bytes += status.st_size
            elif folder == top:
                moved.append(name)
            else:
                # A name that a store may have: who is killed here leaves what the next `clear` knows.
                up = f"tmp.{secrets.token_hex(16)}"
                os.rename(name, up, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(up)
    return freed_bytes, moved

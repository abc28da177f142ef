"""Locks that keep processes of one machine from compiling the same kernel at once.

They only save work: what happens without them is that two processes publish the same bytes. So no failure here is an error.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from filelock import Timeout, UnixFileLock

from deepgemm_jit.settings import Settings
from deepgemm_jit.store.location import error_text, locate_locks
from deepgemm_jit.store.trust import DamagedError, believe, opened

_LOGGER = logging.getLogger("deepgemm_jit.store")
_SAY_SO_AFTER_S = 5.0
_MAX_HOLDER_BYTES = 256


class Locks:
    """The locks of one store, by name.

    The kernel drops an ``flock`` with the process that holds it, so a killed holder blocks nobody and a leftover file
    means nothing. Lock files are never unlinked: two processes could then hold one name through two inodes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warned = False
        # By process as well: a fork may inherit a lock whose holder did not come along.
        self._threads: dict[tuple[int, str], threading.Lock] = {}

    @contextmanager
    def hold_in_process(self, name: str, what: str) -> Iterator[bool]:
        """Exclude the other threads of this process only; as :meth:`hold`."""
        lock = self._threads.setdefault((os.getpid(), name), threading.Lock())
        held = self._waited_for(lambda limit_s: lock.acquire(timeout=limit_s), what, lambda: "another thread of this process")
        try:
            yield held
        finally:
            if held:
                lock.release()

    @contextmanager
    def hold(self, name: str, what: str) -> Iterator[bool]:
        """Exclude other threads and processes; yields False after the time limit or where locking does not work.

        Args:
            name: the lock's file name without its suffix.
            what: what is waited for, in words.
        """
        lock = self._try_acquire(name, what)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with suppress(OSError):
                    lock.release()

    def _try_acquire(self, name: str, what: str) -> UnixFileLock | None:
        try:
            path = locate_locks(self._settings) / f"{name}.lock"
            # filelock takes a file that it cannot create for one that another process holds, and waits.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "is not a regular file", str(path))
            finally:
                os.close(descriptor)
            # A soft lock (a file that exists) would outlive a killed holder: no fallback to one.
            lock = UnixFileLock(path, mode=0o600, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_sign)
            return lock if self._waited_for(partial(_acquired, lock), what, lambda: f"{_holder(path)} (lock {path})") else None
        except OSError as error:
            if not self._warned:
                self._warned = True
                _LOGGER.warning("locks do not work, other processes may compile the same kernels: %s", error_text(error))
            return None

    def _waited_for(self, acquired: Callable[[float], bool], what: str, holder: Callable[[], str]) -> bool:
        """Call ``acquired`` with the seconds that it may wait; whoever waits long is told for what and for whom, once."""
        limit_s = min(self._settings.lock_timeout_s, threading.TIMEOUT_MAX)
        start_s = time.monotonic()
        if acquired(min(limit_s, _SAY_SO_AFTER_S)):
            return True
        if limit_s > _SAY_SO_AFTER_S:
            _LOGGER.warning("waiting for %s, which %s is building", what, holder())
            if acquired(max(limit_s - (time.monotonic() - start_s), 0)):
                return True
        waited_s = time.monotonic() - start_s
        _LOGGER.warning("gave up after %.1f s on the lock of %s, held by %s; going on without it", waited_s, what, holder())
        return False


def _acquired(lock: UnixFileLock, limit_s: float) -> bool:
    with suppress(Timeout):
        lock.acquire(timeout=limit_s)
        return True
    return False


def lock_failure(settings: Settings) -> str | None:
    """Return why locks do not work where ``settings`` have them, or None; leaves nothing on disk."""
    try:
        folder = locate_locks(settings, create=False)
        if folder.exists():
            with tempfile.TemporaryFile(dir=folder) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error_text(error)
    return None


def _sign(descriptor: int) -> None:
    """Write this process into the lock file it holds, for those who wait; best effort."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode()[:_MAX_HOLDER_BYTES], 0)


def _holder(path: Path) -> str:
    text = ""
    # Whatever lies there now is only told, and must not be waited for.
    with suppress(OSError, DamagedError), opened(path, follow=False, distrust=believe) as (descriptor, _status):
        text = os.read(descriptor, _MAX_HOLDER_BYTES).decode(errors="replace").strip()
    return text if text and text.isprintable() else "an unknown process"

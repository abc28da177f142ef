"""Where the store and its locks lie, and whether they may be used there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from deepgemm_jit.errors import StoreError
from deepgemm_jit.settings import Settings
from deepgemm_jit.store.key import SCHEMA
from deepgemm_jit.store.trust import distrust, make_private_dir

_APP = "deepgemm_jit"
NAME_ANOTHER = "Name a directory that can be written with --cache-dir or DEEPGEMM_JIT_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Location:
    """Where the store lies: ``root`` is None for memory only, and ``reason`` says why."""

    root: Path | None
    origin: str
    trusted: bool = False
    """True when ``TRUST_ROOT`` names this root: owners, modes and links are not checked."""
    reason: str = ""
    """What went wrong on the way here; empty when the first choice was fine."""
    refused: str = ""
    """The place that ``reason`` is about, where there is no root."""
    fix: str = ""

    @property
    def text(self) -> str:
        """One line for people: the effective place and where it came from."""
        if self.root is None:
            return f"memory only, nothing is kept on disk: {self.refused} {self.reason}. {self.fix}"
        trusted = ", trusted by TRUST_ROOT" if self.trusted else ""
        return f"{self.root} (from {self.origin}{trusted})" + (f"; {self.reason}" if self.reason else "")

    def error(self) -> StoreError:
        """Return the refusal of a location without a root, to be raised."""
        return StoreError(path=self.refused, reason=self.reason, fix=self.fix)


class _UnsafeError(Exception):
    """A folder must not be used; says why and what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. {fix}")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True)
class _Candidate:
    root: Path
    origin: str
    base: Path | None = None
    """A folder that must be there already: a home directory is never created."""


def locate(settings: Settings, *, create: bool = True) -> Location:
    """Find the root of the store and create it where it is missing; never raises.

    With ``create=False`` nothing is left on disk: a root that is missing is returned when it could be created.

    The order: the setting, ``XDG_CACHE_HOME``, the home directory's cache folder, a temporary folder of this uid, memory.
    What cannot be used gives way to the next; what is *unsafe*, and a setting, does not: a store that quietly moves
    elsewhere would hide the reason.
    """
    if settings.cache_dir is not None:
        candidates = [_Candidate(_lexical(settings.cache_dir), settings.origins.get("cache_dir", "the setting cache_dir"))]
    else:
        candidates = list(_default_candidates())
    failures: list[str] = []
    for candidate in candidates:
        trusted = settings.trust_root is not None and _lexical(settings.trust_root) == _lexical(candidate.root)
        try:
            _open_root(candidate, trusted=trusted, create=create)
        except _UnsafeError as unsafe:
            return Location(None, candidate.origin, reason=unsafe.reason, refused=str(candidate.root), fix=unsafe.fix)
        except OSError as error:
            failures.append(f"{candidate.root} (from {candidate.origin}) cannot be used: {error_text(error)}")
        else:
            return Location(candidate.root, candidate.origin, trusted=trusted, reason="; ".join(failures))
    if settings.cache_dir is not None:
        reason = failures[0].replace(f" (from {candidates[0].origin})", "", 1).removeprefix(f"{candidates[0].root} ")
        return Location(None, candidates[0].origin, reason=reason, refused=str(candidates[0].root), fix=NAME_ANOTHER)
    return Location(None, "memory", reason="; ".join(failures), refused="in no default place", fix=NAME_ANOTHER)


def locate_locks(settings: Settings, *, create: bool = True) -> Path:
    """Return the folder of lock files, created where it is missing; node-local unless ``LOCK_DIR`` says otherwise.

    Raises:
        OSError: it is unsafe or cannot be used; with ``create=False``, it could not be created either.
    """
    candidate = _lock_candidate(settings)
    try:
        _open_dir(candidate, trusted=False, create=create)
    except _UnsafeError as unsafe:
        text = f"{unsafe.reason}. Name another lock folder with DEEPGEMM_JIT_LOCK_DIR"
        raise PermissionError(errno.EACCES, text, f"lock folder {candidate.root}") from None
    return candidate.root


def lock_dir_path(settings: Settings) -> Path:
    """Return the path of the lock folder, whether or not it can be used."""
    return _lock_candidate(settings).root


def try_create_in(folder: Path) -> None:
    """Create something where ``folder`` is or would be, and remove it again.

    Raises:
        OSError: nothing can be created there.
    """
    nearest = next(there for there in (folder, *folder.parents) if os.path.lexists(there))
    Path(tempfile.mkdtemp(prefix=f".{_APP}-probe-", dir=nearest)).rmdir()


def error_text(error: OSError) -> str:
    """Return the path, the reason and the errno of a failed system call."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} (errno {error.errno})"


def _lexical(path: Path) -> Path:
    # Absolute without following links: whether the root is one is what the checks ask.
    return Path(os.path.normpath(path.absolute()))


def _lock_candidate(settings: Settings) -> _Candidate:
    if settings.lock_dir is not None:
        return _Candidate(_lexical(settings.lock_dir), settings.origins.get("lock_dir", "the setting lock_dir"))
    return _temp_candidate("locks")


def _default_candidates() -> Iterator[_Candidate]:
    by_xdg = Path(os.environ.get("XDG_CACHE_HOME", "")).is_absolute()
    # RuntimeError: HOME is not set and the uid has no passwd entry, as in many containers.
    with suppress(RuntimeError):
        cache = platformdirs.user_cache_path(_APP, appauthor=False)
        yield _Candidate(cache, "XDG_CACHE_HOME") if by_xdg else _Candidate(cache, "the home directory", cache.parent.parent)
    home = Path(os.environ.get("HOME", ""))
    if by_xdg and home.is_absolute():
        yield _Candidate(home / ".cache" / _APP, "the home directory", home)
    yield _temp_candidate("cache")


def _temp_candidate(purpose: str) -> _Candidate:
    # Not tempfile.gettempdir(): it writes a probe file, and falls back to the working directory.
    base = Path(os.environ.get("TMPDIR", ""))
    if not base.is_absolute():
        base = Path("/tmp")  # noqa: S108 - the folder in it carries the uid, has mode 0700 and is checked
    return _Candidate(base / f"{_APP}-{purpose}-{os.geteuid()}", "the temporary directory of this uid", base)


def _open_root(candidate: _Candidate, *, trusted: bool, create: bool) -> None:
    root = candidate.root
    if root == root.parent:
        raise _UnsafeError("is the root of the file system", "Name a folder of your own below it")
    _open_dir(candidate, trusted=trusted, create=create)
    top = root / f"v{SCHEMA}"
    # Said here once, not by each look-up of a kernel.
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(top.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(top))


def _open_dir(candidate: _Candidate, *, trusted: bool, create: bool) -> None:
    root = candidate.root
    try:
        status = root.lstat()
    except FileNotFoundError:
        if candidate.base is not None:
            candidate.base.stat()
        if not create:
            try_create_in(root)
            return
        make_private_dir(root)
        status = root.lstat()
    # A link is left to the checks of trust: what it leads to is not the question.
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISLNK(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(root))
    if not trusted and (reason := distrust(status)):
        raise _UnsafeError(reason, _fix(status, root))
    with os.scandir(root):  # is a folder, and may be read
        pass


def _fix(status: os.stat_result, root: Path) -> str:
    if status.st_mode & stat.S_ISVTX:
        # A directory that is shared on purpose, such as /tmp: neither its mode nor its trust is to be changed.
        return "Use a folder of your own below it"
    other = f"name another folder, or set DEEPGEMM_JIT_TRUST_ROOT={root} if you trust all who can write there"
    return f"Run chmod go-w {root}, {other}" if _is_own_store(status, root) else f"Either {other}"


def _is_own_store(status: os.stat_result, root: Path) -> bool:
    """Return whether a folder is this user's and holds nothing but a store, so that its mode is ours to change."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    try:
        return {path.name for path in root.iterdir()} <= {f"v{SCHEMA}"}
    except OSError:
        return False

"""Where the store and its locks lie, and whether they may be used there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from deepgemm_jit.errors import StoreError
from deepgemm_jit.settings import Settings
from deepgemm_jit.store.trust import distrust, make_private_dir

_APP = "deepgemm_jit"


@dataclass(frozen=True, slots=True)
class Location:
    """Where the store lies: ``root`` is None for memory only, and ``reason`` says why."""

    root: Path | None
    origin: str
    trusted: bool = False
    """True when ``TRUST_ROOT`` names this root: owners, modes and links are not checked."""
    reason: str = ""
    """What went wrong on the way here; empty when the first choice was fine."""

    @property
    def text(self) -> str:
        """One line for people: the effective place and where it came from."""
        if self.root is None:
            return f"memory only, nothing is kept on disk: {self.reason}"
        trusted = ", trusted by TRUST_ROOT" if self.trusted else ""
        return f"{self.root} (from {self.origin}{trusted})" + (f"; {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class _Candidate:
    root: Path
    origin: str
    base: Path | None = None
    """A folder that must be there already: a home directory is never created."""


def locate(settings: Settings) -> Location:
    """Find the root of the store and create it where it is missing; never raises.

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
            _open_dir(candidate, trusted=trusted)
        except StoreError as refusal:
            return Location(None, candidate.origin, reason=str(refusal))
        except OSError as error:
            failures.append(f"{candidate.root} (from {candidate.origin}) cannot be used: {error_text(error)}")
        else:
            return Location(candidate.root, candidate.origin, trusted=trusted, reason="; ".join(failures))
    return Location(None, "memory", reason="; ".join(failures))


def locate_locks(settings: Settings) -> Path:
    """Return the folder of lock files, created where it is missing; node-local unless ``LOCK_DIR`` says otherwise.

    Raises:
        StoreError: it is unsafe.
        OSError: it cannot be used.
    """
    if settings.lock_dir is not None:
        candidate = _Candidate(_lexical(settings.lock_dir), settings.origins.get("lock_dir", "the setting lock_dir"))
    else:
        candidate = _temp_candidate("locks")
    _open_dir(candidate, trusted=False)
    return candidate.root


def error_text(error: OSError) -> str:
    """Return the path, the reason and the errno of a failed system call."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} (errno {error.errno})"


def _lexical(path: Path) -> Path:
    # Absolute without following links: whether the root is one is what the checks ask.
    return Path(os.path.normpath(path.absolute()))


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


def _open_dir(candidate: _Candidate, *, trusted: bool) -> None:
    root = candidate.root
    try:
        status = root.lstat()
    except FileNotFoundError:
        if candidate.base is not None:
            candidate.base.stat()
        make_private_dir(root)
        status = root.lstat()
    if not trusted and (reason := distrust(status)):
        raise StoreError(path=str(root), reason=reason, fix=_fix(reason, root))
    with os.scandir(root):  # is a folder, and may be read
        pass


def _fix(reason: str, root: Path) -> str:
    other = f"name another folder, or set DEEPGEMM_JIT_TRUST_ROOT={root} if you trust all who can write there"
    return f"Run chmod go-w {root}, {other}" if "mode" in reason else f"Either {other}"

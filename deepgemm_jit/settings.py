"""Every setting of the package, typed, with the place its value came from.

Settings are read on first use, never at import, and parsed strictly: a value that means nothing raises
:class:`~deepgemm_jit.errors.SettingError` instead of being read as its opposite.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deepgemm_jit.errors import SettingError

PREFIX = "DEEPGEMM_JIT_"
CompilePolicy = Literal["auto", "warn", "never"]
COMPILE_POLICIES: tuple[CompilePolicy, ...] = ("auto", "warn", "never")


class _Meaningless(ValueError):
    """A parser's refusal; its text says what is needed."""


def _parse_path(text: str) -> Path:
    if not text.strip():
        raise _Meaningless("a directory path (unset the variable for the default)")
    path = Path(text)
    if not path.is_absolute():
        raise _Meaningless("an absolute directory path")
    return path


def _parse_paths(text: str) -> tuple[Path, ...]:
    if not text.strip():
        raise _Meaningless("absolute paths of files, with : between them (unset the variable for none)")
    try:
        return tuple(_parse_path(part) for part in text.split(os.pathsep))
    except _Meaningless:
        raise _Meaningless("absolute paths of files, with : between them") from None


def _parse_policy(text: str) -> CompilePolicy:
    for policy in COMPILE_POLICIES:
        if text == policy:
            return policy
    raise _Meaningless("one of " + ", ".join(COMPILE_POLICIES))


_MOST_DIGITS = 18


def _parse_count(text: str) -> int:
    # Python reads no number of thousands of digits, and there is nothing to count with one.
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) > 0):
        raise _Meaningless("a whole number of at least 1")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise _Meaningless("a number of seconds of at least 0")
    return seconds


def _parse_file(text: str) -> Path:
    if not text.strip() or not Path(text).is_absolute() or text.endswith("/"):
        raise _Meaningless("the absolute path of a file")
    return Path(text)


def _setting(default: Any, parse: Callable[[str], Any]) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings; ``origins`` says for each name that is not a default where it came from."""

    cache_dir: Path | None = _setting(None, _parse_path)
    """Root of the store; default: the platform's user cache dir."""
    lock_dir: Path | None = _setting(None, _parse_path)
    """Node-local folder of lock files; default: a per-user temp folder."""
    compile: CompilePolicy = _setting("auto", _parse_policy)
    """``auto``: compile what is missing; ``warn``: and log it; ``never``: refuse."""
    jobs: int | None = _setting(None, _parse_count)
    """Compile processes of a warm-up; default: the CPUs of this process."""
    lock_timeout_s: float = _setting(120.0, _parse_seconds)
    """Longest wait for another process's compile of the same kernel."""
    audit: Path | None = _setting(None, _parse_file)
    """A file that gets a line for each kernel that run time asked for and no warm-up had built."""
    trust_root: Path | None = _setting(None, _parse_path)
    """A store root to trust although another user owns it."""
    packs: tuple[Path, ...] = _setting((), _parse_paths)
    """Read-only packs that serve what the store does not hold, in this order; whoever names them trusts their owners."""
    cache_max_bytes: int | None = _setting(None, _parse_count)
    """Most that the store may hold; what was used longest ago goes first. Default: no limit."""
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Return where the value of ``name`` came from: "default", "argument" or the variable's name."""
        return self.origins.get(name, "default")


def setting_text(value: Any) -> str | None:
    """Return the text that a variable has to hold for a value; None when it is one that no variable gives."""
    if isinstance(value, tuple):
        return os.pathsep.join(map(str, value)) or None
    return None if value is None else str(value)


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the documentation."""
    return tuple(f.name for f in fields(Settings) if f.name != "origins")


def read_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings of this moment.

    Args:
        environ: the environment to read; default ``os.environ``.
        overrides: values that win over the environment, already typed; ``None`` means "not given".

    Raises:
        SettingError: a variable holds a value that means nothing, or a ``DEEPGEMM_JIT_`` variable is not known.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    known = {PREFIX + f.name.upper(): f for f in fields(Settings) if f.name != "origins"}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        setting = known.get(variable)
        if setting is None:
            raise SettingError(name=variable, value=text, origin="the environment", needed=_known_name(variable, list(known)))
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except _Meaningless as refusal:
            raise SettingError(name=variable, value=text, origin="the environment", needed=str(refusal)) from None
        origins[setting.name] = variable
    for name, value in overrides.items():
        if value is not None:
            values[name] = value
            origins[name] = "argument"
    return Settings(**values, origins=origins)


def _known_name(variable: str, known: list[str]) -> str:
    near = difflib.get_close_matches(variable, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "unset it."
    return f"a name that is known, as there is no such setting; {hint} Known are: {', '.join(known)}"

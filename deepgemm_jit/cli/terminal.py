"""The one owner of the output: nothing raw, nothing over a bar, and no traceback when it cannot be written."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from deepgemm_jit.store.location import error_text


def shown(text: str, keep: str = "\n\t") -> str:
    """Return ``text`` with what is not printable escaped as ``repr`` does, but for the characters of ``keep``.

    Names of files and values of configs may hold control sequences of the terminal, and bytes that are no text.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


_above_bar: list[Callable[[str], None]] = []
"""What prints above the bar that is on stderr now, if there is one."""


def say(text: str, *, err: bool = False) -> None:
    """Print a line, or several, for people."""
    if err and _above_bar:
        _above_bar[-1](shown(text))
    else:
        click.echo(shown(text), err=err)


@contextlib.contextmanager
def said_above_bar(print_above: Callable[[str], None]) -> Iterator[None]:
    """Hand what goes to stderr to ``print_above`` while a bar is there, which would be torn otherwise."""
    _above_bar.append(print_above)
    try:
        yield
    finally:
        _above_bar.remove(print_above)


class Program(click.Group):
    """A group of commands, each of which ends in an exit status: no error of the system is shown as a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line; as :meth:`click.Command.main`."""
        run: Any = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        _open_standard_streams()
        status = 1
        with _logged_to_stderr():
            try:
                status = run(*args, standalone_mode=False, **extra) or 0
            except click.ClickException as error:
                _last_words(error)
                status = error.exit_code
            except click.Abort:
                _last_words("Aborted!")
            except OSError as error:
                _last_words(f"Error: {error_text(error)}")
        raise SystemExit(_flushed(status))


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # A log that cannot be written must not keep kernels from being built.
        with contextlib.suppress(OSError):
            say(self.format(record), err=True)


@contextlib.contextmanager
def _logged_to_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("deepgemm_jit"), _StderrHandler()  # loggers decide what is said: warnings, unless told
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _open_standard_streams() -> None:
    """Put something where the caller closed a stream: the next file that is opened would take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - for as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of ASCII shows what it can


def _last_words(what: str | click.ClickException) -> None:
    with contextlib.suppress(OSError):
        if isinstance(what, str):
            say(what, err=True)
        else:
            text = io.StringIO()
            what.show(text)
            click.echo(shown(text.getvalue()), nl=False, err=True)


def _flushed(status: int) -> int:
    """Return the exit status, which is a failure when output could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is left in the buffer would fail again, with a traceback, while the interpreter ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or 1
    return status

"""What every command shares: its options, how it answers, and how an error reads."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from deepgemm_jit.builder import Builder
from deepgemm_jit.cli.terminal import say, shown
from deepgemm_jit.errors import DeepGemmJitError, ToolchainError
from deepgemm_jit.settings import Settings, read_settings
from deepgemm_jit.spec import ARCHES, KernelSpec, kernel_set
from deepgemm_jit.store import Damage, Entry, FoundPack
from deepgemm_jit.store.location import Location, locate


@dataclass(frozen=True, slots=True)
class Session:
    """The options that every command takes."""

    as_json: bool
    cache_dir: Path | None

    def settings(self) -> Settings:
        """Return the settings of this command: the environment's, and ``--cache-dir`` before them."""
        return read_settings(cache_dir=self.cache_dir)


@dataclass(frozen=True, slots=True)
class Examined:
    """What lies in a store: entries whose objects are sound, and what cannot be used."""

    sound: list[Entry]
    damage: list[Damage]

    @property
    def checked(self) -> int:
        """Entries that were looked at."""
        return len(self.sound) + len({found.index_name for found in self.damage if found.index_name})

    @property
    def bad(self) -> list[dict[str, str]]:
        """How JSON shows the damage."""
        return [{"path": str(found.path), "reason": found.reason} for found in self.damage]


@dataclass(frozen=True, slots=True)
class Opened:
    """A store to look at; where ``is_there`` is False its folder is missing, and the builder's store must not be asked."""

    place: Location
    builder: Builder
    is_there: bool

    def entries(self) -> list[Entry]:
        """Return the well-formed entries."""
        return list(self.builder.store.entries()) if self.is_there else []

    def examined(self) -> Examined:
        """Check every file and return what is sound and what is not."""
        found = self.builder.store.examine(kernels_by_key(self.builder)) if self.is_there else []
        return Examined([each for each in found if isinstance(each, Entry)], [each for each in found if isinstance(each, Damage)])

    def packs(self) -> tuple[FoundPack, ...]:
        """Return the packs that serve beside the store."""
        return self.builder.store.packs()


def kernels_by_key(builder: Builder) -> dict[str, KernelSpec]:
    """Return the kernel of each request key of the kernel sets; empty where their sources cannot be had."""
    try:
        return {builder.request(spec).key: spec for arch in ARCHES for spec in kernel_set(arch)}
    except ToolchainError:
        return {}


def open_store(settings: Settings) -> Opened:
    """Return the store of these settings to look at; creates nothing.

    Raises:
        StoreError: it cannot be used.
    """
    place = locate(settings, create=False)
    if place.root is None:
        raise place.error()
    return Opened(place, Builder(settings), is_there=place.root.exists())


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; not shown when there are no rows."""

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command answers: one object for programs, and lines and tables that say the same to people."""

    payload: Mapping[str, Any]
    parts: Sequence[str | Table]
    ok: bool = True


def _directory(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    # The rule of DEEPGEMM_JIT_CACHE_DIR: an empty value, as of a variable that is not set, must not mean the working directory.
    if not value.strip():
        raise click.BadParameter("is empty; a directory path is needed.")
    # Made absolute but not resolved: the store refuses symbolic links, so it must see them.
    try:
        return Path(value).absolute()
    except FileNotFoundError as error:
        raise click.BadParameter("is relative, and the working directory is gone; name an absolute path.") from error


def command(function: Callable[..., Reply]) -> Callable[..., None]:
    """Make a function that takes a session and answers a reply the body of a click command.

    Exits with 1 when the reply is not ok, or on an error of this package, which is printed without a traceback.
    """

    @click.option(
        "--cache-dir",
        callback=_directory,
        metavar="DIR",
        help="Root of the store; default: DEEPGEMM_JIT_CACHE_DIR or the user's cache.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else there.")
    @functools.wraps(function)
    def run(*, cache_dir: Path | None, as_json: bool, **options: Any) -> None:
        session = Session(as_json, cache_dir)
        try:
            reply = function(session, **options)
        except DeepGemmJitError as error:
            say(f"Error: {error}", err=True)
            reply = Reply({"error": {"type": type(error).__name__, "message": str(error)}}, (), ok=False)
        if as_json:
            click.echo(json.dumps(reply.payload, indent=2))
        else:
            for part in reply.parts:
                for line in _lines(part):
                    say(line)
        if not reply.ok:
            click.get_current_context().exit(1)

    return run


def count(number: int, one: str, many: str = "") -> str:
    """Return "1 kernel", "2 kernels"; ``many`` where the plural is not one with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def entry_payload(entry: Entry) -> dict[str, Any]:
    """Return how JSON shows an entry."""
    return {
        "name": entry.entry,
        "arch": entry.arch,
        "spec": entry.spec,
        "nvrtc_version": entry.nvrtc_version,
        "key": entry.key,
        "digest": entry.digest,
        "size_bytes": entry.size_bytes,
        "facts": asdict(entry.facts),
    }


def _lines(part: str | Table) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif part.rows:
        grid = [[shown(str(cell), keep="") for cell in row] for row in (part.headings, *part.rows)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        for row in (grid[0], ["-" * width for width in widths], *grid[1:]):
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield ""

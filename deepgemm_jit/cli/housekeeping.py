"""``prune`` and ``clear``: make a store smaller, also while others use it."""

from __future__ import annotations

import math
from pathlib import Path

import click

from deepgemm_jit.cli.output import Reply, Session, command, count, open_store
from deepgemm_jit.errors import StoreError
from deepgemm_jit.store.location import NAME_ANOTHER, error_text
from deepgemm_jit.store.prune import clear as clear_root
from deepgemm_jit.store.prune import remove_other_schemas

_DAY_S = 24 * 3600.0


def _finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    # A range lets nan through, which is neither above nor below anything.
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of days.")
    return value


@click.command()
@click.option("--max-bytes", type=click.IntRange(min=0), metavar="N", help="Keep at most N bytes; what was used last stays.")
@click.option(
    "--unused-for",
    "unused_days",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="DAYS",
    help="Remove entries not used for so long (known to the day, where the file system keeps times of reading).",
)
@click.option("--other-schemas", is_flag=True, help="Remove what other versions of the format left, also newer ones.")
@command
def prune(session: Session, max_bytes: int | None, unused_days: float | None, other_schemas: bool) -> Reply:
    """Remove leftovers and, by size, age and schema, entries of the store.

    Leftovers are what is damaged, was set aside, belongs to no entry, or was being written by processes that are dead.

    Safe while other processes read and write the store: at worst they build a kernel again.
    """
    opened = open_store(session.settings())
    root = opened.place.root
    if not opened.is_there or root is None:
        return _reply(opened.place.text, str(root), 0, 0, 0)
    freed_bytes = _freed(root, other=True) if other_schemas else 0
    pruned = opened.builder.store.prune(max_bytes=max_bytes, unused_s=None if unused_days is None else unused_days * _DAY_S)
    return _reply(opened.place.text, str(root), len(pruned.entries), freed_bytes + pruned.freed_bytes, pruned.kept_bytes)


@click.command()
@command
def clear(session: Session) -> Reply:
    """Empty the store, of every schema; processes that use it build again what they need."""
    opened = open_store(session.settings())
    root = opened.place.root
    if not opened.is_there or root is None:
        return _reply(opened.place.text, str(root), 0, 0, 0)
    entries = len(opened.entries())
    return _reply(opened.place.text, str(root), entries, _freed(root, other=False), 0)


def _freed(root: Path, *, other: bool) -> int:
    try:
        return remove_other_schemas(root) if other else clear_root(root)
    except OSError as error:
        raise StoreError(path=str(root), reason=f"cannot be cleared: {error_text(error)}", fix=NAME_ANOTHER) from error


def _reply(place: str, root: str, entries: int, freed_bytes: int, kept_bytes: int) -> Reply:
    freed, kept = (f"{size_bytes / 2**20:.1f} MiB" for size_bytes in (freed_bytes, kept_bytes))
    return Reply(
        {"store": root, "entries_removed": entries, "freed_bytes": freed_bytes, "kept_bytes": kept_bytes},
        [f"store: {place}", f"{count(entries, 'entry', 'entries')} removed; {freed} freed, {kept} kept"],
    )

"""``pack``: one read-only file of kernels, made from a store, looked at, or taken into a store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deepgemm_jit.__about__ import __version__
from deepgemm_jit.builder import Builder
from deepgemm_jit.cli.output import Reply, Session, Table, command, count, entry_payload, open_store
from deepgemm_jit.cli.planning import PlanOptions, arch_option, model_options
from deepgemm_jit.cli.terminal import say
from deepgemm_jit.errors import StoreError
from deepgemm_jit.store import Entry, FoundPack, Pack
from deepgemm_jit.store.location import NAME_ANOTHER, error_text, locate
from deepgemm_jit.store.pack import pack_bytes, read_pack, verify_pack, write_pack
from deepgemm_jit.store.trust import DamagedError

_FILE = click.argument("file", type=click.Path(path_type=Path))


@dataclass(frozen=True, slots=True)
class CheckedPack:
    """A pack with the entries that it serves, and why it serves none."""

    path: Path
    origin: str
    entries: tuple[Entry, ...]
    reason: str = ""


def checked_pack(found: FoundPack) -> CheckedPack:
    """Check every byte of a pack that serves beside the store."""
    reason = found.reason
    if found.pack is not None:
        try:
            verify_pack(found.pack)
            return CheckedPack(found.path, found.origin, found.pack.entries)
        except DamagedError as damaged:
            reason = damaged.reason
        except OSError as error:
            reason = error_text(error)
    return CheckedPack(found.path, found.origin, (), reason)


@click.group()
def pack() -> None:
    """Make and use packs: files of kernels to ship in an image or a wheel."""


@pack.command()
@_FILE
@arch_option(required=False)
@model_options(required=False)
@command
def create(session: Session, file: Path, arch: str | None, **options: Any) -> Reply:
    """Write the kernels of the store into a pack.

    With --arch, the kernel set of that arch or a model's part of it; otherwise all that the store holds.
    Nothing is written when one of them is damaged or missing, nor over anything but a regular file. The same kernels give
    the same bytes.
    """
    if arch is None and any(value is not None for value in options.values()):
        raise click.UsageError("--model and its sizes need --arch.")
    opened = open_store(session.settings())
    examined = opened.examined()
    entries, bad, missing, fix = examined.sound, examined.bad, [], ""
    if arch is not None:
        wanted = PlanOptions(arch, **options)
        keys = {opened.builder.request(spec).key: spec.name for spec in wanted.plan().kernels}
        entries = [entry for entry in entries if entry.key in keys]
        missing = sorted(set(keys.values()) - {keys[entry.key] for entry in entries})
        bad, fix = [], wanted.warmup_command(session)
    if bad or missing or not entries:
        for fault in bad:
            say(f"Error: {fault['path']} {fault['reason']}", err=True)
        lacks = f"lacks {count(len(missing), 'kernel')}: {', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
        reason = lacks if missing else "holds what is damaged" if bad else "holds no kernel"
        damaged = "Remove that with deepgemm-jit prune, or mend it with deepgemm-jit warmup"
        mend = f"Build them with: {fix}" if missing else damaged if bad else "Fill it with deepgemm-jit warmup"
        raise StoreError(path=str(opened.place.root), reason=f"{reason}; no pack is written", fix=mend)
    store = opened.builder.store
    data = pack_bytes(__version__, entries, lambda entry: store.load(entry).image)
    write_pack(file, data)
    digest = hashlib.sha256(data).hexdigest()
    return Reply(
        {"pack": str(file), "kernels": len(entries), "size_bytes": len(data), "sha256": digest},
        [f"{file}: {count(len(entries), 'kernel')}, {len(data) / 2**20:.1f} MiB, SHA-256 {digest}"],
    )


@pack.command()
@_FILE
@command
def inspect(session: Session, file: Path) -> Reply:
    """Check every byte of a pack and show what is in it."""
    session.settings()  # read for nothing but the refusal of a bad one
    opened = _read(file)
    rows = [(e.entry, e.nvrtc_version, e.facts.registers, e.size_bytes, e.key[:12]) for e in opened.entries]
    archs, versions = ({getattr(entry, name) for entry in opened.entries} for name in ("arch", "nvrtc_version"))
    return Reply(
        {
            "pack": str(file),
            "library_version": opened.library_version,
            "archs": sorted(archs),
            "nvrtc_versions": sorted(versions),
            "kernels": [entry_payload(entry) for entry in opened.entries],
        },
        [
            Table(("kernel", "NVRTC", "registers", "size bytes", "request key"), rows),
            f"{file}: {count(len(rows), 'kernel')} for {', '.join(sorted(archs))}, built by NVRTC {', '.join(sorted(versions))}",
            f"packed by deepgemm-jit {opened.library_version}; sound",
        ],
    )


@pack.command()
@_FILE
@command
def install(session: Session, file: Path) -> Reply:
    """Check a pack and put its kernels into the store."""
    settings = session.settings()
    opened = _read(file)
    place = locate(settings)
    if place.root is None:
        raise place.error()
    store = Builder(settings).store
    for entry in opened.entries:
        if not store.put(entry.key, opened.load_cubin(entry), spec_text=entry.spec):
            reason = (store.write_failure() or "cannot be written").removeprefix(f"store {place.root} ")
            raise StoreError(path=str(place.root), reason=reason, fix=NAME_ANOTHER)
    kernels = len(opened.entries)
    return Reply(
        {"pack": str(file), "kernels": kernels, "store": str(place.root)},
        [f"{count(kernels, 'kernel')} of {file} put into {place.text}"],
    )


def _read(file: Path) -> Pack:
    """Open a pack and check all of it.

    Raises:
        StoreError: it is damaged, or cannot be read.
    """
    try:
        opened = read_pack(file)
        verify_pack(opened)
    except DamagedError as damaged:
        raise StoreError(path=str(file), reason=f"the pack {damaged.reason}", fix="Make or fetch it again") from damaged
    except OSError as error:
        raise StoreError(path=str(file), reason=f"the pack cannot be read: {error_text(error)}", fix="Name a pack") from error
    return opened

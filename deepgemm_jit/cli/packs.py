"""``pack``: one read-only file of kernels, made from a store, looked at, or taken into a store."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deepgemm_jit.__about__ import __version__
from deepgemm_jit.builder import Builder
from deepgemm_jit.cli.output import Reply, Session, Table, command, count, entry_payload, kernels_by_key, open_store
from deepgemm_jit.cli.planning import PlanOptions, arch_option, model_options
from deepgemm_jit.cli.terminal import say
from deepgemm_jit.errors import OperandError, StoreError
from deepgemm_jit.settings import PREFIX, Settings, read_settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store import Entry, FoundPack, Pack
from deepgemm_jit.store.location import NAME_ANOTHER, error_text, locate
from deepgemm_jit.store.pack import pack_bytes, read_pack, verify_pack, write_pack
from deepgemm_jit.store.trust import DamagedError, open_to_others

_FILE = click.argument("file", type=click.Path(path_type=Path))


@dataclass(frozen=True, slots=True)
class CheckedPack:
    """A pack with the entries that it serves, and why it serves none."""

    path: Path
    origin: str
    entries: tuple[Entry, ...]
    reason: str = ""
    library_version: str = ""
    """Of the library that made it, where it could be read."""


def checked_pack(found: FoundPack) -> CheckedPack:
    """Check every byte of a pack that serves beside the store, and that each kernel in it is the one of its key."""
    reason = found.reason
    if found.pack is not None:
        try:
            verify_pack(found.pack)
            reason = "; ".join(_judged(found.pack.entries).wrong.values())
            entries = () if reason else found.pack.entries
            return CheckedPack(found.path, found.origin, entries, reason, found.pack.library_version)
        except DamagedError as damaged:
            reason = damaged.reason
        except OSError as error:
            reason = error_text(error)
    return CheckedPack(found.path, found.origin, (), reason)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What entries turn out to be: of a known spec, of one that this library does not know, or wrong, by index name."""

    known: list[Entry]
    unknown: list[Entry]
    wrong: dict[str, str]


def _judged(entries: Sequence[Entry]) -> _Judged:
    """Sort entries by what this library knows of their specs.

    A key says nothing to who cannot make it, so an entry of other sources is judged by its own spec alone. One that lies
    under a key of this library must be the kernel that is asked for under it: at run time it ends the use of its pack.
    """
    judged, of_key = _Judged([], [], {}), kernels_by_key(Builder(read_settings({})))
    for entry in entries:
        try:
            spec = of_key.get(entry.key) or KernelSpec.from_text(entry.spec)
        except OperandError:
            judged.unknown.append(entry)
            continue
        if faults := entry.mismatches(spec):
            name = f"{entry.key}.{entry.nvrtc_version}"
            judged.wrong[name] = f"holds another kernel under {name}: {', '.join(faults)}"
        else:
            judged.known.append(entry)
    return judged


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
    wrong = _judged(examined.sound).wrong
    found = [(damage.index_name, str(damage.path), damage.reason) for damage in examined.damage]
    found += [(name, f"{opened.place.root}: entry {name}", reason) for name, reason in wrong.items()]
    entries, missing, fix = examined.sound, [], ""
    if arch is not None:
        wanted = PlanOptions(arch, **options)
        plan = wanted.plan()
        keys = {opened.builder.request(spec).key: spec.name for spec in plan.kernels}
        entries = [entry for entry in entries if entry.key in keys]
        missing = sorted(set(keys.values()) - {keys[entry.key] for entry in entries})
        fix = wanted.warmup_command(session, plan)
        found = [fault for fault in found if fault[0].partition(".")[0] in keys]
    bad = [f"{path} {reason}" for _, path, reason in found]
    if bad or missing or not entries:
        for fault in bad:
            say(f"Error: {fault}", err=True)
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
    """Check every byte of a pack and show what is in it.

    Exits with 1 when it is damaged, or holds another kernel than its keys say. Kernels that this library does not know, as
    those of a newer one, are named.
    """
    session.settings()  # read for nothing but the refusal of a bad one
    opened, judged = _read(file)
    rows = [(e.entry, e.nvrtc_version, e.facts.registers, e.size_bytes, e.key[:12]) for e in opened.entries]
    archs, versions = ({getattr(entry, name) for entry in opened.entries} for name in ("arch", "nvrtc_version"))
    return Reply(
        {
            "pack": str(file),
            "library_version": opened.library_version,
            "archs": sorted(archs),
            "nvrtc_versions": sorted(versions),
            "kernels": [entry_payload(entry) for entry in opened.entries],
            "unknown": [_named(entry) for entry in judged.unknown],
        },
        [
            Table(("kernel", "NVRTC", "registers", "size bytes", "request key"), rows),
            f"{file}: {count(len(rows), 'kernel')} for {', '.join(sorted(archs))}, built by NVRTC {', '.join(sorted(versions))}",
            *_unknown_lines(judged, "would not be installed"),
            f"packed by deepgemm-jit {opened.library_version}; sound",
        ],
    )


@pack.command()
@_FILE
@command
def install(session: Session, file: Path) -> Reply:
    """Check a pack and put its kernels into the store.

    Kernels that this library does not know, as those of a newer one, are skipped and named. Exits with 1 when the pack is
    damaged, before anything is put, and when what was put is not there at the end.
    """
    settings = session.settings()
    opened, judged = _read(file)
    with _refusing(file):
        cubins = [opened.load_cubin(entry) for entry in judged.known]
    if judged.unknown and not judged.known:
        reason = f"the pack, made by deepgemm-jit {opened.library_version}, holds no kernel that {__version__} knows"
        raise StoreError(path=str(file), reason=reason, fix="Update deepgemm-jit")
    place = locate(settings)
    if place.root is None:
        raise place.error()
    store = Builder(settings).store
    kernels = len(cubins)
    for done, (entry, cubin) in enumerate(zip(judged.known, cubins, strict=True)):
        if not store.put(entry.key, cubin, spec_text=entry.spec):
            reason = (store.write_failure() or "cannot be written").removeprefix(f"store {place.root} ")
            before = f"; {done} of {count(kernels, 'kernel')} of {file} had been put into it"
            raise StoreError(path=str(place.root), reason=reason + before, fix=NAME_ANOTHER)
    there = {(entry.key, entry.nvrtc_version) for entry in store.entries()}
    kept = sum((entry.key, entry.nvrtc_version) in there for entry in judged.known)
    if kept < kernels:
        raise _not_kept(settings, str(place.root), f"{kernels - kept} of {count(kernels, 'kernel')} of {file}")
    return Reply(
        {
            "pack": str(file),
            "kernels": kernels,
            "skipped": [_named(entry) for entry in judged.unknown],
            "store": str(place.root),
        },
        [f"{count(kernels, 'kernel')} of {file} put into {place.text}", *_unknown_lines(judged, "skipped")],
    )


def _not_kept(settings: Settings, root: str, what: str) -> StoreError:
    if settings.cache_max_bytes is None:
        reason = f"{what} were removed, by another process, after they had been put into it"
        return StoreError(path=root, reason=reason, fix="Install the pack again")
    limit = f"{PREFIX}CACHE_MAX_BYTES"
    reason = f"{what} are not kept, as it is limited to {settings.cache_max_bytes} bytes by {limit}"
    fix = f"Raise or unset {limit} and install the pack again, or name the pack in {PREFIX}PACKS"
    return StoreError(path=root, reason=reason, fix=fix)


def _named(entry: Entry) -> dict[str, str]:
    return {"name": entry.entry, "spec": entry.spec}


def _unknown_lines(judged: _Judged, outcome: str) -> list[str]:
    names = ", ".join(entry.entry for entry in judged.unknown)
    return [f"{outcome}, as deepgemm-jit {__version__} does not know them: {names}"] if names else []


def _read(file: Path) -> tuple[Pack, _Judged]:
    """Open a pack and check all of it.

    Raises:
        StoreError: it is damaged, holds a wrong kernel, or cannot be read.
    """
    with _refusing(file):
        opened = read_pack(file)
        verify_pack(opened)
    judged = _judged(opened.entries)
    if judged.wrong:
        reason = f"the pack {'; '.join(judged.wrong.values())}"
        raise StoreError(path=str(file), reason=reason, fix="Make or fetch it again")
    return opened, judged


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as damaged:
        raise StoreError(path=str(file), reason=f"the pack {damaged.reason}", fix=_mend(file, damaged)) from damaged
    except OSError as error:
        raise StoreError(path=str(file), reason=f"the pack cannot be read: {error_text(error)}", fix="Name a pack") from error


def _mend(file: Path, damaged: DamagedError) -> str:
    try:
        # Made or fetched again under the same umask, it would be as open again.
        if damaged.reason == open_to_others(file.stat()):
            return f"Run: chmod go-w {shlex.quote(str(file))}"
    except OSError:
        pass
    return "Make or fetch it again"

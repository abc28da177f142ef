"""Housekeeping of one root, by size and age, beside readers and writers and without a lock.

An entry goes before its object, and a file is moved out of the way before it is removed: if it turns out to be another one than
was looked at, as a writer has replaced it, it gets its name back. An object that seemed unused is put back too if an entry names
it by then. The writer looks the other way: after its entry, it writes an object again that is gone. So between the two no entry
loses its object, whatever the order of their steps.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepgemm_jit.errors import StoreError
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.folders import empty, files_in, remove
from deepgemm_jit.store.key import SCHEMA
from deepgemm_jit.store.tree import TAKEN_OUT, Tree
from deepgemm_jit.store.trust import DamagedError

_TOP = re.compile(r"v([0-9]{1,9})(\.[0-9a-f]{8})?")
_FOLDERS = {"kernels", "objects", "tmp", "quarantine"}
_REPLACED = re.compile(r"(kernels|objects|tmp|quarantine)\.[0-9a-f]{8}")
_TAKEN_OUT = re.compile(rf"[0-9a-f]{{32}}{re.escape(TAKEN_OUT)}")
_TAKEN_OUT_OLD_S = 3600.0
_NO_SCHEMA = -1


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did.

    Attributes:
        entries: file names of the entries that went.
        freed_bytes: sizes of all files that went: entries, objects, leftovers.
        kept_bytes: sizes of the entries and objects that stay.
    """

    entries: tuple[str, ...]
    freed_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class _Indexed:
    path: Path
    status: os.stat_result
    entry: Entry | None
    """None when it is damaged."""

    @property
    def used_s(self) -> float:
        # The time of the last read is kept to the day by most mounts; a mount without it leaves the time of publishing.
        return max(self.status.st_atime, self.status.st_mtime)


def prune(
    tree: Tree, *, max_bytes: int | None = None, unused_s: float | None = None, keep: str = "", objects_too: bool = False
) -> Pruned:
    """Remove what dead writers left, what is damaged or set aside, objects of no entry, and entries by age and size.

    No link is followed. Where an entry cannot be read, all objects stay, as it may need one of them.

    Args:
        tree: what to prune.
        max_bytes: most that may stay; the entries that were used last stay.
        unused_s: age of the last use from which on an entry goes.
        keep: file name of an entry that stays in any case.
        objects_too: read every object, to find those that are damaged.

    Raises:
        OSError: nothing can be written here, or the store itself is a link.
    """
    if tree.top.is_symlink():  # believed below a trusted root; but what lies elsewhere is not ours to remove
        raise NotADirectoryError(errno.ENOTDIR, "is a symbolic link, through which nothing is removed", str(tree.top))
    now_s = tree.probe()
    freed_bytes = tree.sweep(now_s) + _cleared(tree, now_s)
    index, is_whole = _index(tree, objects_too=objects_too)
    objects = {path.name: (path, status) for path, status in _seen(path for path, _ in tree.object_names())}
    doomed: list[_Indexed] = []
    staying: list[_Indexed] = []
    for each in sorted(index, key=lambda each: each.used_s):
        is_old = unused_s is not None and now_s - each.used_s > unused_s and each.path.name != keep
        (doomed if each.entry is None or is_old else staying).append(each)
    if max_bytes is not None:
        doomed += _over(max_bytes, staying, objects, keep)
    gone = {each.path: each for each in doomed if _remove(tree.take_out(each.path, each.status))}
    freed_bytes += sum(each.status.st_size for each in gone.values())

    named = {each.entry.digest for each in index if each.entry is not None and each.path not in gone}
    taken = [
        (path, status, aside)
        for digest, (path, status) in (objects.items() if is_whole else ())
        if digest not in named and (aside := tree.take_out(path, status)) is not None
    ]
    if taken:
        # Only now is it sure that a writer who has not found its object gone has an entry that is seen.
        again, is_whole = _index(tree)
        named = {each.entry.digest for each in again if each.entry is not None}
    for path, status, aside in taken:
        if path.name in named or not is_whole:
            with suppress(FileNotFoundError):  # cleared away meanwhile
                tree.put_back(aside, path)
        elif _remove(aside):
            freed_bytes += status.st_size
    kept_bytes = sum(each.status.st_size for each in index if each.path not in gone)
    kept_bytes += sum(status.st_size for digest, (_, status) in objects.items() if digest in named or not is_whole)
    return Pruned(tuple(sorted(path.name for path in gone)), freed_bytes, kept_bytes)


def clear(root: Path) -> int:
    """Remove every store below ``root``, of any schema, and return how many bytes that was; the root stays.

    Each store is moved out of the way first, so that readers see all of it or nothing, and writers begin a new one.

    Raises:
        StoreError: a folder holds what no store has, and nothing of it is removed.
        OSError: it cannot be removed.
    """
    return sum(_remove_tree(root, top) for top, _ in _tops(root))


def remove_other_schemas(root: Path) -> int:
    """Remove the stores of other schemas than this library's and return how many bytes that was; raises as :func:`clear`."""
    return sum(_remove_tree(root, top) for top, schema in _tops(root) if schema != SCHEMA)


def _tops(root: Path) -> list[tuple[Path, int]]:
    found = [(path, match) for path in sorted(root.iterdir()) if (match := _TOP.fullmatch(path.name))]
    # A leftover of an earlier removal counts as no schema: it goes in any case.
    return [(path, _NO_SCHEMA if match[2] else int(match[1])) for path, match in found]


def _remove_tree(root: Path, top: Path) -> int:
    aside = root / f"{top.name.partition('.')[0]}.{secrets.token_hex(4)}"
    try:  # another process may clear as well
        if strange := _strange(top):
            reason = f"holds {', '.join(sorted(strange))}, which is none of a store's"
            raise StoreError(path=str(top), reason=reason, fix="Name the root of a store, or remove the folder by hand")
        top.rename(aside)
        return remove(aside)
    except FileNotFoundError:
        return 0


def _strange(top: Path) -> set[str]:
    """Return what a store would not hold."""
    found = top.iterdir() if stat.S_ISDIR(top.lstat().st_mode) else [top / "no folder"]
    return {path.name.partition(".")[0] for path in found} - _FOLDERS


def _index(tree: Tree, *, objects_too: bool = False) -> tuple[list[_Indexed], bool]:
    """Return the entries, and whether that is all of them: one that cannot be read now is not ours to judge."""
    found, is_whole = [], not tree.kernels.is_symlink()
    for path, key, version in tree.names() if is_whole else ():
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        except OSError:
            is_whole = False
            continue
        try:
            entry = tree.load_entry(key, version)
        except DamagedError:
            found.append(_Indexed(path, status, None))
            continue
        except FileNotFoundError:
            if os.path.lexists(path):  # a link to nothing; otherwise it is gone meanwhile
                found.append(_Indexed(path, status, None))
            continue
        except OSError:
            is_whole = False
            continue
        found.append(_Indexed(path, status, entry if not objects_too or _has_object(tree, entry) else None))
    return found, is_whole


def _has_object(tree: Tree, entry: Entry) -> bool:
    try:
        tree.load_cubin(entry)
    except (DamagedError, FileNotFoundError):
        return False
    except OSError:  # not ours to judge
        return True
    return True


def _over(
    max_bytes: int, staying: list[_Indexed], objects: dict[str, tuple[Path, os.stat_result]], keep: str
) -> Iterator[_Indexed]:
    """Yield the entries that must go, those used longest ago first, until the rest is small enough."""
    users: dict[str, int] = {}
    for each in staying:
        assert each.entry is not None
        users[each.entry.digest] = users.get(each.entry.digest, 0) + 1

    def object_bytes(digest: str) -> int:
        return objects[digest][1].st_size if digest in objects else 0

    total_bytes = sum(each.status.st_size for each in staying) + sum(map(object_bytes, users))
    for each in staying:
        if total_bytes <= max_bytes:
            return
        if each.path.name == keep:
            continue
        assert each.entry is not None
        users[each.entry.digest] -= 1
        total_bytes -= each.status.st_size + (0 if users[each.entry.digest] else object_bytes(each.entry.digest))
        yield each


def _cleared(tree: Tree, now_s: float) -> int:
    """Remove what was set aside, and what a prune or a clear took out and then died; return how many bytes that was."""
    freed_bytes = 0
    for fault in tree.folder_faults():
        with suppress(OSError):
            if fault.path.parent == tree.objects:
                tree.set_aside(fault)
            elif fault.path == tree.quarantine:
                freed_bytes += remove(tree.quarantine)
    freed_bytes += empty(tree.quarantine)
    aside = [path for path in files_in(tree.top) if _REPLACED.fullmatch(path.name)]
    taken_out = [path for path in files_in(tree.tmp) if _TAKEN_OUT.fullmatch(path.name)]
    with suppress(OSError):
        taken_out += [path for path, schema in _tops(tree.root) if schema == _NO_SCHEMA and not _strange(path)]
    aside += [path for path, status in _seen(taken_out) if now_s - status.st_ctime > _TAKEN_OUT_OLD_S]
    for path in aside:
        with suppress(OSError):
            freed_bytes += remove(path)
    return freed_bytes


def _seen(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield those that are there with their status: another process may clean up as well."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.lstat()


def _remove(path: Path | None) -> bool:
    """Remove a file or folder; False when it is gone, or stays."""
    if path is None:
        return False
    try:
        remove(path)
    except OSError:
        return False
    return True

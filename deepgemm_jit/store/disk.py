"""The store as the layers above see it: verified reads, atomic writes, memory where there is no disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import OperandError, StoreError
from deepgemm_jit.settings import Settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.key import is_digest, is_nvrtc_version, parsed_version
from deepgemm_jit.store.location import NAME_ANOTHER, Location, error_text, locate
from deepgemm_jit.store.locks import Locks
from deepgemm_jit.store.packs import FoundPack, Packs
from deepgemm_jit.store.prune import Pruned, prune
from deepgemm_jit.store.tree import Tree
from deepgemm_jit.store.trust import DamagedError

_LOGGER = logging.getLogger("deepgemm_jit.store")
_Load = Callable[[str, str, KernelSpec], Cubin | None]


@dataclass(frozen=True, slots=True)
class Damage:
    """A file of the store that cannot be used, and why."""

    path: Path
    reason: str
    index_name: str = ""
    """File name of the entry that cannot be used for it; empty for a folder."""


class Store:
    """Cubins on disk, by request key and NVRTC version; safe for threads and processes.

    Nothing that is read is believed: owner, mode, size, digest and spec are checked each time. What cannot be used is a
    miss, what cannot be written stays in the memory of this store, so that a process compiles a kernel once in any case.
    No method raises OSError; each kind of trouble is logged once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._locks = Locks(settings)
        self._memory: dict[tuple[str, str], tuple[str, Cubin]] = {}
        self._warned: set[str] = set()
        self._found: dict[str, Location] = {}
        self._write_failure: str | None = None
        self._probed = False
        self._swept = False
        self._packs = Packs(settings, lambda about, text: self._warn_once(about, "%s", text))

    @classmethod
    def open(cls, settings: Settings) -> Store:
        """Return the store that ``settings`` name; the disk is touched on first use."""
        return cls(settings)

    @property
    def root(self) -> Path | None:
        """The effective root, or None when this store has memory only."""
        return self._location.root

    def describe(self) -> str:
        """Return one line: the effective root and where it came from."""
        return self._location.text + (f"; {self._write_failure}" if self._write_failure else "")

    def write_failure(self) -> str | None:
        """Return why cubins cannot be written to disk, or None; tries it when nothing has been written yet."""
        tree = self._tree
        if tree is None:
            return self.describe()
        if not self._probed:
            try:
                tree.probe()
            except OSError as error:
                self._write_failure = self._failure_text(error)
            self._probed = True
        return self._write_failure

    def get(
        self, key: str, *, spec_text: str, nvrtc_version: str | None = None, max_cuda_major: int | None = None
    ) -> Cubin | None:
        """Return a cubin of the request, or None.

        What ``nvrtc_version`` built comes first, from the store and then from packs; then what others built, from the newest on,
        from the store and then from packs.

        Args:
            key: the request key.
            spec_text: canonical text of the spec; an entry of another spec is set aside.
            nvrtc_version: ``major.minor`` of the NVRTC at hand; None when there is none.
            max_cuda_major: newest CUDA major that the driver can load; None for no bound.

        Raises:
            OperandError: an argument is not well formed.
        """
        _check_key("Store.get", key)
        if nvrtc_version is not None and not is_nvrtc_version(nvrtc_version):
            raise OperandError(operation="Store.get", faults=[f"nvrtc_version {nvrtc_version!r} must be major.minor in digits"])
        spec = KernelSpec.from_text(spec_text)
        # Lazily, each only after the one before has missed: the usual hit is one open() of an entry and one of its object.
        sources: tuple[tuple[Callable[[], Iterable[str]], _Load], ...] = (
            (lambda: [nvrtc_version] if nvrtc_version else [], self._try_kept),
            (lambda: [nvrtc_version] if nvrtc_version else [], self._packs.try_load),
            (lambda: self._versions(key), self._try_kept),
            (lambda: self._packs.versions(key), self._packs.try_load),
        )
        for versions, try_load in sources:
            for version in sorted(versions(), key=parsed_version, reverse=True):
                if max_cuda_major is not None and parsed_version(version)[0] > max_cuda_major:
                    continue
                cubin = try_load(key, version, spec)
                if cubin is not None:
                    return cubin
        return None

    def put(self, key: str, cubin: Cubin, *, spec_text: str) -> bool:
        """Keep a cubin; return whether it is on disk (otherwise it is in memory).

        Raises:
            OperandError: the key, the cubin or the spec is not well formed, or they do not belong together.
        """
        _check_key("Store.put", key)
        entry = Entry.for_cubin(key, cubin, spec_text)
        faults = entry.mismatches(KernelSpec.from_text(spec_text)) + cubin.faults()
        if faults:
            raise OperandError(operation="Store.put", faults=faults)
        tree = self._tree
        if tree is not None:
            failure, about = None, ""
            try:
                tree.publish(entry, cubin.image)
            except OSError as error:
                failure, about = self._failure_text(error), f"errno {error.errno}"
            # Other threads set these too, so what is returned goes by this call's own outcome.
            self._write_failure, self._probed = failure, True
            if failure is None:
                self._memory.pop((key, cubin.nvrtc_version), None)
                self._tidy(tree, tree.index_path(key, cubin.nvrtc_version))
                return True
            self._warn_once(about, "%s; compiled kernels stay in memory", failure)
        self._memory[key, cubin.nvrtc_version] = (spec_text, cubin)
        return False

    def is_in_memory(self, key: str, nvrtc_version: str) -> bool:
        """Return whether a cubin is kept in the memory of this store, as it could not be written."""
        return (key, nvrtc_version) in self._memory

    def lock(self, key: str, what: str | None = None) -> AbstractContextManager[bool]:
        """Return a context manager that keeps others from building ``key``; it yields whether the lock is held.

        False means go on without it: the time limit has passed, or locks do not work here. A store that cannot be
        written excludes threads only, as no process could read what another one builds.

        Args:
            key: the request key.
            what: what is being built, in words, for the messages of those who wait.
        """
        _check_key("Store.lock", key)
        if self.root is None or self.write_failure() is not None:
            return self._locks.hold_in_process(key, what or f"kernel {key}")
        # The lock folder is shared by all stores of this user, and a build for one serves none of the others.
        return self._locks.hold(f"{key}-{_identity(self.root)}", what or f"kernel {key}")

    def entries(self) -> Iterator[Entry]:
        """Yield the well-formed index entries on disk, sorted by key and version text; no object is read."""
        return (found for found in self._examined(with_objects=False) if isinstance(found, Entry))

    def examine(self, kernels: Mapping[str, KernelSpec] | None = None) -> list[Entry | Damage]:
        """Check everything on disk and return what is sound and what is not; nothing is moved.

        A store without a root has nothing; :meth:`describe` says why.

        Args:
            kernels: the kernel of each request key that is known; an entry of another kernel under it is not sound.
        """
        tree = self._tree
        faults = [] if tree is None else [Damage(fault.path, fault.reason) for fault in tree.folder_faults()]
        places = {fault.path for fault in faults}
        return [*faults, *(found for found in self._examined(with_objects=True, kernels=kernels) if not _is_at(found, places))]

    def verify(self) -> list[Damage]:
        """Return what is not sound on disk; nothing is moved."""
        return [found for found in self.examine() if isinstance(found, Damage)]

    def load(self, entry: Entry) -> Cubin:
        """Return the cubin of an entry on disk.

        Raises:
            StoreError: it is gone, damaged, or cannot be read.
        """
        tree = self._tree
        if tree is None:
            raise self._location.error()
        try:
            return tree.load_cubin(entry)
        except (DamagedError, OSError) as error:
            reason = error.reason if isinstance(error, DamagedError) else error_text(error)
            path = str(tree.object_path(entry.digest))
            raise StoreError(path=path, reason=reason, fix="Build it again with deepgemm-jit warmup") from error

    def packs(self) -> tuple[FoundPack, ...]:
        """Return the packs that settings and installed packages name, in the order in which they are asked."""
        return self._packs.found()

    def prune(self, *, max_bytes: int | None = None, unused_s: float | None = None) -> Pruned:
        """Remove leftovers and damage, and entries by size and age; safe beside readers and writers. See :mod:`.prune`.

        Raises:
            StoreError: there is no root, or it cannot be written.
        """
        tree = self._tree
        if tree is None:
            raise self._location.error()
        try:
            return prune(tree, max_bytes=max_bytes, unused_s=unused_s, objects_too=True)
        except OSError as error:
            raise StoreError(path=str(self.root), reason=f"cannot be pruned: {error_text(error)}", fix=NAME_ANOTHER) from error

    @property
    def _location(self) -> Location:
        location = self._found.get("location")
        if location is None:
            # No lock, which a fork could inherit from a thread that did not come along: of two threads the first one's stands.
            found = locate(self._settings)
            location = self._found.setdefault("location", found)
            if location is found:
                _LOGGER.log(logging.WARNING if found.reason else logging.INFO, "store: %s", found.text)
        return location

    @property
    def _tree(self) -> Tree | None:
        location = self._location
        return None if location.root is None else Tree(location.root, trusted=location.trusted)

    def _versions(self, key: str) -> set[str]:
        # list() takes the names in one step; another thread may add one meanwhile.
        found = {version for known, version in list(self._memory) if known == key}
        tree = self._tree
        if tree is not None:
            try:
                found |= {version for _, _, version in tree.names(key)}
            except OSError as error:
                self._warn_of(error, "store %s cannot be listed: %s", tree.kernels, error_text(error))
        return found

    def _try_kept(self, key: str, version: str, spec: KernelSpec) -> Cubin | None:
        kept = self._memory.get((key, version))
        if kept is not None and kept[0] == spec.text:
            return kept[1]
        tree = self._tree
        if tree is None:
            return None
        path = tree.index_path(key, version)
        try:
            return tree.load_cubin(tree.load_entry(key, version, spec))
        except DamagedError as damaged:
            self._set_aside(tree, damaged)
        except FileNotFoundError:
            pass  # the entry, or its object: a prune, or a client of a network file system that does not see it yet
        except OSError as error:
            self._warn_of(error, "store entry %s cannot be read, its kernel is built again: %s", path, error_text(error))
        return None

    def _tidy(self, tree: Tree, published: Path) -> None:
        """After a write: once, remove what dead writers left; each time, keep the store within its limit."""
        limit = self._settings.cache_max_bytes
        try:
            if limit is not None:
                pruned = prune(tree, max_bytes=limit, keep=published.name)
                if pruned.entries:
                    text = "store %s was above its limit of %d bytes; what was used longest ago is removed"
                    self._warn_once("limit", text, self.root, limit)
            elif not self._swept:
                tree.sweep(published.stat().st_mtime)
            self._swept = True
        except FileNotFoundError:
            pass  # another process cleans up
        except OSError as error:
            self._warn_of(error, "store %s cannot be tidied: %s", self.root, error_text(error))

    def _set_aside(self, tree: Tree, damaged: DamagedError) -> None:
        try:
            aside = tree.set_aside(damaged)
        except OSError as error:
            outcome = f"it could not be set aside ({error_text(error)})"
        else:
            outcome = f"set aside as {aside}" if aside else "another process has dealt with it already"
        self._warn_once(str(damaged.path), "store file %s; %s; its kernel is built again", damaged, outcome)

    def _examined(self, *, with_objects: bool, kernels: Mapping[str, KernelSpec] | None = None) -> Iterator[Entry | Damage]:
        tree = self._tree
        if tree is None:
            return
        try:
            names = list(tree.names())
        except OSError as error:
            yield Damage(tree.kernels, error_text(error))
            return
        for path, key, version in names:
            try:
                entry = tree.load_entry(key, version)
                if with_objects:
                    tree.load_cubin(entry)
            except DamagedError as damaged:
                yield Damage(damaged.path, damaged.reason, path.name)
            except FileNotFoundError as error:
                if path.exists():  # otherwise it was removed while we looked
                    yield Damage(path, f"names an object that is missing: {error_text(error)}", path.name)
            except OSError as error:
                yield Damage(path, error_text(error), path.name)
            else:
                faults = entry.mismatches(kernels[key]) if kernels and key in kernels else []
                yield Damage(path, "; ".join(faults), path.name) if faults else entry

    def _failure_text(self, error: OSError) -> str:
        return f"store {self.root} cannot be written: {error_text(error)}"

    def _warn_of(self, error: OSError, message: str, *args: object) -> None:
        # A process without descriptors, or a disk that fails, meets one trouble at every file.
        self._warn_once(f"errno {error.errno}", message, *args)

    def _warn_once(self, about: str, message: str, *args: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOGGER.warning(message, *args)


def _is_at(found: Entry | Damage, places: set[Path]) -> bool:
    return isinstance(found, Damage) and found.path in places


def _check_key(operation: str, key: str) -> None:
    if not is_digest(key):
        raise OperandError(operation=operation, faults=[f"key {key!r} must be a SHA-256 in lower-case hex"])


def _identity(root: Path) -> str:
    """Return a name for the folder itself: a mount in another place is the same store."""
    try:
        status = root.stat()
    except OSError:
        return hashlib.sha256(str(root).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{status.st_dev:x}-{status.st_ino:x}"

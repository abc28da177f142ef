"""The store as the layers above see it: verified reads, atomic writes, memory where there is no disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import OperandError
from deepgemm_jit.settings import Settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.key import is_digest, is_nvrtc_version
from deepgemm_jit.store.location import Location, error_text, locate
from deepgemm_jit.store.locks import Locks
from deepgemm_jit.store.tree import Tree
from deepgemm_jit.store.trust import DamagedError

_LOGGER = logging.getLogger("deepgemm_jit.store")
_ELF_MAGIC = b"\x7fELF"


@dataclass(frozen=True, slots=True)
class Damage:
    """A file of the store that cannot be used, and why."""

    path: Path
    reason: str


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

        The entry that ``nvrtc_version`` built comes first, then the others from the newest NVRTC on.

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
        for version in self._versions(key, nvrtc_version, max_cuda_major):
            kept = self._memory.get((key, version))
            if kept is not None and kept[0] == spec_text:
                return kept[1]
            cubin = self._try_load(key, version, spec)
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
        faults = entry.mismatches(KernelSpec.from_text(spec_text))
        if not cubin.image.startswith(_ELF_MAGIC):
            faults.append("image is not an ELF file")
        if faults:
            raise OperandError(operation="Store.put", faults=faults)
        tree = self._tree
        if tree is not None:
            failure = None
            try:
                tree.publish(entry, cubin.image)
            except OSError as error:
                failure = self._failure_text(error)
            # Other threads set these too, so what is returned goes by this call's own outcome.
            self._write_failure, self._probed = failure, True
            if failure is None:
                self._memory.pop((key, cubin.nvrtc_version), None)
                return True
            self._warn_once("write", "%s; compiled kernels stay in memory", failure)
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
            return self._locks.hold_in_process(key)
        # The lock folder is shared by all stores of this user, and a build for one serves none of the others.
        store = hashlib.sha256(str(self.root).encode(errors="surrogateescape")).hexdigest()[:16]
        return self._locks.hold(f"{key}-{store}", what or f"kernel {key}")

    def entries(self) -> Iterator[Entry]:
        """Yield the well-formed index entries on disk, sorted by key and version text."""
        for found in self._examined(with_objects=False):
            if isinstance(found, Entry):
                yield found

    def verify(self) -> list[Damage]:
        """Check every entry and its object; nothing is moved. A store without a root has none; :meth:`describe` says why."""
        return [found for found in self._examined(with_objects=True) if isinstance(found, Damage)]

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

    def _versions(self, key: str, preferred: str | None, max_cuda_major: int | None) -> Iterator[str]:
        def loadable(version: str) -> bool:
            return max_cuda_major is None or _parsed(version)[0] <= max_cuda_major

        # The usual hit is one open(): the folder is listed only after the preferred entry is missing.
        if preferred is not None and loadable(preferred):
            yield preferred
        # list() takes the names in one step; another thread may add one meanwhile.
        found = {version for known, version in list(self._memory) if known == key}
        tree = self._tree
        if tree is not None:
            try:
                found |= {version for _, known, version in tree.names() if known == key}
            except OSError as error:
                self._warn_once("list", "store cannot be listed: %s", error_text(error))
        yield from sorted((v for v in found if v != preferred and loadable(v)), key=_parsed, reverse=True)

    def _try_load(self, key: str, version: str, spec: KernelSpec) -> Cubin | None:
        tree = self._tree
        if tree is None:
            return None
        path = tree.index_path(key, version)
        try:
            entry = tree.load_entry(key, version, spec)
            return entry.cubin(tree.load_object(entry))
        except DamagedError as damaged:
            self._set_aside(tree, damaged)
        except FileNotFoundError:
            pass  # the entry, or its object: a prune, or a client of a network file system that does not see it yet
        except OSError as error:
            self._warn_once(str(path), "store entry %s cannot be read, its kernel is built again: %s", path, error_text(error))
        return None

    def _set_aside(self, tree: Tree, damaged: DamagedError) -> None:
        try:
            aside = tree.set_aside(damaged)
        except OSError as error:
            outcome = f"it could not be set aside ({error_text(error)})"
        else:
            outcome = f"set aside as {aside}" if aside else "another process has replaced it already"
        self._warn_once(str(damaged.path), "store file %s; %s; its kernel is built again", damaged, outcome)

    def _examined(self, *, with_objects: bool) -> Iterator[Entry | Damage]:
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
                    tree.load_object(entry)
            except DamagedError as damaged:
                yield Damage(damaged.path, damaged.reason)
            except OSError as error:
                yield Damage(path, error_text(error))
            else:
                yield entry

    def _failure_text(self, error: OSError) -> str:
        return f"store {self.root} cannot be written: {error_text(error)}"

    def _warn_once(self, about: str, message: str, *args: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOGGER.warning(message, *args)


def _check_key(operation: str, key: str) -> None:
    if not is_digest(key):
        raise OperandError(operation=operation, faults=[f"key {key!r} must be a SHA-256 in lower-case hex"])


def _parsed(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)

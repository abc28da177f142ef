"""The folders and files of one root: publish, load, set aside. Knows no settings, no memory and no locks."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store.entry import MAX_ENTRY_BYTES, Entry
from deepgemm_jit.store.folders import files_in
from deepgemm_jit.store.key import SCHEMA, is_digest, is_nvrtc_version
from deepgemm_jit.store.temp import sweep, written
from deepgemm_jit.store.trust import DamagedError, distrust, make_private_dir, read_file

_T = TypeVar("_T")
_SUFFIX = ".json"
_PREFIX_DIGITS = 2
_PREFIX = re.compile(r"[0-9a-f]{2}")
TAKEN_OUT = ".removed"
"""Ends the names of files in ``tmp/`` that a prune has taken out and is about to remove."""
_ATTEMPTS = 10
_TAKEN_BY_A_FOLDER = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)


class Tree:
    """The ``v1`` folder of a root; every method may raise OSError.

    Args:
        root: the root of the store, which exists.
        trusted: skip the checks of owner, mode and links.
    """

    def __init__(self, root: Path, *, trusted: bool) -> None:
        self._trusted = trusted
        # For readers, inside a root of 0700: one chmod of it by its owner serves other users. Where all who may write are
        # trusted, their umask decides, so that a group can fill one store.
        self._folder_mode, self._file_mode = (0o777, 0o666) if trusted else (0o755, 0o644)
        self.root = root
        self.top = root / f"v{SCHEMA}"
        self.kernels = self.top / "kernels"
        self.objects = self.top / "objects"
        self.tmp = self.top / "tmp"
        self.quarantine = self.top / "quarantine"

    def index_path(self, key: str, nvrtc_version: str) -> Path:
        """Return the path of an index entry."""
        return self.kernels / f"{key}.{nvrtc_version}{_SUFFIX}"

    def object_path(self, digest: str) -> Path:
        """Return the path of an object."""
        return self.objects / digest[:_PREFIX_DIGITS] / digest

    def names(self, key: str = "") -> Iterator[tuple[Path, str, str]]:
        """Yield path, key and NVRTC version of the index entries, of one key or of all, sorted; other files are skipped."""
        try:
            with os.scandir(self.kernels) as folder:
                found = sorted(file.name for file in folder if file.name.startswith(key) and file.name.endswith(_SUFFIX))
        except FileNotFoundError:
            return
        for name in found:
            found_key, _, version = name.removesuffix(_SUFFIX).partition(".")
            if is_digest(found_key) and is_nvrtc_version(version):
                yield self.kernels / name, found_key, version

    def object_names(self) -> Iterator[tuple[Path, str]]:
        """Yield path and digest of the objects, sorted; other files are skipped, and no link to a folder is followed."""
        for folder in self._object_folders():
            for path in files_in(folder):
                if is_digest(path.name) and path.name[:_PREFIX_DIGITS] == folder.name:
                    yield path, path.name

    def folder_faults(self) -> Iterator[DamagedError]:
        """Yield the folders through which nothing is written, as others could change what lies there."""
        for folder in (self.top, self.kernels, self.objects, self.tmp, self.quarantine, *self._object_folders()):
            with suppress(FileNotFoundError):
                if fault := self._folder_fault(folder, folder.lstat()):
                    yield fault

    def load_entry(self, key: str, nvrtc_version: str, spec: KernelSpec | None = None) -> Entry:
        """Read one index entry; with ``spec``, one of another spec is damaged. Without, it is looked at and not used.

        Raises:
            DamagedError: it is not to be used.
            FileNotFoundError: there is none.
        """
        path = self.index_path(key, nvrtc_version)
        data, status = self._read(path, MAX_ENTRY_BYTES) if spec else self._look_at(path)
        try:
            entry = Entry.from_json(data)
        except OperandError as error:
            raise DamagedError(path, "; ".join(error.faults), status) from None
        if (entry.key, entry.nvrtc_version) != (key, nvrtc_version):
            raise DamagedError(path, f"is the entry of {entry.key}.{entry.nvrtc_version}", status)
        if spec is not None and (faults := entry.mismatches(spec)):
            raise DamagedError(path, "; ".join(faults), status)
        return entry

    def load_cubin(self, entry: Entry) -> Cubin:
        """Read the object of an entry and check that it is what the entry says: size, digest, arch and kernel.

        Raises:
            DamagedError: it is not.
            FileNotFoundError: there is none.
        """
        path = self.object_path(entry.digest)
        image, status = self._read(path, entry.size_bytes)
        if len(image) != entry.size_bytes:
            raise DamagedError(path, f"has {len(image)} bytes; its entry says {entry.size_bytes}", status)
        if hashlib.sha256(image).hexdigest() != entry.digest:
            raise DamagedError(path, "does not have the SHA-256 it is named by", status)
        cubin = entry.cubin(image)
        if faults := cubin.faults():
            # The object is what its name says; the entry that commits it to this kernel is wrong.
            index = self.index_path(entry.key, entry.nvrtc_version)
            raise DamagedError(index, "; ".join(faults), index.lstat())
        return cubin

    def publish(self, entry: Entry, image: bytes) -> None:
        """Write the object and then the entry that commits it; each appears whole or not at all."""
        path = self.object_path(entry.digest)
        # An object that is there already is written again: whether it is sound is not known, and asking costs as much.
        self._write(path, image)
        self._write(self.index_path(entry.key, entry.nvrtc_version), entry.to_json())
        # A prune that saw no entry of this object yet may have removed it; it looks for entries again after that (prune.py).
        if not os.path.lexists(path):
            self._write(path, image)

    def probe(self) -> float:
        """Write and remove a file where :meth:`publish` would write; raises what keeps it from doing so.

        Returns:
            The time by the clock of the file system, seconds since the epoch.
        """
        return self._again(self._probe)

    def sweep(self, now_s: float | None = None) -> int:
        """Remove what dead writers left and return how many bytes that was; raises OSError where nothing can be written."""
        now_s = self.probe() if now_s is None else now_s
        return 0 if self.top.is_symlink() else sweep(self.tmp, now_s)

    def take_out(self, path: Path, status: os.stat_result) -> Path | None:
        """Move a file that was seen with ``status`` out of the way; return where it is, or None when another had its name."""
        aside = self.tmp / f"{secrets.token_hex(16)}{TAKEN_OUT}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return None
        with suppress(FileNotFoundError):  # cleared away meanwhile
            found = aside.lstat()
            if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                return aside
            self.put_back(aside, path)
        return None

    @staticmethod
    def put_back(aside: Path, path: Path) -> None:
        """Give a file its name again, unless another one has it by now."""
        try:
            os.link(aside, path)
        except FileExistsError:
            aside.unlink()
        except OSError:  # no hard links here
            aside.rename(path)
        else:
            aside.unlink()

    def set_aside(self, damaged: DamagedError) -> Path | None:
        """Move a damaged file into quarantine; return its new path, or None when another file had taken its name."""
        self._make_dir(self.quarantine)
        aside = self.quarantine / f"{damaged.path.name}.{secrets.token_hex(4)}"
        try:
            damaged.path.rename(aside)
        except FileNotFoundError:
            return None
        status = aside.lstat()
        if (status.st_dev, status.st_ino) == damaged.identity:
            return aside
        # Another process had replaced the damaged file by a sound one since we read it.
        self.put_back(aside, damaged.path)
        return None

    def _read(self, path: Path, limit_bytes: int, extra_flags: int = 0) -> tuple[bytes, os.stat_result]:
        try:
            return read_file(path, limit_bytes, trusted=self._trusted, extra_flags=extra_flags)
        except NotADirectoryError:
            for folder in (self.kernels, self.objects, path.parent):
                with suppress(FileNotFoundError):
                    if not stat.S_ISDIR((status := folder.lstat()).st_mode) and not folder.is_dir():
                        raise DamagedError(folder, "is not a folder", status) from None
            raise

    def _look_at(self, path: Path) -> tuple[bytes, os.stat_result]:
        # A list must not make every entry look used: prune goes by that time. The flag is for owners only.
        try:
            return self._read(path, MAX_ENTRY_BYTES, os.O_NOATIME)
        except PermissionError:
            return self._read(path, MAX_ENTRY_BYTES)

    def _write(self, path: Path, data: bytes) -> None:
        self._again(lambda: self._write_once(path, data))

    def _write_once(self, path: Path, data: bytes) -> None:
        self._make_dir(path.parent)
        self._make_dir(self.tmp)
        with written(self.tmp, data, self._file_mode) as temp:
            self._move(temp, path)

    def _probe(self) -> float:
        for folder in (self.kernels, self.objects, self.tmp):
            self._make_dir(folder)
        with written(self.tmp, b"", self._file_mode) as temp:
            return temp.stat().st_mtime

    @staticmethod
    def _again(attempt: Callable[[], _T]) -> _T:
        # The folder may be cleared away meanwhile, or the file be swept by a machine whose clock is a day ahead.
        for _ in range(_ATTEMPTS - 1):
            with suppress(FileNotFoundError):
                return attempt()
        return attempt()

    def _move(self, temp: Path, path: Path) -> None:
        try:
            temp.replace(path)
        except OSError as error:
            if error.errno not in _TAKEN_BY_A_FOLDER or not path.is_dir():
                raise
            self.set_aside(DamagedError(path, "is a folder", path.lstat()))
            temp.replace(path)

    def _make_dir(self, folder: Path) -> None:
        if folder != self.top:
            self._make_dir(folder.parent)
        else:
            make_private_dir(folder.parent)  # whoever removed it meanwhile
        for _ in range(_ATTEMPTS - 1):
            try:
                folder.mkdir(self._folder_mode)
                return
            except FileExistsError:
                with suppress(FileNotFoundError):
                    status = folder.lstat()
                    fault = self._folder_fault(folder, status)
                    if fault is None:
                        return
                    self._take_away(fault, status)
        folder.mkdir(self._folder_mode)

    def _take_away(self, fault: DamagedError, status: os.stat_result) -> None:
        folder = fault.path
        if folder.parent == self.objects:
            self.set_aside(fault)  # what it held is built again
        elif folder == self.quarantine or self._trusted or not distrust(status):
            # Not into quarantine, which may be what this is about. Names with a dot are none of a store's.
            folder.rename(folder.with_name(f"{folder.name}.{secrets.token_hex(4)}"))
        else:
            raise PermissionError(errno.EACCES, f"the folder {fault.reason}", str(folder))

    def _object_folders(self) -> list[Path]:
        return [folder for folder in files_in(self.objects) if _PREFIX.fullmatch(folder.name)]

    def _folder_fault(self, folder: Path, status: os.stat_result) -> DamagedError | None:
        """Return why a folder must not be used, or None. Most may be links below a trusted root, as its user made them."""
        if not stat.S_ISDIR(status.st_mode) and not (self._trusted and folder != self.quarantine and folder.is_dir()):
            return DamagedError(folder, "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder", status)
        reason = None if self._trusted else distrust(status)
        return DamagedError(folder, reason, status) if reason else None

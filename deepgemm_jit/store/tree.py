"""The folders and files of one root: publish, load, set aside. Knows no settings, no memory and no locks."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store.entry import MAX_ENTRY_BYTES, Entry
from deepgemm_jit.store.key import SCHEMA, is_digest, is_nvrtc_version
from deepgemm_jit.store.trust import DamagedError, distrust, read_file

_SUFFIX = ".json"
_TAKEN_BY_A_FOLDER = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)


class Tree:
    """The ``v1`` folder of a root; every method may raise OSError.

    Args:
        root: the root of the store, which exists.
        trusted: skip the checks of owner, mode and links.
    """

    def __init__(self, root: Path, *, trusted: bool) -> None:
        self._trusted = trusted
        self._top = root / f"v{SCHEMA}"
        self.kernels = self._top / "kernels"
        self.objects = self._top / "objects"
        self.tmp = self._top / "tmp"
        self.quarantine = self._top / "quarantine"

    def index_path(self, key: str, nvrtc_version: str) -> Path:
        """Return the path of an index entry."""
        return self.kernels / f"{key}.{nvrtc_version}{_SUFFIX}"

    def object_path(self, digest: str) -> Path:
        """Return the path of an object."""
        return self.objects / digest[:2] / digest

    def names(self) -> Iterator[tuple[Path, str, str]]:
        """Yield path, key and NVRTC version of the index entries, sorted; other files are skipped."""
        try:
            found = sorted(self.kernels.iterdir())
        except FileNotFoundError:
            return
        for path in found:
            key, _, version = path.name.removesuffix(_SUFFIX).partition(".")
            if path.suffix == _SUFFIX and is_digest(key) and is_nvrtc_version(version):
                yield path, key, version

    def load_entry(self, key: str, nvrtc_version: str, spec: KernelSpec | None = None) -> Entry:
        """Read one index entry; with ``spec``, one of another spec is damaged.

        Raises:
            DamagedError: it is not to be used.
            FileNotFoundError: there is none.
        """
        path = self.index_path(key, nvrtc_version)
        data, status = read_file(path, MAX_ENTRY_BYTES, trusted=self._trusted)
        try:
            entry = Entry.from_json(data)
        except OperandError as error:
            raise DamagedError(path, "; ".join(error.faults), status) from None
        if (entry.key, entry.nvrtc_version) != (key, nvrtc_version):
            raise DamagedError(path, f"is the entry of {entry.key}.{entry.nvrtc_version}", status)
        if spec is not None and (faults := entry.mismatches(spec)):
            raise DamagedError(path, "; ".join(faults), status)
        return entry

    def load_object(self, entry: Entry) -> bytes:
        """Read the object of an entry and check its size and digest.

        Raises:
            DamagedError: it is not what the entry commits.
            FileNotFoundError: there is none.
        """
        path = self.object_path(entry.digest)
        image, status = read_file(path, entry.size_bytes, trusted=self._trusted)
        if len(image) != entry.size_bytes:
            raise DamagedError(path, f"has {len(image)} bytes; its entry says {entry.size_bytes}", status)
        if hashlib.sha256(image).hexdigest() != entry.digest:
            raise DamagedError(path, "does not have the SHA-256 it is named by", status)
        return image

    def publish(self, entry: Entry, image: bytes) -> None:
        """Write the object and then the entry that commits it; each appears whole or not at all."""
        # An object that is there already is written again: whether it is sound is not known, and asking costs as much.
        self._write(self.object_path(entry.digest), image)
        self._write(self.index_path(entry.key, entry.nvrtc_version), entry.to_json())

    def probe(self) -> None:
        """Write and remove a file where :meth:`publish` would write; raises what keeps it from doing so."""
        for folder in (self.kernels, self.objects):
            self._make_dir(folder)
        self._remove(self._write_temp(b""))

    def set_aside(self, damaged: DamagedError) -> Path | None:
        """Move a damaged file into quarantine; return its new path, or None when another file had taken its name."""
        self._make_dir(self.quarantine)
        aside = self.quarantine / f"{damaged.path.name}.{secrets.token_hex(4)}"
        damaged.path.rename(aside)
        status = aside.lstat()
        if (status.st_dev, status.st_ino) == damaged.identity:
            return aside
        # Another process had replaced the damaged file by a sound one since we read it: put that back.
        aside.rename(damaged.path)
        return None

    def _write(self, path: Path, data: bytes) -> None:
        self._make_dir(path.parent)
        temp = self._write_temp(data)
        try:
            try:
                temp.replace(path)
            except OSError as error:
                if error.errno not in _TAKEN_BY_A_FOLDER or not path.is_dir():
                    raise
                self.set_aside(DamagedError(path, "is a folder", path.lstat()))
                temp.replace(path)
        except BaseException:
            self._remove(temp)
            raise

    def _write_temp(self, data: bytes) -> Path:
        self._make_dir(self.tmp)
        temp = self.tmp / secrets.token_hex(16)
        # 0644 inside a root of 0700: a root that its owner opens with one chmod then serves other users.
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                # Without this a power cut can leave the new name with none of the bytes.
                os.fsync(file.fileno())
        except BaseException:
            self._remove(temp)
            raise
        return temp

    def _make_dir(self, folder: Path) -> None:
        parent = folder.parent
        if folder != self._top:
            self._make_dir(parent)
        try:
            folder.mkdir(0o755)
        except FileExistsError:
            if not self._trusted and (reason := distrust(folder.lstat())):
                raise PermissionError(errno.EACCES, f"the folder {reason}", str(folder)) from None

    @staticmethod
    def _remove(temp: Path) -> None:
        # Best effort: a busy temporary file on a network file system must not undo work that is done.
        with suppress(OSError):
            temp.unlink()

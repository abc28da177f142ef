"""A pack: one read-only file that holds kernels, to ship in an image or a wheel.

It is a zip of stored members, ``manifest.json`` and then the objects by digest, and its bytes follow from its manifest. So a
reader takes the manifest at the front and knows where everything lies: offsets, sizes and names that the file claims elsewhere,
in member headers and in the directory at the end, are never believed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import OperandError, StoreError
from deepgemm_jit.store.entry import Entry, check_schema, json_of, malformed
from deepgemm_jit.store.key import SCHEMA, parsed_version
from deepgemm_jit.store.trust import DamagedError, believe, open_to_others, opened

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Thousands of kernels; keeps what somebody made of nested nothings from filling the memory."""
MAX_PACK_BYTES = 512 * 1024 * 1024
MAX_OBJECTS = 2**15
"""Below the number from which on a zip looks different, as is the size."""

_MANIFEST = "manifest.json"
_MAX_VERSION_LETTERS = 100
_HEADER_BYTES = 30
_DIRECTORY_ENTRY_BYTES = 46
_END_BYTES = 22


@dataclass(frozen=True, slots=True)
class Pack:
    """An open pack: what its manifest says. Objects are read when they are asked for, and checked each time."""

    path: Path
    library_version: str
    """Of the library that made it: information, never a condition."""
    entries: tuple[Entry, ...]
    offsets: Mapping[str, int]
    """Where the member of an object begins, by digest."""
    from_package: bool

    def load_cubin(self, entry: Entry) -> Cubin:
        """Read and check the cubin of one of the entries.

        Raises:
            DamagedError: it is not what the manifest says.
            OSError: the file cannot be read.
        """
        with opened(self.path, follow=True, distrust=_doubt(self.from_package)) as (descriptor, status):
            header_bytes = _HEADER_BYTES + len(_member(entry.digest))
            data = os.pread(descriptor, header_bytes + entry.size_bytes, self.offsets[entry.digest])
            header, image = data[:header_bytes], data[header_bytes:]
            # The entry belongs to a manifest read earlier; a file that took its place since fails here too.
            if hashlib.sha256(image).hexdigest() != entry.digest or header != _header(_member(entry.digest), image):
                raise DamagedError(self.path, f"does not hold object {entry.digest} as its manifest says", status)
            cubin = entry.cubin(image)
            if faults := cubin.faults():
                raise DamagedError(self.path, f"has an entry for {entry.entry} that is wrong: {'; '.join(faults)}", status)
            return cubin


def read_pack(path: Path, *, from_package: bool = False) -> Pack:
    """Read the manifest of a pack; at most 4 MiB are read, however large the file is.

    Args:
        path: the file. Whoever named it trusts its owner; that its group or others may write to it is refused.
        from_package: it came with an installed package and is trusted as the package's code is.

    Raises:
        DamagedError: it is no pack, one of another schema, or damaged.
        OSError: it cannot be read.
    """
    with opened(path, follow=True, distrust=_doubt(from_package)) as (descriptor, status):
        start_bytes = _HEADER_BYTES + len(_MANIFEST)
        header = os.pread(descriptor, start_bytes, 0)
        size_bytes = int.from_bytes(header[22:26], "little")
        data = os.pread(descriptor, min(size_bytes, MAX_MANIFEST_BYTES + 1), start_bytes)
        try:
            manifest = json_of(data, MAX_MANIFEST_BYTES) if header[:4] == b"PK\x03\x04" else None
            if not isinstance(manifest, dict):
                raise malformed("is not a pack")
            # First of all: what follows may look different in another schema.
            check_schema(manifest)
            library_version, entries = _parsed(manifest)
            if header != _header(_MANIFEST, data) or _manifest(library_version, entries) != data:
                raise malformed("has a manifest that is not in canonical form or does not match its own digest")
            offsets, end = _layout(len(data), entries)
            if end != status.st_size:
                raise malformed(f"has {status.st_size} bytes; its manifest says {end}")
        except OperandError as error:
            raise DamagedError(path, "; ".join(error.faults), status) from None
    return Pack(path, library_version, entries, offsets, from_package)


def verify_pack(pack: Pack) -> None:
    """Check every byte of a pack: each object, and that the file is what this library writes for them.

    Raises:
        DamagedError, OSError: it is not, or cannot be read.
    """
    cubins = {entry.digest: pack.load_cubin(entry) for entry in pack.entries}
    wanted = pack_bytes(pack.library_version, pack.entries, lambda entry: cubins[entry.digest].image)
    with opened(pack.path, follow=True, distrust=_doubt(pack.from_package)) as (descriptor, status):
        if status.st_size != len(wanted) or os.pread(descriptor, len(wanted), 0) != wanted:
            raise DamagedError(pack.path, "is not the file that this library writes for its manifest", status)


def pack_bytes(library_version: str, entries: Sequence[Entry], image_of: Callable[[Entry], bytes]) -> bytes:
    """Return the one file for these entries: nothing of time, user, host or order is in it.

    Raises:
        OperandError: there are none, or too many for one pack.
    """
    entries = sorted(entries, key=_order)
    objects = {entry.digest: entry for entry in entries}
    manifest = _manifest(library_version, entries)
    _layout(len(manifest), entries)  # refuses what is too large
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as pack:
        pack.writestr(_info(_MANIFEST), manifest)
        for digest in sorted(objects):
            pack.writestr(_info(_member(digest)), image_of(objects[digest]))
    return file.getvalue()


def write_pack(path: Path, data: bytes) -> None:
    """Write a pack, whole or not at all, readable by every user; a file that is there is replaced.

    Anything else that is there stays: renaming a file over a FIFO, a device or a link would take that away from its users.

    Raises:
        StoreError: it cannot be written, or something that is no regular file is there.
    """
    if what := _in_the_way(path):
        reason, fix = f"the pack cannot be written: it {what}", "Name a file, or a path where nothing is yet"
        raise StoreError(path=str(path), reason=reason, fix=fix)
    temp = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        try:
            with temp.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temp.chmod(0o644)  # whatever the umask: a pack is made to be given away
            temp.replace(path)
        finally:
            with suppress(OSError):
                temp.unlink()
    except OSError as error:
        reason = f"the pack cannot be written: {error.strerror} (errno {error.errno})"
        raise StoreError(path=str(path), reason=reason, fix="Name a file in a folder that can be written") from error


def _in_the_way(path: Path) -> str | None:
    """Return what is at a path that no pack must replace; None where there is nothing, or a regular file."""
    try:
        status = path.lstat()
    except OSError:
        return None  # nothing is there, or the write will meet the same error
    if stat.S_ISREG(status.st_mode):
        return None
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    return "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"


def _order(entry: Entry) -> tuple[str, tuple[int, int]]:
    return entry.key, parsed_version(entry.nvrtc_version)


def _manifest(library_version: str, entries: Sequence[Entry]) -> bytes:
    body = {
        "schema": SCHEMA,
        "library_version": library_version,
        "archs": sorted({entry.arch for entry in entries}),
        "nvrtc_versions": sorted({entry.nvrtc_version for entry in entries}, key=parsed_version),
        "kernels": [entry.body() for entry in entries],
    }
    return _dumped({**body, "sha256": hashlib.sha256(_dumped(body)).hexdigest()})


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def _parsed(manifest: dict[str, Any]) -> tuple[str, tuple[Entry, ...]]:
    version, kernels = manifest.get("library_version"), manifest.get("kernels")
    if not (isinstance(version, str) and version.isprintable() and 0 < len(version) <= _MAX_VERSION_LETTERS):
        raise malformed("has a manifest without library version")
    if not isinstance(kernels, list):
        raise malformed("has a manifest without kernels")
    entries = tuple(Entry.from_body(kernel) for kernel in kernels)
    if [*entries] != sorted({_order(entry): entry for entry in entries}.values(), key=_order):
        raise malformed("has a manifest whose kernels are not sorted, or not different")
    return version, entries


def _layout(manifest_bytes: int, entries: Sequence[Entry]) -> tuple[dict[str, int], int]:
    """Return where the member of each object begins, and where the file ends."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if sizes.setdefault(entry.digest, entry.size_bytes) != entry.size_bytes:
            raise malformed(f"gives object {entry.digest} two sizes")
    at = _HEADER_BYTES + len(_MANIFEST) + manifest_bytes
    directory_bytes = _DIRECTORY_ENTRY_BYTES + len(_MANIFEST) + _END_BYTES
    offsets = {}
    for digest, size_bytes in sorted(sizes.items()):
        offsets[digest] = at
        at += _HEADER_BYTES + len(_member(digest)) + size_bytes
        directory_bytes += _DIRECTORY_ENTRY_BYTES + len(_member(digest))
    end = at + directory_bytes
    for what, number, most in (
        ("bytes of manifest", manifest_bytes, MAX_MANIFEST_BYTES),
        ("bytes", end, MAX_PACK_BYTES),
        ("objects", len(sizes), MAX_OBJECTS),
    ):
        if number > most:
            raise malformed(f"has {number} {what}; the limit of a pack is {most}")
    return offsets, end


def _member(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # dated 1980-01-01
    info.create_system = 3  # Unix, on every system
    info.external_attr = 0o100644 << 16
    return info


def _header(name: str, data: bytes) -> bytes:
    """Return what stands before the bytes of a member."""
    info = _info(name)
    info.CRC, info.compress_size, info.file_size = zlib.crc32(data), len(data), len(data)
    return info.FileHeader(zip64=False)


def _doubt(from_package: bool) -> Callable[[os.stat_result], str | None]:
    # An umask of 002 lets the group write to an installed package, to its code as well as to its pack.
    return believe if from_package else open_to_others

"""Packs: what they serve, what is refused of them, and that nothing in one can crash, hang or mislead."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from store.faults import Faults, injected

from deepgemm_jit.errors import OperandError, StoreError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Entry, Store
from deepgemm_jit.store.pack import MAX_MANIFEST_BYTES, pack_bytes, read_pack, verify_pack, write_pack
from deepgemm_jit.store.trust import DamagedError

pytestmark = pytest.mark.none

LIBRARY = "0.6.10"


@pytest.fixture
def packed(sample: ModuleType) -> Callable[..., bytes]:
    """Return a function that gives the bytes of a pack of the sample, by some NVRTC versions."""

    def packed(*versions: str, library: str = LIBRARY, key: str | None = None) -> bytes:
        cubins = {version: sample.cubin_for(version) for version in versions or ("13.5",)}
        entries = [Entry.for_cubin(key or sample.KEY, cubin, sample.SPEC.text) for cubin in cubins.values()]
        return pack_bytes(library, entries, lambda entry: cubins[entry.nvrtc_version].image)

    return packed


@pytest.fixture
def pack(packed: Callable[..., bytes], tmp_path: Path) -> Path:
    """A sound pack of the sample."""
    path = tmp_path / "kernels.pack"
    write_pack(path, packed())
    return path


def opened(*packs: Path, **overrides: Any) -> Store:
    return Store.open(read_settings(packs=packs, **overrides))


def get(store: Store, sample: ModuleType, **kwargs: Any) -> Any:
    return store.get(sample.KEY, spec_text=sample.SPEC.text, **kwargs)


def test_a_pack_serves_a_store_that_is_empty_and_nothing_is_written(pack: Path, cache_dir: Path, sample: ModuleType) -> None:
    store = opened(pack)
    assert get(store, sample, nvrtc_version="13.5") == sample.cubin_for()
    assert list(cache_dir.iterdir()) == []
    assert get(store, sample, nvrtc_version="13.5") == sample.cubin_for()


def test_a_pack_serves_where_there_is_no_store_at_all(pack: Path, cache_dir: Path, sample: ModuleType) -> None:
    cache_dir.touch()
    assert get(opened(pack), sample) == sample.cubin_for()


@pytest.mark.parametrize("at_hand", [None, "13.5", "13.0", "12.9", "14.1"])
def test_a_pack_serves_whatever_nvrtc_is_at_hand_or_none(pack: Path, sample: ModuleType, at_hand: str | None) -> None:
    assert get(opened(pack), sample, nvrtc_version=at_hand) == sample.cubin_for()


@pytest.mark.parametrize(("driver", "served"), [(12, None), (13, "13.5"), (14, "13.5")])
def test_a_pack_serves_only_what_the_driver_can_load(pack: Path, sample: ModuleType, driver: int, served: str | None) -> None:
    cubin = get(opened(pack), sample, nvrtc_version="13.5", max_cuda_major=driver)
    assert (cubin and cubin.nvrtc_version) == served


def test_the_order_is_own_nvrtc_in_store_and_pack_then_others_in_store_and_pack(
    tmp_path: Path, packed: Callable[..., bytes], sample: ModuleType
) -> None:
    path = tmp_path / "kernels.pack"
    write_pack(path, packed("13.1", "13.9"))
    store = opened(path)
    for version in ("13.0", "13.2"):
        assert store.put(sample.KEY, sample.cubin_for(version), spec_text=sample.SPEC.text)
    served = {at_hand: get(store, sample, nvrtc_version=at_hand).nvrtc_version for at_hand in ("13.0", "13.1", "13.5", None)}
    assert served == {"13.0": "13.0", "13.1": "13.1", "13.5": "13.2", None: "13.2"}


def test_packs_are_asked_in_the_order_of_the_setting(
    tmp_path: Path, packed: Callable[..., bytes], sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "one.pack", tmp_path / "two.pack"]
    write_pack(paths[0], packed(key="0" * 64))
    write_pack(paths[1], packed())
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", os.pathsep.join(map(str, paths)))
    store = Store.open(read_settings())
    assert get(store, sample) == sample.cubin_for()
    assert [(found.path, found.origin) for found in store.packs()] == [(path, "DEEPGEMM_JIT_PACKS") for path in paths]


def test_a_request_that_a_pack_does_not_hold_is_a_miss(pack: Path, sample: ModuleType, warnings: Callable[[], list[str]]) -> None:
    assert opened(pack).get("0" * 64, spec_text=sample.SPEC.text) is None
    assert warnings() == []


def test_a_hit_in_the_store_looks_for_no_pack(sample: ModuleType, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    monkeypatch.setattr("deepgemm_jit.store.packs._find", lambda *_: pytest.fail("looked for packs"))
    assert get(store, sample, nvrtc_version="13.5") is not None
    assert get(store, sample) is not None


def test_the_same_kernels_are_the_same_bytes_in_whatever_order_and_place(
    packed: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = packed("13.0", "13.10", "13.9")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    assert packed("13.9", "13.10", "13.0") == one
    assert packed("13.9", "13.10", "13.0", library="0.6.11") != one


# The format of schema 1: it changes with the schema only.
GOLDEN = "9945587a0f5388cbb33263464cabacd4381228551ceb9551f4dfc60e399ad093"


def test_the_bytes_of_a_pack_are_those_of_schema_1_on_every_python(packed: Callable[..., bytes]) -> None:
    assert hashlib.sha256(packed("13.5", "12.9")).hexdigest() == GOLDEN


def test_a_pack_is_a_zip_that_others_can_read(pack: Path, sample: ModuleType) -> None:
    cubin = sample.cubin_for()
    with zipfile.ZipFile(pack) as file:
        assert file.testzip() is None
        assert file.namelist() == ["manifest.json", f"objects/{cubin.digest[:2]}/{cubin.digest}"]
        assert file.read(file.namelist()[1]) == cubin.image
        manifest = json.loads(file.read("manifest.json"))
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
    assert manifest["schema"] == 1
    assert (manifest["library_version"], manifest["archs"], manifest["nvrtc_versions"]) == (LIBRARY, ["sm_90a"], ["13.5"])
    assert pack.stat().st_mode & 0o777 == 0o644


def test_a_pack_is_readable_by_all_whatever_the_umask(tmp_path: Path, packed: Callable[..., bytes]) -> None:
    umask = os.umask(0o077)
    try:
        write_pack(tmp_path / "kernels.pack", packed())
    finally:
        os.umask(umask)
    assert (tmp_path / "kernels.pack").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["nowhere/kernels.pack", "file/kernels.pack"])
def test_a_pack_that_cannot_be_written_is_an_error_with_path_and_errno(
    tmp_path: Path, packed: Callable[..., bytes], name: str
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="errno") as refused:
        write_pack(tmp_path / name, packed())
    assert str(tmp_path / name) in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder", "link to a file", "link to a device", "link to nothing"])
def test_what_is_no_file_is_never_replaced_by_a_pack(
    tmp_path: Path, packed: Callable[..., bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aim = tmp_path / "some.pack", tmp_path / "aim"
    if kind.endswith("device"):
        try:
            os.mknod(aim, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes a device")
    elif kind == "link to a file":
        aim.write_bytes(b"of somebody")
    if kind.startswith("link"):
        path.symlink_to(aim)
    elif kind == "device":
        path = aim
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    before = {file: file.lstat().st_ino for file in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=r"cannot be written: it is (a symbolic link|a folder|not a regular file)\. Name a"):
        write_pack(path, packed())
    assert {file: file.lstat().st_ino for file in tmp_path.iterdir()} == before
    assert not aim.is_file() or aim.read_bytes() == b"of somebody"


@pytest.mark.parametrize("name", ["", ".", "/", "..", "../"])
def test_a_path_without_a_file_name_is_refused(
    tmp_path: Path, packed: Callable[..., bytes], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="cannot be written: it is a folder"):
        write_pack(Path(name), packed())


def test_a_pack_is_on_the_disk_before_it_has_its_name(
    pack: Path, packed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened, fsync, replace_file = [], os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        happened.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def noted_replace(temp: Path, target: Path) -> Path:
        happened.append(("replace", temp.stat().st_size))
        return replace_file(temp, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    data = packed("12.9", "13.0")
    write_pack(pack, data)  # over one that is there
    assert happened == [("fsync", len(data)), ("replace", len(data))]
    assert pack.read_bytes() == data


# ---- what is ignored, with one warning

MANIFEST_AT = 30 + len("manifest.json")


def with_manifest(pack: bytes, manifest: bytes) -> bytes:
    """Put another manifest into a pack, with a member header that is right for it."""
    old = manifest_of(pack)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        info = zipfile.ZipInfo("manifest.json")
        info.create_system, info.external_attr = 3, 0o100644 << 16
        zipped.writestr(info, manifest)
    start = MANIFEST_AT + len(manifest)
    return file.getvalue()[:start] + pack[MANIFEST_AT + len(old) :]


def manifest_of(pack: bytes) -> bytes:
    (size,) = struct.unpack_from("<I", pack, 22)
    return pack[MANIFEST_AT : MANIFEST_AT + size]


def changed(pack: bytes, **fields: Any) -> bytes:
    """Change fields of the manifest, and sign it afresh: the fields alone decide; ``...`` removes one."""
    body = {name: value for name, value in {**json.loads(manifest_of(pack)), **fields}.items() if value is not ...}
    body.pop("sha256")
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    signed = json.dumps({**body, "sha256": hashlib.sha256(text).hexdigest()}, separators=(",", ":")).encode() + b"\n"
    return with_manifest(pack, signed)


def entry_of(pack: bytes, **fields: Any) -> dict[str, Any]:
    return {**json.loads(manifest_of(pack))["kernels"][0], **fields}


def zipped(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED, mode: int = 0o100644) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as pack:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr, info.compress_type = 3, mode << 16, compression
            pack.writestr(info, data)
    return file.getvalue()


def object_of(pack: bytes) -> tuple[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(pack)) as file:
        name = file.namelist()[1]
        return name, file.read(name)


def lying_size(pack: bytes) -> bytes:
    data = bytearray(pack)
    struct.pack_into("<I", data, 22, 2**32 - 1)
    return bytes(data)


BAD_PACKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda pack: b"",
    "not a zip": lambda pack: b"not a zip",
    "random bytes": lambda pack: os.urandom(len(pack)),
    "cut to half": lambda pack: pack[: len(pack) // 2],
    "cut by a byte": lambda pack: pack[:-1],
    "a byte more": lambda pack: pack + b"\0",
    "something before it": lambda pack: b"#!/bin/sh\n" + pack,
    "only a header": lambda pack: pack[:30],
    "schema 10": lambda pack: changed(pack, schema=10),
    "schema 2": lambda pack: changed(pack, schema=2),
    "schema 1 as text": lambda pack: changed(pack, schema="1"),
    "schema 1 as a float": lambda pack: changed(pack, schema=1.0),
    "schema true": lambda pack: changed(pack, schema=True),
    "schema missing": lambda pack: changed(pack, schema=...),
    "schema a deep list": lambda pack: with_manifest(pack, b'{"schema":' + b"[" * 900 + b"]" * 900 + b"}"),
    "broken manifest": lambda pack: with_manifest(pack, b"{"),
    "manifest a list": lambda pack: with_manifest(pack, b"[]\n"),
    "manifest a pickle": lambda pack: with_manifest(pack, b"\x80\x04}\x94."),
    "manifest not UTF-8": lambda pack: with_manifest(pack, b"\xff\xfe"),
    "manifest of deep lists": lambda pack: with_manifest(pack, b"[" * 1_000_000),
    "manifest of deep objects": lambda pack: with_manifest(pack, b'{"a":' * 200_000),
    "manifest of a long number": lambda pack: with_manifest(pack, b'{"schema":' + b"1" * 1_000_000 + b"}"),
    "manifest above the limit": lambda pack: with_manifest(pack, b" " * (MAX_MANIFEST_BYTES + 1)),
    "manifest with a lying size": lying_size,
    "manifest not signed": lambda pack: with_manifest(pack, manifest_of(pack).replace(b'"registers":168', b'"registers":169')),
    "manifest with spaces": lambda pack: with_manifest(pack, json.dumps(json.loads(manifest_of(pack))).encode()),
    "unknown field": lambda pack: changed(pack, extra=1),
    "no kernels": lambda pack: changed(pack, kernels=...),
    "kernels a text": lambda pack: changed(pack, kernels="abc"),
    "kernels of texts": lambda pack: changed(pack, kernels=["abc"]),
    "kernels twice": lambda pack: changed(pack, kernels=[entry_of(pack)] * 2),
    "kernels not sorted": lambda pack: changed(pack, kernels=[entry_of(pack, key="f" * 64), entry_of(pack, key="0" * 64)]),
    "key with a path": lambda pack: changed(pack, kernels=[entry_of(pack, key="../" * 20 + "abcd")]),
    "object with a path": lambda pack: changed(pack, kernels=[entry_of(pack, object={"sha256": "../../x", "size_bytes": 9})]),
    "object of another size": lambda pack: changed(
        pack, kernels=[entry_of(pack, object={**entry_of(pack)["object"], "size_bytes": 2**28})]
    ),
    "object of two sizes": lambda pack: changed(
        pack,
        kernels=[
            entry_of(pack),
            entry_of(pack, nvrtc_version="13.6", object={**entry_of(pack)["object"], "size_bytes": 1}),
        ],
    ),
    "wrong archs": lambda pack: changed(pack, archs=["sm_100a"]),
    "library version missing": lambda pack: changed(pack, library_version=...),
    "library version a number": lambda pack: changed(pack, library_version=1),
    "library version with a control character": lambda pack: changed(pack, library_version="\x1b[2J"),
    "manifest not first": lambda pack: zipped(object_of(pack), ("manifest.json", manifest_of(pack))),
    "manifest compressed": lambda pack: zipped(
        ("manifest.json", manifest_of(pack)), object_of(pack), compression=zipfile.ZIP_DEFLATED
    ),
    "a zip bomb": lambda pack: zipped(("manifest.json", bytes(50_000_000)), compression=zipfile.ZIP_DEFLATED),
    "a member more": lambda pack: zipped(("manifest.json", manifest_of(pack)), object_of(pack), ("../../../evil", b"evil")),
    "a member twice": lambda pack: zipped(("manifest.json", manifest_of(pack)), object_of(pack), object_of(pack)),
}


@pytest.mark.parametrize("spoil", BAD_PACKS.values(), ids=BAD_PACKS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_bad_pack_is_ignored_with_one_warning_and_the_next_one_serves(
    tmp_path: Path,
    packed: Callable[..., bytes],
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    spoil: Callable[[bytes], bytes],
) -> None:
    bad, sound = tmp_path / "bad.pack", tmp_path / "sound.pack"
    bad.write_bytes(spoil(packed()))
    write_pack(sound, packed())
    with pytest.raises((DamagedError, OSError)):
        read_pack(bad)
    store = opened(bad, sound)
    for _ in range(2):
        assert get(store, sample) == sample.cubin_for()
        assert store.get("0" * 64, spec_text=sample.SPEC.text) is None
    (told,) = warnings()
    assert told.startswith(f"pack {bad} is ignored: ")
    assert "schema" not in told or "schema 1" in told
    assert told.isprintable()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]


def test_no_flipped_bit_is_believed(tmp_path: Path, packed: Callable[..., bytes], sample: ModuleType) -> None:
    data, path = packed(), tmp_path / "kernels.pack"
    served = set()
    for place in range(len(data)):
        path.write_bytes(flipped(data, place))
        try:
            pack = read_pack(path)
            served.add(pack.load_cubin(pack.entries[0]) == sample.cubin_for())
            # What is served is right; the rest of the file is checked by inspect.
            with pytest.raises(DamagedError):
                verify_pack(pack)
        except DamagedError:
            continue
    assert served == {True}  # a flip in the directory at the end, which no reader believes


def test_an_object_whose_header_is_changed_is_not_served(pack: Path, sample: ModuleType) -> None:
    data, opened_pack = pack.read_bytes(), read_pack(pack)
    (entry,) = opened_pack.entries
    start = opened_pack.offsets[entry.digest]
    for place in range(start, data.index(sample.cubin_for().image)):
        pack.write_bytes(flipped(data, place))
        with pytest.raises(DamagedError, match="does not hold object"):
            opened_pack.load_cubin(entry)


def test_no_more_is_read_for_a_manifest_than_the_limit_whatever_the_file_says(
    tmp_path: Path, packed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, pread = tmp_path / "kernels.pack", [], os.pread
    path.write_bytes(lying_size(packed()))

    def noted(descriptor: int, length: int, offset: int) -> bytes:
        asked.append(length)
        return pread(descriptor, min(length, MAX_MANIFEST_BYTES + 1), offset)

    monkeypatch.setattr(os, "pread", noted)
    with pytest.raises(DamagedError):
        read_pack(path)
    assert max(asked) == MAX_MANIFEST_BYTES + 1


@pytest.mark.parametrize("damage", ["flipped", "gone", "cut", "of other kernels"])
def test_an_object_that_turns_out_to_be_damaged_ends_the_use_of_its_pack(
    pack: Path,
    packed: Callable[..., bytes],
    tmp_path: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    damage: str,
) -> None:
    other = tmp_path / "other.pack"
    write_pack(other, packed())
    store = opened(pack, other)
    assert [found.pack is not None for found in store.packs()] == [True, True]
    data = pack.read_bytes()
    if damage == "flipped":
        pack.write_bytes(flipped(data, data.index(b"payload ")))
    elif damage == "gone":
        pack.unlink()
    elif damage == "cut":
        pack.write_bytes(data[:-700])
    else:
        pack.write_bytes(packed("12.9"))
    first, second = get(store, sample), get(store, sample)
    # Whether a file is gone for good is not known; one that lies is not asked again.
    assert (first, second) == ((None, None) if damage == "gone" else (sample.cubin_for(), sample.cubin_for()))
    (told,) = warnings()
    assert str(pack) in told


def test_an_entry_for_another_kernel_than_asked_for_is_not_served(
    tmp_path: Path, sample: ModuleType, packed: Callable[..., bytes], warnings: Callable[[], list[str]]
) -> None:
    other = sample.cubin_for(spec=sample.OTHER_SPEC)
    entry = Entry.for_cubin(sample.KEY, other, sample.OTHER_SPEC.text)
    path = tmp_path / "kernels.pack"
    write_pack(path, pack_bytes(LIBRARY, [entry], lambda entry: other.image))
    assert get(opened(path), sample) is None
    (told,) = warnings()
    assert sample.OTHER_SPEC.text in told


@pytest.mark.parametrize("lie", ["arch", "kernel", "machine"])
def test_a_cubin_that_is_not_what_its_entry_says_never_leaves_the_pack(
    tmp_path: Path, sample: ModuleType, warnings: Callable[[], list[str]], lie: str
) -> None:
    header = {
        "arch": sample.elf_for("sm_100a", sample.SPEC.name),
        "kernel": sample.elf_for("sm_90a", sample.OTHER_SPEC.name),
        "machine": b"\x7fELF\x02\x01".ljust(18, b"\0") + b"\x3e\0".ljust(60, b"\0"),
    }[lie]
    cubin = replace(sample.cubin_for(), image=header + b"payload")
    path = tmp_path / "kernels.pack"
    write_pack(path, pack_bytes(LIBRARY, [Entry.for_cubin(sample.KEY, cubin, sample.SPEC.text)], lambda entry: cubin.image))
    assert get(opened(path), sample) is None
    (told,) = warnings()
    assert "is wrong: image" in told


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_named_pack_that_others_may_write_is_ignored(
    pack: Path, sample: ModuleType, warnings: Callable[[], list[str]], mode: int
) -> None:
    pack.chmod(mode)
    assert get(opened(pack), sample) is None
    (told,) = warnings()
    assert f"(mode {mode:04o})" in told


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "socket", "link to nothing", "device"])
def test_what_is_no_file_is_ignored_and_nobody_waits(
    tmp_path: Path, sample: ModuleType, warnings: Callable[[], list[str]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.pack"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to("nothing")
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "device":
        path = Path("/dev/zero")
    assert get(opened(path), sample) is None
    assert len(warnings()) == 1


def test_a_link_to_a_pack_is_followed_as_whoever_names_it_means_it(pack: Path, tmp_path: Path, sample: ModuleType) -> None:
    (tmp_path / "current.pack").symlink_to(pack)
    assert get(opened(tmp_path / "current.pack"), sample) == sample.cubin_for()


@pytest.mark.parametrize("failure", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOENT])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_whatever_call_on_a_pack_fails_is_a_miss_with_one_warning_or_none(
    pack: Path, sample: ModuleType, caplog: pytest.LogCaptureFixture, failure: int, lasting: bool
) -> None:
    with injected(Faults(str(pack))) as faults:
        assert get(opened(pack), sample) is not None
    for number in range(len(faults.calls)):
        caplog.clear()
        with injected(Faults(str(pack), number, failure, lasting)) as faults:
            cubin = get(opened(pack), sample)
        assert faults.injected
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert cubin == sample.cubin_for() if not warnings else cubin is None
        assert all(str(pack) in told and f"errno {failure}" in told for told in warnings)
        assert len(warnings) <= 1


def test_no_pack_of_nothing_is_made(sample: ModuleType) -> None:
    cubin = sample.cubin_for()
    entry = Entry.for_cubin(sample.KEY, cubin, sample.SPEC.text)
    other = replace(entry, nvrtc_version="13.6", size_bytes=1)
    with pytest.raises(OperandError, match="two sizes"):
        pack_bytes(LIBRARY, [entry, other], lambda entry: cubin.image)
    with pytest.raises(OperandError, match="limit of a pack"):
        pack_bytes(LIBRARY, [replace(entry, key=f"{n:064x}", digest=f"{n:064x}") for n in range(2**15 + 1)], lambda entry: b"")


# ---- packs that packages carry


@pytest.fixture
def package(tmp_path: Path, packed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs a package with a pack, whose code must not run; gives the pack's path."""

    def install(point: str = "sm 90.pack", value: str = "shipped_kernels", data: bytes | None = None) -> Path:
        site = tmp_path / "site"
        folder = site.joinpath(*value.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (site / value.partition(".")[0] / "__init__.py").write_text("raise SystemExit('the code of a pack was run')\n")
        (folder / "sm 90.pack").write_bytes(packed() if data is None else data)
        info = site / "shipped_kernels-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped-kernels\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepgemm_jit.packs]\n{point} = {value}\n")
        monkeypatch.syspath_prepend(str(site))
        return folder / "sm 90.pack"

    return install


@pytest.mark.parametrize("value", ["shipped_kernels", "shipped_kernels.data.hopper"])
def test_an_installed_package_ships_a_pack_and_none_of_its_code_runs(
    package: Callable[..., Path], store: Store, sample: ModuleType, value: str
) -> None:
    path = package(value=value)
    path.chmod(0o664)  # as an umask of 002 installs it, like the package's code
    assert get(store, sample) == sample.cubin_for()
    (found,) = store.packs()
    assert (found.path, found.origin) == (path, f"package {value}")
    assert "shipped_kernels" not in sys.modules


@pytest.mark.parametrize(
    ("point", "value"),
    [("../../evil", "shipped_kernels"), ("other.pack", "shipped_kernels"), ("sm 90.pack", "no_such_package"), ("..", "json")],
)
def test_an_entry_point_that_leads_to_no_file_is_ignored(
    package: Callable[..., Path],
    store: Store,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    point: str,
    value: str,
) -> None:
    path = package()
    (path.parents[1] / "shipped_kernels-1.0.dist-info/entry_points.txt").write_text(f"[deepgemm_jit.packs]\n{point} = {value}\n")
    assert get(store, sample) is None
    (told,) = warnings()
    assert value in told


def test_a_damaged_pack_of_a_package_is_ignored_and_import_works(
    package: Callable[..., Path], store: Store, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    path = package(data=b"damaged")
    code = "import deepgemm_jit, deepgemm_jit.store, deepgemm_jit.builder"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DEEPGEMM_JIT_PACKS": str(path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    assert get(store, sample) is None
    (told,) = warnings()
    assert str(path) in told


BROKEN = {
    "not UTF-8": b"[console_scripts]\nfoo = \xff:foo\n",
    "a line without =": b"[console_scripts]\nfoo\n",
    "a pack without =": b"[deepgemm_jit.packs]\nsm_90.pack\n",
    "a line before any group": b"foo\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("site", ["a", "z"], ids=["before", "after"])
def test_broken_metadata_of_another_package_hides_no_pack(
    package: Callable[..., Path],
    store: Store,
    tmp_path: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    text: bytes,
    site: str,
) -> None:
    package()
    info = tmp_path / site / "foo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(text)
    monkeypatch.setattr(sys, "path", [str(info.parent), *sys.path] if site == "a" else [*sys.path, str(info.parent)])
    for _ in range(2):
        assert get(store, sample) == sample.cubin_for()
        assert store.get("0" * 64, spec_text=sample.SPEC.text) is None
    told = warnings()
    assert len(told) <= 1  # what comes before any group is for some Pythons no fault
    assert all(f"packs of distribution {info} are ignored" in line for line in told)
    assert told or text == BROKEN["a line before any group"]
    assert len(store.packs()) == 1


def test_a_pack_of_a_distribution_without_a_readable_name_is_ignored(
    package: Callable[..., Path], store: Store, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    info = package().parents[1] / "shipped_kernels-1.0.dist-info"
    (info / "METADATA").write_bytes(b"Name: \xff\n")
    assert get(store, sample) is None
    (told,) = warnings()
    assert str(info) in told and "UnicodeDecodeError" in told


class Broken:
    """A finder that some package has put into the import system."""

    def __init__(self, broken: str, error: Exception) -> None:
        self.broken, self.error = broken, error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.broken == "find_spec" and name.startswith("shipped"):
            raise self.error

    def find_distributions(self, context: Any) -> list[Any]:
        if self.broken == "find_distributions":
            raise self.error
        return []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("broken"), OSError(errno.ELOOP, "broken")])
@pytest.mark.parametrize("broken", ["find_spec", "find_distributions"])
def test_a_finder_that_raises_ends_no_call(
    package: Callable[..., Path],
    pack: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    error: Exception,
) -> None:
    package()
    monkeypatch.setattr(sys, "meta_path", [Broken(broken, error), *sys.meta_path])
    store = Store.open(read_settings())
    for _ in range(2):
        assert get(store, sample) == (None if broken == "find_spec" else sample.cubin_for())
    (told,) = warnings()
    assert "broken" in told and ("shipped_kernels" in told if broken == "find_spec" else "Broken" in told)
    assert get(opened(pack), sample) == sample.cubin_for()


def test_a_process_without_descriptors_looks_for_packs_again(
    package: Callable[..., Path],
    store: Store,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [Broken("find_distributions", OSError(errno.EMFILE, "full")), *sys.meta_path])
        assert get(store, sample) is None
    assert len(warnings()) == 1
    assert get(store, sample) == sample.cubin_for()


def test_packs_of_packages_are_asked_in_the_order_of_their_names(
    package: Callable[..., Path], store: Store, tmp_path: Path, packed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{letter}_kernels" for letter in "hbgdafce"]
    for name in names:
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        for file in ("one.pack", "two.pack"):
            (folder / file).write_bytes(packed())
        info = tmp_path / "site" / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepgemm_jit.packs]\ntwo.pack = {name}\none.pack = {name}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    wanted = [tmp_path / "site" / name / file for name in sorted(names) for file in ("one.pack", "two.pack")]
    assert [found.path for found in store.packs()] == wanted


def test_a_shadowed_distribution_ships_no_pack(
    package: Callable[..., Path], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package()
    info = tmp_path / "later/shipped_kernels-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped-kernels\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[deepgemm_jit.packs]\nold.pack = shipped_kernels\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(info.parent)])
    assert [found.path for found in store.packs()] == [path]

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import OperandError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Entry, Store
from deepgemm_jit.store.tree import Tree
from deepgemm_jit.store.trust import DamagedError

pytestmark = pytest.mark.none


def files_in(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def index_file(root: Path) -> Path:
    (path,) = (root / "v1/kernels").iterdir()
    return path


def object_file(root: Path) -> Path:
    (path,) = (root / "v1/objects").glob("*/*")
    return path


@pytest.fixture
def filled(store: Store, sample: ModuleType) -> Store:
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    return store


def get(store: Store, sample: ModuleType, **kwargs: Any) -> Any:
    return store.get(sample.KEY, spec_text=sample.SPEC.text, **kwargs)


def test_opening_a_store_touches_no_disk(cache_dir: Path) -> None:
    Store.open(read_settings())
    assert not cache_dir.exists()


def test_an_empty_store_misses(store: Store, sample: ModuleType) -> None:
    assert get(store, sample) is None
    assert list(store.entries()) == []
    assert store.verify() == []


def test_what_was_put_is_had_by_another_store_with_all_its_facts(filled: Store, sample: ModuleType) -> None:
    other = Store.open(read_settings())
    assert get(other, sample) == sample.cubin_for()
    assert list(other.entries()) == [Entry.for_cubin(sample.KEY, sample.cubin_for(), sample.SPEC.text)]
    assert other.verify() == []
    assert other.write_failure() is None


def test_the_object_is_the_raw_cubin_under_its_digest(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    cubin = sample.cubin_for()
    assert object_file(cache_dir) == cache_dir / "v1/objects" / cubin.digest[:2] / cubin.digest
    assert object_file(cache_dir).read_bytes() == cubin.image
    assert index_file(cache_dir).name == f"{sample.KEY}.13.5.json"


def test_stores_with_the_same_content_are_the_same_bytes(tmp_path: Path, sample: ModuleType) -> None:
    contents = []
    for name, versions in (("one", ("13.5", "13.0")), ("a longer name", ("13.0", "13.5"))):
        store = Store.open(read_settings(cache_dir=tmp_path / name))
        for version in versions:
            assert store.put(sample.KEY, sample.cubin_for(version), spec_text=sample.SPEC.text)
        contents.append(files_in(tmp_path / name))
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4


def test_the_root_is_private_and_its_content_can_be_shared_by_one_chmod(filled: Store, cache_dir: Path) -> None:
    modes = {
        path.relative_to(cache_dir).parts[:2]: path.stat().st_mode & 0o7777 for path in cache_dir.rglob("*") if path.is_dir()
    }
    assert cache_dir.stat().st_mode & 0o7777 == 0o700
    assert {mode & 0o700 for mode in modes.values()} == {0o700}
    assert {mode & 0o022 for mode in modes.values()} == {0}
    assert {path.stat().st_mode & 0o7133 for path in cache_dir.rglob("*") if path.is_file()} == {0}


PREFERENCES = {
    "none at hand: the newest": ({}, "13.10"),
    "the one at hand": ({"nvrtc_version": "13.0"}, "13.0"),
    "one at hand that built nothing: the newest": ({"nvrtc_version": "13.4"}, "13.10"),
    "newest that the driver loads": ({"max_cuda_major": 12}, "12.9"),
    "the one at hand, when the driver loads it": ({"nvrtc_version": "12.8", "max_cuda_major": 12}, "12.8"),
    "not the one at hand, when the driver is older": ({"nvrtc_version": "13.0", "max_cuda_major": 12}, "12.9"),
    "a driver of the future": ({"max_cuda_major": 99}, "13.10"),
    "a driver too old for all": ({"max_cuda_major": 11}, None),
}


@pytest.mark.parametrize(("wish", "expected"), PREFERENCES.values(), ids=PREFERENCES)
@pytest.mark.parametrize("on_disk", [True, False], ids=["disk", "memory"])
def test_which_nvrtc_version_is_served(
    cache_dir: Path, store: Store, sample: ModuleType, wish: dict[str, Any], expected: str | None, on_disk: bool
) -> None:
    if not on_disk:
        cache_dir.write_text("a file where the root should be")
    for version in ("13.0", "13.10", "12.9", "13.9", "12.8"):
        assert store.put(sample.KEY, sample.cubin_for(version), spec_text=sample.SPEC.text) is on_disk
    cubin = get(store, sample, **wish)
    assert cubin == (None if expected is None else sample.cubin_for(expected))


def test_a_damaged_preferred_entry_gives_way_to_another_version(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    assert filled.put(sample.KEY, sample.cubin_for("13.0"), spec_text=sample.SPEC.text)
    (cache_dir / f"v1/kernels/{sample.KEY}.13.5.json").write_bytes(b"")
    assert get(filled, sample, nvrtc_version="13.5") == sample.cubin_for("13.0")


def cut_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    (path / "sub").mkdir(parents=True)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: list[Callable[[Path], None]] = [cut_to_half, flip_one_byte, empty, grow, replace_by_folder, replace_by_fifo]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("find", [index_file, object_file])
def test_a_damaged_file_is_a_miss_is_set_aside_and_is_rebuilt_once(
    filled: Store,
    cache_dir: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    find: Callable[[Path], Path],
    damage: Callable[[Path], None],
) -> None:
    path = find(cache_dir)
    damage(path)
    damage = Store.open(read_settings()).verify()
    assert [found.path for found in damage] == [path]

    assert get(filled, sample) is None
    assert get(filled, sample) is None
    (told,) = warnings()
    assert str(path) in told
    assert [aside.name.startswith(path.name) for aside in (cache_dir / "v1/quarantine").iterdir()] == [True]
    assert not path.exists()

    assert filled.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(Store.open(read_settings()), sample) == sample.cubin_for()
    assert filled.verify() == []
    assert list((cache_dir / "v1/tmp").iterdir()) == []
    assert len(warnings()) == 1


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("find", [index_file, object_file])
def test_a_damaged_file_that_nobody_read_is_replaced(
    filled: Store, cache_dir: Path, sample: ModuleType, find: Callable[[Path], Path], damage: Callable[[Path], None]
) -> None:
    damage(find(cache_dir))
    assert filled.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(filled, sample) == sample.cubin_for()


def test_an_entry_of_another_spec_is_set_aside(
    filled: Store, cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    assert filled.get(sample.KEY, spec_text=sample.OTHER_SPEC.text) is None
    assert list((cache_dir / "v1/kernels").iterdir()) == []
    (told,) = warnings()
    assert sample.SPEC.text in told
    assert sample.OTHER_SPEC.text in told


@pytest.mark.parametrize("name", ["{other}.13.5.json", "{key}.13.0.json"])
def test_an_entry_under_another_name_is_set_aside(filled: Store, cache_dir: Path, sample: ModuleType, name: str) -> None:
    other = "0" * 64
    path = index_file(cache_dir)
    moved = path.with_name(name.format(other=other, key=sample.KEY))
    path.rename(moved)
    assert filled.get(other if "other" in name else sample.KEY, spec_text=sample.SPEC.text) is None
    assert not moved.exists()
    assert [aside.name.startswith(moved.name) for aside in (cache_dir / "v1/quarantine").iterdir()] == [True]


def test_an_object_of_another_cubin_is_set_aside(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    image = sample.cubin_for().image
    object_file(cache_dir).write_bytes(image[:-1] + bytes([image[-1] ^ 0xFF]))
    assert get(filled, sample) is None
    assert list((cache_dir / "v1/objects").glob("*/*")) == []


@pytest.mark.parametrize("lie", ["arch", "kernel", "machine", "not ELF"])
def test_a_cubin_that_is_not_what_its_entry_says_never_reaches_the_driver(
    store: Store, cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]], lie: str
) -> None:
    header = {
        "arch": sample.elf_for("sm_100a", sample.SPEC.name),
        "kernel": sample.elf_for("sm_90a", sample.OTHER_SPEC.name),
        "machine": b"\x7fELF\x02\x01".ljust(18, b"\0") + b"\x3e\0".ljust(60, b"\0"),
        "not ELF": b"payload" * 20,
    }[lie]
    cubin = replace(sample.cubin_for(), image=header + b"payload")
    cache_dir.mkdir(mode=0o700)
    # Whoever wrote this knows the format and signs with right digests.
    Tree(cache_dir, trusted=False).publish(Entry.for_cubin(sample.KEY, cubin, sample.SPEC.text), cubin.image)
    assert len(store.verify()) == 1
    assert get(store, sample) is None
    assert get(store, sample) is None
    (told,) = warnings()
    assert str(cache_dir / "v1/kernels") in told and "image" in told
    assert list((cache_dir / "v1/kernels").iterdir()) == []


@pytest.mark.parametrize("name", ["scale_layout.nvrtc-12.9.cubin", "scale_layout.nvrtc-13.5.cubin"])
def test_real_cubins_of_both_abis_are_told_from_those_of_other_archs_and_kernels(name: str) -> None:
    image = (Path(__file__).parents[1] / "data/cubins" / name).read_bytes()
    entry = next(word.decode() for word in image.split(b"\0") if word.startswith(b"sm_90a_scale_layout"))
    facts = CubinFacts(1, 0, 0, 0, 0)

    def faults(arch: str, entry: str) -> int:
        return len(Cubin(image, arch, entry, "13.5", (), facts).faults())

    assert [faults("sm_90a", entry), faults("sm_90", entry), faults("sm_100a", entry), faults("sm_9", entry)] == [0, 0, 1, 1]
    assert [faults("sm_90a", entry[:-1]), faults("sm_90a", entry + "x"), faults("sm_89", "f")] == [1, 1, 2]


def test_every_read_is_checked_not_only_the_first(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    assert get(filled, sample) == sample.cubin_for()
    flip_one_byte(object_file(cache_dir))
    assert get(filled, sample) is None


def test_a_missing_object_is_a_miss_that_a_put_repairs(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    shutil.rmtree(object_file(cache_dir).parent)
    assert get(filled, sample) is None
    (damage,) = filled.verify()
    assert damage.path == index_file(cache_dir)
    assert filled.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(filled, sample) == sample.cubin_for()


def test_files_of_other_names_are_left_alone(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    strangers = [
        cache_dir / "v1/kernels" / name for name in ("README", f"{sample.KEY}.json", f"{sample.KEY}.13.5.json.bak", "x.13.5.json")
    ]
    for stranger in strangers:
        stranger.write_text("?")
    assert get(filled, sample) == sample.cubin_for()
    assert len(list(filled.entries())) == 1
    assert filled.verify() == []
    assert all(stranger.exists() for stranger in strangers)


def test_a_sound_file_that_took_the_place_of_a_damaged_one_is_not_set_aside(
    filled: Store, cache_dir: Path, sample: ModuleType
) -> None:
    tree = Tree(cache_dir, trusted=False)
    path = index_file(cache_dir)
    sound = path.read_bytes()
    path.write_bytes(b"damaged")
    with pytest.raises(DamagedError) as damaged:
        tree.load_entry(sample.KEY, "13.5")
    fresh = path.with_name("fresh")
    fresh.write_bytes(sound)
    fresh.replace(path)
    assert tree.set_aside(damaged.value) is None
    assert get(filled, sample) == sample.cubin_for()
    assert list((cache_dir / "v1/quarantine").iterdir()) == []


@pytest.mark.parametrize("failure", [errno.ESTALE, errno.EBUSY, errno.EIO, errno.EACCES])
def test_a_read_that_fails_is_a_miss_and_the_next_one_hits(
    filled: Store,
    cache_dir: Path,
    sample: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    failure: int,
) -> None:
    real_open = os.open

    def failing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".json"):
            raise OSError(failure, os.strerror(failure), str(path))
        return real_open(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        assert get(filled, sample) is None
        assert get(filled, sample) is None
    assert get(filled, sample) == sample.cubin_for()
    assert len(warnings()) == 1
    assert not (cache_dir / "v1/quarantine").exists()


@pytest.mark.parametrize("nth_rename", [1, 2], ids=["before the object", "before the entry"])
def test_a_killed_writer_leaves_all_or_nothing(
    store: Store, sample: ModuleType, start: Callable[..., Any], cache_dir: Path, nth_rename: int
) -> None:
    writer = start("put", str(nth_rename))
    assert writer.wait() == -9
    assert len(list((cache_dir / "v1/tmp").iterdir())) == 1
    assert get(store, sample) is None
    assert store.verify() == []
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(store, sample) == sample.cubin_for()


def test_a_writer_killed_while_it_replaces_an_entry_leaves_the_old_one(
    filled: Store, sample: ModuleType, start: Callable[..., Any]
) -> None:
    for nth_rename in ("1", "2"):
        assert start("put", nth_rename).wait() == -9
        assert get(filled, sample) == sample.cubin_for()


def test_eight_processes_put_the_same_key_at_once(
    store: Store, sample: ModuleType, start: Callable[..., Any], cache_dir: Path
) -> None:
    writers = [start("put_at_once") for _ in range(8)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.communicate()[0] for writer in writers] == ["True True\n"] * 8
    assert len(files_in(cache_dir)) == 2
    assert store.verify() == []
    assert get(store, sample) == sample.cubin_for()


def test_a_write_that_fails_keeps_the_cubin_in_memory_and_is_told_once(
    store: Store, sample: ModuleType, cache_dir: Path, warnings: Callable[[], list[str]]
) -> None:
    # A real failure that root meets too: no file of this process may grow beyond 100 bytes.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert store.write_failure() is None
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        stored = [store.put(sample.KEY, sample.cubin_for(version), spec_text=sample.SPEC.text) for version in ("13.5", "13.0")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stored == [False, False]
    assert get(store, sample) == sample.cubin_for()
    assert get(Store.open(read_settings()), sample) is None
    assert files_in(cache_dir) == {}
    (told,) = warnings()
    assert str(cache_dir) in told
    assert f"errno {errno.EFBIG}" in told
    assert str(cache_dir) in str(store.write_failure())
    assert "cannot be written" in store.describe()

    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert store.write_failure() is None
    assert get(Store.open(read_settings()), sample) == sample.cubin_for()


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EEXIST, errno.ENOENT, errno.ESTALE])
def test_a_rename_that_fails_is_no_error(
    store: Store,
    sample: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    cache_dir: Path,
    failure: int,
) -> None:
    def failing(self: Path, target: Path) -> Path:
        raise OSError(failure, os.strerror(failure), str(self))

    monkeypatch.setattr(Path, "replace", failing)
    assert not store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(store, sample) == sample.cubin_for()
    assert f"errno {failure}" in warnings()[0]
    assert files_in(cache_dir) == {}


def test_a_temporary_file_that_cannot_be_removed_is_no_error(
    store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def busy(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EBUSY, "busy", str(self))

    monkeypatch.setattr(Path, "unlink", busy)
    assert store.write_failure() is None
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert get(store, sample) == sample.cubin_for()
    assert warnings() == []


def test_what_put_answers_goes_by_its_own_write_and_not_by_another_threads(
    store: Store, sample: ModuleType, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, others = Tree.publish, []

    def failing_once(self: Tree, entry: Entry, image: bytes) -> None:
        monkeypatch.setattr(Tree, "publish", publish)
        raise OSError(errno.ENOSPC, "full")

    class OtherThread(logging.Handler):
        """Writes to the store, with success, just after the first write has failed."""

        def emit(self, record: logging.LogRecord) -> None:
            if "cannot be written" in record.getMessage():
                others.append(store.put("0" * 64, sample.cubin_for(), spec_text=sample.SPEC.text))

    monkeypatch.setattr(Tree, "publish", failing_once)
    handler = OtherThread()
    logging.getLogger("deepgemm_jit.store").addHandler(handler)
    try:
        stored = store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    finally:
        logging.getLogger("deepgemm_jit.store").removeHandler(handler)
    assert (stored, others) == (False, [True])
    assert get(store, sample) == sample.cubin_for()
    assert store.write_failure() is None


def test_a_cubin_is_in_memory_until_it_can_be_written(store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Tree, entry: Entry, image: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(Tree, "publish", full)
        assert not store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert store.is_in_memory(sample.KEY, "13.5")
    assert not store.is_in_memory(sample.KEY, "13.0")
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert not store.is_in_memory(sample.KEY, "13.5")


@pytest.mark.parametrize(
    "key", ["../../x", "", "A" * 64, "a" * 63, "a" * 64 + "/", "a" * 64 + "\n", None, 0, b"a" * 64], ids=repr
)
def test_a_key_that_is_no_digest_is_refused_and_nothing_is_written(
    store: Store, sample: ModuleType, tmp_path: Path, key: Any
) -> None:
    with pytest.raises(OperandError, match="key"):
        store.put(key, sample.cubin_for(), spec_text=sample.SPEC.text)
    with pytest.raises(OperandError, match="key"):
        store.get(key, spec_text=sample.SPEC.text)
    with pytest.raises(OperandError, match="key"):
        store.lock(key)
    assert list(tmp_path.iterdir()) == []


BAD_CUBINS: dict[str, dict[str, Any]] = {
    "empty": {"image": b""},
    "not ELF": {"image": os.urandom(100).replace(b"\x7f", b"")},
    "entry with a path": {"entry": "../../x"},
    "another entry": {"entry": "f"},
    "another arch": {"arch": "sm_90"},
    "version with a path": {"nvrtc_version": "../13.5"},
}


@pytest.mark.parametrize("change", BAD_CUBINS.values(), ids=BAD_CUBINS)
def test_a_cubin_that_could_not_be_served_is_not_published(
    store: Store, sample: ModuleType, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(OperandError):
        store.put(sample.KEY, replace(sample.cubin_for(), **change), spec_text=sample.SPEC.text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["../13.5", "13", "", "13.5.1", 13.5])
def test_an_nvrtc_version_that_is_none_is_refused(store: Store, sample: ModuleType, version: Any) -> None:
    with pytest.raises(OperandError, match="nvrtc_version"):
        get(store, sample, nvrtc_version=version)


def test_entries_are_sorted_and_skip_the_damaged(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    for key in ("f" * 64, "0" * 64):
        assert filled.put(key, sample.cubin_for(), spec_text=sample.SPEC.text)
    keys = [entry.key for entry in filled.entries()]
    assert keys == sorted(keys)
    assert len(keys) == 3
    (cache_dir / f"v1/kernels/{keys[1]}.13.5.json").write_bytes(b"{}")
    assert [entry.key for entry in filled.entries()] == [keys[0], keys[2]]
    assert [found.path.name for found in filled.verify()] == [f"{keys[1]}.13.5.json"]


def test_an_object_of_another_size_is_told_with_both_sizes(
    filled: Store, cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    size_bytes = len(sample.cubin_for().image)
    os.truncate(object_file(cache_dir), 7)
    assert get(filled, sample) is None
    (told,) = warnings()
    assert f"has 7 bytes; its entry says {size_bytes}" in told


def test_memory_does_not_serve_a_cubin_of_another_spec(store: Store, cache_dir: Path, sample: ModuleType) -> None:
    cache_dir.touch()
    assert not store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert store.get(sample.KEY, spec_text=sample.OTHER_SPEC.text) is None
    assert get(store, sample) == sample.cubin_for()


def test_each_file_is_on_disk_before_it_has_its_name_and_the_object_before_the_entry(
    store: Store, cache_dir: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    fsync, rename = os.fsync, Path.replace

    def seen_fsync(descriptor: int) -> None:
        steps.append(("flush", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def seen_replace(self: Path, target: Path) -> Path:
        steps.append(("rename", self.stat().st_ino))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "replace", seen_replace)
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    inodes = [object_file(cache_dir).stat().st_ino, index_file(cache_dir).stat().st_ino]
    assert steps == [(step, inode) for inode in inodes for step in ("flush", "rename")]

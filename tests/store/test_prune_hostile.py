"""Housekeeping among what was planted, what fails, and what others do meanwhile: nothing outside goes, nothing of use goes."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from deepgemm_jit.errors import StoreError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store
from deepgemm_jit.store.folders import remove
from deepgemm_jit.store.prune import clear
from deepgemm_jit.store.tree import TAKEN_OUT, Tree
from deepgemm_jit.store.trust import DamagedError

pytestmark = pytest.mark.none

DEPTH = 3000
HOUR_S = 3600.0


def put(store: Store, sample: ModuleType, digit: str = "a") -> bool:
    return store.put(digit * 64, sample.cubin_for(payload=digit.encode() * 1000), spec_text=sample.SPEC.text)


def get(store: Store, sample: ModuleType, digit: str = "a") -> object:
    return store.get(digit * 64, spec_text=sample.SPEC.text)


@pytest.fixture
def filled(store: Store, sample: ModuleType) -> Store:
    assert put(store, sample)
    return store


@pytest.fixture
def top(cache_dir: Path) -> Path:
    return cache_dir / "v1"


@pytest.fixture
def make_deep(cache_dir: Path) -> Iterator[Callable[[Path], None]]:
    """Make a folder in a folder in a folder, deeper than a path can name and Python can recurse."""
    yield _make_deep
    subprocess.run(["rm", "-rf", cache_dir], check=True)  # pytest could not


def _make_deep(path: Path) -> None:
    path.mkdir()
    folder = os.open(path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.close(folder)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "private"])
@pytest.mark.parametrize("how", ["prune", "limit", "write"])
@pytest.mark.parametrize("name", ["quarantine", "tmp", "objects", "kernels", "objects/aa", "."])
def test_nothing_is_removed_through_a_link_in_the_place_of_a_folder(
    filled: Store, sample: ModuleType, top: Path, tmp_path: Path, name: str, how: str, trusted: bool
) -> None:
    precious = tmp_path / "precious"
    for folder in ("aa", "tmp", "quarantine"):
        (precious / folder).mkdir(parents=True)
        for file in ("a" * 64, f"{'0' * 32}{TAKEN_OUT}", f"{'0' * 16}-1-1-{'0' * 16}", f"{'0' * 64}.13.5.json"):
            for path in (precious / file, precious / folder / file):
                path.write_bytes(b"precious")
                os.utime(path, (0, 0))
    place = top / name
    if place.exists():
        place.rename(tmp_path / "moved")
    place.symlink_to(precious)
    before = content(precious)
    options = {"trust_root": top.parent} if trusted else {}
    if how == "prune":
        with suppress(StoreError):  # it says so and leaves all as it is
            Store.open(read_settings(**options)).prune(max_bytes=0)
    else:
        put(Store.open(read_settings(cache_max_bytes=1 if how == "limit" else None, **options)), sample, "b")
    assert before.items() <= content(precious).items()
    if name == "quarantine" and how != "write":
        assert not place.is_symlink()


def test_what_is_set_aside_stays_in_the_store(filled: Store, sample: ModuleType, top: Path, tmp_path: Path) -> None:
    (top / "quarantine").symlink_to(tmp_path)
    (entry,) = top.glob("kernels/*")
    entry.write_bytes(b"damaged")
    before = set(tmp_path.iterdir())
    assert get(Store.open(read_settings(trust_root=top.parent)), sample) is None
    assert set(tmp_path.iterdir()) == before
    assert not entry.exists()
    filled.prune()
    assert {path.name for path in top.iterdir()} == {"kernels", "objects", "tmp", "quarantine"}
    assert not any((top / "quarantine").iterdir())


def test_a_link_inside_what_is_removed_goes_and_its_target_stays(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    for path in (precious, folder / "sub"):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"12345")
    for link in (folder / "link", folder / "sub/link"):
        link.symlink_to(precious)
    size_bytes = 5 + sum(path.lstat().st_size for path in folder.rglob("link"))
    assert remove(folder) == size_bytes
    assert not folder.exists()
    link = tmp_path / "link"
    link.symlink_to(precious)
    remove(link)
    assert content(precious) == {precious / "file": b"12345"}


@pytest.mark.parametrize("moment", ["first", "later"])
def test_an_entry_that_is_replaced_while_a_prune_looks_stays(
    sample: ModuleType, top: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    store = Store.open(read_settings(cache_max_bytes=1_000_000))
    assert put(store, sample, "a") and put(store, sample, "c")
    entry = next(path for path in top.glob("kernels/*") if path.name[0] == ("a" if moment == "first" else "c"))
    lstat, gone = Path.lstat, []

    def gone_once(self: Path) -> os.stat_result:
        if self == entry and not gone:
            gone.append(self)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", gone_once)
    assert put(store, sample, "b")
    assert gone
    assert store.verify() == []
    assert get(store, sample, entry.name[0]) is not None


@pytest.mark.parametrize("how", ["prune", "limit", "clear"])
@pytest.mark.parametrize("place", ["kernels", "objects", "quarantine"])
def test_no_depth_of_a_planted_folder_is_too_much(
    filled: Store, sample: ModuleType, top: Path, make_deep: Callable[[Path], None], place: str, how: str
) -> None:
    planted = {
        "kernels": top / f"kernels/{'e' * 64}.13.5.json",
        "objects": top / "objects/ee" / ("e" * 64),
        "quarantine": top / "quarantine/planted",
    }[place]
    planted.parent.mkdir(exist_ok=True)
    make_deep(planted)
    if how == "clear":
        clear(top.parent)
        assert list(top.parent.iterdir()) == []
        return
    if how == "limit":
        assert put(Store.open(read_settings(cache_max_bytes=1_000_000)), sample, "b")
    else:
        filled.prune()
    assert not os.path.lexists(planted)
    assert not any((top / "tmp").iterdir())
    assert filled.verify() == []
    assert get(filled, sample) is not None


@pytest.mark.parametrize("reads", ["none", "first", "second"])
def test_while_an_entry_cannot_be_read_no_object_goes(
    filled: Store, sample: ModuleType, top: Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    assert put(filled, sample, "b")
    (top / f"kernels/{'b' * 64}.13.5.json").unlink()  # its object belongs to nobody now
    load_entry, calls = Tree.load_entry, []

    def failing(self: Tree, *arguments: str) -> object:
        calls.append(arguments)
        if reads == "none" or len(calls) == (1 if reads == "first" else 2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return load_entry(self, *arguments)

    objects = set(top.glob("objects/*/*"))
    with monkeypatch.context() as patch:
        patch.setattr(Tree, "load_entry", failing)
        pruned = filled.prune()
    assert set(top.glob("objects/*/*")) == objects
    assert pruned.entries == ()
    assert pruned.kept_bytes >= sum(path.stat().st_size for path in objects)
    assert filled.verify() == []
    filled.prune()
    assert len(set(top.glob("objects/*/*"))) == 1


def by_mode(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def by_link_to_nothing(folder: Path) -> None:
    folder.symlink_to("nowhere")


def by_link_to_itself(folder: Path) -> None:
    folder.symlink_to(folder.name)


def by_file(folder: Path) -> None:
    folder.write_bytes(b"")


SPOILT = [by_mode, by_link_to_nothing, by_link_to_itself, by_file]


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "private"])
@pytest.mark.parametrize("mend", ["put", "prune"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_folder_of_objects_is_named_and_mended(
    filled: Store, sample: ModuleType, top: Path, spoil: Callable[[Path], None], mend: str, trusted: bool
) -> None:
    (folder,) = top.glob("objects/*")
    remove(folder)
    spoil(folder)
    store = Store.open(read_settings(trust_root=top.parent)) if trusted else filled
    spoilt = spoil is not by_mode or not trusted
    assert (folder in [found.path for found in store.verify()]) == spoilt
    if mend == "prune":
        store.prune()
        assert store.verify() == []
        assert os.path.lexists(folder) != spoilt
    assert put(store, sample)
    assert get(store, sample) is not None
    assert store.verify() == []


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_quarantine_is_taken_out_of_the_way(
    filled: Store, sample: ModuleType, top: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(top / "quarantine")
    filled.prune()
    assert filled.verify() == []
    (entry,) = top.glob("kernels/*")
    entry.write_bytes(b"damaged")
    spoil(top / "quarantine") if not (top / "quarantine").exists() else None
    assert get(filled, sample) is None
    assert not entry.exists()


@pytest.mark.parametrize("old", [True, False])
def test_what_a_killed_clear_left_goes_when_it_is_old(
    filled: Store, top: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    left = top.with_name("v1.0123abcd")
    (left / "objects/aa").mkdir(parents=True)
    (left / "objects/aa/file").write_bytes(b"12345")
    strangers = [top.with_name(name) for name in ("v1.0123ABCD", "v1.0123abcd0", "v1.old", "v1.89abcdef", "v2", "v2.76543210")]
    for stranger in strangers[:-1]:
        (stranger / "src").mkdir(parents=True)
    strangers[-1].symlink_to(strangers[0])
    now_s = time.time() + (HOUR_S + 60 if old else HOUR_S - 60)
    monkeypatch.setattr(Tree, "probe", lambda self: now_s)
    pruned = filled.prune()
    assert left.exists() != old
    assert pruned.freed_bytes == (5 if old else 0)
    assert all(map(os.path.lexists, strangers))


@pytest.mark.parametrize("old", [True, False])
def test_what_another_prune_has_taken_out_stays_while_it_may_live(
    filled: Store, top: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    held = top / f"tmp/{'0' * 32}{TAKEN_OUT}"
    held.write_bytes(b"12345")
    now_s = held.stat().st_ctime + (HOUR_S + 1 if old else HOUR_S - 1)
    monkeypatch.setattr(Tree, "probe", lambda self: now_s)
    pruned = filled.prune()
    assert held.exists() != old
    assert pruned.freed_bytes == (5 if old else 0)


@pytest.mark.parametrize("kind", ["missing", "link to nothing"])
def test_an_entry_without_its_object_goes(filled: Store, sample: ModuleType, top: Path, kind: str) -> None:
    assert put(filled, sample, "b")
    entry = top / f"kernels/{'a' * 64}.13.5.json"
    if kind == "missing":
        digest = next(each.digest for each in filled.entries() if each.key[0] == "a")
        (top / "objects" / digest[:2] / digest).unlink()
        store = filled
    else:
        entry.unlink()
        entry.symlink_to("nowhere")
        store = Store.open(read_settings(trust_root=top.parent))
    assert store.prune().entries == (entry.name,)
    assert not os.path.lexists(entry)
    assert store.verify() == []
    assert get(store, sample, "b") is not None


def test_what_is_put_back_gives_way_to_a_newer_file_and_leaves_nothing(filled: Store, top: Path) -> None:
    tree = Tree(top.parent, trusted=False)
    (entry,) = top.glob("kernels/*")
    newer = entry.read_bytes()
    aside = top / f"tmp/{'0' * 32}{TAKEN_OUT}"
    aside.write_bytes(b"older")
    tree.put_back(aside, entry)
    assert entry.read_bytes() == newer
    assert list(aside.parent.iterdir()) == []
    other = DamagedError(entry, "was another file", top.stat())
    assert tree.set_aside(other) is None
    assert entry.read_bytes() == newer
    assert list((top / "quarantine").iterdir()) == []

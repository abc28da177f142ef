"""Housekeeping: what goes, what stays, and that it harms nobody who reads or writes at the same time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deepgemm_jit.errors import StoreError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store
from deepgemm_jit.store import tree as tree_module
from deepgemm_jit.store.prune import clear, remove_other_schemas
from deepgemm_jit.store.tree import Tree

pytestmark = pytest.mark.none

DAY_S = 24 * 3600.0


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def put(store: Store, sample: ModuleType, cache_dir: Path) -> Callable[..., Path]:
    """Put a cubin of a digit's key, last used so many days ago; return its index entry."""

    def put(digit: str, days: float = 0, payload: bytes | None = None) -> Path:
        cubin = sample.cubin_for(payload=payload or digit.encode() * 1000)
        assert store.put(digit * 64, cubin, spec_text=sample.SPEC.text)
        index = cache_dir / f"v1/kernels/{digit * 64}.13.5.json"
        then = time.time() - days * DAY_S
        os.utime(index, (then, then))
        return index

    return put


def size_of(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def test_without_a_wish_no_sound_entry_goes(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    put("a", days=1000), put("b")
    before = files_in(cache_dir)
    pruned = store.prune()
    assert files_in(cache_dir) == before
    assert (pruned.entries, pruned.freed_bytes, pruned.kept_bytes) == ((), 0, size_of(cache_dir))


def test_leftovers_go(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    index = put("a")
    before = files_in(cache_dir)
    put("b").write_bytes(b"damaged")
    put("c").unlink()  # its object belongs to nobody now
    aside = cache_dir / "v1/quarantine"
    (aside / "folder/sub").mkdir(parents=True)
    (aside / "file").write_bytes(b"12345")
    old = cache_dir / "v1/tmp" / f"{'0' * 16}-1-1-{'0' * 16}"
    old.write_bytes(b"left")
    os.utime(old, (0, 0))
    pruned = store.prune()
    assert files_in(cache_dir) == before
    assert list(aside.iterdir()) == list((cache_dir / "v1/tmp").iterdir()) == []
    assert pruned.entries == (f"{'b' * 64}.13.5.json",)
    assert pruned.freed_bytes > 2000
    assert index.exists()


def test_what_was_not_used_for_long_goes_with_its_object(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    old, young = put("a", days=31), put("b", days=29)
    pruned = store.prune(unused_s=30 * DAY_S)
    assert pruned.entries == (old.name,)
    assert young.exists() and not old.exists()
    assert len(list(cache_dir.glob("v1/objects/*/*"))) == 1
    assert pruned.kept_bytes == size_of(cache_dir)


def test_a_read_counts_as_use_and_a_look_does_not(store: Store, put: Callable[..., Path], sample: ModuleType) -> None:
    used, looked_at = put("a", days=40), put("b", days=40)
    if used.stat().st_atime > time.time() - 39 * DAY_S:
        pytest.skip("this file system does not keep the times that utime sets")
    assert store.get("a" * 64, spec_text=sample.SPEC.text) is not None
    if used.stat().st_atime < time.time() - DAY_S:
        pytest.skip("this mount does not keep times of reading (noatime)")
    assert store.verify() == []
    assert len(list(store.entries())) == 2
    assert store.prune(unused_s=30 * DAY_S).entries == (looked_at.name,)


def test_by_size_what_was_used_longest_ago_goes_first(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    indexes = [put(digit, days=days) for digit, days in zip("abcd", (3, 1, 4, 2), strict=True)]
    whole = size_of(cache_dir)
    assert store.prune(max_bytes=whole).entries == ()
    pruned = store.prune(max_bytes=whole - 1)
    assert pruned.entries == (indexes[2].name,)
    assert store.prune(max_bytes=whole // 2).entries == (indexes[0].name,)
    assert {index.exists() for index in (indexes[1], indexes[3])} == {True}
    assert size_of(cache_dir) <= whole // 2
    assert len(store.prune(max_bytes=0).entries) == 2
    assert files_in(cache_dir) == set()


def test_an_object_that_two_entries_share_goes_with_the_last(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    put("a", days=9, payload=b"same"), put("b", days=1, payload=b"same")
    store.prune(unused_s=5 * DAY_S)
    assert store.verify() == []
    assert len(list(store.entries())) == len(list(cache_dir.glob("v1/objects/*/*"))) == 1
    store.prune(unused_s=0)
    assert files_in(cache_dir) == set()


def test_the_limit_of_the_setting_holds_after_each_write_and_never_costs_the_entry_just_written(
    cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    def put_in(store: Store, digit: str) -> None:
        assert store.put(digit * 64, sample.cubin_for(payload=digit.encode() * 10_000), spec_text=sample.SPEC.text)
        assert store.get(digit * 64, spec_text=sample.SPEC.text) is not None

    store = Store.open(read_settings(cache_max_bytes=30_000))
    for digit in "abcdef":
        put_in(store, digit)
        assert size_of(cache_dir) <= 30_000
        time.sleep(0.01)
    assert {entry.key[0] for entry in store.entries()} == {"e", "f"}
    (told,) = warnings()
    assert "30000" in told and str(cache_dir) in told
    tight = Store.open(read_settings(cache_max_bytes=1))
    put_in(tight, "0")
    assert [entry.key[0] for entry in tight.entries()] == ["0"]


def test_a_writer_that_replaces_an_entry_while_it_is_pruned_does_not_lose_it(
    store: Store, put: Callable[..., Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch, sample: ModuleType
) -> None:
    put("a", days=100)
    take_out, again = Tree.take_out, []

    def republished_first(self: Tree, path: Path, status: os.stat_result) -> Path | None:
        if not again:
            again.append(put("a"))
        return take_out(self, path, status)

    monkeypatch.setattr(Tree, "take_out", republished_first)
    assert store.prune(unused_s=DAY_S).entries == ()
    assert store.verify() == []
    assert store.get("a" * 64, spec_text=sample.SPEC.text) is not None


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("moment", ["entry after the prune has looked", "object gone before its entry comes"])
def test_a_writer_and_a_prune_between_them_keep_the_object_of_an_entry(
    store: Store, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, sample: ModuleType, moment: str, links: bool
) -> None:
    if not links:

        def no_link(source: Path, target: Path) -> None:
            raise PermissionError(1, "no links here", str(source))

        monkeypatch.setattr(tree_module.os, "link", no_link)
    index = put("a")
    entry = index.read_bytes()
    index.unlink()  # a writer stands between its two renames
    if moment == "entry after the prune has looked":
        take_out = Tree.take_out

        def entry_first(self: Tree, path: Path, status: os.stat_result) -> Path | None:
            index.write_bytes(entry)
            return take_out(self, path, status)

        monkeypatch.setattr(Tree, "take_out", entry_first)
        store.prune()
    else:
        write = Tree._write

        def pruned_between(self: Tree, path: Path, data: bytes) -> None:
            if path == index:
                Store.open(read_settings()).prune()
            write(self, path, data)

        monkeypatch.setattr(Tree, "_write", pruned_between)
        put("a")
    assert store.verify() == []
    assert store.get("a" * 64, spec_text=sample.SPEC.text) is not None


def test_clear_removes_every_schema_and_what_an_earlier_one_left_and_nothing_else(
    store: Store, put: Callable[..., Path], cache_dir: Path, sample: ModuleType
) -> None:
    put("a")
    for name in ("v2/kernels", "v10", "v1.0123abcd/objects"):
        (cache_dir / name).mkdir(parents=True)
    strangers = [cache_dir / name for name in ("v", "vault", "1", "v1x", "notes")]
    for stranger in strangers:
        stranger.mkdir()
    assert clear(cache_dir) > 1000
    assert sorted(cache_dir.iterdir()) == sorted(strangers)
    assert store.get("a" * 64, spec_text=sample.SPEC.text) is None
    put("a")
    assert store.verify() == []


def test_other_schemas_go_by_their_number_and_ours_stays(store: Store, put: Callable[..., Path], cache_dir: Path) -> None:
    index = put("a")
    for name in ("v2", "v10", "v0"):
        (cache_dir / name / "kernels").mkdir(parents=True)
    remove_other_schemas(cache_dir)
    assert [path.name for path in cache_dir.iterdir()] == ["v1"]
    assert index.exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_folder_that_is_no_store_is_not_cleared(cache_dir: Path, kind: str) -> None:
    cache_dir.mkdir()
    api = cache_dir / "v2"
    if kind == "folder":
        (api / "src").mkdir(parents=True)
    elif kind == "file":
        api.write_text("precious")
    else:
        (cache_dir / "elsewhere/kernels").mkdir(parents=True)
        api.symlink_to(cache_dir / "elsewhere")
    for remove in (clear, remove_other_schemas):
        with pytest.raises(StoreError, match="none of a store's"):
            remove(cache_dir)
    assert api.exists()
    assert kind != "link" or (cache_dir / "elsewhere/kernels").exists()


def test_prune_and_clear_beside_readers_and_writers_tear_nothing_and_raise_nothing(
    cache_dir: Path, sample: ModuleType, start: Callable[..., subprocess.Popen[str]]
) -> None:
    seconds = "3"
    workers = [
        start(verb, seconds, env={"SEED": str(random.random())})
        for verb in ("write_on", "write_on", "read_on", "prune_on", "prune_on")
    ]
    answers = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    wrote, _, read, pruned, _ = answers
    assert min(wrote["puts"], read["hits"], pruned["prunes"], pruned["clears"]) > 0
    assert read["torn"] == 0
    assert [answer["warnings"] for answer in answers] == [[]] * len(workers)
    store = Store.open(read_settings())
    assert store.verify() == []
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    store.prune()
    assert {path.parts[-3] for path in cache_dir.rglob("*") if path.is_file()} <= {"v1", "objects"}
    assert store.verify() == []

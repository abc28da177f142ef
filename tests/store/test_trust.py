from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store

pytestmark = pytest.mark.none

OTHER_UID = 12345


@pytest.fixture
def filled(store: Store, sample: ModuleType) -> Store:
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    return store


def get(store: Store, sample: ModuleType) -> Any:
    return store.get(sample.KEY, spec_text=sample.SPEC.text)


def put(store: Store, sample: ModuleType) -> bool:
    return store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)


def writable_by_all(root: Path) -> None:
    root.chmod(0o777)


def writable_by_its_group(root: Path) -> None:
    root.chmod(0o770)


def owned_by_another(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"only root can give a folder to another user; this is uid {os.geteuid()}")
    os.chown(root, OTHER_UID, OTHER_UID)


def linked_from_elsewhere(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))


UNSAFE_ROOTS = {
    writable_by_all: "written by its group or by others (mode 0777)",
    writable_by_its_group: "written by its group or by others (mode 0770)",
    owned_by_another: f"owned by uid {OTHER_UID}",
    linked_from_elsewhere: "symbolic link",
}


@pytest.mark.parametrize(("spoil", "reason"), UNSAFE_ROOTS.items())
def test_an_unsafe_root_is_neither_read_nor_written_and_memory_serves(
    filled: Store,
    cache_dir: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    spoil(cache_dir)
    before = {path: path.lstat().st_mtime_ns for path in cache_dir.rglob("*")}
    store = Store.open(read_settings())
    assert get(store, sample) is None
    assert not put(store, sample)
    assert get(store, sample) == sample.cubin_for()
    assert store.root is None
    assert {path: path.lstat().st_mtime_ns for path in cache_dir.rglob("*")} == before
    (told,) = warnings()
    for text in (told, store.describe(), str(store.write_failure())):
        assert reason in text
        assert str(cache_dir) in text
        assert "DEEPGEMM_JIT_TRUST_ROOT" in text


@pytest.mark.parametrize("spoil", UNSAFE_ROOTS)
def test_a_root_that_trust_root_names_is_used(
    filled: Store, cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]], spoil: Callable[[Path], None]
) -> None:
    spoil(cache_dir)
    store = Store.open(read_settings(trust_root=cache_dir))
    assert get(store, sample) == sample.cubin_for()
    assert put(store, sample)
    assert store.write_failure() is None
    assert "TRUST_ROOT" in store.describe()
    assert warnings() == []


def test_trust_root_names_one_root_and_no_other(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    cache_dir.chmod(0o777)
    for other in (cache_dir.parent, cache_dir / "v1", cache_dir.with_name("storehouse")):
        assert get(Store.open(read_settings(trust_root=other)), sample) is None


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def given_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"only root can give a file to another user; this is uid {os.geteuid()}")
    os.chown(path, OTHER_UID, OTHER_UID)


def linked(path: Path) -> None:
    target = path.parents[4] / "outside"
    path.rename(target)
    path.symlink_to(target)


def linked_to_a_system_file(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def linked_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/file")


UNSAFE_FILES = [open_to_all, given_away, linked, linked_to_a_system_file, linked_to_nothing]


@pytest.mark.parametrize("spoil", UNSAFE_FILES)
@pytest.mark.parametrize("which", ["v1/kernels/*", "v1/objects/*/*"])
def test_an_unsafe_file_is_not_believed_and_its_target_not_written(
    filled: Store,
    cache_dir: Path,
    sample: ModuleType,
    warnings: Callable[[], list[str]],
    which: str,
    spoil: Callable[[Path], None],
) -> None:
    (path,) = cache_dir.glob(which)
    spoil(path)
    outside = cache_dir.parent / "outside"
    before = outside.read_bytes() if outside.exists() else None
    assert [found.path for found in filled.verify()] == [path]
    assert get(filled, sample) is None
    (told,) = warnings()
    assert str(path) in told
    assert put(filled, sample)
    assert get(filled, sample) == sample.cubin_for()
    assert not path.is_symlink()
    assert (outside.read_bytes() if outside.exists() else None) == before


@pytest.mark.parametrize("spoil", UNSAFE_FILES)
def test_a_put_replaces_an_unsafe_file_instead_of_writing_through_it(
    filled: Store, cache_dir: Path, sample: ModuleType, spoil: Callable[[Path], None]
) -> None:
    (path,) = cache_dir.glob("v1/kernels/*")
    spoil(path)
    hostname = Path("/etc/hostname").read_bytes() if Path("/etc/hostname").exists() else None
    assert put(filled, sample)
    assert get(filled, sample) == sample.cubin_for()
    assert not path.is_symlink()
    assert (Path("/etc/hostname").read_bytes() if hostname is not None else None) == hostname


def test_a_file_that_the_trusted_root_links_to_is_served(filled: Store, cache_dir: Path, sample: ModuleType) -> None:
    (path,) = cache_dir.glob("v1/objects/*/*")
    linked(path)
    assert get(Store.open(read_settings(trust_root=cache_dir)), sample) == sample.cubin_for()


@pytest.mark.parametrize("folder", ["v1", "v1/kernels", "v1/objects", "v1/tmp"])
@pytest.mark.parametrize("how", ["mode", "link"])
def test_nothing_is_written_through_an_unsafe_folder(
    filled: Store, cache_dir: Path, sample: ModuleType, warnings: Callable[[], list[str]], folder: str, how: str
) -> None:
    path = cache_dir / folder
    if how == "mode":
        path.chmod(0o777)
    else:
        path.rename(cache_dir.parent / "outside")
        path.symlink_to(cache_dir.parent / "outside")
    before = sorted((cache_dir.parent / "outside").rglob("*"))
    assert not filled.put(sample.KEY, sample.cubin_for("13.0"), spec_text=sample.SPEC.text)
    assert sorted((cache_dir.parent / "outside").rglob("*")) == before
    (told,) = warnings()
    assert str(path) in told


def test_a_socket_in_the_place_of_an_entry_is_a_miss(
    filled: Store, cache_dir: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = cache_dir.glob("v1/kernels/*")
    path.unlink()
    monkeypatch.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        Path("s").rename(path)
        assert get(filled, sample) is None
        assert put(filled, sample)
    assert get(filled, sample) == sample.cubin_for()


def test_a_read_only_store_of_root_serves_another_user(
    open_dir: Path, sample: ModuleType, as_other_user: Callable[[Callable[[], Any]], Any]
) -> None:
    root = open_dir / "baked"
    assert put(Store.open(read_settings(cache_dir=root)), sample)
    root.chmod(0o555)

    def use() -> dict[str, Any]:
        store = Store.open(read_settings(cache_dir=root, lock_dir=open_dir / "locks"))
        hit = get(store, sample) == sample.cubin_for()
        with store.lock(sample.KEY) as held:
            stored = store.put(sample.KEY, sample.cubin_for("13.0"), spec_text=sample.SPEC.text)
        return {
            "uid": os.geteuid(),
            "hit": hit,
            "held": held,
            "stored": stored,
            "kept": store.get(sample.KEY, spec_text=sample.SPEC.text, nvrtc_version="13.0") == sample.cubin_for("13.0"),
            "failure": store.write_failure(),
            "root": str(store.root),
        }

    seen = as_other_user(use)
    failure = seen.pop("failure")
    assert seen == {"uid": OTHER_UID, "hit": True, "held": True, "stored": False, "kept": True, "root": str(root)}
    assert str(root) in failure
    assert "errno 13" in failure


def test_a_damaged_file_of_a_read_only_store_is_told_once(
    open_dir: Path, sample: ModuleType, as_other_user: Callable[[Callable[[], Any]], Any], warnings: Callable[[], list[str]]
) -> None:
    root = open_dir / "baked"
    assert put(Store.open(read_settings(cache_dir=root)), sample)
    root.chmod(0o555)
    (path,) = root.glob("v1/objects/*/*")
    path.write_bytes(b"damaged")

    def use() -> list[Any]:
        store = Store.open(read_settings(cache_dir=root))
        misses = [get(store, sample) is None for _ in range(2)]
        return [misses, warnings()]

    misses, (told,) = as_other_user(use)
    assert misses == [True, True]
    assert str(path) in told
    assert path.read_bytes() == b"damaged"


def test_a_store_of_another_user_is_refused(
    open_dir: Path, sample: ModuleType, as_other_user: Callable[[Callable[[], Any]], Any]
) -> None:
    open_dir.chmod(0o777)
    root = open_dir / "theirs"
    assert as_other_user(lambda: put(Store.open(read_settings(cache_dir=root)), sample)) is True
    store = Store.open(read_settings(cache_dir=root))
    assert get(store, sample) is None
    assert f"owned by uid {OTHER_UID}" in str(store.write_failure())
    assert get(Store.open(read_settings(cache_dir=root, trust_root=root)), sample) == sample.cubin_for()


def test_users_of_a_trusted_root_fill_one_store(
    open_dir: Path, sample: ModuleType, as_other_user: Callable[[Callable[[], Any]], Any]
) -> None:
    root = open_dir / "shared"
    root.mkdir()
    root.chmod(0o777)

    def fill(version: str) -> bool:
        os.umask(0)
        store = Store.open(read_settings(cache_dir=root, trust_root=root))
        cubin = sample.cubin_for(version)
        return store.put(sample.KEY, cubin, spec_text=sample.SPEC.text) and store.verify() == []

    umask = os.umask(0)
    try:
        assert fill("13.0")
        assert as_other_user(lambda: fill("13.5"))
        assert as_other_user(lambda: fill("13.0"))  # in the place of the other's
        assert fill("13.5")
    finally:
        os.umask(umask)
    store = Store.open(read_settings(cache_dir=root, trust_root=root))
    assert [entry.nvrtc_version for entry in store.entries()] == ["13.0", "13.5"]
    assert get(store, sample) == sample.cubin_for()


def test_the_umask_decides_below_a_trusted_root_and_never_opens_another(cache_dir: Path, sample: ModuleType) -> None:
    umask = os.umask(0o002)
    try:
        modes = []
        for settings in (
            read_settings(),
            read_settings(cache_dir=cache_dir.with_name("trusted"), trust_root=cache_dir.with_name("trusted")),
        ):
            assert put(Store.open(settings), sample)
            paths = [path for path in settings.cache_dir.rglob("*") if "objects" in path.parts]
            modes.append({path.stat().st_mode & 0o777 for path in paths})
    finally:
        os.umask(umask)
    assert modes == [{0o755, 0o644}, {0o775, 0o664}]

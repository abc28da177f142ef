from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store
from deepgemm_jit.store.location import locate

pytestmark = pytest.mark.none

OTHER_UID = 12345


@pytest.fixture(autouse=True)
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No setting, no XDG folder; a home and a temporary folder of this test."""
    for variable in ("DEEPGEMM_JIT_CACHE_DIR", "DEEPGEMM_JIT_LOCK_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, name in (("HOME", "home"), ("TMPDIR", "tmp")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    return monkeypatch


def opened(**overrides: Any) -> Store:
    return Store.open(read_settings(**overrides))


def temp_root(tmp_path: Path) -> Path:
    return tmp_path / "tmp" / f"deepgemm_jit-cache-{os.geteuid()}"


def test_the_setting_comes_first_and_is_created_private(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    env.setenv("DEEPGEMM_JIT_CACHE_DIR", str(tmp_path / "a/b/c"))
    umask = os.umask(0)
    try:
        store = opened()
        assert store.root == tmp_path / "a/b/c"
    finally:
        os.umask(umask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert "DEEPGEMM_JIT_CACHE_DIR" in store.describe()
    assert not (tmp_path / "xdg").exists()


def test_a_setting_made_after_import_counts_and_a_store_keeps_the_one_it_was_opened_with(
    env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env.setenv("DEEPGEMM_JIT_CACHE_DIR", str(tmp_path / "one"))
    first = opened()
    env.delenv("DEEPGEMM_JIT_CACHE_DIR")
    second = opened()
    assert first.root == tmp_path / "one"
    assert second.root == tmp_path / "home/.cache/deepgemm_jit"


def test_a_relative_argument_is_taken_from_the_working_directory_once(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.chdir(tmp_path)
    store = opened(cache_dir=Path("here"))
    assert store.root == tmp_path / "here"
    env.chdir("/")
    assert store.root == tmp_path / "here"


def test_xdg_comes_before_home(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = opened()
    assert store.root == tmp_path / "xdg/deepgemm_jit"
    assert "XDG_CACHE_HOME" in store.describe()


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_xdg_folder_that_is_not_absolute_does_not_count(env: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    env.setenv("XDG_CACHE_HOME", value)
    store = opened()
    assert store.root == tmp_path / "home/.cache/deepgemm_jit"
    assert "home" in store.describe()


def test_home_serves_when_the_xdg_folder_cannot_be_used(
    env: pytest.MonkeyPatch, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").touch()
    env.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store = opened()
    assert store.root == tmp_path / "home/.cache/deepgemm_jit"
    (told,) = warnings()
    assert str(tmp_path / "file") in told
    assert str(store.root) in told


def test_a_home_that_does_not_exist_is_not_created(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("HOME", str(tmp_path / "nowhere"))
    store = opened()
    assert store.root == temp_root(tmp_path)
    assert not (tmp_path / "nowhere").exists()
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_memory_serves_when_no_folder_can_be_used(
    env: pytest.MonkeyPatch, tmp_path: Path, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    for variable in ("HOME", "TMPDIR"):
        env.setenv(variable, str(tmp_path / "nowhere"))
    before = sorted(tmp_path.rglob("*"))
    store = opened()
    assert store.root is None
    assert not store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert store.get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()
    assert "memory only" in store.describe()
    assert store.write_failure() == store.describe()
    assert list(store.entries()) == []
    assert store.verify() == []
    (told,) = warnings()
    assert told.count(str(tmp_path / "nowhere")) >= 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("obstacle", ["file", "file in the path", "link to nothing"])
def test_a_setting_that_cannot_be_used_gives_way_to_memory_not_to_another_folder(
    env: pytest.MonkeyPatch, tmp_path: Path, warnings: Callable[[], list[str]], obstacle: str
) -> None:
    root = tmp_path / "root"
    if obstacle == "link to nothing":
        root.symlink_to(tmp_path / "nothing")
    else:
        root.touch()
    if obstacle == "file in the path":
        root = root / "sub"
    store = opened(cache_dir=root)
    assert store.root is None
    assert str(root) in str(store.write_failure())
    assert len(warnings()) == 1
    assert not (tmp_path / "home/.cache").exists()


def test_an_unsafe_default_folder_gives_way_to_memory_not_to_another_folder(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unsafe = tmp_path / "home/.cache/deepgemm_jit"
    unsafe.mkdir(parents=True)
    unsafe.chmod(0o777)
    store = opened()
    assert store.root is None
    assert str(unsafe) in store.describe()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_folder_planted_in_the_temporary_directory_is_refused(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("HOME", str(tmp_path / "nowhere"))
    temp_root(tmp_path).symlink_to(tmp_path / "home")
    store = opened()
    assert store.root is None
    assert "symbolic link" in store.describe()
    assert list((tmp_path / "home").iterdir()) == []


HOMES = {"unset": None, "root of the file system": "/", "not there": "/nonexistent", "read-only": "home"}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_user_without_passwd_line_and_home_gets_a_temporary_folder(
    env: pytest.MonkeyPatch,
    open_dir: Path,
    sample: ModuleType,
    as_other_user: Callable[[Callable[[], Any]], Any],
    home: str | None,
) -> None:
    (open_dir / "home").mkdir()
    (open_dir / "home").chmod(0o555)
    (open_dir / "tmp").mkdir()
    (open_dir / "tmp").chmod(0o1777)

    def use() -> dict[str, Any]:
        os.environ["TMPDIR"] = str(open_dir / "tmp")
        os.environ.pop("HOME")
        if home is not None:
            os.environ["HOME"] = str(open_dir / home)  # an absolute one stays as it is
        store = opened()
        with store.lock(sample.KEY) as held:
            stored = store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
        hit = opened().get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()
        return {"root": str(store.root), "held": held, "stored": stored, "hit": hit, "failure": store.write_failure()}

    root = open_dir / "tmp" / f"deepgemm_jit-cache-{OTHER_UID}"
    assert as_other_user(use) == {"root": str(root), "held": True, "stored": True, "hit": True, "failure": None}


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("/dev/null", "is not a directory"),
        ("/", "is the root of the file system. Name a folder of your own"),
        ("shared", "Use a folder of your own below it"),
        ("not a store", "Either name another folder"),
    ],
)
def test_advice_never_changes_what_is_not_a_store(env: pytest.MonkeyPatch, tmp_path: Path, root: str, says: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "not a store").mkdir()
    (tmp_path / "not a store" / "mail").touch()
    (tmp_path / "not a store").chmod(0o777)
    store = opened(cache_dir=tmp_path / root)  # an absolute one stays as it is
    assert store.root is None
    assert says in store.describe()
    assert "chmod" not in store.describe()


def test_a_file_in_the_place_of_the_stores_folder_is_told_once(
    env: pytest.MonkeyPatch, tmp_path: Path, sample: ModuleType, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/v1").touch()
    store = opened(cache_dir=tmp_path / "root")
    assert store.get(sample.KEY, spec_text=sample.SPEC.text, nvrtc_version="13.0") is None
    assert not store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    (told,) = warnings()
    assert str(tmp_path / "root/v1") in told


def test_looking_creates_nothing_and_finds_what_could_not_be_created(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert locate(read_settings(), create=False).root == tmp_path / "home/.cache/deepgemm_jit"
    assert locate(read_settings(cache_dir=Path("/proc/no-store-here")), create=False).root is None
    assert sorted(tmp_path.rglob("*")) == before

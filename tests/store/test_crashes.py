"""Writers that die at any moment: readers see all or nothing, nobody waits for the dead, and their leftovers go."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store
from deepgemm_jit.store.temp import sweep

pytestmark = pytest.mark.none

CRASH = Path(__file__).with_name("crash.py")
DAY_S = 24 * 3600


def test_random_kills_of_writers_tear_lose_and_block_nothing(cache_dir: Path, profile: Any, record: Callable[..., None]) -> None:
    seed = time.time_ns() % 2**32
    command = [sys.executable, str(CRASH), str(cache_dir), str(profile.kills), str(seed)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=3600)
    assert finished.stdout, finished.stderr
    report = json.loads(finished.stdout)
    record("kills of writers", **report)
    assert finished.returncode == 0, report
    assert report["kills_at_a_line"] + report["kills_by_time"] >= profile.kills
    assert report["hits"] > 0


@pytest.fixture
def killed(store: Store, sample: ModuleType, start: Callable[..., Any], cache_dir: Path) -> Path:
    """What a writer has left that was killed before its first rename."""
    assert start("put", "1").wait() == -9
    (left,) = (cache_dir / "v1/tmp").iterdir()
    return left


def test_the_next_writer_sweeps_what_the_dead_one_left(killed: Path, store: Store, sample: ModuleType) -> None:
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert list(killed.parent.iterdir()) == []


def test_a_file_that_a_living_writer_is_at_is_left_alone(killed: Path, store: Store, sample: ModuleType) -> None:
    with killed.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(killed, (0, 0))
        assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
        assert killed.exists()
        store.prune()
        assert killed.exists()
    store.prune()
    assert not killed.exists()


def test_files_of_other_names_and_kinds_are_not_swept(killed: Path, store: Store, sample: ModuleType) -> None:
    strangers = [killed.with_name(name) for name in ("notes", "a" * 31, "g" * 32)]
    for stranger in strangers:
        stranger.write_text("?")
    (killed.parent / ("a" * 32)).mkdir()
    os.mkfifo(killed.parent / ("b" * 32))
    (killed.parent / ("c" * 32)).symlink_to("/etc/hostname")
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert not killed.exists()
    assert all(stranger.exists() for stranger in strangers)
    assert len(list(killed.parent.iterdir())) == len(strangers) + 3


@pytest.mark.parametrize("failure", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EIO])
@pytest.mark.parametrize(("age_s", "goes"), [(DAY_S - 60, False), (DAY_S + 60, True)], ids=["young", "old"])
def test_where_locks_do_not_work_the_age_decides_by_the_file_systems_own_clock(
    killed: Path, monkeypatch: pytest.MonkeyPatch, failure: int, age_s: int, goes: bool
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(fcntl, "flock", refuse)
    sweep(killed.parent, killed.stat().st_mtime + age_s)
    assert killed.exists() is not goes


def test_a_writer_whose_file_is_swept_by_a_host_that_sees_no_locks_writes_it_again(
    store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, warnings: Callable[[], list[str]]
) -> None:
    replace, lost = Path.replace, []

    def swept(self: Path, target: Path) -> Path:
        if len(lost) < 2:
            lost.append(self)
            self.unlink()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", swept)
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert len(lost) == 2
    assert store.get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()
    assert warnings() == []


@pytest.mark.parametrize("folder", ["v1", "v1/tmp", "v1/objects", "."])
def test_a_store_that_is_removed_under_a_writer_is_made_again(
    store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, folder: str
) -> None:
    replace, removed = Path.replace, []

    def remove_first(self: Path, target: Path) -> Path:
        if not removed:
            removed.append(folder)
            subprocess.run(["rm", "-rf", str(cache_dir / folder)], check=True)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", remove_first)
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert Store.open(read_settings()).get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()
    assert cache_dir.stat().st_mode & 0o777 == 0o700

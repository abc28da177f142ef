"""Writers that die at any moment: readers see all or nothing, nobody waits for the dead, and their leftovers go."""

from __future__ import annotations

import errno
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


def named(file: Path, **changes: str) -> Path:
    """Give a file in ``tmp/`` another writer: ``machine``, ``pid``, ``started``."""
    parts = dict(zip(("machine", "pid", "started", "random"), file.name.split("-"), strict=True)) | changes
    return file.rename(file.with_name("-".join(parts.values())))


def is_swept(file: Path, age_s: float = 0) -> bool:
    sweep(file.parent, file.stat().st_mtime + age_s)
    return not file.exists()


def test_a_file_that_a_living_writer_is_at_is_left_alone(
    store: Store, sample: ModuleType, start: Callable[..., Any], cache_dir: Path
) -> None:
    writer = start("stop_before_rename")
    assert writer.stdout.readline() == "stopping\n"
    (file,) = (cache_dir / "v1/tmp").iterdir()
    assert store.put(sample.KEY, sample.cubin_for("13.0"), spec_text=sample.SPEC.text)
    store.prune()
    assert file.exists()
    writer.communicate("go on\n")
    assert store.get(sample.KEY, spec_text=sample.SPEC.text, nvrtc_version="13.5") == sample.cubin_for()
    assert list(file.parent.iterdir()) == []


def test_a_killed_writer_that_nobody_has_waited_for_is_dead(store: Store, start: Callable[..., Any], cache_dir: Path) -> None:
    writer = start("stop_before_rename")
    assert writer.stdout.readline() == "stopping\n"
    (file,) = (cache_dir / "v1/tmp").iterdir()
    writer.kill()
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert is_swept(file)


@pytest.mark.parametrize(("age_s", "goes"), [(0, False), (DAY_S - 60, False), (DAY_S + 60, True)], ids=["new", "young", "old"])
@pytest.mark.parametrize("who", ["another machine", "an unknown machine", "another user", "one that cannot be asked for"])
def test_where_nobody_can_say_whether_the_writer_lives_its_age_decides_by_the_file_systems_own_clock(
    killed: Path, monkeypatch: pytest.MonkeyPatch, who: str, age_s: float, goes: bool
) -> None:
    if who == "another machine":
        file = named(killed, machine="0123456789abcdef")
    elif who == "an unknown machine":
        monkeypatch.setattr("deepgemm_jit.store.temp._machine", lambda: "0" * 16)
        file = named(killed, machine="0" * 16)
    else:
        file = named(killed, pid=str(os.getpid()), started="1")

        def refuse(pid: int, number: int) -> None:
            raise PermissionError(errno.EPERM, "not yours")

        if who == "another user":
            monkeypatch.setattr(os, "kill", refuse)
        else:  # no /proc
            monkeypatch.setattr("deepgemm_jit.store.temp._started", lambda pid: None)
    assert is_swept(file, age_s) is goes


def test_a_process_of_the_same_number_that_started_at_another_time_is_another_one(killed: Path) -> None:
    assert is_swept(named(killed, pid=str(os.getpid()), started="1"))


def test_a_number_that_no_process_can_have_is_a_dead_one(killed: Path) -> None:
    assert is_swept(named(killed, pid="9999999999"))


def test_files_of_other_names_and_kinds_are_not_swept(killed: Path, store: Store, sample: ModuleType) -> None:
    strangers = [killed.with_name(name) for name in ("notes", "a" * 32, killed.name + ".bak", killed.name.upper())]
    for stranger in strangers:
        stranger.write_text("?")
    odd = [killed.with_name(f"{killed.name[:-1]}{digit}") for digit in set("0123456789abcdef") - {killed.name[-1]}][:3]
    odd[0].mkdir()
    os.mkfifo(odd[1])
    odd[2].symlink_to("/etc/hostname")
    assert store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
    assert not killed.exists()
    assert sorted(killed.parent.iterdir()) == sorted([*strangers, *odd])


def test_a_writer_whose_file_is_swept_all_the_same_writes_it_again(
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

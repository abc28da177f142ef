from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store, locks
from deepgemm_jit.store.locks import lock_failure

pytestmark = pytest.mark.none


@pytest.fixture
def lock_dir(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def opened(**overrides: Any) -> Store:
    return Store.open(read_settings(**overrides))


def lock_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_lock_is_held_and_can_be_taken_again(store: Store, sample: ModuleType) -> None:
    for _ in range(2):
        with store.lock(sample.KEY) as held:
            assert held is True


def test_processes_exclude_each_other(store: Store, sample: ModuleType, start: Callable[..., Any], tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    workers = [start("count", str(counter), "25") for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0] * 4
    assert counter.read_text() == "100"


def test_the_time_limit_ends_the_wait_and_the_holder_is_named(
    sample: ModuleType, start: Callable[..., Any], lock_dir: Path, warnings: Callable[[], list[str]]
) -> None:
    holder = start("hold")
    assert holder.stdout.readline() == "True\n"
    with opened(lock_timeout_s=0.2).lock(sample.KEY, "kernel k") as held:
        assert held is False
    (told,) = warnings()
    for fact in ("kernel k", f"pid {holder.pid}", socket.gethostname(), str(lock_file(lock_dir)), "gave up after 0."):
        assert fact in told
    holder.communicate("done\n")
    with opened(lock_timeout_s=60).lock(sample.KEY) as held:
        assert held is True


def test_no_time_means_one_try(sample: ModuleType, start: Callable[..., Any]) -> None:
    with opened(lock_timeout_s=0).lock(sample.KEY) as held:
        assert held is True
    holder = start("hold")
    assert holder.stdout.readline() == "True\n"
    with opened(lock_timeout_s=0).lock(sample.KEY) as held:
        assert held is False


def test_a_long_wait_says_once_what_for_and_for_whom(
    sample: ModuleType, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(locks, "_SAY_SO_AFTER_S", 0.1)
    holder = start("hold")
    assert holder.stdout.readline() == "True\n"
    # The holder goes on only after the waiting process has said so.
    said = threading.Event()
    monkeypatch.setattr(locks._LOGGER, "warning", tell_and(said.set, locks._LOGGER.warning))
    release = threading.Thread(target=lambda: (said.wait(), holder.communicate("done\n")))
    release.start()
    with opened(lock_timeout_s=60).lock(sample.KEY, "kernel k") as held:
        assert held is True
    release.join()
    (told,) = warnings()
    assert told.startswith("waiting for kernel k")
    assert f"pid {holder.pid}" in told


def tell_and(then: Callable[[], None], tell: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        tell(*args)
        then()

    return both


def test_a_killed_holder_blocks_nobody(sample: ModuleType, start: Callable[..., Any], warnings: Callable[[], list[str]]) -> None:
    holder = start("hold")
    assert holder.stdout.readline() == "True\n"
    holder.kill()
    holder.wait()
    with opened(lock_timeout_s=0).lock(sample.KEY) as held:
        assert held is True
    assert warnings() == []


def test_a_leftover_lock_file_means_nothing(store: Store, sample: ModuleType, lock_dir: Path) -> None:
    with store.lock(sample.KEY):
        pass
    os.utime(lock_file(lock_dir), (1, 1))
    lock_file(lock_dir).write_text("pid 1 on host elsewhere\n")
    with opened(lock_timeout_s=0).lock(sample.KEY) as held:
        assert held is True


def test_the_lock_file_is_the_same_over_many_cycles(store: Store, sample: ModuleType, lock_dir: Path) -> None:
    inodes = set()
    for _ in range(100):
        with store.lock(sample.KEY) as held:
            assert held
        inodes.add(lock_file(lock_dir).stat().st_ino)
    assert len(inodes) == 1


def test_a_store_under_another_path_is_the_same_store(cache_dir: Path, sample: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mounted elsewhere").symlink_to(cache_dir.parent)
    other = opened(cache_dir=tmp_path / "mounted elsewhere" / cache_dir.name, lock_timeout_s=0)
    with opened().lock(sample.KEY) as held, other.lock(sample.KEY) as also_held:
        assert (held, also_held) == (True, False)


def test_an_error_in_the_build_passes_and_the_lock_is_free(store: Store, sample: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), store.lock(sample.KEY):
        raise ZeroDivisionError
    with opened(lock_timeout_s=0).lock(sample.KEY) as held:
        assert held is True


def test_other_keys_and_other_stores_do_not_wait(sample: ModuleType, start: Callable[..., Any], tmp_path: Path) -> None:
    holder = start("hold")
    assert holder.stdout.readline() == "True\n"
    with opened(lock_timeout_s=0).lock("0" * 64) as held:
        assert held is True
    with opened(lock_timeout_s=0, cache_dir=tmp_path / "another").lock(sample.KEY) as held:
        assert held is True


@pytest.mark.parametrize("disk", ["store on disk", "memory only"])
def test_threads_of_a_process_exclude_each_other(cache_dir: Path, sample: ModuleType, disk: str) -> None:
    if disk == "memory only":
        cache_dir.touch()
    store = opened(lock_timeout_s=0)
    seen = []

    def try_lock(key: str) -> None:
        with store.lock(key) as held:
            seen.append(held)

    with store.lock(sample.KEY) as held:
        assert held is True
        for key in (sample.KEY, "0" * 64):
            thread = threading.Thread(target=try_lock, args=(key,))
            thread.start()
            thread.join()
    try_lock(sample.KEY)
    assert seen == [False, True, True]


def test_a_long_wait_for_a_thread_says_so_too(
    cache_dir: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    cache_dir.touch()  # memory only
    monkeypatch.setattr(locks, "_SAY_SO_AFTER_S", 0.1)
    store, seen = opened(lock_timeout_s=0.2), []

    def try_lock() -> None:
        with store.lock(sample.KEY, "kernel k") as held:
            seen.append(held)

    with store.lock(sample.KEY):
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
    assert seen == [False]
    waiting, gave_up = [told for told in warnings() if "kernel k" in told]
    assert waiting.startswith("waiting for kernel k, which another thread of this process is building")
    assert gave_up.startswith("gave up after 0.")


def test_a_store_that_no_process_could_read_makes_no_lock_file(cache_dir: Path, sample: ModuleType, lock_dir: Path) -> None:
    cache_dir.touch()
    with opened().lock(sample.KEY) as held:
        assert held is True
    assert not lock_dir.exists()


@pytest.mark.parametrize(
    "failure", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO, errno.EINVAL, errno.ESTALE, errno.EPERM]
)
def test_where_locking_does_not_work_the_build_goes_on_with_one_warning(
    store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]], failure: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for key in (sample.KEY, "0" * 64):
        with store.lock(key) as held:
            assert held is False
            assert store.put(key, sample.cubin_for(), spec_text=sample.SPEC.text)
    (told,) = warnings()
    assert f"errno {failure}" in told


@pytest.mark.parametrize("fault", ["writable by all", "link", "file"])
def test_an_unsafe_lock_folder_is_not_used(
    store: Store, sample: ModuleType, lock_dir: Path, warnings: Callable[[], list[str]], fault: str
) -> None:
    if fault == "file":
        lock_dir.touch()
    elif fault == "link":
        (lock_dir.parent / "elsewhere").mkdir()
        lock_dir.symlink_to(lock_dir.parent / "elsewhere")
    else:
        lock_dir.mkdir()
        lock_dir.chmod(0o777)
    for _ in range(2):
        with store.lock(sample.KEY) as held:
            assert held is False
    (told,) = warnings()
    assert str(lock_dir) in told
    assert lock_failure(read_settings()) in told
    assert "store" not in told.replace(str(lock_dir), "")
    assert "TRUST_ROOT" not in told
    assert fault == "file" or list(lock_dir.iterdir()) == []


def test_a_planted_link_is_not_written_through(store: Store, sample: ModuleType, lock_dir: Path) -> None:
    with store.lock(sample.KEY):
        pass
    path = lock_file(lock_dir)
    path.unlink()
    outside = lock_dir.parent / "outside"
    outside.write_text("precious")
    path.symlink_to(outside)
    with store.lock(sample.KEY) as held:
        assert held is False
    assert outside.read_text() == "precious"


def test_a_planted_pipe_is_no_lock_and_nobody_waits_for_it(
    store: Store, sample: ModuleType, lock_dir: Path, warnings: Callable[[], list[str]]
) -> None:
    with store.lock(sample.KEY):
        pass
    path = lock_file(lock_dir)
    path.unlink()
    os.mkfifo(path)
    with store.lock(sample.KEY) as held:
        assert held is False
    (told,) = warnings()
    assert str(path) in told
    assert "not a regular file" in told
    # Planted while another process held the file that lay there before.
    assert locks._holder(path) == "an unknown process"


def test_the_default_lock_folder_is_private_and_named_by_the_uid(
    sample: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DEEPGEMM_JIT_LOCK_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with opened().lock(sample.KEY) as held:
        assert held is True
    folder = tmp_path / f"deepgemm_jit-locks-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert lock_file(folder).stat().st_mode & 0o777 == 0o600


def test_a_folder_in_which_nothing_can_be_created_is_no_held_lock(sample: ModuleType, warnings: Callable[[], list[str]]) -> None:
    settings = {"lock_dir": Path("/proc"), "lock_timeout_s": 1000.0}
    store = opened(**settings)
    for key in (sample.KEY, "0" * 64):
        with store.lock(key) as held:
            assert held is False
    (told,) = warnings()
    assert "/proc/" in told
    assert "/proc" in str(lock_failure(read_settings(**settings)))


def test_asking_whether_locks_work_leaves_nothing_behind(lock_dir: Path) -> None:
    assert lock_failure(read_settings()) is None
    assert not lock_dir.exists()
    lock_dir.mkdir(mode=0o700)
    assert lock_failure(read_settings()) is None
    assert list(lock_dir.iterdir()) == []

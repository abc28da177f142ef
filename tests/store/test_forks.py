"""A fork made while another thread is in the store: that thread does not come along, and whatever it held stays held."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from doubles.fork import holds_in_fork

from deepgemm_jit.settings import Settings, read_settings
from deepgemm_jit.store import Store, disk
from deepgemm_jit.store.location import Location

pytestmark = pytest.mark.none

PATIENCE_S = 20


@contextmanager
def thread_inside(work: Callable[[], object], inside: threading.Event, leave: threading.Event) -> Iterator[None]:
    """Run ``work`` in a thread that stays where it sets ``inside`` until the block is left."""
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(PATIENCE_S)
    try:
        yield
    finally:
        leave.set()
        thread.join()


def within_patience(claim: Callable[[], bool]) -> bool:
    """Return whether ``claim`` holds in a fork that is killed when it waits for what never comes."""

    def bounded() -> bool:
        signal.alarm(PATIENCE_S)
        return claim()

    return holds_in_fork(bounded)


def test_a_fork_made_while_a_thread_looks_for_the_root_can_use_the_store(
    store: Store, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate, inside, leave, parent = disk.locate, threading.Event(), threading.Event(), threading.current_thread()

    def slow(settings: Settings) -> Location:
        if threading.current_thread() is not parent:
            inside.set()
            assert leave.wait(2 * PATIENCE_S)
        return locate(settings)

    monkeypatch.setattr(disk, "locate", slow)

    def in_child() -> bool:
        with store.lock(sample.KEY):
            stored = store.put(sample.KEY, sample.cubin_for(), spec_text=sample.SPEC.text)
        return stored and store.get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()

    with thread_inside(lambda: store.root, inside, leave):
        assert within_patience(in_child)
    assert store.get(sample.KEY, spec_text=sample.SPEC.text) == sample.cubin_for()


def test_a_fork_made_while_a_thread_holds_a_lock_in_memory_does_not_wait_for_it(cache_dir: Path, sample: ModuleType) -> None:
    cache_dir.touch()  # no folder: the store has memory only
    store = Store.open(read_settings(lock_timeout_s=2 * PATIENCE_S))
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock(sample.KEY):
            inside.set()
            assert leave.wait(2 * PATIENCE_S)

    def in_child() -> bool:
        with store.lock(sample.KEY) as held:
            return held

    with thread_inside(hold, inside, leave):
        assert within_patience(in_child)


def test_threads_that_come_first_at_once_agree_on_the_root_and_tell_of_it_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    cache_dir.touch()
    locate, barrier = disk.locate, threading.Barrier(4, timeout=PATIENCE_S)

    def at_once(settings: Settings) -> Location:
        barrier.wait()
        return locate(settings)

    monkeypatch.setattr(disk, "locate", at_once)
    store, seen = Store.open(read_settings()), []
    threads = [threading.Thread(target=lambda: seen.append(store._location)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert len({id(location) for location in seen}) == 1
    assert len(warnings()) == 1

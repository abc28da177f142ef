"""The pool with stand-in workers: real processes and pipes that misbehave on demand, so that no compile is needed."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit.settings import Settings, read_settings
from deepgemm_jit.spec import KernelSpec, kernel_set
from deepgemm_jit.warmup import pool
from deepgemm_jit.warmup.pool import KernelOutcome, build_in_workers

pytestmark = pytest.mark.none

SPECS = kernel_set("sm_90a")[:6]
BAD = SPECS[2]
LONG_S = 60.0

# Answers every kernel at once but for BAD, with which it does what the test says. Notes its pid and what it was asked.
WORKER = """
import json, os, signal, sys, time
folder, bad = {folder!r}, {bad!r}
open(os.path.join(folder, str(os.getpid())), "a").close()
for line in sys.stdin:
    spec = json.loads(line)["spec"]
    answer = dict(outcome="compiled", stored=True, seconds=0.25, peak_bytes=1000)
    if spec == bad:
        {deed}
    print(json.dumps(answer), flush=True)
"""

Misbehaving = Callable[[str], Path]


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Misbehaving:
    """Return a function that makes workers do ``deed`` with BAD, and the folder in which each leaves a file named by its pid."""

    def install(deed: str) -> Path:
        folder = tmp_path / "pids"
        folder.mkdir()
        source = WORKER.format(folder=str(folder), bad=BAD.text, deed=deed)
        monkeypatch.setattr(pool, "WORKER_COMMAND", ("-c", source))
        return folder

    return install


def outcomes(
    specs: tuple[KernelSpec, ...] = SPECS, jobs: int = 2, timeout_s: float = LONG_S, settings: Settings | None = None
) -> dict[str, KernelOutcome]:
    found: list[KernelOutcome] = []
    build_in_workers(specs, settings or read_settings(), jobs, timeout_s, found.append)
    assert len({outcome.name for outcome in found}) == len(found)
    return {outcome.name: outcome for outcome in found}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def workers_of(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir()]


def only_bad_failed(found: dict[str, KernelOutcome]) -> bool:
    return {name: outcome.outcome for name, outcome in found.items()} == {
        spec.name: "failed" if spec == BAD else "compiled" for spec in SPECS
    }


@pytest.mark.parametrize("jobs", [1, 2, 3, 20])
def test_every_kernel_is_built_once_by_no_more_workers_than_jobs(misbehaving: Misbehaving, jobs: int) -> None:
    folder = misbehaving("pass")
    found = outcomes(jobs=jobs)
    assert {name: outcome.outcome for name, outcome in found.items()} == {spec.name: "compiled" for spec in SPECS}
    assert {(outcome.seconds, outcome.worker_peak_bytes) for outcome in found.values()} == {(0.25, 1000)}
    assert len(workers_of(folder)) == min(jobs, len(SPECS))
    assert all(map(gone, workers_of(folder)))


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os._exit(3)", "status 3"),
        ("os._exit(0)", "status 0"),
        ("raise RuntimeError('what it met')", "what it met"),
        ("os.close(1); time.sleep(1000)", "closed"),
    ],
)
def test_a_worker_that_dies_fails_its_kernel_only_and_is_replaced(
    misbehaving: Misbehaving, jobs: int, deed: str, says: str
) -> None:
    folder = misbehaving(deed)
    found = outcomes(jobs=jobs)
    assert only_bad_failed(found)
    assert says in found[BAD.name].error
    assert all(map(gone, workers_of(folder)))


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    "deed",
    [
        "time.sleep(1000)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["hangs", "ignores SIGTERM", "stopped"],
)
def test_a_worker_that_is_too_late_is_ended_and_fails_its_kernel_only(misbehaving: Misbehaving, jobs: int, deed: str) -> None:
    folder = misbehaving(deed)
    found = outcomes(jobs=jobs, timeout_s=3.0)
    assert only_bad_failed(found)
    assert "3 s" in found[BAD.name].error
    assert all(map(gone, workers_of(folder)))


def test_an_error_that_a_worker_reports_fails_its_kernel_and_leaves_the_worker(misbehaving: Misbehaving) -> None:
    folder = misbehaving("answer = dict(error='the log of NVRTC', peak_bytes=7)")
    found = outcomes(jobs=1)
    assert only_bad_failed(found)
    assert (found[BAD.name].error, found[BAD.name].worker_peak_bytes) == ("the log of NVRTC", 7)
    assert len(workers_of(folder)) == 1


def test_a_kernel_that_could_not_be_stored_is_a_failure(misbehaving: Misbehaving) -> None:
    misbehaving("answer['stored'] = False")
    found = outcomes()
    assert only_bad_failed(found)
    assert "store" in found[BAD.name].error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_worker_is_left_behind_when_the_caller_leaves(misbehaving: Misbehaving, error: type[BaseException]) -> None:
    folder = misbehaving("time.sleep(1000)")

    def leave(_outcome: KernelOutcome) -> None:
        for _ in range(300):  # the second worker may still be starting when the first one answers
            if len(workers_of(folder)) == 2:
                break
            time.sleep(0.1)
        raise error

    with pytest.raises(error):
        build_in_workers((SPECS[0], BAD), read_settings(), 2, LONG_S, leave)
    assert len(workers_of(folder)) == 2
    assert all(map(gone, workers_of(folder)))


def test_what_a_worker_says_reaches_the_log(misbehaving: Misbehaving, caplog: pytest.LogCaptureFixture) -> None:
    misbehaving("print('waiting for another process', file=sys.stderr, flush=True)")
    with caplog.at_level(logging.WARNING, logger="deepgemm_jit"):
        outcomes(jobs=1)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["waiting for another process"]


def test_what_every_worker_says_of_every_kernel_reaches_the_log_once(
    misbehaving: Misbehaving, caplog: pytest.LogCaptureFixture
) -> None:
    deed = "print('disk full: tmp/' + os.urandom(16).hex(), file=sys.stderr, flush=True); os._exit(1)"
    misbehaving(deed)
    with caplog.at_level(logging.WARNING, logger="deepgemm_jit"):
        build_in_workers((BAD, BAD), read_settings(), 1, LONG_S, lambda _outcome: None)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "disk full" in told


def test_a_working_directory_that_is_gone_keeps_no_worker_from_starting(
    misbehaving: Misbehaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misbehaving("pass")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert {outcome.outcome for outcome in outcomes().values()} == {"compiled"}


def test_a_flood_of_messages_does_not_block_a_worker(misbehaving: Misbehaving) -> None:
    misbehaving("sys.stderr.write('word ' * 200_000 + chr(10)); sys.stderr.flush()")
    assert {outcome.outcome for outcome in outcomes(jobs=1).values()} == {"compiled"}


def test_workers_that_cannot_be_started_fail_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    found = outcomes()
    assert [outcome.outcome for outcome in found.values()] == ["failed"] * len(SPECS)
    assert all("/nonexistent/python" in outcome.error for outcome in found.values())


@pytest.mark.parametrize("policy", ["warn", "never"])
def test_workers_run_under_the_effective_settings_and_no_others(
    misbehaving: Misbehaving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    misbehaving("answer = dict(error=json.dumps({k: v for k, v in os.environ.items() if 'DEEPGEMM' in k}), peak_bytes=0)")
    monkeypatch.setenv("DEEPGEMM_JIT_JOBS", "5")
    packs = (tmp_path / "a.pack", tmp_path / "b.pack")
    settings = read_settings({}, cache_dir=tmp_path / "mine", compile=policy, packs=packs)
    error = outcomes(settings=settings)[BAD.name].error
    assert f'"DEEPGEMM_JIT_PACKS": "{packs[0]}:{packs[1]}"' in error
    assert str(tmp_path / "mine") in error
    assert "DEEPGEMM_JIT_JOBS" not in error
    # Compiles of a warm-up are wanted, so nobody is to be warned of them or kept from them.
    assert '"DEEPGEMM_JIT_COMPILE": "auto"' in error


def test_modules_in_the_working_directory_are_not_imported_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json.py", "queue.py", "deepgemm_jit.py"):
        (tmp_path / name).write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    unknown = KernelSpec("no_such_family", "sm_90a", ("f32",), (1,))
    error = outcomes(specs=(unknown,))[unknown.name].error
    assert "no_such_family" in error
    assert "planted" not in error

"""Real warm-ups: NVRTC in worker processes, a store on disk, and interruptions of every kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.builder import Builder
from deepgemm_jit.errors import OperandError, StoreError, UnsupportedError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.warmup import Plan, Uncovered, build_plan, plan_for, pool, warm_up

pytestmark = pytest.mark.nvrtc

WHOLE_SET = kernel_set("sm_90a")
WORKER_MODULE = "deepgemm_jit.warmup.worker"
PATIENCE_S = 60.0


def worker_pids(parent: int) -> list[int]:
    """Return the warm-up workers that ``parent`` has started and that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")  # of any process on the machine
            state, ppid = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if WORKER_MODULE in command and int(ppid) == parent and state != "Z":
            found.append(int(folder.name))
    return found


def test_workers_are_found_among_processes_whose_command_lines_are_not_text() -> None:
    sleep = "import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", sleep, b"\xff\xfe"]) as other:
        line = Path(f"/proc/{other.pid}/cmdline")
        until(lambda: b"\xff\xfe" in line.read_bytes())
        found = worker_pids(os.getpid())
        other.kill()
    assert other.pid not in found


def until(ask: Callable[[], Any]) -> Any:
    """Return the first true answer of ``ask``."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if answer := ask():
            return answer
        time.sleep(0.01)
    pytest.fail(f"nothing came of {ask} in {PATIENCE_S} s")


def temporary_files(root: Path) -> list[str]:
    return [file.name for file in root.glob("v1/tmp/*")]


def stored_names() -> set[str]:
    return {entry.entry for entry in Builder().store.entries()}


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Let children begin with the default action of SIGINT: one that the caller of the tests ignores stays ignored in them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def ended_midway(request: pytest.FixtureRequest, default_sigint: None) -> tuple[int, list[int], int]:
    """Send a signal to a warm-up that has begun to compile; return its status, its workers and the kernels it had stored."""
    command = [sys.executable, "-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", "--jobs", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        workers = until(lambda: len(found := worker_pids(process.pid)) == 2 and found)
        until(stored_names)
        if request.param == signal.SIGINT:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        else:
            process.send_signal(request.param)
        process.communicate(timeout=PATIENCE_S)
        return process.returncode, workers, len(stored_names())


def test_a_first_run_compiles_the_whole_set_and_a_second_finds_all_of_it(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = warm_up("sm_90a", jobs=2)
    assert (first.kernels, first.compiled, first.cached, first.failed) == (len(WHOLE_SET), len(WHOLE_SET), 0, ())
    assert first.store == str(cache_dir)
    assert stored_names() == {spec.name for spec in WHOLE_SET}
    assert temporary_files(cache_dir) == []
    # What is in the store is found without a worker: there is none that could be started.
    monkeypatch.setattr(pool, "WORKER_COMMAND", ("-c", "raise SystemExit(9)"))
    second = warm_up("sm_90a", jobs=2)
    assert (second.kernels, second.compiled, second.cached, second.failed) == (len(WHOLE_SET), 0, len(WHOLE_SET), ())


def test_kernels_that_the_store_may_not_hold_are_failures_that_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_CACHE_MAX_BYTES", "1000")
    report = warm_up("sm_90a", jobs=2)
    left = stored_names()
    assert len(left) < len(WHOLE_SET)
    assert {outcome.name for outcome in report.failed} == {spec.name for spec in WHOLE_SET} - left
    assert all("DEEPGEMM_JIT_CACHE_MAX_BYTES" in outcome.error and "1000 bytes" in outcome.error for outcome in report.failed)


def test_a_model_warms_up_its_plan_and_no_more(models: Path) -> None:
    report = warm_up("sm_90a", models / "deepseek-v3", jobs=2)
    planned = plan_for("sm_90a", models / "deepseek-v3").kernels
    assert report.compiled == len(planned) < len(WHOLE_SET)
    assert stored_names() == {spec.name for spec in planned}


def test_a_worker_killed_from_outside_costs_one_kernel() -> None:
    def kill() -> None:
        os.kill(until(lambda: worker_pids(os.getpid()))[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    report = warm_up("sm_90a", jobs=2)
    killer.join()
    assert (report.compiled, len(report.failed)) == (len(WHOLE_SET) - 1, 1)
    assert "SIGKILL" in report.failed[0].error
    assert warm_up("sm_90a", jobs=2).compiled == 1


def test_kernels_that_take_longer_than_allowed_fail_and_leave_no_worker(cache_dir: Path) -> None:
    plan = replace(plan_for("sm_90a"), kernels=WHOLE_SET[:3])
    report = build_plan(plan, 2, timeout_s=0.01)
    assert [outcome.outcome for outcome in report.outcomes] == ["failed"] * 3
    assert all("0.01 s" in outcome.error for outcome in report.failed)
    assert worker_pids(os.getpid()) == []
    assert temporary_files(cache_dir) == []


def test_a_warm_up_that_is_ended_leaves_neither_workers_nor_broken_entries(
    ended_midway: tuple[int, list[int], int], cache_dir: Path
) -> None:
    status, workers, stored = ended_midway
    assert status != 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert Builder().store.verify() == []
    report = warm_up("sm_90a", jobs=2)
    assert report.failed == ()
    # Those that were stored stay; a worker may have stored one more after the count was taken.
    assert report.cached >= stored
    assert report.compiled + report.cached == len(WHOLE_SET)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_removes_temporary_files(cache_dir: Path) -> None:
    command = [sys.executable, "-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        until(stored_names)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert worker_pids(process.pid) == []
    assert temporary_files(cache_dir) == []


def test_two_warm_ups_of_one_store_compile_each_kernel_once() -> None:
    source = "import deepgemm_jit as dj; print(dj.warm_up('sm_90a', jobs=2).compiled)"
    both = [subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(map(int, answers)) == len(WHOLE_SET)


def test_a_script_that_warms_up_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text("import deepgemm_jit as dj\nprint('started')\nprint(dj.warm_up('sm_90a', jobs=2).compiled)\n")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert run.stdout.split() == ["started", str(len(WHOLE_SET))]


def test_the_peak_memory_of_a_worker_is_its_own() -> None:
    held = b"x" * (400 << 20)
    plan = replace(plan_for("sm_90a"), kernels=WHOLE_SET[-1:])
    report = build_plan(plan, 1)
    assert 10 << 20 < report.worker_peak_bytes < len(held)


def test_a_warm_up_is_a_wanted_build_and_goes_on_under_the_policy_never() -> None:
    plan = replace(plan_for("sm_90a"), kernels=WHOLE_SET[-1:])
    never = read_settings(compile="never")
    assert build_plan(plan, 1, settings=never).compiled == 1
    assert build_plan(plan, 1, settings=never).cached == 1


def test_a_store_that_cannot_be_written_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WORKER_COMMAND", ("-c", "raise SystemExit(9)"))
    for root in ("/proc/no-store-here", "/proc"):
        with pytest.raises(StoreError, match=rf"^store {root}: cannot be (used|written): ") as refused:
            warm_up("sm_90a", jobs=1, settings=read_settings(cache_dir=Path(root)))
        assert str(refused.value).count("store ") == 1


@pytest.mark.parametrize("arguments", [{"jobs": 0}, {"jobs": -1}, {"jobs": 1.5}, {"timeout_s": 0}, {"timeout_s": float("nan")}])
def test_arguments_that_mean_nothing_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(OperandError, match=f"{next(iter(arguments))} = "):
        warm_up("sm_90a", **arguments)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"ep": 2}, {"max_tokens": 5}, {"sms": 78}])
def test_sizes_of_a_model_without_a_model_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(OperandError, match="needed: a model"):
        warm_up("sm_90a", **sizes)


def test_a_lock_folder_that_cannot_be_used_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_LOCK_DIR", "/proc")
    plan = replace(plan_for("sm_90a"), kernels=WHOLE_SET[:3])
    assert build_plan(plan, 2).compiled == 3
    (told,) = [record.getMessage() for record in caplog.records]
    assert "locks do not work" in told


def test_a_home_that_cannot_be_used_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("DEEPGEMM_JIT_CACHE_DIR")
    for variable, value in (("XDG_CACHE_HOME", "/proc/no-store-here"), ("HOME", "/nonexistent"), ("TMPDIR", str(tmp_path))):
        monkeypatch.setenv(variable, value)
    report = build_plan(replace(plan_for("sm_90a"), kernels=WHOLE_SET[:3]), 2)
    assert report.compiled == 3
    assert Path(report.store).parent == tmp_path
    (told,) = [record.getMessage() for record in caplog.records]
    assert "/proc/no-store-here" in told


def test_a_plan_without_kernels_is_refused_with_its_reasons() -> None:
    empty = Plan("sm_90a", "config.json", "builtin", (132,), (), (), (Uncovered("experts", "no kernels for them", "torch"),))
    with pytest.raises(UnsupportedError, match="experts: no kernels for them"):
        build_plan(empty)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "waiting for a lock"])
def test_a_worker_whose_parent_is_gone_ends(busy: bool) -> None:
    builder, spec = Builder(), WHOLE_SET[-1]
    job = json.dumps({"spec": spec.text}) + "\n" if busy else ""
    with builder.store.lock(builder.request(spec).key) as held:
        assert held
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        # The lock is waited for longer than this test waits for the worker's end.
        assert read_settings().lock_timeout_s > PATIENCE_S
        worker.communicate(job, timeout=PATIENCE_S)
        assert worker.returncode == int(busy)

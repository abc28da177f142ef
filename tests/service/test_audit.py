"""The audit file: a line for each kernel that was asked for and not there, from any number of processes; no call fails for it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.builder import build
from deepgemm_jit.errors import KernelNotBuiltError
from deepgemm_jit.service import KernelService
from deepgemm_jit.service.audit import Asked, Audit, read_audit
from deepgemm_jit.settings import CompilePolicy, read_settings
from deepgemm_jit.spec import CAST_TO_FP8, KernelSpec, kernel_set

CASTS = [spec for spec in kernel_set("sm_90a") if spec.family == CAST_TO_FP8]


def ask(audit: Path, spec: KernelSpec = CASTS[0], policy: CompilePolicy = "auto") -> KernelService:
    """Ask for a kernel as an operation does, in a service of its own."""
    service = KernelService(settings=read_settings(compile=policy, audit=audit), driver=DriverDouble())
    with service.call(0, 0) as call:
        call.kernel(spec)
    return service


def lines(audit: Path) -> list[Asked]:
    read = list(read_audit(audit))
    assert all(isinstance(line, Asked) for line in read), read
    return read  # type: ignore[return-value]


@pytest.mark.nvrtc
@pytest.mark.parametrize("policy", ["auto", "warn", "never"])
def test_a_missing_kernel_is_noted_once_with_the_call_that_asked(policy: CompilePolicy, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    settings = read_settings(compile=policy, audit=audit)
    service = KernelService(settings=settings, driver=DriverDouble(gpus=2))
    line = sys._getframe().f_lineno + 4
    for gpu in (0, 1, 0):
        try:
            with service.call(gpu, 0) as call:
                call.kernel(CASTS[0])
        except KernelNotBuiltError:
            assert policy == "never"
    (asked,) = lines(audit)
    assert (asked.kernel, asked.key) == (CASTS[0].name, service.builder.request(CASTS[0]).key)
    assert asked.pid == os.getpid()
    assert asked.caller == f"{__file__}:{line} in {test_a_missing_kernel_is_noted_once_with_the_call_that_asked.__name__}"
    assert datetime.fromisoformat(asked.time).tzinfo is not None


@pytest.mark.nvrtc
def test_a_kernel_that_was_built_before_is_not_noted_and_the_file_is_there(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    build(CASTS[0])
    ask(audit, policy="never")
    assert audit.read_text() == ""
    ask(audit, CASTS[1])
    ask(audit, CASTS[1])
    assert [asked.kernel for asked in lines(audit)] == [CASTS[1].name]


@pytest.mark.nvrtc
@pytest.mark.parametrize("what", ["no folder", "a folder", "a full disk", "a pipe that nobody reads"])
def test_a_file_that_cannot_be_written_is_logged_once_and_fails_no_call(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = {"no folder": tmp_path / "no" / "audit", "a folder": tmp_path, "a full disk": Path("/dev/full")}.get(what)
    if audit is None:
        audit = tmp_path / "pipe"
        os.mkfifo(audit)
    service = ask(audit)
    with service.call(0, 0) as call:
        call.kernel(CASTS[1])
    told = [record for record in caplog.records if record.name == "deepgemm_jit.audit"]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert str(audit) in told[0].getMessage()


_ASK_MANY = """
import sys
from pathlib import Path
from deepgemm_jit.service.audit import Audit

audit = Audit(Path(sys.argv[1]))
audit.begin()
print("ready", flush=True)
sys.stdin.readline()
for number in range(500):
    audit.note(f"kernel_{sys.argv[2]}_{number}_" + "x" * 200, "0" * 64)
"""


@pytest.mark.none
def test_lines_of_many_processes_do_not_mix(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    command = [sys.executable, "-c", _ASK_MANY, str(audit)]
    processes = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for number in range(6)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    found = lines(audit)
    assert len({asked.kernel for asked in found}) == len(found) == 6 * 500
    assert {asked.pid for asked in found} == {process.pid for process in processes}


@pytest.mark.none
def test_a_torn_line_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    Audit(audit).note("first", "0")
    with audit.open("a") as file:
        file.write('{"time": "20\n{}\n[]\n')
    Audit(audit).note("second", "0")
    read = list(read_audit(audit))
    assert [line.kernel for line in read if isinstance(line, Asked)] == ["first", "second"]
    assert [line for line in read if isinstance(line, str)] == [f"line {number} is no audit line" for number in (2, 3, 4)]


@pytest.mark.none
def test_the_file_is_appended_to_and_nobody_elses_to_read(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    before = os.umask(0)
    try:
        Audit(audit).note("first", "0")
    finally:
        os.umask(before)
    assert audit.stat().st_mode & 0o777 == 0o600
    Audit(audit).begin()
    Audit(audit).note("second", "0")
    assert [json.loads(line)["kernel"] for line in audit.read_text().splitlines()] == ["first", "second"]


@pytest.mark.none
def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    audit = Audit(None)
    audit.begin()
    audit.note("first", "0")
    assert list(tmp_path.iterdir()) == []

"""What reaches the terminal when it, the folder or the input is hostile: one clean line, never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from deepgemm_jit.cli.terminal import shown

pytestmark = pytest.mark.none

MODELS = Path(__file__).parents[1] / "data" / "models"
PROGRAM = f"{shlex.quote(sys.executable)} -m deepgemm_jit"

Run = Callable[..., Result]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é\n\tline", "plain é\n\tline"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\udc80", "\\udc80"),
        ("\r\x07\x9b", "\\r\\x07\\x9b"),
        ("\u202e", "\\u202e"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_a_cell_of_a_table_stays_on_its_line() -> None:
    assert shown("a\nb\tc", keep="") == "a\\nb\\tc"


@pytest.mark.parametrize("command", ["list", "--help", "kernels --arch sm_90a", "list --json", "verify"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_a_failure(command: str) -> None:
    finished = shell(f"{PROGRAM} {command} > /dev/full")
    assert finished.returncode == 1
    (line,) = finished.stderr.decode().splitlines()
    assert "No space left on device" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("command", "status"), [("list", 0), ("list --cache-dir /dev/null", 1), ("no-such-command", 2)])
def test_errors_that_cannot_be_written_leave_the_exit_status(command: str, status: int) -> None:
    assert shell(f"{PROGRAM} {command} 2> /dev/full").returncode == status


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    finished = shell(f"{PROGRAM} list {closed}")
    assert finished.returncode == 0
    assert finished.stderr == b""


def test_a_relative_folder_below_a_working_directory_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    finished = shell(f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {PROGRAM} list --cache-dir foo")
    assert finished.returncode == 2
    assert b"working directory is gone" in finished.stderr
    assert b"Traceback" not in finished.stderr


def test_bytes_of_names_that_are_no_text_or_steer_the_terminal_are_escaped(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\x1b[31m\xff"
    environment = {"DEEPGEMM_JIT_CACHE_DIR": os.fsdecode(name)}
    for command in ("list", "verify", "doctor"):
        finished = shell(f"{PROGRAM} {command}", **environment)
        assert finished.returncode == 0, finished.stderr
        assert b"\\x1b[31m\\udcff" in finished.stdout
        assert b"\x1b" not in finished.stdout + finished.stderr


@pytest.mark.parametrize("arguments", [["show", "\x1b[31m"], ["\x1b[31m"], ["plan", "--arch", "sm_90a", "--model", "/\x1b[31m"]])
def test_usage_errors_escape_what_was_given(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "\\x1b[31m" in result.stderr
    assert "\x1b" not in result.output


def test_strings_of_a_config_are_escaped(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "\\u001b[31m"}}')
    result = run("plan", "--arch", "sm_90a", "--model", tmp_path)
    assert "[31m" in result.output
    assert "\x1b" not in result.output


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path: Path) -> None:
    source = (
        "import builtins, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *args):\n"
        "    if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *args)\n"
        "builtins.__import__ = interrupted\n"
        "from deepgemm_jit.cli import main\n"
    )
    finished = shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(source)}")
    assert (finished.returncode, finished.stderr) == (1, b"Aborted!\n")


@pytest.mark.parametrize("command", ["list", "verify", "show sm_90a_x", "warmup --arch sm_90a"])
@pytest.mark.parametrize("root", ["/dev/null", "/", "/proc/no-store-here"])
def test_a_store_that_cannot_be_used_is_said_once(run: Run, command: str, root: str) -> None:
    result = run(*command.split(), "--cache-dir", root)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: store {root}: ")
    assert line.count("store ") == 1
    assert "memory only" not in result.output


@pytest.mark.parametrize("command", ["list", "verify", "doctor"])
def test_looking_does_not_create_the_store(run: Run, cache_dir: Path, command: str) -> None:
    if command == "doctor":
        assert shell(f"{PROGRAM} doctor").returncode == 0
    else:
        assert run(command).exit_code == 0
    assert not cache_dir.exists()
    assert not cache_dir.with_name("locks").exists()


@pytest.mark.parametrize(("variable", "value"), [("JOBS", "0"), ("NO_SUCH_SETTING", "1")])
@pytest.mark.parametrize("command", ["kernels", "plan"])
def test_commands_without_a_store_refuse_bad_variables_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"DEEPGEMM_JIT_{variable}", value)
    model = ["--model", MODELS / "deepseek-v3"] if command == "plan" else []
    result = run(command, "--arch", "sm_90a", *model)
    assert result.exit_code == 1
    assert f"DEEPGEMM_JIT_{variable}" in result.stderr

"""Commands around a store that a real warm-up filled."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepgemm_jit.builder import build
from deepgemm_jit.cli import main, progress
from deepgemm_jit.errors import KernelNotBuiltError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.store import Entry

pytestmark = pytest.mark.nvrtc

WHOLE_SET = kernel_set("sm_90a")
KERNEL = WHOLE_SET[0].name
DEEPSEEK = Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"

Run = Callable[..., Result]
Answer = Callable[..., dict[str, Any]]
Environment = dict[str, str]
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def full_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the whole set; tests work on copies."""
    root = tmp_path_factory.mktemp("full") / "store"
    result = CliRunner().invoke(main, ["warmup", "--arch", "sm_90a", "--jobs", "2", "--cache-dir", str(root), "--json"])
    assert json.loads(result.stdout)["compiled"] == len(WHOLE_SET), result.output
    return root


@pytest.fixture
def store(full_store: Path, cache_dir: Path) -> Path:
    shutil.copytree(full_store, cache_dir)
    return cache_dir


def index_of(store: Path, name: str) -> Path:
    return next(file for file in store.glob("v1/kernels/*.json") if json.loads(file.read_text())["entry"] == name)


def test_a_warm_up_compiles_what_is_missing_and_nothing_on_the_next_run(answer: Answer, cache_dir: Path) -> None:
    first = answer("warmup", "--arch", "sm_90a", "--jobs", 2)
    assert set(first) >= {"arch", "kernels", "compiled", "cached", "failed", "seconds", "store"}
    whole = len(WHOLE_SET)
    assert [first[key] for key in ("arch", "kernels", "compiled", "cached", "failed")] == ["sm_90a", whole, whole, 0, []]
    assert first["store"] == str(cache_dir)
    second = answer("warmup", "--arch", "sm_90a", "--jobs", 2)
    assert [second[key] for key in ("kernels", "compiled", "cached", "failed")] == [whole, 0, whole, []]


def test_verify_of_a_full_store_misses_nothing(answer: Answer, store: Path) -> None:
    payload = answer("verify", "--arch", "sm_90a")
    assert payload == {"ok": True, "checked": len(WHOLE_SET), "bad": [], "missing": []}


def test_verify_of_a_model_asks_for_its_plan_only(answer: Answer, cache_dir: Path) -> None:
    built = answer("warmup", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin", "--jobs", 2)["compiled"]
    assert answer("verify", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin")["ok"]
    assert len(answer("verify", "--arch", "sm_90a", status=1)["missing"]) == len(WHOLE_SET) - built > 0


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda file: file.write_bytes(b""), Path.unlink], ids=["flipped bit", "empty", "gone"])
@pytest.mark.parametrize("part", ["index", "object"])
def test_verify_finds_a_damaged_entry_leaves_it_there_and_a_warm_up_mends_it(
    answer: Answer, store: Path, part: str, damage: Callable[[Path], object]
) -> None:
    index = index_of(store, KERNEL)
    digest = json.loads(index.read_text())["object"]["sha256"]
    file = index if part == "index" else store / "v1" / "objects" / digest[:2] / digest
    damage(file)
    before = sorted(path.name for path in store.rglob("*"))
    payload = answer("verify", "--arch", "sm_90a", status=1)
    whole = part == "index" and not file.exists()
    assert [kernel["name"] for kernel in payload["missing"]] == [KERNEL]
    assert len(payload["bad"]) == (0 if whole else 1)
    assert payload["checked"] == len(WHOLE_SET) - whole
    assert sorted(path.name for path in store.rglob("*")) == before
    mended = answer("warmup", "--arch", "sm_90a", "--jobs", 2)
    assert (mended["compiled"], mended["cached"]) == (1, len(WHOLE_SET) - 1)
    assert answer("verify", "--arch", "sm_90a")["ok"]


def test_an_entry_of_another_kernel_under_a_key_is_bad_for_verify_and_missing_for_doctor(
    answer: Answer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, other = index_of(store, KERNEL), index_of(store, WHOLE_SET[1].name)
    strange = replace(Entry.from_json(other.read_bytes()), key=Entry.from_json(index.read_bytes()).key)
    index.write_bytes(strange.to_json())
    payload = answer("verify", "--arch", "sm_90a", status=1)
    assert [fault["path"] for fault in payload["bad"]] == [str(index)]
    assert [kernel["name"] for kernel in payload["missing"]] == [KERNEL]
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "never")
    (kernels,) = [check for check in answer("doctor", status=1)["checks"] if check["name"] == "kernels of sm_90a"]
    assert kernels["detail"].startswith(f"{len(WHOLE_SET) - 1} of {len(WHOLE_SET)} ")
    assert not kernels["ok"]
    assert answer("warmup", "--arch", "sm_90a")["compiled"] == 1
    assert answer("verify", "--arch", "sm_90a")["ok"]


def test_the_command_that_verify_names_builds_what_is_missing(answer: Answer, store: Path) -> None:
    index_of(store, KERNEL).unlink()
    command = answer("verify", "--arch", "sm_90a", status=1)["missing"][0]["command"].split()
    assert command[0] == "deepgemm-jit"
    assert answer(*command[1:])["compiled"] == 1
    assert answer("verify", "--arch", "sm_90a")["ok"]


def test_the_command_of_a_kernel_that_is_not_built_works_where_the_error_occurred(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "never")
    settings = read_settings(cache_dir=tmp_path / "a store")
    with pytest.raises(KernelNotBuiltError) as refused:
        build(WHOLE_SET[0], settings)
    program, *arguments = shlex.split(refused.value.command)
    assert program == "deepgemm-jit"
    assert answer(*arguments, "--jobs", 2)["compiled"] == len(WHOLE_SET)
    assert build(WHOLE_SET[0], settings).entry == KERNEL


def test_list_gives_the_facts_of_every_entry(answer: Answer, run: Run, store: Path) -> None:
    payload = answer("list")
    assert payload["store"] == str(store)
    assert {entry["name"] for entry in payload["entries"]} == {spec.name for spec in WHOLE_SET}
    assert all(entry["facts"]["registers"] > 0 and entry["size_bytes"] > 0 for entry in payload["entries"])
    assert all(spec.name in run("list").stdout for spec in WHOLE_SET)


def test_show_gives_the_facts_of_a_kernel_and_its_source(answer: Answer, run: Run, store: Path) -> None:
    payload = answer("show", KERNEL)
    (entry,) = payload["entries"]
    assert entry["current"]
    assert entry["facts"]["registers"] > 0
    text = run("show", KERNEL).stdout
    assert payload["source"] in text
    assert str(entry["facts"]["registers"]) in text


def test_show_tells_an_entry_of_other_sources_from_the_current_one(
    answer: Answer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(store, KERNEL)
    other = "0" * 64
    monkeypatch.setattr("deepgemm_jit.builder.request_key", lambda **_fields: other)
    (entry,) = answer("show", KERNEL)["entries"]
    assert not entry["current"]
    assert index.name.startswith(entry["key"])


@pytest.mark.parametrize("known", [True, False], ids=["of the language", "of a language to come"])
def test_show_gives_the_facts_of_a_kernel_of_another_version(answer: Answer, run: Run, store: Path, known: bool) -> None:
    index = index_of(store, KERNEL)
    entry = Entry.from_json(index.read_bytes())
    name, spec = (KERNEL + "_s7", entry.spec) if known else ("sm_90a_to_come", "to come")
    index.write_bytes(replace(entry, entry=name, spec=spec).to_json())
    payload = answer("show", name)
    assert (payload["name"], payload["spec"], payload["key"], payload["source"]) == (name, spec, None, None)
    (stored,) = payload["entries"]
    assert stored["facts"]["registers"] == entry.facts.registers
    assert not stored["current"]
    assert str(entry.facts.registers) in run("show", name).stdout


def on_terminal(command: list[str]) -> tuple[bytes, str]:
    """Run a program whose stderr is a terminal; return what that was shown, and stdout."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += (some := os.read(ours, 65536))
            except OSError:  # the terminal has no writer any more
                break
            if not some:
                break
        stdout, _ = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0
    return shown, stdout


def test_a_warm_up_is_a_bar_on_a_terminal() -> None:
    shown, stdout = on_terminal([sys.executable, "-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", "--jobs", "2"])
    assert f"/{len(WHOLE_SET)}".encode() in shown
    assert b"looked up" not in shown
    assert "compiled" in stdout
    assert "\x1b" not in stdout


_BAR = """
import logging
from deepgemm_jit.cli.progress import progress
from deepgemm_jit.cli.terminal import _logged_to_stderr
from deepgemm_jit.warmup import KernelOutcome

with _logged_to_stderr(), progress(2, quiet=False) as note:
    note(KernelOutcome("first", "compiled"))
    logging.getLogger("deepgemm_jit.store").warning("disk [bold]full\x1b[31m: " + "long " * 40)
    note(KernelOutcome("second[red]", "compiled"))
"""


def test_a_warning_while_there_is_a_bar_is_a_line_above_it() -> None:
    shown = on_terminal([sys.executable, "-c", _BAR])[0].decode()
    assert "disk [bold]full\\x1b[31m: " + "long " * 40 in shown.replace("\r\n", "")
    assert "second[red] compiled" in shown and "2/2" in shown


def test_a_warm_up_is_a_line_a_phase_and_now_and_then_in_a_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    result = run("warmup", "--arch", "sm_90a", "--jobs", 1)
    lines = result.stderr.splitlines()
    phases = [line for line in lines if f" of {len(WHOLE_SET)} kernels after " not in line]
    assert phases == [
        f"looked up: the store has 0 of {len(WHOLE_SET)} kernels for sm_90a",
        f"building: {len(WHOLE_SET)} kernels, 1 at a time",
    ]
    assert len(lines) - len(phases) > 1
    assert "\x1b" not in result.stderr


def test_a_warm_up_is_quiet_for_programs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    assert run("warmup", "--arch", "sm_90a", "--jobs", 2, "--json").stderr == ""


def test_a_warm_up_whose_stderr_is_closed_builds(cache_dir: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m deepgemm_jit warmup --arch sm_90a --jobs 2 2>&-"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL, env=environment, check=True, timeout=120)
    assert len(list(cache_dir.glob("v1/kernels/*"))) == len(WHOLE_SET)


def test_a_warm_up_without_nvrtc_exits_with_1_and_says_once_what_is_missing(
    program: Program, hiding: Callable[[str], Environment]
) -> None:
    finished = program("-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", "--jobs", "2", environment=hiding("cuda"))
    assert finished.returncode == 1
    assert finished.stderr.count("pip install") == 1
    *phases, cause, names = finished.stderr.splitlines()
    assert [phase.partition(":")[0] for phase in phases] == ["looked up", "building"]
    assert cause.startswith("Error: package cuda-")
    assert names.startswith(f"{len(WHOLE_SET)} kernels failed so: ")
    assert names.endswith(f" and {len(WHOLE_SET) - 3} more")
    assert "Traceback" not in finished.stderr


def test_a_full_store_is_found_complete_without_nvrtc(
    program: Program, hiding: Callable[[str], Environment], store: Path
) -> None:
    environment = hiding("cuda")
    for command in ("warmup", "verify"):
        finished = program("-m", "deepgemm_jit", command, "--arch", "sm_90a", environment=environment)
        assert finished.returncode == 0, finished.stderr


def test_compile_errors_are_printed_with_the_log_and_no_traceback(program: Program, cache_dir: Path, tmp_path: Path) -> None:
    planted = (
        "import deepgemm_jit.builder as builder\n"
        "builder.compile_options = lambda arch: ('--gpu-architecture=sm_90a', '--no-such-option')\n"
    )
    (tmp_path / "sitecustomize.py").write_text(planted)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    finished = program("-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", "--json", environment=environment)
    assert finished.returncode == 1
    failed = json.loads(finished.stdout)["failed"]
    assert {kernel["name"] for kernel in failed} == {spec.name for spec in WHOLE_SET}
    assert all("no-such-option" in kernel["error"] for kernel in failed)
    assert "Traceback" not in finished.stderr
    assert not any(cache_dir.glob("v1/kernels/*"))

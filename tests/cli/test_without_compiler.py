"""Commands that compile nothing: what they print, for people and for programs, and how they refuse."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from deepgemm_jit.cli import main
from deepgemm_jit.spec import kernel_set

pytestmark = pytest.mark.none

MODELS = Path(__file__).parents[1] / "data" / "models"
DEEPSEEK = MODELS / "deepseek-v3"
COMMANDS = ("kernels", "plan", "warmup", "verify", "list", "show", "prune", "clear", "doctor")
PACK_COMMANDS = ("create", "inspect", "install")
KERNEL = kernel_set("sm_90a")[0].name
IN_PROCESS: dict[str, list[str]] = {
    "kernels": ["kernels", "--arch", "sm_90a"],
    "plan": ["plan", "--arch", "sm_90a", "--model", str(DEEPSEEK), "--reader", "builtin"],
    "verify": ["verify"],
    "list": ["list"],
    "show": ["show", KERNEL],
    "prune": ["prune"],
    "clear": ["clear"],
}

Run = Callable[..., Result]
Answer = Callable[..., dict[str, Any]]
Program = Callable[..., subprocess.CompletedProcess[str]]


def test_kernels_lists_the_closed_set(answer: Answer) -> None:
    payload = answer("kernels", "--arch", "sm_90a")
    expected = [{"name": spec.name, "family": spec.family, "spec": spec.text} for spec in kernel_set("sm_90a")]
    assert payload == {"arch": "sm_90a", "kernels": expected}


def test_plan_maps_a_config_to_problems_kernels_and_what_is_left(answer: Answer) -> None:
    payload = answer(*IN_PROCESS["plan"])
    assert set(payload) == {"arch", "model", "reader", "problems", "kernels", "uncovered", "complete"}
    assert (payload["arch"], payload["model"]) == ("sm_90a", str(DEEPSEEK / "config.json"))
    assert (payload["reader"], payload["complete"]["ok"], payload["complete"]["gaps"]) == ("builtin", True, [])
    named = {kernel["name"] for kernel in payload["kernels"]}
    assert all(problem["kernels"] and set(problem["kernels"]) <= named for problem in payload["problems"])
    assert {(problem["n"], problem["k"], problem["groups"]) for problem in payload["problems"]} == {
        (4096, 7168, 256),
        (7168, 2048, 256),
    }
    assert all(set(part) == {"what", "reason", "instead"} and all(part.values()) for part in payload["uncovered"])


def test_plan_follows_its_sizes(answer: Answer) -> None:
    sizes = ("--tp", 8, "--ep", 4, "--max-tokens", 100, "--sms", 78)
    problems = answer(*IN_PROCESS["plan"], *sizes)["problems"]
    assert {(problem["n"], problem["k"], problem["groups"]) for problem in problems} == {(512, 7168, 64), (7168, 256, 64)}
    assert {problem["max_m"] for problem in problems if problem["layout"] == "masked"} == {100}


def test_the_rows_of_a_plan_differ_and_have_modules_only_where_they_are_known(run: Callable[..., Result]) -> None:
    lines = run(*IN_PROCESS["plan"]).stdout.splitlines()
    heading = next(line for line in lines if line.startswith("problem "))
    assert "alignment" in heading and "modules" not in heading
    rows = [line for line in lines if line.startswith("experts ")]
    assert len(rows) == len(set(rows)) > 0
    at = heading.index("alignment")
    assert {row[at : at + len("alignment")].strip() for row in rows if " masked " in row} == {"128"}


def test_a_plan_covers_fp4_experts_and_says_what_it_does_not_cover(answer: Answer) -> None:
    payload = answer("plan", "--arch", "sm_90a", "--model", MODELS / "deepseek-v4-flash", "--reader", "builtin")
    gemms = {"experts gate_up", "experts down"}
    assert {problem["what"] for problem in payload["problems"]} == gemms | {f"{what}, few tokens" for what in gemms}
    assert payload["kernels"]
    assert all(part["reason"] for part in payload["uncovered"])
    assert any("attention" in part["what"] for part in payload["uncovered"])


@pytest.mark.parametrize("command", IN_PROCESS)
def test_every_command_reads_the_same_for_people(run: Run, command: str) -> None:
    result = run(*IN_PROCESS[command])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stdout)


@pytest.mark.parametrize("command", IN_PROCESS)
def test_every_command_prints_one_object_for_programs(answer: Answer, command: str) -> None:
    answer(*IN_PROCESS[command])


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), *(("pack", name) for name in PACK_COMMANDS)], ids=" ".join)
def test_every_command_takes_json_and_cache_dir(run: Run, command: tuple[str, ...]) -> None:
    text = run(*command, "--help").stdout
    assert "--json" in text
    assert "--cache-dir" in text


def test_the_commands_are_those_that_do_something() -> None:
    assert set(main.commands) == {*COMMANDS, "pack"}
    assert set(main.commands["pack"].commands) == set(PACK_COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kernels"], "--arch"),
        (["kernels", "--arch", "sm_80"], "sm_90a"),
        (["kernels", "--arch", "sm_90"], "Did you mean sm_90a"),
        (["warmup", "--arch", "sm_100a"], "sm_90a"),
        (["warmup", "--arch", "sm_90a", "--jobs", "0"], "--jobs"),
        (["warmup", "--arch", "sm_90a", "--jobs", "two"], "--jobs"),
        *(
            (["warmup", "--arch", "sm_90a", "--timeout", seconds], "--timeout")
            for seconds in ("0", "-1", "nan", "inf", "1e999", "x")
        ),
        *(([command, "--cache-dir="], "--cache-dir") for command in ("list", "verify", "doctor")),
        (["warmup", "--arch", "sm_90a", "--cache-dir", " "], "--cache-dir"),
        *(
            (["plan", "--arch", "sm_90a", "--model", str(DEEPSEEK), size, number], size)
            for size in ("--tp", "--ep", "--sms", "--max-tokens")
            for number in ("-1", "nan", "1.5", "")
        ),
        (["warmup", "--arch", "sm_90a", "--model", "/nonexistent"], "/nonexistent"),
        (["warmup", "--arch", "sm_90a", "--tp", "2", "--max-tokens", "5"], "--tp, --max-tokens"),
        (["verify", "--arch", "sm_90a", "--reader", "builtin"], "--reader"),
        (["plan", "--arch", "sm_90a", "--model", str(DEEPSEEK), "--reader", "vllm"], "vllm"),
        (["warmup", "--arch", "sm_90a", "--shard", "1/2"], "--shard"),
        (["plan", "--arch", "sm_90a"], "--model"),
        (["plan", "--arch", "sm_90a", "--model", str(DEEPSEEK), "--tp", "0"], "--tp"),
        (["verify", "--model", str(DEEPSEEK)], "--arch"),
        (["show"], "NAME"),
        (["show", "../../etc/passwd"], "../../etc/passwd"),
        (["show", KERNEL[:-1]], KERNEL),
        (["compile"], "compile"),
        (["list", "extra"], "extra"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_names_what_is_wrong(run: Run, arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSON"),
        ('{"hidden_size": 2048,', "JSON"),
        ("[]", "list"),
        ("{}", "hidden_size"),
        ('{"quantization_config": {"quant_method": "awq"}}', "awq"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "warmup", "verify"])
def test_a_bad_config_exits_with_1_and_names_file_and_fault(run: Run, tmp_path: Path, command: str, text: str, says: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    result = run(command, "--arch", "sm_90a", "--model", config)
    assert result.exit_code == 1
    assert str(config) in result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_an_error_is_one_object_too_for_programs(answer: Answer, tmp_path: Path) -> None:
    payload = answer("plan", "--arch", "sm_90a", "--model", tmp_path, status=1)
    assert payload["error"]["type"] == "OperandError"
    assert str(tmp_path) in payload["error"]["message"]


@pytest.mark.parametrize("command", ["verify", "list", "show", "warmup"])
def test_a_setting_that_means_nothing_is_refused_by_its_variable(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_LOCK_TIMEOUT_S", "soon")
    result = run(*(IN_PROCESS.get(command) or ["warmup", "--arch", "sm_90a"]))
    assert result.exit_code == 1
    assert "DEEPGEMM_JIT_LOCK_TIMEOUT_S" in result.stderr


def test_a_warm_up_into_a_store_that_cannot_be_written_exits_with_1_and_the_reason(run: Run) -> None:
    result = run("warmup", "--arch", "sm_90a", "--cache-dir", "/proc/no-store-here")
    assert result.exit_code == 1
    assert "/proc/no-store-here" in result.stderr
    assert "--cache-dir" in result.stderr


def test_a_relative_cache_dir_is_one_of_the_working_directory(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer("list", "--cache-dir", "here/store")["store"] == str(tmp_path / "here" / "store")


def test_an_empty_cache_dir_leaves_the_working_directory_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("warmup", "--arch", "sm_90a", "--cache-dir=").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_warm_up_of_a_model_without_kernels_exits_with_1_and_the_reason(run: Run, tmp_path: Path) -> None:
    config = json.loads((MODELS / "qwen3-30b-a3b-fp8" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("warmup", "--arch", "sm_90a", "--model", tmp_path)
    assert result.exit_code == 1
    assert "quant_method" in result.stderr and "gptq" in result.stderr


def test_verify_of_an_empty_store_is_ok_until_an_arch_is_named(answer: Answer) -> None:
    assert answer("verify") == {"ok": True, "checked": 0, "bad": [], "missing": []}
    payload = answer("verify", "--arch", "sm_90a", status=1)
    assert [kernel["name"] for kernel in payload["missing"]] == [spec.name for spec in kernel_set("sm_90a")]


def test_verify_names_the_command_that_builds_what_is_missing(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(DEEPSEEK), "--reader", "builtin"]
    options = ["--arch", "sm_90a", *model, "--tp", "2", "--ep", "4", "--max-tokens", "64", "--sms", "132"]
    payload = answer("verify", *options, "--cache-dir", "a store", status=1)
    command = f"deepgemm-jit warmup {' '.join(options)} --cache-dir '{tmp_path}/a store'"
    assert {kernel["command"] for kernel in payload["missing"]} == {command}


def test_verify_of_a_store_that_cannot_be_used_is_not_ok(answer: Answer) -> None:
    payload = answer("verify", "--cache-dir", "/proc/no-store-here", status=1)
    assert not payload["ok"]
    assert "/proc/no-store-here" in payload["bad"][0]["reason"]


def test_show_renders_the_source_of_a_kernel_that_is_not_built(run: Run, answer: Answer) -> None:
    payload = answer("show", KERNEL)
    assert payload["name"] == KERNEL
    assert payload["entries"] == []
    assert f"{KERNEL}(" in payload["source"]
    assert "deepgemm-jit warmup --arch sm_90a" in run("show", KERNEL).stdout


def test_python_m_runs_the_command_line(program: Program) -> None:
    finished = program("-m", "deepgemm_jit", "kernels", "--arch", "sm_90a", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert len(json.loads(finished.stdout)["kernels"]) == len(kernel_set("sm_90a"))


def test_a_reader_that_leaves_early_is_no_error(program: Program) -> None:
    pipeline = f"{shlex.quote(sys.executable)} -m deepgemm_jit show {KERNEL} | head -n 1"
    finished = program("-c", f"import os; raise SystemExit(os.system({pipeline!r}))")
    assert (finished.stdout.strip(), finished.stderr) == (KERNEL, "")


@pytest.mark.parametrize("command", IN_PROCESS)
def test_no_command_but_doctor_brings_in_the_driver_or_torch(program: Program, command: str) -> None:
    source = (
        "import sys\n"
        "from deepgemm_jit.cli import main\n"
        f"main({IN_PROCESS[command]!r}, standalone_mode=False)\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'torch' or name == 'cuda.bindings.driver'])"
    )
    finished = program("-c", source)
    assert finished.stdout.splitlines()[-1:] == ["[]"], finished.stderr

"""``verify --audit``: what run time had to do without, compared with a plan and a store."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from doubles.driver import DriverDouble

from deepgemm_jit.builder import build
from deepgemm_jit.cli import main
from deepgemm_jit.service import KernelService
from deepgemm_jit.service.audit import Audit
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import BF16_GEMM, CAST_TO_FP8, KernelSpec, kernel_set

pytestmark = pytest.mark.nvrtc

Answer = Callable[..., dict[str, Any]]
DEEPSEEK = Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"
CAST = next(spec for spec in kernel_set("sm_90a") if spec.family == CAST_TO_FP8)
OUTSIDE = next(spec for spec in kernel_set("sm_90a") if spec.family == BF16_GEMM)
"""No model of FP8 experts plans it."""


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def compiled_by_run_time(audit: Path, spec: KernelSpec) -> None:
    service = KernelService(settings=read_settings(audit=audit), driver=DriverDouble())
    with service.call(0, 0) as call:
        call.kernel(spec)


def test_an_empty_file_is_fine_and_a_missing_one_is_wrong_usage(answer: Answer, audit: Path) -> None:
    assert CliRunner().invoke(main, ["verify", "--audit", str(audit)]).exit_code == 2
    Audit(audit).begin()
    assert answer("verify", "--audit", audit) == {"ok": True, "checked": 0, "bad": [], "missing": []}


def test_what_run_time_was_refused_is_missing_until_the_command_has_run(answer: Answer, audit: Path, cache_dir: Path) -> None:
    Audit(audit).note(CAST.name, "0" * 64)
    (missing,) = answer("verify", "--audit", audit, status=1)["missing"]
    assert (missing["name"], missing["command"]) == (CAST.name, f"deepgemm-jit warmup --arch sm_90a --cache-dir {cache_dir}")
    assert missing["caller"].endswith(test_what_run_time_was_refused_is_missing_until_the_command_has_run.__name__)
    text = CliRunner().invoke(main, ["verify", "--audit", str(audit)])
    assert text.exit_code == 1
    assert CAST.name in text.stdout and "not built" in text.stdout and missing["command"] in text.stdout
    ran = CliRunner().invoke(main, [*shlex.split(missing["command"])[1:], "--jobs", "2"])
    assert ran.exit_code == 0, ran.output
    assert answer("verify", "--audit", audit)["ok"]


def test_what_run_time_compiled_itself_is_built_but_missing_from_a_plan_without_it(
    answer: Answer, audit: Path, cache_dir: Path
) -> None:
    compiled_by_run_time(audit, OUTSIDE)
    assert answer("verify", "--audit", audit)["ok"], "the store has it now"
    answer("warmup", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin", "--jobs", 2)
    planned = "verify", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin"
    assert answer(*planned)["ok"]
    (missing,) = answer(*planned, "--audit", audit, status=1)["missing"]
    assert missing["name"] == OUTSIDE.name
    assert missing["command"] == f"deepgemm-jit warmup --arch sm_90a --cache-dir {cache_dir}"


def test_a_kernel_that_both_lack_is_named_once(answer: Answer, audit: Path) -> None:
    for spec in kernel_set("sm_90a"):
        if spec != CAST:
            build(spec)
    Audit(audit).note(CAST.name, "0" * 64)
    payload = answer("verify", "--arch", "sm_90a", "--audit", audit, status=1)
    assert [kernel["name"] for kernel in payload["missing"]] == [CAST.name]


def test_lines_that_say_nothing_are_bad(answer: Answer, audit: Path) -> None:
    Audit(audit).note("sm_90a_of_another_version", "0" * 64)
    with audit.open("a") as file:
        file.write("{\n")
    bad = answer("verify", "--audit", audit, status=1)["bad"]
    assert [fault["path"] for fault in bad] == [str(audit)] * 2
    assert "line 2" in bad[0]["reason"] and "sm_90a_of_another_version" in bad[1]["reason"]

"""README's commands are the ones that CI runs, each a single line to paste."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.none

ROOT = Path(__file__).resolve().parents[2]


def _commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv")]


def test_one_line_sets_up_and_runs_the_main_job_and_one_the_tests() -> None:
    main_job, tests = _commands()
    assert main_job.endswith("deepgemm-jit warmup --arch sm_90a")
    assert tests.endswith("bin/python -m pytest")


def test_ci_takes_its_test_command_from_readme() -> None:
    pattern = re.search(r"grep -m1 '([^']+)' README.md", (ROOT / ".ci/run").read_text())
    assert pattern
    assert [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(pattern[1], line)] == [_commands()[1]]

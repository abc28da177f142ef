"""README tells the truth: its commands are the ones CI runs, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepgemm_jit import errors
from deepgemm_jit.cli import main
from deepgemm_jit.settings import PREFIX, setting_names

pytestmark = pytest.mark.none

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv")]


def _section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_one_line_sets_up_and_runs_the_main_job_and_one_the_tests() -> None:
    main_job, tests = _commands()
    assert main_job.endswith("deepgemm-jit warmup --arch sm_90a")
    assert tests.endswith("bin/python -m pytest")


def test_ci_takes_its_warm_up_and_its_test_command_from_readme() -> None:
    patterns = re.findall(r"grep -m1 '([^']+)' README.md", (ROOT / ".ci/run").read_text())
    found = [[line for line in README.splitlines() if re.search(pattern, line)] for pattern in patterns]
    assert found == [[command] for command in _commands()]


def test_every_command_is_listed_with_options_that_exist() -> None:
    listed = dict(re.findall(r"`deepgemm-jit (\w+)((?: [^`]*)?)`", _section("Command line")))
    assert sorted(listed) == sorted(main.commands)
    for name, usage in listed.items():
        options = {text for parameter in main.commands[name].params for text in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", usage)) <= options, name


def test_every_setting_is_listed() -> None:
    listed = re.findall(rf"^\| `{PREFIX}(\w+)`", _section("Settings"), re.MULTILINE)
    assert [name.lower() for name in listed] == list(setting_names())


def test_every_error_is_listed() -> None:
    tree = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.DeepGemmJitError)]
    listed = set(re.findall(r"`(\w+Error)`", _section("Errors")))
    assert listed - {"DeepGemmJitError"} == {cls.__name__ for cls in tree if not cls.__subclasses__()}


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/cache.md",
    "docs/migration.md",
    "docs/multi-device.md",
    "docs/serving.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_of_the_repository(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []

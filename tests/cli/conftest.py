"""How the tests of the command line run it: in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepgemm_jit.cli import main

Environment = dict[str, str]


@pytest.fixture
def run() -> Callable[..., Result]:
    """Return a function that runs a command in this process."""
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def answer(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a command with --json and returns the one object on its stdout."""

    def ask(*arguments: object, status: int = 0) -> dict[str, Any]:
        result = run(*arguments, "--json")
        assert result.exit_code == status, result.output
        payload = json.loads(result.stdout)
        assert isinstance(payload, dict)
        return payload

    return ask


def _import_path(*first: Path) -> str:
    return os.pathsep.join([*map(str, first), *filter(None, sys.path)])


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python with arguments as a process of its own, in an empty folder."""
    folder = tmp_path / "empty"
    folder.mkdir()

    def start(*arguments: str, environment: Environment | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=folder,
            env=environment or {**os.environ, "PYTHONPATH": _import_path()},
        )

    return start


@pytest.fixture
def hiding(tmp_path: Path) -> Callable[[str], Environment]:
    """Return a function that gives an environment in which a package cannot be imported, as if it were not installed."""

    def environment(package: str) -> Environment:
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.abc, sys\n"
            "class Hide(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.partition('.')[0] == {package!r}:\n"
            "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
            "sys.meta_path.insert(0, Hide())\n"
        )
        return {**os.environ, "PYTHONPATH": _import_path(tmp_path)}

    return environment

"""The Dockerfile of the examples, without Docker: its ``RUN`` lines as they stand, each stage in an environment of its own.

A stage is a folder that stands for the root of its file system: ``WORKDIR`` and ``COPY`` lead into it, and so do absolute paths
in ``ENV``. What a line of a stage finds besides is the system's shell, and the Python of the tests where the image has its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "examples/image/Dockerfile"
ARGUMENTS = {"MODEL": "tests/data/models/qwen3-30b-a3b-fp8"}
NOT_RUN = ("USER", "EXPOSE")


@dataclass
class Stage:
    """One stage of a build."""

    root: Path
    workdir: Path
    env: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def place(self, path: str) -> Path:
        """Return where a path of the stage lies."""
        return self.root / path.lstrip("/") if path.startswith("/") else self.workdir / path


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if line.endswith("\\") or "<<" in line], "this reads one line an instruction"
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def begin(root: Path) -> Stage:
    commands = root / "python/bin"
    venv.create(commands.parent, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(commands / "python")]  # the tests' own pip, which need not be installed
    (commands / "pip").write_text(f'#!/bin/sh\nexec {shlex.join(pip)} "$@"\n')
    (commands / "pip").chmod(0o755)
    return Stage(root, root, {"PATH": f"{commands}:{os.defpath}", "HOME": str(root), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def copy(stage: Stage, stages: dict[str, Stage], words: list[str]) -> None:
    """Copy as a build does: a folder gives its content, several sources go into a folder."""
    origin = stages[words.pop(0).removeprefix("--from=")].root if words[0].startswith("--from=") else ROOT
    *sources, target = words
    place = stage.place(target)
    for source in sources:
        path = origin / source.lstrip("/")
        if path.is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            into = place / path.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)


def perform(stage: Stage, stages: dict[str, Stage], word: str, rest: str) -> None:
    if word == "ARG":
        stage.arguments[rest] = ARGUMENTS[rest]
    elif word == "WORKDIR":
        stage.workdir = stage.place(rest)
        stage.workdir.mkdir(parents=True, exist_ok=True)
    elif word == "COPY":
        copy(stage, stages, [re.sub(r"\$\{(\w+)\}", lambda name: stage.arguments[name[1]], each) for each in shlex.split(rest)])
    elif word == "ENV":
        pairs = (pair.partition("=") for pair in shlex.split(rest))
        stage.env |= {name: str(stage.place(value)) if value.startswith("/") else value for name, _, value in pairs}
    elif word == "CMD":
        stage.command = json.loads(rest)
    elif word == "RUN":
        run = subprocess.run(
            ["sh", "-c", rest],
            cwd=stage.workdir,
            env={**stage.env, **stage.arguments},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert run.returncode == 0, f"{rest}\n{run.stdout}\n{run.stderr}"
        stage.said.append(run.stdout)
    else:
        assert word in NOT_RUN, f"{word} is not known to this test"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    """Build the image; return its stages by name."""
    made: dict[str, Stage] = {}
    stage = None
    for word, rest in instructions():
        if word == "FROM":
            name = rest.partition(" AS ")[2]
            stage = made[name] = begin(tmp_path_factory.mktemp(name))
        elif stage is not None:  # what stands before the first FROM chooses a base image, of which there is none here
            perform(stage, made, word, rest)
    return made


def test_what_is_shipped_holds_a_pack_and_no_compiler(stages: dict[str, Stage]) -> None:
    server = stages["server"]
    installed = json.loads(
        subprocess.run(
            ["pip", "list", "--format", "json"], cwd=server.root, env=server.env, capture_output=True, check=True, timeout=120
        ).stdout
    )
    names = {package["name"].lower() for package in installed}
    assert "deepgemm-jit" in names
    assert [name for name in names if "nvrtc" in name] == []
    assert list(server.root.rglob("libnvrtc*")) == []
    assert (server.workdir / "kernels.pack").stat().st_mode & 0o022 == 0


def test_the_build_ends_with_a_check_that_found_nothing_missing(stages: dict[str, Stage]) -> None:
    assert re.search(r"^0 of [1-9][0-9]* kernels missing$", stages["server"].said[-1], re.MULTILINE)


def test_the_command_of_the_image_serves_without_compiling(stages: dict[str, Stage]) -> None:
    server = stages["server"]
    command = [*server.command[: server.command.index("--host")], "--port", "0"]
    process = subprocess.Popen(command, cwd=server.workdir, env=server.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        with pytest.raises(urllib.error.HTTPError) as answer:  # no torch in this environment, whatever GPU there is
            urllib.request.urlopen(f"{address}/ready", timeout=60)
        with answer.value as reply:
            state = json.load(reply)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
    assert process.returncode == 0
    assert state["kernels"] > 0
    assert not state["ready"]

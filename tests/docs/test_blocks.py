"""Every code block of README and the documentation runs, or its source says why not, and then it is at least parsed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from docs.blocks import MARKS, PAGES, ROOT, Block, blocks_of, script_of

LANGUAGES = {"", "text", "python", "bash", "toml", "json", "dockerfile"}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN_BY_CI = [ROOT / "README.md", ROOT / "docs/quick-start.md"]
"""Pages whose commands install: .ci/run runs them, in a fresh copy of the repository."""
MODEL = ROOT / "tests/data/models/qwen3-30b-a3b-fp8/config.json"


def _pages_with(language: str, mark: str) -> list[Path]:
    return sorted({block.page for block in BLOCKS if block.language == language and re.fullmatch(mark, block.mark)})


def _named(values: list[Any]) -> Any:
    return pytest.mark.parametrize("page", values, ids=lambda page: str(page.relative_to(ROOT)))


def _run(script: list[str], folder: Path, environment: dict[str, str]) -> None:
    child = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a reader's folder: a checkout, and the files that the pages call path/to/..."""
    folder = tmp_path / "checkout"
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/config.json").write_bytes(MODEL.read_bytes())
    (folder / "path/to/kernels.jsonl").touch()
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def environment(tmp_path: Path, warm_store: Path) -> dict[str, str]:
    """Return a reader's environment, in which the commands are those of this tree."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in {"deepgemm-jit": ("-m", "deepgemm_jit"), "python": ()}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "DEEPGEMM_JIT_CACHE_DIR": str(warm_store),
    }


@pytest.mark.none
def test_no_block_is_overlooked() -> None:
    fences = sum(line.lstrip().startswith("```") for page in PAGES for line in page.read_text().splitlines())
    assert fences == 2 * len(BLOCKS)
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.none
def test_every_mark_is_one_that_is_known_and_fits() -> None:
    marked = [block for block in BLOCKS if block.mark]
    assert [block.name for block in marked if not MARKS.fullmatch(block.mark)] == []
    assert [block.name for block in marked if block.mark.startswith("gpu") and block.language != "python"] == []
    assert [block.name for block in marked if block.mark == "exit status 1" and block.language != "bash"] == []


@pytest.mark.none
def test_every_block_parses() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.name, "exec")
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "dockerfile":  # only ever a file of the repository, which tests/packaging/test_image.py runs
            assert re.fullmatch(r'--8<-- "examples/image/Dockerfile"\n', block.text), block.name


@pytest.mark.nvrtc
@_named(_pages_with("python", ""))
def test_python_runs_as_it_stands(page: Path, folder: Path, environment: dict[str, str]) -> None:
    text = "\n".join(block.text for block in blocks_of(page) if block.language == "python" and not block.mark)
    _run([sys.executable, "-c", text], folder, environment)


@pytest.mark.nvrtc
@_named([page for page in _pages_with("bash", "(exit status 1)?") if page not in RUN_BY_CI])
def test_commands_run_as_they_stand(page: Path, folder: Path, environment: dict[str, str]) -> None:
    _run(["bash", "-c", script_of(page)], folder, environment)


@pytest.mark.none
def test_what_installs_is_run_by_ci() -> None:
    installing = {block.page for block in BLOCKS if block.language == "bash" and "pip install" in block.text}
    ci = (ROOT / ".ci/run").read_text()
    assert sorted(installing) == RUN_BY_CI
    assert [page.name for page in RUN_BY_CI if page.relative_to(ROOT).as_posix() not in ci] == []


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="blocks that need a GPU need torch, which is not installed")


@pytest.mark.none
@needs_torch
@_named(_pages_with("python", "gpu"))
def test_python_for_a_gpu_runs_on_tensors_without_memory(page: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for block in blocks_of(page):
            if block.mark == "gpu":
                # A torch without CUDA makes no tensor of a GPU, also not one without memory.
                exec(compile(block.text.replace('"cuda"', '"cpu"'), block.name, "exec"), {})


@pytest.mark.none
@needs_torch
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers, which is not installed")
@_named(_pages_with("python", "gpu: .+"))
def test_python_for_a_gpu_uses_names_and_arguments_that_exist(page: Path) -> None:
    python = [block for block in blocks_of(page) if block.language == "python"]
    known: dict[str, Any] = {}
    checked = 0
    for block in python:
        for node in ast.walk(ast.parse(block.text)):
            known |= _imported(node)
        for call in _calls(block):
            function = _looked_up(call.func, known)
            if block.mark.startswith("gpu: ") and function is not None:
                keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
                inspect.signature(function).bind(*call.args, **keywords)
                checked += 1
    assert checked > 0


def _calls(block: Block) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call))


def _imported(node: ast.AST) -> dict[str, Any]:
    """Return what an import of ours binds."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepgemm_jit"):
        module = importlib.import_module(node.module or "")
        return {alias.asname or alias.name: _member(module, alias.name) for alias in node.names}
    return {}


def _member(module: Any, name: str) -> Any:
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{module.__name__}.{name}")


def _looked_up(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return what a dotted name of ours stands for; None for another's. One that is not there is an AttributeError."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    owner = _looked_up(node.value, known) if isinstance(node, ast.Attribute) else None
    return None if owner is None else getattr(owner, node.attr)

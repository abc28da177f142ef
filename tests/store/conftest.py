"""Fixtures of the store's tests: sample cubins, other processes, another user."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deepgemm_jit
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store

WORKER = Path(__file__).with_name("worker.py")
OTHER_UID = 12345


def _load_worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_worker", WORKER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_WORKER = _load_worker()


@pytest.fixture
def sample() -> ModuleType:
    """The sample request (KEY, SPEC, REQUEST) and its cubins (cubin_for)."""
    return _WORKER


@pytest.fixture
def store(cache_dir: Path) -> Store:
    """The store that the environment of this test names; nothing is on disk yet."""
    return Store.open(read_settings())


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a verb of worker.py in a process of its own, with this test's environment."""
    running = []

    def start_worker(*arguments: str, env: dict[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[str]:
        child_env = {**os.environ, "PYTHONPATH": str(Path(deepgemm_jit.__file__).parents[1]), **(env or {})}
        child = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_env,
            **kwargs,
        )
        running.append(child)
        return child

    yield start_worker
    for child in running:
        child.kill()
        child.communicate()


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that every user can enter; the test's own tmp_path is private to its user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def as_other_user() -> Callable[[Callable[[], Any]], Any]:
    """Run a function in a fork under a uid that has no passwd line, and return its JSON-able result."""
    if os.geteuid() != 0:
        pytest.skip(f"only root can become uid {OTHER_UID}; this is uid {os.geteuid()}")

    def run(function: Callable[[], Any]) -> Any:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(OTHER_UID)
                os.setuid(OTHER_UID)
                answer: dict[str, Any] = {"result": function()}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            answer = json.load(file)
        os.waitpid(child, 0)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    return run


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings that the store has logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name == "deepgemm_jit.store" and r.levelname == "WARNING"]

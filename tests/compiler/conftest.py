"""Fixtures of the compiler's tests: compiles in this process and in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import deepgemm_jit
from deepgemm_jit.compiler import Compiled, compile_options, compile_source
from deepgemm_jit.frontend import render
from deepgemm_jit.spec import KernelSpec

COMPILE = Path(__file__).with_name("compile.py")
PACKAGE_PARENT = str(Path(deepgemm_jit.__file__).parents[1])


@pytest.fixture
def compile_spec() -> Callable[..., Compiled]:
    """Compile a spec, with other options or sources if given; never through a store."""

    def compile_(spec: KernelSpec, **changes: Any) -> Compiled:
        source = render(spec)
        arguments = {
            "source": source.text,
            "headers": source.headers,
            "entry": source.entry,
            "options": compile_options(spec.arch),
        }
        return compile_source(arch=spec.arch, **{**arguments, **changes})

    return compile_


@pytest.fixture(scope="session")
def digest_of() -> Callable[[KernelSpec], str]:
    """The digest of a spec's cubin as this process builds it, once per test run."""

    @cache
    def digest(spec: KernelSpec) -> str:
        source = render(spec)
        options = compile_options(spec.arch)
        compiled = compile_source(source=source.text, headers=source.headers, entry=source.entry, arch=spec.arch, options=options)
        return compiled.cubin.digest

    return digest


@pytest.fixture
def start_compiles() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start compile.py with its arguments in a process of its own; ``prefix`` is a command to run it under."""
    running: list[subprocess.Popen[str]] = []

    def start(
        times: int, *specs: KernelSpec, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None, **kwargs: Any
    ) -> Any:
        command = [*prefix, sys.executable, "-BP", str(COMPILE), str(times), *(spec.text for spec in specs)]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, **(env or {})},
            **kwargs,
        )
        running.append(child)
        return child

    yield start
    for child in running:
        child.kill()
        child.communicate()


@pytest.fixture
def digests_from() -> Callable[[subprocess.Popen[str]], dict[str, list[str]]]:
    """Wait for a process of compile.py and return the digests it printed, by spec text."""

    def wait(child: subprocess.Popen[str]) -> dict[str, list[str]]:
        output, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
        return dict(json.loads(output))

    return wait

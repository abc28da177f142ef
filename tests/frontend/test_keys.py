"""Request keys are a function of content: not of places, times, processes or what was built before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import deepgemm_jit
from deepgemm_jit.builder import Builder
from deepgemm_jit.frontend import header_path, render
from deepgemm_jit.resources import data_dir
from deepgemm_jit.spec import ARCHES, kernel_set

pytestmark = pytest.mark.none

SPECS = {spec.name: spec for arch in ARCHES for spec in kernel_set(arch)}
PACKAGE = Path(deepgemm_jit.__file__).parent

_PRINT_KEYS = """
import json, sys, deepgemm_jit
from deepgemm_jit.builder import Builder
from deepgemm_jit.spec import KernelSpec
builder = Builder()
keys = {text: builder.request(KernelSpec.from_text(text)).key for text in json.loads(sys.argv[1])}
print(json.dumps({"package": deepgemm_jit.__file__, "keys": keys}))
"""


def _keys_here() -> dict[str, str]:
    builder = Builder()
    return {name: builder.request(spec).key for name, spec in SPECS.items()}


def _keys_in_a_process(
    package: Path = PACKAGE, *, names: list[str] | None = None, cwd: Path | None = None, env: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the keys that a new process computes with the package at ``package``, by name."""
    names = list(SPECS) if names is None else names
    env = env or {}
    search = os.pathsep.join(filter(None, (str(package.parent), env.get("PYTHONPATH"))))
    command = [sys.executable, "-BP", "-c", _PRINT_KEYS, json.dumps([SPECS[name].text for name in names])]
    child = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env, "PYTHONPATH": search},
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    answer = json.loads(child.stdout)
    assert Path(answer["package"]).parent == package
    return {name: answer["keys"][SPECS[name].text] for name in names}


def _copy_package(to: Path, sources: str) -> Path:
    package = to / "deepgemm_jit"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_kernels_src", "_cache"))
    shutil.copytree(data_dir("kernels_src"), to / sources)
    return package


@pytest.mark.parametrize(
    ("folder", "sources"),
    [("checkout", "kernels_src"), ("in stalled", "deepgemm_jit/_kernels_src")],
    ids=["checkout", "installed"],
)
def test_the_place_of_the_package_does_not_matter(tmp_path: Path, folder: str, sources: str) -> None:
    package = _copy_package(tmp_path / folder, sources)
    for path in (tmp_path / folder).rglob("*"):
        os.utime(path, (1, 1))
    assert _keys_in_a_process(package) == _keys_here()


def test_the_place_of_cutlass_does_not_matter(cutlass: Callable[..., Path]) -> None:
    path = cutlass(header_path().read_bytes())
    assert path == header_path()
    there = _keys_in_a_process(env={"PYTHONPATH": sys.path[0]})  # where the fixture put it
    assert there == _keys_here()


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": "/", "TZ": "Asia/Tokyo", "CUDA_HOME": "/nowhere"},
    ],
    ids=["hash seed", "locale", "home"],
)
def test_the_process_does_not_matter(tmp_path: Path, env: dict[str, str]) -> None:
    assert _keys_in_a_process(cwd=tmp_path, env=env) == _keys_here()


def test_what_was_asked_before_does_not_matter() -> None:
    backwards = list(reversed(SPECS))
    assert _keys_in_a_process(names=backwards) == _keys_here()
    assert _keys_in_a_process(names=backwards[:1]).items() <= _keys_here().items()


def test_threads_that_ask_at_once_get_the_same_keys(fresh: None) -> None:
    together = threading.Barrier(8)

    def ask() -> dict[str, str]:
        together.wait()
        return _keys_here()

    with ThreadPoolExecutor(8) as threads:
        answers = [future.result() for future in [threads.submit(ask) for _ in range(8)]]
    assert answers == [answers[0]] * 8


@pytest.mark.parametrize(
    "file",
    [
        "include/dj/types.cuh",
        "include/dj/ptx/mbarrier.cuh",  # included by a header that a header includes
        "include/dj/ptx/convert.cuh",
        "include/dj/kernels/scale_layout.cuh",
        "templates/scale_layout.cu.j2",
        "templates/fp8_gemm_1d2d.cu.j2",
    ],
)
def test_one_byte_changes_the_keys_of_all_that_see_it_and_of_no_other(tmp_path: Path, file: str) -> None:
    package = _copy_package(tmp_path, "kernels_src")
    path = tmp_path / "kernels_src" / file
    content = bytearray(path.read_bytes())
    content[content.index(b"once" if file.startswith("include") else b"extern")] ^= 0x20
    path.write_bytes(content)
    here, edited = _keys_here(), _keys_in_a_process(package)
    name = file.removeprefix("include/")
    see_it = {spec.name for spec in SPECS.values() if name in render(spec).headers or name == f"templates/{spec.family}.cu.j2"}
    assert see_it
    assert {spec for spec in SPECS if edited[spec] != here[spec]} == see_it


@pytest.mark.parametrize("columns", [128, 96], ids=["used", "not used"])
def test_a_byte_of_cutlass_changes_the_keys_of_the_kernels_that_hold_it(cutlass: Callable[..., Path], columns: int) -> None:
    here = _keys_here()
    struct = f"MMA_64x{columns}x32_F32E4M3E4M3_SS_TN"
    header = header_path().read_bytes()
    place = header.index(b"using DRegisters", header.index(f"struct {struct}\n".encode()))
    cutlass(header[:place] + b"U" + header[place + 1 :])
    edited = _keys_in_a_process(env={"PYTHONPATH": sys.path[0]})
    hold_it = {
        name for name, spec in SPECS.items() if any(f"struct {struct}\n" in text for text in render(spec).headers.values())
    }
    assert bool(hold_it) == (columns == 128)
    assert {name for name in SPECS if edited[name] != here[name]} == hold_it

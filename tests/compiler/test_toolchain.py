"""A broken or missing toolchain, in a real environment of its own: the error names package and file and chains the loader's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import deepgemm_jit
from deepgemm_jit.compiler import nvrtc_info

pytestmark = pytest.mark.nvrtc

PURE_PACKAGES = ("elftools", "filelock", "jinja2", "markupsafe", "platformdirs")
_COMPILE = """
import json
from deepgemm_jit.compiler import compile_options, compile_source
from deepgemm_jit.errors import ToolchainError
try:
    compiled = compile_source(
        source='extern "C" __global__ void k(float* p) { *p = 1; }', headers={}, entry="k", arch="sm_90a",
        options=compile_options("sm_90a"),
    )
except ToolchainError as error:
    print(json.dumps({"error": str(error), "cause": error.__cause__ and f"{type(error.__cause__).__name__}: {error.__cause__}"}))
else:
    print(json.dumps({"digest": compiled.cubin.digest}))
"""


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations, package
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds links to what a compile needs."""

    root: Path

    @property
    def site(self) -> Path:
        return next(self.root.glob("lib/python*/site-packages"))

    @property
    def libraries(self) -> Path:
        """The folder of NVRTC's libraries, where its package puts it below site-packages."""
        parts = Path(nvrtc_info().path).parts
        return self.site.joinpath(*parts[len(parts) - 1 - parts[::-1].index("nvidia") : -1])

    @property
    def nvrtc(self) -> Path:
        return self.libraries / Path(nvrtc_info().path).name

    @property
    def builtins(self) -> Path:
        return self.libraries / f"libnvrtc-builtins.so.{nvrtc_info().version}"

    def compile(self, **env: str) -> dict[str, Any]:
        """Compile a small kernel there and return its digest, or the error and its cause."""
        python_path = str(Path(deepgemm_jit.__file__).parents[1])
        child = subprocess.run(
            [self.root / "bin/python", "-BPs", "-c", _COMPILE],
            check=False,
            capture_output=True,
            text=True,
            env={"PATH": os.defpath, "HOME": str(self.root), "PYTHONPATH": python_path, **env},
            cwd=self.root,
            timeout=120,
        )
        assert child.returncode == 0, child.stderr
        return dict(json.loads(child.stdout))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    if "nvidia" not in Path(nvrtc_info().path).parts:
        pytest.skip(f"NVRTC is not from a package of the index: {nvrtc_info().path}")
    venv.create(tmp_path / "environment", symlinks=True)
    environment = Environment(tmp_path / "environment")
    (environment.site / "cuda").mkdir()
    for package in (*PURE_PACKAGES, "cuda.bindings", "cuda.pathfinder"):
        (environment.site / package.replace(".", "/")).symlink_to(_folder_of(package))
    environment.libraries.mkdir(parents=True)
    for library in (environment.nvrtc, environment.builtins):
        library.symlink_to(Path(nvrtc_info().path).with_name(library.name))
    return environment


@pytest.fixture
def own_nvrtc(environment: Environment) -> Iterator[Environment]:
    """An environment whose libnvrtc is no link: from a link the loader may find the builtins beside the real one."""
    library = environment.nvrtc
    source = library.resolve()
    library.unlink()
    try:
        library.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, library)
    yield environment
    library.unlink()  # 100 MB that pytest would keep


def test_a_whole_environment_compiles(environment: Environment) -> None:
    assert len(environment.compile()["digest"]) == 64


def _replace_by_text(library: Path) -> None:
    library.unlink()
    library.write_text("this is a text file, whatever its name says; " * 100)


def test_a_broken_nvrtc_is_named_with_the_loaders_message(environment: Environment) -> None:
    _replace_by_text(environment.nvrtc)
    answer = environment.compile()
    assert f"NVRTC is broken ({answer['cause'].partition(': ')[2]})" in answer["error"]
    assert "pip install --force-reinstall nvidia-cuda-nvrtc" in answer["error"]
    assert str(environment.nvrtc) in answer["cause"]
    assert "invalid ELF header" in answer["cause"]


def test_a_missing_nvrtc_is_named_with_its_package(environment: Environment) -> None:
    environment.nvrtc.unlink()
    answer = environment.compile()
    assert "NVRTC cannot be used; looked for: libnvrtc of an installed nvidia-cuda-nvrtc package" in answer["error"]
    assert "pip install 'nvidia-cuda-nvrtc>=13,<14' 'cuda-bindings>=13,<14'" in answer["error"]
    assert "'nvidia-cuda-nvrtc-cu12>=12.9,<13'" in answer["error"]
    assert "libnvrtc.so" in answer["cause"]


def test_missing_builtins_are_named_with_their_package(own_nvrtc: Environment) -> None:
    own_nvrtc.builtins.unlink()
    answer = own_nvrtc.compile()
    assert f"{own_nvrtc.builtins.name} of package nvidia-cuda-nvrtc is missing (" in answer["error"]
    assert str(own_nvrtc.builtins) in answer["error"]
    assert answer["cause"].startswith("OSError")
    assert "cannot open shared object file" in answer["cause"]


def test_broken_builtins_are_named_with_the_loaders_message(own_nvrtc: Environment) -> None:
    _replace_by_text(own_nvrtc.builtins)
    answer = own_nvrtc.compile()
    assert f"{own_nvrtc.builtins.name} of package nvidia-cuda-nvrtc is broken (" in answer["error"]
    assert "pip install --force-reinstall nvidia-cuda-nvrtc" in answer["error"]
    assert all("invalid ELF header" in text for text in answer.values())


@pytest.mark.parametrize("package", ["cuda.bindings", "cuda.pathfinder"])
def test_missing_bindings_are_named_by_their_package(environment: Environment, package: str) -> None:
    (environment.site / package.replace(".", "/")).unlink()
    answer = environment.compile()
    assert f"package {package.replace('.', '-')} cannot be used" in answer["error"]
    assert "pip install" in answer["error"]
    assert answer["cause"].startswith(("ModuleNotFoundError", "ImportError"))
    assert package.partition(".")[2] in answer["cause"]


@pytest.mark.parametrize("variables", [("CUDA_HOME", "CUDA_PATH"), ("LD_LIBRARY_PATH",)], ids=["toolkit", "loader"])
def test_an_nvrtc_of_a_toolkit_is_no_substitute(environment: Environment, tmp_path: Path, variables: tuple[str, ...]) -> None:
    toolkit = tmp_path / "toolkit"
    (toolkit / "lib64").mkdir(parents=True)
    for library in (environment.nvrtc, environment.builtins):
        library.rename(toolkit / "lib64" / library.name)
    value = toolkit / "lib64" if variables == ("LD_LIBRARY_PATH",) else toolkit
    answer = environment.compile(**dict.fromkeys(variables, str(value)))
    assert f"NVRTC at {toolkit / 'lib64' / environment.nvrtc.name} (found via" in answer["error"]
    assert "installed nvidia-cuda-nvrtc package" in answer["error"]


@pytest.mark.parametrize("variables", [("CUDA_HOME", "CUDA_PATH"), ("LD_LIBRARY_PATH",)], ids=["toolkit", "loader"])
def test_a_broken_nvrtc_of_a_toolkit_is_not_looked_at(
    environment: Environment, tmp_path: Path, variables: tuple[str, ...]
) -> None:
    healthy = environment.compile()
    folder = tmp_path / "toolkit/lib64"
    folder.mkdir(parents=True)
    for library in (environment.nvrtc, environment.builtins):
        (folder / library.name).write_text("not a library")
    value = folder if variables == ("LD_LIBRARY_PATH",) else folder.parent
    assert environment.compile(**dict.fromkeys(variables, str(value))) == healthy

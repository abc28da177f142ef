"""What is built is what is in the tree, and it works where nothing else is: wheel, sdist and editable installs.

The wheel is installed with its real dependencies, so this ring needs a package index: borrowing the dependencies of the tests'
own environment would not show that the declared ones suffice. The two other forms only have to import.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit import __version__
from deepgemm_jit.spec import kernel_set

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("wheel", "sdist", "editable")
MODELS = ("deepseek-v3", "deepseek-v4-flash", "qwen3-235b-a22b-fp8", "qwen3-30b-a3b-fp8")
SHIPPED_DATA = {"kernels_src": "_kernels_src", "cache": "_cache"}


def _run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return its stdout; its stderr is the message of a failure."""
    child = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, cwd=cwd, env=env, timeout=900
    )
    assert child.returncode == 0, f"{command}\n{child.stdout}\n{child.stderr}"
    return child.stdout


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that belong to the package, by relative path: neither compiled Python nor the store's."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    skipped = ("store",) if folder.name == "cache" else ()
    return {
        str(name): path.read_bytes()
        for name, path in files.items()
        if name.parts[0] not in skipped and "__pycache__" not in name.parts
    }


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout and leave in it what a day's work leaves: compiled Python and a filled store."""
    tree = tmp_path_factory.mktemp("tree") / "checkout"
    hidden = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "dist", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=hidden)
    (tree / "cache/store/v1/objects").mkdir(parents=True, exist_ok=True)
    (tree / "cache/store/v1/objects/ab").write_bytes(b"\x7fELF")
    (tree / "deepgemm_jit/__pycache__").mkdir()
    (tree / "deepgemm_jit/__pycache__/errors.cpython-311.pyc").write_bytes(b"old")
    (tree / "kernels_src/__pycache__").mkdir()
    (tree / "kernels_src/__pycache__/x.pyc").write_bytes(b"old")
    return tree


@pytest.fixture(scope="session")
def distributions(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist from the tree and the wheel from that sdist, as a release does."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="session")
def python_of(tree: Path, distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the interpreter of a fresh environment with one form of the package installed."""
    sdist, wheel = distributions
    wanted: dict[str, tuple[str | Path, ...]] = {
        "wheel": ("--constraint", tree / "constraints.txt", f"{wheel}[cu13]"),
        "wheel without a compiler": ("--constraint", tree / "constraints.txt", wheel),
        "sdist": ("--no-deps", sdist),
        "editable": ("--no-deps", "--constraint", tree / "constraints.txt", "editables", "--editable", tree),
    }
    made: dict[str, Path] = {}

    def python_of(form: str) -> Path:
        if form not in made:
            home = tmp_path_factory.mktemp(form) / "env"
            venv.create(home, symlinks=True)
            python = home / "bin/python"
            _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted[form], cwd=home)
            made[form] = python
        return made[form]

    return python_of


@pytest.fixture
def bare_env(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a PATH and nothing else that could help: no CUDA_HOME, no PYTHONPATH."""
    return {"PATH": os.defpath, "HOME": str(tmp_path), "DEEPGEMM_JIT_CACHE_DIR": str(tmp_path / "store")}


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(tree: Path, distributions: tuple[Path, Path]) -> None:
    expected = {f"deepgemm_jit/{name}": data for name, data in _files(tree / "deepgemm_jit").items()}
    for folder, shipped in SHIPPED_DATA.items():
        expected |= {f"deepgemm_jit/{shipped}/{name}": data for name, data in _files(tree / folder).items()}
    with zipfile.ZipFile(distributions[1]) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
        notices = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert sorted(held) == sorted(expected)
    assert held == expected
    assert len(notices) == 1


def test_the_sdist_holds_what_a_build_and_a_test_run_need(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "tests/conftest.py", "cache/README.md"} <= names
    assert [name for name in names if "__pycache__" in name or name.startswith(("cache/store", ".venv", ".git/"))] == []


def test_a_wheel_built_from_the_tree_equals_the_one_built_from_the_sdist(
    tree: Path, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tree, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.read_bytes() == distributions[1].read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_an_install_finds_its_data_and_adds_no_other_name(
    form: str, tree: Path, python_of: Callable[[str], Path], bare_env: dict[str, str], tmp_path: Path
) -> None:
    code = """
import importlib, importlib.metadata, json
import deepgemm_jit
from deepgemm_jit.resources import data_dir
leaked = []
for name in ("cache", "kernels_src", "tests", "docs", "bench", "examples"):
    try:
        importlib.import_module(name)
        leaked.append(name)
    except ModuleNotFoundError:
        pass
folders = {name: str(data_dir(name)) for name in ("kernels_src", "cache")}
print(json.dumps([deepgemm_jit.__file__, folders, leaked, importlib.metadata.version("deepgemm-jit")]))
"""
    python = python_of(form)
    file, folders, leaked, version = json.loads(_run(python, "-c", code, cwd=tmp_path, env=bare_env))
    home = tree if form == "editable" else python.parents[1]
    assert Path(file).is_relative_to(home)
    assert leaked == []
    assert version == __version__
    for name, folder in folders.items():
        assert Path(folder).is_relative_to(home)
        assert _files(Path(folder)) == _files(tree / name) != {}


def test_the_command_of_a_wheel_lists_the_kernel_set(
    python_of: Callable[[str], Path], bare_env: dict[str, str], tmp_path: Path
) -> None:
    command = python_of("wheel").with_name("deepgemm-jit")
    listed = json.loads(_run(command, "kernels", "--arch", "sm_90a", "--json", cwd=tmp_path, env=bare_env))
    assert listed["arch"] == "sm_90a"
    assert [kernel["name"] for kernel in listed["kernels"]] == [spec.name for spec in kernel_set("sm_90a")]


def test_a_wheel_compiles_a_kernel_with_nothing_but_what_it_declares(
    python_of: Callable[[str], Path], bare_env: dict[str, str], tmp_path: Path
) -> None:
    code = """
import deepgemm_jit as dj
spec = dj.kernel_set("sm_90a")[0]
cubin = dj.build(spec)
print(cubin.image[:4] == b"\\x7fELF", cubin.entry == spec.name)
"""
    assert _run(python_of("wheel"), "-c", code, cwd=tmp_path, env=bare_env).split() == ["True", "True"]
    assert list((tmp_path / "store").rglob("*.json"))


@pytest.fixture(scope="session")
def packs(python_of: Callable[[str], Path], tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Warm a store up for each published config with an installed wheel, and return a pack for each."""
    folder = tmp_path_factory.mktemp("packs")
    env = {"PATH": os.defpath, "HOME": str(folder), "DEEPGEMM_JIT_CACHE_DIR": str(folder / "store")}
    command, made = python_of("wheel").with_name("deepgemm-jit"), {}
    for name in MODELS:
        model = ("--arch", "sm_90a", "--model", tree / "tests/data/models" / name)
        report = json.loads(_run(command, "warmup", *model, "--jobs", "2", "--json", cwd=folder, env=env))
        assert report["failed"] == []
        made[name] = folder / f"{name}.pack"
        _run(command, "pack", "create", made[name], *model, cwd=folder, env=env)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_the_wheel_and_a_pack_are_all_that_a_model_needs_where_there_is_no_compiler(
    name: str, python_of: Callable[[str], Path], packs: dict[str, Path], tree: Path, bare_env: dict[str, str], tmp_path: Path
) -> None:
    python = python_of("wheel without a compiler")
    model = ("--arch", "sm_90a", "--model", tree / "tests/data/models" / name)
    env = {**bare_env, "DEEPGEMM_JIT_PACKS": str(packs[name])}
    answer = json.loads(_run(python.with_name("deepgemm-jit"), "verify", *model, "--json", cwd=tmp_path, env=env))
    assert answer == {"ok": True, "checked": 0, "bad": [], "missing": []}
    # What is planned comes out of the pack, and nothing else could: there is no NVRTC.
    code = """
import sys
import deepgemm_jit as dj
from deepgemm_jit.errors import ToolchainError
from deepgemm_jit.warmup import plan_for
planned = plan_for("sm_90a", sys.argv[1]).kernels
print(all(dj.build(spec).entry == spec.name for spec in planned))
try:
    dj.build(next(spec for spec in dj.kernel_set("sm_90a") if spec not in planned))
except ToolchainError as refusal:
    print(refusal.missing)
"""
    said = _run(python, "-c", code, model[-1], cwd=tmp_path, env=env).splitlines()
    assert said[0] == "True"
    assert "nvrtc" in said[1].lower()
    without_pack = subprocess.run(
        [python.with_name("deepgemm-jit"), "verify", *model],
        cwd=tmp_path,
        env=bare_env,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert without_pack.returncode == 1

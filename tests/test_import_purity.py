"""Importing does nothing: no disk beyond the import system's own reads, no CUDA, no torch, no process, no socket.

Each module is imported in a fresh interpreter under an audit hook, which sees every open, directory change, process and
library load that Python makes, also those inside of third-party modules.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepgemm_jit

pytestmark = pytest.mark.none

PACKAGE = Path(deepgemm_jit.__file__).parent
MODULES = sorted(
    ".".join(("deepgemm_jit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__main__"  # to import it is to run the command
)

_WATCHED = """
import importlib, json, os, sys

deeds = []
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime",
           "shutil.", "tempfile.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.dlopen")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, arguments):
    if event == "ctypes.dlopen" and arguments[0] is None:
        return  # `import ctypes` opens the interpreter itself
    if event.startswith(CHANGES):
        deeds.append([event, repr(arguments)])
    elif event == "open":
        path, mode, flags = arguments
        code = str(path).endswith((".py", ".pyc", ".so")) or ".cpython-" in str(path)
        if flags & WRITES or not code:
            deeds.append([event, repr(arguments)])

sys.addaudithook(watch)
importlib.import_module(sys.argv[1])
print(json.dumps({"deeds": deeds, "modules": sorted(sys.modules)}))
"""


def _import_watched(module: str, folder: Path) -> tuple[list[list[str]], set[str]]:
    """Import ``module`` in a fresh interpreter and return what it did and the top-level modules it brought."""
    command = [sys.executable, "-B", "-c", _WATCHED, module]
    child = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, timeout=120)
    assert child.returncode == 0, child.stderr
    answer = json.loads(child.stdout)
    return answer["deeds"], {name.partition(".")[0] for name in answer["modules"]}


def _part(module: str) -> str:
    """Return the part of the package a module belongs to, for example "cli"."""
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", [module for module in MODULES if _part(module) not in ("ops", "integrations")])
def test_importing_a_module_has_no_effect(module: str, tmp_path: Path) -> None:
    deeds, brought = _import_watched(module, tmp_path)
    assert deeds == []
    assert brought & {"torch", "cuda"} == set()
    if _part(module) != "cli":
        assert brought & {"click", "rich"} == set()
    assert list(tmp_path.iterdir()) == []


def test_the_watch_would_see_a_module_that_writes(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text("import os\nos.makedirs('made')\nopen('written', 'w').close()\n")
    deeds, _ = _import_watched("careless", tmp_path)
    assert {event for event, _ in deeds} == {"os.mkdir", "open"}


HOMES = {"cuda.bindings.driver": {"runtime"}, "cuda.bindings.nvrtc": {"compiler"}}


def _cuda_modules_named(path: Path) -> set[str]:
    """Return the ``cuda`` modules that a source file imports, anywhere in it and also by a string."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda.bindings."):
            named.add(node.value)
    return {name for name in named if name.split(".")[0] == "cuda"}


def test_the_driver_is_touched_only_in_runtime_and_nvrtc_only_in_compiler() -> None:
    strays = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in _cuda_modules_named(path):
            allowed = next((homes for prefix, homes in HOMES.items() if name.startswith(prefix)), {"compiler", "runtime"})
            if part not in allowed:
                strays.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert strays == []

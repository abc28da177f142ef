"""A compile depends on nothing of the machine but NVRTC, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit.compiler import Compiled, compile_options
from deepgemm_jit.errors import CompileError
from deepgemm_jit.frontend import render
from deepgemm_jit.spec import ARCHES, FP8_GEMM, SCALE_LAYOUT, KernelSpec, kernel_set

pytestmark = pytest.mark.nvrtc

SPECS = [spec for arch in ARCHES for spec in kernel_set(arch)]
GEMM = next(spec for spec in SPECS if spec.family == FP8_GEMM)
SMALL = next(spec for spec in SPECS if spec.family == SCALE_LAYOUT)
POISON = "#error this file must not be read\n"


def _tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return kind and mode, time and content of all that lies below ``root``."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
    return found


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A machine full of traps (working directory, toolkit, home, temporary folder) and the environment that leads to them."""
    root = tmp_path / "machine"
    names = {name for spec in SPECS for name in render(spec).headers} | {
        "foo.h",
        "cuda_fp8.h",
        "cuda_runtime.h",
        "cute/arch/mma_sm90_gmma.hpp",
        "cstdint",
    }
    for folder in ("cwd", "toolkit/include", "toolkit/targets/x86_64-linux/include"):
        for name in names:
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(POISON)
    for library in ("libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so"):
        for folder in ("lib", "lib64"):
            path = root / "toolkit" / folder / library
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not a library, whatever its name says\n")
    for folder in ("home", "tmp"):
        (root / folder).mkdir()
        (root / folder).chmod(0o555)  # root writes all the same: the trees are compared, too
    toolkit = str(root / "toolkit")
    return root, {
        **dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH"), toolkit),
        **dict.fromkeys(("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"), f"{toolkit}/include"),
        "LD_LIBRARY_PATH": f"{toolkit}/lib64",
        "HOME": str(root / "home"),
        "XDG_CACHE_HOME": str(root / "home/.cache"),
        "TMPDIR": str(root / "tmp"),
        "NVRTC_PREPEND_FLAGS": "",
    }


def test_a_poisoned_machine_changes_no_byte_and_no_file_appears(
    poisoned: tuple[Path, dict[str, str]],
    start_compiles: Callable[..., subprocess.Popen[str]],
    digests_from: Callable[[subprocess.Popen[str]], dict[str, list[str]]],
    digest_of: Callable[[KernelSpec], str],
) -> None:
    root, env = poisoned
    before = _tree(root)
    digests = digests_from(start_compiles(1, *SPECS, env=env, cwd=root / "cwd"))
    assert digests == {spec.text: [digest_of(spec)] for spec in SPECS}
    assert _tree(root) == before


# How an open or a change of a file looks in a trace; looks at names (stat, access) are no reads.
_OPENED = re.compile(r'\b(?:open|openat|openat2|creat)\((?:AT_FDCWD, )?"([^"]*)"')
_CHANGED = re.compile(r"\b(?:mkdir|mkdirat|rename|renameat2?|unlink|unlinkat|link|linkat|symlink|symlinkat|truncate|execve)\(")


def test_nvrtc_opens_no_file_but_its_own_library(
    poisoned: tuple[Path, dict[str, str]],
    start_compiles: Callable[..., subprocess.Popen[str]],
    digests_from: Callable[[subprocess.Popen[str]], dict[str, list[str]]],
    tmp_path: Path,
) -> None:
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    root, env = poisoned
    trace = tmp_path / "trace"
    prefix = (strace, "-f", "-e", "trace=%file,%network,execve", "-o", str(trace))
    digests_from(start_compiles(2, *SPECS, prefix=prefix, env=env, cwd=root / "cwd"))
    _, begin, rest = trace.read_text().partition('"/compiles begin"')
    compiles, end, _ = rest.partition('"/compiles end"')
    assert begin and end
    opened = {Path(path).name for path in _OPENED.findall(compiles)}
    assert opened - {"localtime"} <= {name for name in opened if name.startswith("libnvrtc-builtins.so.")}
    assert _CHANGED.findall(compiles) == []
    assert "socket(" not in compiles and "connect(" not in compiles


INCLUDES = ['"foo.h"', '"./foo.h"', '"sub/../foo.h"', "<foo.h>"]


@pytest.fixture
def foo_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foo.h").write_text("#define FOO 1\n")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)


def _source(include: str) -> str:
    return f'#include {include}\nextern "C" __global__ void {SMALL.name}(int* x) {{ *x = FOO; }}\n'


@pytest.mark.parametrize("include", INCLUDES)
def test_a_header_of_the_working_directory_is_not_found(
    include: str, foo_in_the_working_directory: None, compile_spec: Callable[..., Compiled]
) -> None:
    with pytest.raises(CompileError) as error:
        compile_spec(SMALL, source=_source(include))
    assert f"{SMALL.name}.cu(1)" in error.value.log
    assert "could not open source file" in error.value.log
    assert compile_spec(SMALL, source=_source(include), headers={include[1:-1]: "#define FOO 1\n"}).cubin.entry == SMALL.name


def test_it_would_be_found_without_our_option(foo_in_the_working_directory: None, compile_spec: Callable[..., Compiled]) -> None:
    options = tuple(option for option in compile_options(SMALL.arch) if option != "--no-source-include")
    assert compile_spec(SMALL, source=_source('"foo.h"'), options=options).cubin.entry == SMALL.name


@pytest.mark.parametrize("spec", [GEMM, SMALL], ids=lambda spec: spec.name)
def test_each_header_handed_over_is_needed(spec: KernelSpec, compile_spec: Callable[..., Compiled]) -> None:
    headers = render(spec).headers
    for missing in headers:
        with pytest.raises(CompileError, match=f'could not open source file "{missing}"'):
            compile_spec(spec, headers={name: text for name, text in headers.items() if name != missing})

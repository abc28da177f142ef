"""Two real NVRTCs: what one of them built serves the other, and a machine without any, from a store and from a pack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.builder import Builder
from deepgemm_jit.compiler import nvrtc_info
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import FP8_GEMM, kernel_set
from deepgemm_jit.store import Entry
from deepgemm_jit.store.pack import pack_bytes, write_pack

pytestmark = pytest.mark.packaging

OLDER = "nvidia-cuda-nvrtc>=13.0,<13.1"
GEMM = next(spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM)
BUILD = """
import json, sys
from deepgemm_jit.builder import Builder
from deepgemm_jit.compiler import nvrtc_info
from deepgemm_jit.errors import ToolchainError
from deepgemm_jit.spec import KernelSpec
try:
    version = nvrtc_info().version
except ToolchainError:
    version = None
built = Builder().build(KernelSpec.from_text(sys.argv[1]))
print(json.dumps([version, built.outcome, built.cubin.nvrtc_version, built.cubin.digest]))
"""


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with our packages, but an NVRTC of its own or none; return its interpreter."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    if packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *packages]
        subprocess.run(command, check=True, timeout=600)
    # Through a .pth file our packages can be imported, but NVRTC is looked for in the site folder alone.
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def build_with(python: Path, **env: str) -> list[Any]:
    path = str(Path(__file__).parents[2])
    environ = {"PATH": os.defpath, "PYTHONPATH": path, "DEEPGEMM_JIT_LOCK_DIR": os.environ["DEEPGEMM_JIT_LOCK_DIR"], **env}
    finished = subprocess.run(
        [str(python), "-c", BUILD, GEMM.text], check=False, capture_output=True, text=True, env=environ, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    answer: list[Any] = json.loads(finished.stdout)
    return answer


def test_what_one_nvrtc_built_serves_another_and_a_machine_without_any(tmp_path: Path) -> None:
    older, none = environment(tmp_path / "older", OLDER), environment(tmp_path / "none")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    never = {"DEEPGEMM_JIT_COMPILE": "never"}

    version, outcome, by, their_digest = build_with(older, DEEPGEMM_JIT_CACHE_DIR=str(theirs))
    assert (version, outcome, by) == ("13.0", "compiled", "13.0")
    assert nvrtc_info().version != "13.0"
    builder = Builder(read_settings(cache_dir=ours))
    our_cubin = builder.build(GEMM).cubin

    # The older one with our store, we with theirs, and one without NVRTC with either.
    served = build_with(older, DEEPGEMM_JIT_CACHE_DIR=str(ours), **never)
    assert served == ["13.0", "cached", our_cubin.nvrtc_version, our_cubin.digest]
    assert Builder(read_settings(cache_dir=theirs, compile="never")).build(GEMM).cubin.digest == their_digest
    assert build_with(none, DEEPGEMM_JIT_CACHE_DIR=str(theirs), **never) == [None, "cached", "13.0", their_digest]

    pack = tmp_path / "ours.pack"
    entry = Entry.for_cubin(builder.request(GEMM).key, our_cubin, GEMM.text)
    write_pack(pack, pack_bytes("1", [entry], lambda entry: our_cubin.image))
    for python, here in ((older, "13.0"), (none, None)):
        empty = str(tmp_path / "empty")
        served = build_with(python, DEEPGEMM_JIT_CACHE_DIR=empty, DEEPGEMM_JIT_PACKS=str(pack), **never)
        assert served == [here, "cached", our_cubin.nvrtc_version, our_cubin.digest]

    # Both in one store: each its own, and the newest for those without.
    both = Builder(read_settings(cache_dir=theirs)).build(GEMM, max_cuda_major=13)
    assert both.cubin.digest == their_digest
    assert builder.store.put(
        builder.request(GEMM).key, Builder(read_settings(cache_dir=theirs)).build(GEMM).cubin, spec_text=GEMM.text
    )
    assert build_with(older, DEEPGEMM_JIT_CACHE_DIR=str(ours), **never)[3] == their_digest
    assert build_with(none, DEEPGEMM_JIT_CACHE_DIR=str(ours), **never)[3] == our_cubin.digest
    assert Builder(read_settings(cache_dir=ours)).build(GEMM).cubin.digest == our_cubin.digest

"""The builder with the real store and the real NVRTC: what it refuses, and what it says of what it built."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.builder import Builder
from deepgemm_jit.compiler import nvrtc_info
from deepgemm_jit.errors import KernelNotBuiltError, ToolchainError
from deepgemm_jit.settings import Settings, read_settings
from deepgemm_jit.spec import kernel_set

pytestmark = pytest.mark.nvrtc

CAST = next(spec for spec in kernel_set("sm_90a") if spec.family == "per_token_cast_to_fp8")


def test_an_nvrtc_newer_than_the_driver_compiles_nothing_and_says_what_fits() -> None:
    builder, major = Builder(), int(nvrtc_info().version.partition(".")[0])
    with pytest.raises(ToolchainError, match=f"one of CUDA {major - 1}") as refused:
        builder.build(CAST, max_cuda_major=major - 1)
    assert refused.value.missing == f"NVRTC {nvrtc_info().version}"
    assert "nvidia-cuda-nvrtc-cu12" in refused.value.fix
    assert list(builder.store.entries()) == []
    # Where the driver loads it, or no driver is asked, it is built.
    assert builder.build(CAST, max_cuda_major=major).outcome == "compiled"
    assert builder.build(CAST).outcome == "cached"


def test_a_cubin_that_is_on_disk_is_called_stored() -> None:
    builder = Builder()
    assert [(built.outcome, built.stored) for built in (builder.build(CAST), builder.build(CAST))] == [
        ("compiled", True),
        ("cached", True),
    ]


def test_a_cubin_that_lives_in_memory_is_never_called_stored() -> None:
    builder = Builder(read_settings(cache_dir=Path("/proc/no-store-here")))
    assert [(built.outcome, built.stored) for built in (builder.build(CAST), builder.build(CAST))] == [
        ("compiled", False),
        ("cached", False),
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (lambda root: read_settings(cache_dir=root, compile="never"), True),
        (lambda root: Settings(cache_dir=root, compile="never"), True),
        (lambda root: read_settings({"DEEPGEMM_JIT_CACHE_DIR": str(root)}, compile="never"), True),
        (lambda root: read_settings({}, compile="never"), False),
    ],
    ids=["argument", "made by hand", "variable", "default"],
)
def test_the_command_for_a_kernel_that_is_not_built_names_the_store_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Callable[[Path], Settings], named: bool
) -> None:
    root = tmp_path / "a store"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    with pytest.raises(KernelNotBuiltError) as refused:
        Builder(settings(root)).build(CAST)
    expected = ["deepgemm-jit", "warmup", "--arch", "sm_90a", *(["--cache-dir", str(root)] if named else [])]
    assert shlex.split(refused.value.command) == expected


def failing(path: Path, failure: int, *, from_call: int = 0, calls: int = 10**9) -> Callable[..., Any]:
    """Return an ``os.open`` that fails for files below ``path``: a number of calls, from one on."""
    real, seen = os.open, itertools.count()

    def run(name: Any, *args: Any, **kwargs: Any) -> int:
        if str(name).startswith(str(path)) and from_call <= next(seen) < from_call + calls:
            raise OSError(failure, os.strerror(failure), str(name))
        return real(name, *args, **kwargs)

    return run


@pytest.mark.parametrize("failure", [errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EXDEV])
def test_who_loses_the_race_to_publish_has_its_own_kernel_and_does_not_read_back(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: int
) -> None:
    def lose(self: Path, target: Path) -> Path:
        raise OSError(failure, os.strerror(failure), str(self))

    monkeypatch.setattr(Path, "replace", lose)
    builder = Builder()
    assert builder.store.root == cache_dir
    # A client of a network file system may not see for a minute what another host has published.
    for folder in ("kernels", "objects"):
        monkeypatch.setattr(os, "open", failing(cache_dir / "v1" / folder, errno.ENOENT))
    built = [builder.build(CAST) for _ in range(2)]
    assert [each.outcome for each in built] == ["compiled", "cached"]
    assert built[0].cubin == built[1].cubin
    assert len(caplog.records) == 1
    assert f"errno {failure}" in caplog.text


def test_busy_leftovers_and_a_stale_handle_cost_a_warning_at_most_and_the_next_build_hits(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))

    monkeypatch.setattr(Path, "unlink", busy)
    builder = Builder()
    assert builder.build(CAST).stored
    assert caplog.records == []
    with monkeypatch.context() as once:
        once.setattr(os, "open", failing(cache_dir / "v1/kernels", errno.ESTALE, calls=1))
        first = Builder().build(CAST)
    assert first.cubin == builder.build(CAST).cubin
    assert Builder().build(CAST).outcome == "cached"
    assert len(caplog.records) == 1


def test_a_holder_that_is_too_slow_is_named_and_the_kernel_compiled_without_it(caplog: pytest.LogCaptureFixture) -> None:
    slow, builder = Builder(), Builder(read_settings(lock_timeout_s=0.2))
    with slow.store.lock(slow.request(CAST).key) as held:
        assert held
        built = builder.build(CAST)
    assert (built.outcome, built.stored) == ("compiled", True)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for fact in (CAST.name, f"pid {os.getpid()}", socket.gethostname(), ".lock", "gave up after"):
        assert fact in told


def test_a_warm_start_needs_no_compiler_and_keeps_the_name_of_the_kernel(tmp_path: Path) -> None:
    cubin = Builder().build(CAST).cubin
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/__init__.py").write_text("raise ImportError('no CUDA package here')\n")
    code = (
        "import sys, deepgemm_jit as dj; from deepgemm_jit.spec import KernelSpec\n"
        "cubin = dj.build(KernelSpec.from_text(sys.argv[1]))\n"
        "print(cubin.entry, cubin.digest, 'cuda.bindings' in sys.modules)"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", code, CAST.text]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": search})
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [CAST.name, cubin.digest, "False"]


def test_a_process_without_descriptors_gets_its_kernel_and_one_warning(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Really: no file can be opened any more. What NVRTC needs is open by then."""
    nvrtc_info()
    Builder().build(next(spec for spec in kernel_set("sm_90a") if spec != CAST))  # its builtins library, too
    builder = Builder()
    builder.request(CAST)
    assert builder.store.root == cache_dir
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        built = [builder.build(CAST) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [(each.outcome, each.stored) for each in built] == [("compiled", False), ("cached", False)]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"errno {errno.EMFILE}" in told and str(cache_dir) in told

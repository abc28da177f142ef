"""The builder with the real store and the real NVRTC: what it refuses, and what it says of what it built."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

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
        (lambda root: read_settings(compile="never"), False),
    ],
    ids=["argument", "made by hand", "variable"],
)
def test_the_command_for_a_kernel_that_is_not_built_names_the_store_that_the_environment_does_not(
    tmp_path: Path, settings: Callable[[Path], Settings], named: bool
) -> None:
    root = tmp_path / "a store"
    with pytest.raises(KernelNotBuiltError) as refused:
        Builder(settings(root)).build(CAST)
    expected = ["deepgemm-jit", "warmup", "--arch", "sm_90a", *(["--cache-dir", str(root)] if named else [])]
    assert shlex.split(refused.value.command) == expected

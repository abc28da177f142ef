"""What a hit touches: the files of its kernel, and nothing when the service has it. bench/store.py has the times."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.builder import build
from deepgemm_jit.service import KernelService
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.store import Store

pytestmark = pytest.mark.nvrtc


@pytest.fixture
def opened(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the store's files that were opened, as they are."""
    seen: list[str] = []
    real = os.open

    def noted(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(cache_dir)):
            seen.append(Path(path).relative_to(cache_dir).parts[1])
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", noted)
    return seen


@pytest.fixture
def full(store: Store, sample: ModuleType, opened: list[str]) -> Store:
    for number in range(20):
        assert store.put(f"{number:064x}", sample.cubin_for(payload=bytes([number])), spec_text=sample.SPEC.text)
    opened.clear()
    return store


def test_a_hit_opens_its_entry_and_its_object_and_lists_nothing(
    full: Store, sample: ModuleType, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    scandir: Callable[..., Any] = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(str(path)), scandir(path))[1])
    for _ in range(2):
        assert full.get(f"{7:064x}", spec_text=sample.SPEC.text, nvrtc_version="13.5") is not None
    assert (opened, listed) == (["kernels", "objects"] * 2, [])


def test_the_index_of_the_whole_set_is_read_without_an_object_and_a_kernel_with_its_own_only(
    full: Store, sample: ModuleType, opened: list[str]
) -> None:
    store = Store.open(read_settings())
    assert len(list(store.entries())) == 20
    assert opened == ["kernels"] * 20
    assert store.get(f"{7:064x}", spec_text=sample.SPEC.text) is not None
    assert opened[20:] == ["kernels", "objects"]


def test_a_kernel_that_the_service_has_never_reaches_the_store_again(opened: list[str]) -> None:
    spec = kernel_set("sm_90a")[0]
    build(spec)
    opened.clear()
    service = KernelService(settings=read_settings(compile="never"), driver=DriverDouble(gpus=2))
    for device in (0, 1):
        with service.call(device, 0) as call:
            kernels = {id(call.kernel(spec)) for _ in range(100)}
        assert len(kernels) == 1
    assert opened == ["kernels", "objects"]

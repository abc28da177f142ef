"""The service with the real builder, store and NVRTC; only the driver is the double."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.errors import KernelNotBuiltError
from deepgemm_jit.service import KernelService
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set

pytestmark = pytest.mark.nvrtc

CAST = next(spec for spec in kernel_set("sm_90a") if spec.family == "per_token_cast_to_fp8")


def test_a_cold_kernel_is_compiled_into_the_store_and_the_next_process_may_be_sealed(cache_dir: Path) -> None:
    driver = DriverDouble()
    service = KernelService(driver=driver)
    with service.call(0, 0) as call:
        call.kernel(CAST).launch((1, 1, 1), (32, 8, 1), 0, 0)
    assert len(driver.launches) == 1
    assert cache_dir.exists()

    sealed = KernelService(settings=read_settings(compile="never"), driver=DriverDouble())
    with sealed.call(0, 0) as call:
        assert call.kernel(CAST).spec == CAST


def test_an_empty_store_under_never_names_the_kernel_and_the_command() -> None:
    service = KernelService(settings=read_settings(compile="never"), driver=DriverDouble())
    with service.call(0, 0) as call, pytest.raises(KernelNotBuiltError, match=f"{CAST.name}.*deepgemm-jit warmup --arch sm_90a"):
        call.kernel(CAST)

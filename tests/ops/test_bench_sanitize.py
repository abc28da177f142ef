"""The sanitizer run covers the kernel set: shown for the GEMMs on pretended tensors, and for its judgement on recorded output."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.tensors import pretend, pretend_gpus

from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import FP8_GEMM_SWAP_AB, kernel_set
from deepgemm_jit.spec.kernel_set import is_gemm

pytestmark = pytest.mark.none


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    import sanitize

    yield sanitize
    for module in ("sanitize", "common"):
        sys.modules.pop(module, None)


def test_every_gemm_of_the_set_is_run_and_the_others_are_told_as_not_run(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = DriverDouble()
    driver.push_context(driver.retain_primary(0))
    service = KernelService(builder=InstantBuilder(), driver=driver)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(sanitize, "fp8", lambda *shape: pretend(torch.empty(shape, dtype=torch.float8_e4m3fn)))
    monkeypatch.setattr(sanitize, "bf16", lambda *shape: pretend(torch.empty(shape, dtype=torch.bfloat16)))
    monkeypatch.setattr(sanitize, "scales", lambda *shape: pretend(torch.empty(shape)))
    monkeypatch.setattr(
        sanitize, "m_major", lambda *shape: pretend(torch.empty((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2))
    )
    monkeypatch.setattr(sanitize, "fragments", lambda *shape: pretend(torch.empty(shape, dtype=torch.uint8)))
    monkeypatch.setattr(sanitize, "int32", lambda numbers: pretend(torch.tensor(numbers, dtype=torch.int32)))
    gemms = [spec for spec in kernel_set("sm_90a") if is_gemm(spec)]
    sanitize.run_gemms(gemms)
    steps = [spec.name for spec in kernel_set("sm_90a") if not is_gemm(spec)]
    assert sanitize.uncovered(without_maps=False) == sanitize.uncovered(without_maps=True) == steps
    layouts = {spec: 4 if 128 % spec.block[0] == 0 else 2 for spec in gemms}
    splits = {spec: 3 if spec.family == FP8_GEMM_SWAP_AB else 1 for spec in gemms}
    assert len(driver.launches) == sum(layouts[spec] * splits[spec] for spec in gemms)


def test_a_tool_that_hangs_is_ended_with_all_it_started(sanitize: ModuleType, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho begun; sleep 60 & sleep 60\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    found = sanitize.watch(str(tool), "memcheck", tmp_path / "results", 0.5)
    assert found["faults"][0].startswith("not done after")
    assert (tmp_path / "results" / "memcheck.txt").read_text() == "begun\n"


@pytest.mark.parametrize(
    ("printed", "status", "faults"),
    [
        ('{"uncovered": []}\n========= ERROR SUMMARY: 0 errors', 0, []),
        ('{"uncovered": []}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)', 0, []),
        ('{"uncovered": ["k"]}\n========= ERROR SUMMARY: 0 errors', 0, ["k is run by nothing here"]),
        ('{"uncovered": []}\n========= ERROR SUMMARY: 3 errors', 86, ["exit status 86", "ERROR SUMMARY: 3 errors"]),
        ("========= ERROR SUMMARY: 0 errors", 0, ["the kernels did not run to their end"]),
        ("Traceback", 1, ["exit status 1", "no summary of the tool"]),
    ],
)
def test_only_a_clean_and_whole_run_is_fine(
    sanitize: ModuleType, tmp_path: Path, printed: str, status: int, faults: list[str]
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {status}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    assert sanitize.watch(str(tool), "memcheck", tmp_path / "results", 60)["faults"] == faults
    assert (tmp_path / "results" / "memcheck.txt").read_text() == printed + "\n"


def test_races_of_torch_alone_are_told_apart(sanitize: ModuleType) -> None:
    torchs = "========= Error: Race reported between Write access at void at::native::sort<int>(int*)+0x10 in Sort.cu"
    ours = "========= Error: Race reported between Read access at sm_90a_route_i32_1024+0x70 and Write access at it+0x90"
    assert len(sanitize.races_elsewhere(f"{torchs}\n{torchs}\n")) == 2
    assert sanitize.races_elsewhere(f"{torchs}\n{ours}\n") == sanitize.races_elsewhere("========= nothing\n") == []

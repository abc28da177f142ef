"""The benchmark of the host's cost takes a call apart as the operation is built: run here on pretended tensors, for no figure."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.tensors import pretend, pretend_gpus

from deepgemm_jit import ops
from deepgemm_jit.service import KernelService

pytestmark = pytest.mark.none


def test_every_part_of_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    import host

    driver = DriverDouble()
    driver.push_context(driver.retain_primary(0))
    service = KernelService(builder=InstantBuilder(), driver=driver)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pretend_gpus(monkeypatch)[0] = driver.create_stream(driver.retain_primary(0))
    a = pretend(torch.empty((64, 512), dtype=torch.float8_e4m3fn)), pretend(torch.empty((4, 64)).T)
    b = pretend(torch.empty((256, 512), dtype=torch.float8_e4m3fn)), pretend(torch.empty((2, 4)))
    out = pretend(torch.empty((64, 256), dtype=torch.bfloat16))
    for _ in range(2):
        ops.fp8_gemm_nt(a, b, out)
    parts = host.parts_of(a, b, out)
    spreads = host.time_in_turn(list(parts.values()), bursts=2)
    assert len(spreads) == len(parts) > 10
    measured = {name: spread.record("us") for name, spread in zip(parts, spreads, strict=True)}
    measured["context check"] |= {"median_us": 1.5}
    rows = [
        {"kind": "dense", "stream": "own", "ratio": 0.7},
        {"kind": "masked", "stream": "own", "ratio": 0.5},
        {"kind": "alone"},
    ]
    faults = host.verdicts(rows, measured, require=0.6)
    assert [fault.split(":")[0] for fault in faults] == ["dense on the own stream", "the context check takes 1.50 us, required"]
    for module in ("host", "gemm", "problems", "common"):
        sys.modules.pop(module, None)

"""Logs in tests/data/logs are NVRTC 13.5's own, of this kernel set and of sources made worse on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepgemm_jit.compiler.log import PtxasReport, read_ptxas_log

pytestmark = pytest.mark.none

LOGS = Path(__file__).parents[1] / "data/logs"
REPORTS = {
    "clean": PtxasReport(168, 0, 0, 0, 0, ()),
    "shared_memory": PtxasReport(16, 8320, 0, 0, 0, ()),
    "c7508_setmaxnreg_ignored": PtxasReport(227, 0, 0, 0, 0, ("C7508",)),
    "c7511_c7517_products_serialised": PtxasReport(58, 0, 0, 0, 0, ("C7511", "C7517")),
    "c7512_spills": PtxasReport(64, 0, 392, 968, 1200, ("C7512",)),
    "c7518_products_serialised": PtxasReport(168, 0, 0, 0, 0, ("C7518",)),
    "c7602_refused": None,
}


def test_each_kept_log_has_its_report() -> None:
    assert {path.stem for path in LOGS.iterdir()} == set(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_a_log_of_nvrtc_is_read(name: str) -> None:
    assert read_ptxas_log((LOGS / f"{name}.log").read_text()) == REPORTS[name]


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7519"])
def test_advisories_are_known_by_the_form_of_their_code(code: str) -> None:
    log = (LOGS / "c7512_spills.log").read_text().replace("C7512", code)
    report = read_ptxas_log(log + log.splitlines()[0])
    assert report is not None
    assert report.advisories == (code,)


@pytest.mark.parametrize("log", ["", "\n", "ptxas info    : 149 bytes gmem", "Used 168 registers"])
def test_a_log_without_a_kernel_has_no_report(log: str) -> None:
    assert read_ptxas_log(log) is None


def test_a_log_of_two_kernels_has_no_report() -> None:
    assert read_ptxas_log((LOGS / "clean.log").read_text() + (LOGS / "shared_memory.log").read_text()) is None

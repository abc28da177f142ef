"""What tests of operations share on a GPU: a service that is cold, calls of their own, and a limit of time."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest

GPU_LIMIT_S = 120
"""Includes the first compiles of a session; a kernel itself takes milliseconds."""


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service that has loaded nothing yet, in place of the one that operations share; its store is empty."""
    from deepgemm_jit.service import KernelService

    service = KernelService()
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    return service


@pytest.fixture(autouse=True)
def no_calls_from_other_tests(request: pytest.FixtureRequest) -> None:
    """Let each test on a GPU select anew: some of them put a kernel of their own in place of selection."""
    if any(marker.name in ("gpu", "multigpu") for marker in request.node.iter_markers()):
        from deepgemm_jit.service import default_service

        default_service().forget_calls()


@pytest.fixture(autouse=True)
def gpu_time_limit(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """End the whole run with a traceback when a test on a GPU hangs: a hung kernel cannot be taken back, only its process can."""
    if not any(marker.name in ("gpu", "multigpu") for marker in request.node.iter_markers()):
        yield
        return
    with capfd.disabled():
        terminal = os.dup(2)
    faulthandler.dump_traceback_later(GPU_LIMIT_S, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(terminal)

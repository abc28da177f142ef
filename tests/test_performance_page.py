"""The page of measured figures against the results that it is made of."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.none
@pytest.mark.skipif(find_spec("torch") is None, reason="the benchmarks need torch")
def test_the_page_is_what_the_results_give() -> None:
    check = subprocess.run(
        [sys.executable, str(BENCH / "report.py"), "--check"], capture_output=True, text=True, timeout=120, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr

"""The parsers under a coverage-guided fuzzer. Atheris, as it follows the coverage of Python code; hypothesis does not."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.none,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None, reason="atheris is not installed (it has no wheel for each system)"
    ),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: some file systems write a file that is replaced to disk at once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


@pytest.mark.parametrize("parser", ["entry", "pack"])
def test_no_input_that_the_fuzzer_finds_crashes_hangs_or_is_wrongly_believed(
    folder: Path, profile: Any, record: Callable[..., None], parser: str
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), parser, str(profile.fuzz_runs), str(folder / "corpus")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=4 * 3600)
    assert finished.returncode == 0, finished.stderr[-5000:]
    done = re.search(r"Done (\d+) runs in (\d+) second", finished.stderr)
    assert done is not None
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", finished.stderr)[-1]
    record(f"fuzzed {parser}", runs=int(done[1]), seconds=int(done[2]), covered=int(coverage[0]), inputs_kept=int(coverage[2]))
    assert int(done[1]) >= profile.fuzz_runs
    assert int(coverage[2]) > 5  # it has found its way into the code

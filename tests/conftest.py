"""What every test shares: a private store, a clean environment, and the rules by which a ring is skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

RINGS = ("none", "nvrtc", "gpu", "multigpu", "packaging")
GPUS_NEEDED = {"gpu": 1, "multigpu": 2}
HOPPER = [9, 0]

# A machine that runs only the GPU rings may lack it.
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # No deadline: a test never fails for being slow. "nightly" looks ten times as long for the same faults.
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=100)
    hypothesis.settings.register_profile("nightly", deadline=None, max_examples=1000)


@dataclass(frozen=True)
class Profile:
    """How long the tests look that could go on for ever."""

    name: str
    rounds: int
    """Cold rounds of eight processes that start at once."""
    processes: int
    """Processes of the one round of many."""
    kills: int
    """Writers that are killed while others read."""
    examples: int
    """Generated index entries, and as many packs."""
    fuzz_runs: int
    """Inputs of the coverage-guided fuzzer, for each parser."""


PROFILES = {
    "quick": Profile("quick", rounds=4, processes=16, kills=100, examples=2_000, fuzz_runs=20_000),
    "nightly": Profile("nightly", rounds=50, processes=64, kills=1_000, examples=100_000, fuzz_runs=300_000),
}
_RECORDS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose how long to look and where to keep what was counted."""
    parser.addoption("--profile", choices=PROFILES, default="quick", help="how long the tests look (CI: quick)")
    parser.addoption("--record", type=Path, metavar="FILE", help="keep what the tests counted in a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the profile to hypothesis too."""
    config.stash[_RECORDS] = {}
    if importlib.util.find_spec("hypothesis") is not None:
        hypothesis.settings.load_profile(config.getoption("--profile"))


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> Profile:
    """How long to look."""
    return PROFILES[request.config.getoption("--profile")]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep counts under a name, for ``--record``."""

    def keep(name: str, **counts: Any) -> None:
        request.config.stash[_RECORDS][name] = counts

    return keep


# Asks the driver in a process of its own, so that the tests' process is one in which CUDA was never started.
_PROBE = """
import ctypes, json
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as missing:
    print(json.dumps({"found": str(missing), "capabilities": []}))
else:
    result, count = driver.cuInit(0), ctypes.c_int()
    if result == 0:
        result = driver.cuDeviceGetCount(ctypes.byref(count))
    capabilities = []
    for device in range(count.value):
        pair = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            number = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            pair.append(number.value)
        capabilities.append(pair)
    print(json.dumps({"found": f"driver result {result}, compute capabilities {capabilities}", "capabilities": capabilities}))
"""


@cache
def _hopper_gpus() -> tuple[int, str]:
    """Return how many Hopper GPUs the driver reports, and what it said."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(probe.stdout)
    return answer["capabilities"].count(HOPPER), answer["found"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test without exactly one ring; skip the GPU rings where the driver reports too few GPUs."""
    homeless = []
    for item in items:
        rings = {marker.name for marker in item.iter_markers() if marker.name in RINGS}
        if len(rings) != 1:
            homeless.append(f"{item.nodeid}: {', '.join(sorted(rings)) or 'no ring'}")
        for ring in rings & GPUS_NEEDED.keys():
            gpus, found = _hopper_gpus()
            if gpus < GPUS_NEEDED[ring]:
                reason = f"ring {ring} needs {GPUS_NEEDED[ring]} GPU(s) of compute capability 9.0; found: {found}"
                item.add_marker(pytest.mark.skip(reason=reason))
    if homeless:
        raise pytest.UsageError("a test belongs to exactly one ring of " + ", ".join(RINGS) + ":\n" + "\n".join(homeless))


def _bench_common() -> Any:
    """Load what benchmarks share, by its path: their folder has modules of the names of ours."""
    path = Path(__file__).parents[1] / "bench" / "common.py"
    spec = importlib.util.spec_from_file_location("bench_common", path)
    assert spec and spec.loader
    module = sys.modules["bench_common"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped and why, one line per reason: ``-rs`` has one per place, hundreds of them without a GPU."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    path = terminalreporter.config.getoption("--record")
    if path is not None:
        bench = _bench_common()
        outcomes = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error")}
        command = shlex.join(["python", "-m", "pytest", *map(str, terminalreporter.config.invocation_params.args)])
        record = {**bench.environment(("nvidia-cuda-nvrtc", "hypothesis", "atheris", "filelock")), "command": command}
        bench.write_json(path, {**record, **outcomes, "skipped": dict(reasons), **terminalreporter.config.stash[_RECORDS]})


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own store and lock folder, neither of which exists yet, and none of the caller's settings."""
    for variable in [name for name in os.environ if name.startswith("DEEPGEMM_JIT_")]:
        monkeypatch.delenv(variable)
    root = tmp_path / "store"
    monkeypatch.setenv("DEEPGEMM_JIT_CACHE_DIR", str(root))
    monkeypatch.setenv("DEEPGEMM_JIT_LOCK_DIR", str(tmp_path / "locks"))
    return root

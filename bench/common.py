"""What the benchmarks share: the record of a machine, statistics, tables as text and results as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from deepgemm_jit import __version__
from deepgemm_jit.settings import PREFIX


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and tenth and ninetieth percentile of a series, in the unit of its samples."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])

    def record(self, unit: str) -> dict[str, float]:
        """Return the JSON form, the unit in its keys."""
        return {f"median_{unit}": round(self.median, 4), f"p10_{unit}": round(self.p10, 4), f"p90_{unit}": round(self.p90, 4)}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers; NaN of none, so that no comparison with it holds."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


class Table:
    """Prints rows under headers as they come, so that a long run shows what it has.

    Args:
        columns: header and width of each column. The first is aligned left, all others right.
    """

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._headers = [header for header, _ in columns]
        self._widths = [max(width, len(header)) for header, width in columns]

    def start(self, title: str) -> None:
        """Print the title and the headers."""
        print(f"\n{title}", flush=True)
        self.row(*self._headers)
        self.row(*("-" * width for width in self._widths))

    def row(self, *cells: object) -> None:
        """Print one row; cells that are missing at its end stay empty."""
        first, *others = (str(cell) for cell in cells)
        widths = self._widths[1:]
        texts = [first.ljust(self._widths[0]), *(text.rjust(width) for text, width in zip(others, widths, strict=False))]
        print("  ".join(texts).rstrip(), flush=True)


def number(value: float | None, digits: int = 1) -> str:
    """Return a number for a table, or a dash for what was not measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def environment(packages: Iterable[str]) -> dict[str, Any]:
    """Return what decides the figures of a run besides its code: machine, versions, command, time.

    Args:
        packages: further distributions whose versions matter; those that are not installed are recorded as None.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join([f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": {
            "platform": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cpus": len(os.sched_getaffinity(0)),
            "load_average_1_min": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "deepgemm_jit": __version__,
            "python": platform.python_version(),
            **{name: package_version(name) for name in packages},
        },
    }


def package_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def try_driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None where it cannot be asked."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def without_settings() -> dict[str, str]:
    """Return the environment of this process without the settings of this package."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that was started in a session of its own, and all that it started; nothing if it was waited for."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def answer_of(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run Python in a process of its own; return the JSON object in its last line, or under "fault" how it ended without one."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, told = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        return {"fault": f"no end after {timeout_s:.0f} s"}
    if process.returncode != 0:
        print(told, file=sys.stderr)
        return {"fault": f"exit status {process.returncode}: {last_line(told) or 'no error told'}"}
    return answer_in(printed) or {"fault": "no answer"}


def answer_in(printed: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of what a program printed, or None."""
    try:
        answer = json.loads(last_line(printed))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def last_line(text: str) -> str:
    """Return the last line that is not empty: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a result, folders included, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)

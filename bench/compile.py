"""Cold compiles on this machine's CPU: every kernel of an arch, then the whole set through the warm-up command. Needs no GPU.

A kernel is rendered and compiled by the front end and NVRTC directly, with no store, in two fresh processes: the first one
compiles it once (library load included; its peak memory is that of a worker), the second one several times (the median is the
cold compile). Their bytes must be equal. Exit status: 0, or 1 when bytes differ or a warm-up fails, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import Spread, Table, environment, number, without_settings, write_json

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, kernel_set

PACKAGES = ("nvidia-cuda-nvrtc", "cuda-bindings", "nvidia-cutlass")
RESULT = Path(__file__).parent / "results" / "compile.json"

PEER: dict[str, Any] = {
    "what": "DeepGEMM's sm90 FP8 1D2D GEMM, nvcc 13.0, one kernel",
    "cold_compile_s": 4.2,
    "peak_bytes": 466_000_000,
    "source": "recorded in another run (sgl-deep-gemm 0.1.4, 2-core CPU machine, measured 2026-11-30), not measured by this one",
}


@dataclass(frozen=True, slots=True)
class Compiles:
    """What one fresh process measured."""

    first_s: float
    """Imports, library load, render and compile; the start of the interpreter is not in it."""
    later_s: list[float]
    digests: set[str]
    size_bytes: int
    peak_bytes: int


def compile_here(spec: KernelSpec, runs: int) -> dict[str, Any]:
    """Compile ``spec`` in this process: once from nothing, then ``runs`` times with NVRTC loaded."""
    started = time.perf_counter()
    from deepgemm_jit.compiler import compile_options, compile_source
    from deepgemm_jit.frontend import render

    seconds: list[float] = []
    digests: list[str] = []
    size_bytes = 0
    for _ in range(1 + runs):
        render.cache_clear()  # rendering is part of a cold compile
        source = render(spec)
        compiled = compile_source(
            source=source.text, headers=source.headers, entry=source.entry, arch=spec.arch, options=compile_options(spec.arch)
        )
        ended = time.perf_counter()
        seconds.append(ended - started)
        digests.append(compiled.cubin.digest)
        size_bytes = len(compiled.cubin.image)
        started = time.perf_counter()
    # Imported late, so that its own imports are not in the first figure.
    from deepgemm_jit.warmup.worker import peak_memory_bytes

    return {"seconds": seconds, "digests": digests, "size_bytes": size_bytes, "peak_bytes": peak_memory_bytes()}


def in_fresh_process(spec: KernelSpec, runs: int) -> Compiles:
    """Run :func:`compile_here` in a process of its own."""
    answer = _run([__file__, "--arch", spec.arch, "--runs", str(runs), "--compile-here", spec.text])
    first_s, *later_s = answer["seconds"]
    return Compiles(first_s, later_s, set(answer["digests"]), answer["size_bytes"], answer["peak_bytes"])


def measure_kernel(spec: KernelSpec, runs: int) -> dict[str, Any]:
    """Measure one kernel in two fresh processes and return its row."""
    once, often = in_fresh_process(spec, 0), in_fresh_process(spec, runs)
    return {
        "name": spec.name,
        "family": spec.family,
        **Spread.of(often.later_s).record("s"),
        "first_in_process_s": round(median((once.first_s, often.first_s)), 4),
        "worker_peak_bytes": once.peak_bytes,
        "cubin_bytes": once.size_bytes,
        "cubin_sha256": sorted(once.digests | often.digests),
        "identical": len(once.digests | often.digests) == 1,
    }


def measure_warm_up(arch: str, jobs: int) -> list[dict[str, Any]]:
    """Warm up an empty store with the command, then again, and return both reports with the time of the whole process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for store in ("empty", "full"):
            started = time.perf_counter()
            report = _run(["-m", "deepgemm_jit", "warmup", "--arch", arch, "--jobs", str(jobs), "--cache-dir", folder, "--json"])
            wall_s = time.perf_counter() - started
            kept = ("kernels", "compiled", "cached", "failed", "seconds", "worker_peak_bytes")
            rows.append({"store": store, "jobs": jobs, "process_s": round(wall_s, 3), **{key: report[key] for key in kept}})
    return rows


def _run(arguments: list[str]) -> dict[str, Any]:
    """Run Python with the user's settings of this package left out, and return the JSON object it prints."""
    done = subprocess.run([sys.executable, *arguments], env=without_settings(), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"bench/compile.py: a process ended with status {done.returncode} and no result; its reason is above")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the FP8 GEMM family, which the peer's figure is about."""
    gemms = [row for row in rows if row["family"] == FP8_GEMM]
    cold_s = [row["median_s"] for row in gemms]
    return {
        "fp8_gemm_kernels": len(gemms),
        "fp8_gemm_median_s": median(cold_s),
        "fp8_gemm_slowest_s": max(cold_s),
        "first_in_process_median_s": median(row["first_in_process_s"] for row in gemms),
        "worker_peak_bytes": max(row["worker_peak_bytes"] for row in gemms),
        "all_identical": all(row["identical"] for row in rows),
        "peer_over_ours": PEER["cold_compile_s"] / median(cold_s),
    }


def print_summary(summary: dict[str, Any], warm_ups: list[dict[str, Any]]) -> None:
    """Print ours beside the peer's recorded figure, then the warm-ups."""
    table = Table(("one FP8 GEMM kernel", 40), ("cold s", 8), ("peak MB", 8))
    table.start("Beside the peer's recorded figure")
    ours = f"ours, median of {summary['fp8_gemm_kernels']} kernels"
    table.row(ours, number(summary["fp8_gemm_median_s"], 3), _megabytes(summary["worker_peak_bytes"]))
    table.row("ours, slowest", number(summary["fp8_gemm_slowest_s"], 3))
    table.row("ours, first of a process", number(summary["first_in_process_median_s"], 3))
    table.row("DeepGEMM with nvcc, RECORDED", number(PEER["cold_compile_s"], 3), _megabytes(PEER["peak_bytes"]))
    print(f"DeepGEMM / ours: {summary['peer_over_ours']:.1f}. The peer's figure was {PEER['source']}.")

    table = Table(
        ("deepgemm-jit warmup into", 24), ("kernels", 7), ("compiled", 8), ("cached", 6), ("failed", 6), ("s", 7), ("peak MB", 8)
    )
    table.start(f"The whole set, {warm_ups[0]['jobs']} worker processes (s: the whole command, interpreter included)")
    for row in warm_ups:
        peak = _megabytes(row["worker_peak_bytes"]) if row["worker_peak_bytes"] else "-"
        table.row(
            f"{'an' if row['store'] == 'empty' else 'a'} {row['store']} store",
            *(row[key] for key in ("kernels", "compiled", "cached")),
            len(row["failed"]),
            number(row["process_s"], 2),
            peak,
        )


def _megabytes(size_bytes: int) -> str:
    return number(size_bytes / 1e6, 0)


def positive_count(text: str) -> int:
    """Read a whole number above 0."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--arch", default="sm_90a", help="default: sm_90a")
    line.add_argument("--runs", type=int, default=5, help="compiles behind each median; default: 5")
    line.add_argument("--jobs", type=positive_count, default=2, help="processes of the warm-up; default: 2")
    line.add_argument("--json", type=Path, default=RESULT, metavar="PATH", help="default: bench/results/compile.json")
    line.add_argument("--compile-here", metavar="SPEC", help=argparse.SUPPRESS)
    return line


def main() -> int:
    options = parser().parse_args()
    if options.compile_here is not None:
        print(json.dumps(compile_here(KernelSpec.from_text(options.compile_here), options.runs)))
        return 0
    if options.runs < 1:
        parser().error("argument --runs: must be at least 1")
    try:
        kernels = kernel_set(options.arch)
    except UnsupportedError as error:
        print(f"bench/compile.py: {error}", file=sys.stderr)
        return 2
    record = environment(PACKAGES)
    machine = record["machine"]
    print(f"{machine['platform']}, {machine['cpus']} CPUs ({machine['cpu']}), load {machine['load_average_1_min']}")
    print(", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    table = Table(
        ("kernel", 58), ("median s", 8), ("p10", 6), ("p90", 6), ("first s", 7), ("peak MB", 7), ("cubin KB", 8), ("bytes", 9)
    )
    table.start(f"Cold compile, {options.runs} runs each (first: of a process, with imports and library load)")
    rows = []
    for spec in kernels:
        row = measure_kernel(spec, options.runs)
        rows.append(row)
        table.row(
            row["name"],
            *(number(row[key], 3) for key in ("median_s", "p10_s", "p90_s", "first_in_process_s")),
            _megabytes(row["worker_peak_bytes"]),
            number(row["cubin_bytes"] / 1e3),
            "identical" if row["identical"] else "DIFFER",
        )
    warm_ups = measure_warm_up(options.arch, options.jobs)
    summary = summarize(rows)
    print_summary(summary, warm_ups)
    write_json(options.json, {**record, "peer": PEER, "summary": summary, "warm_ups": warm_ups, "kernels": rows})
    failed = [failure for row in warm_ups for failure in row["failed"]]
    return 0 if summary["all_identical"] and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Two GPUs in one process: what DeepGEMM does there and what this package does, by the same calls, each in a process of its own.

One dense FP8 product on GPU 0, then one on GPU 1, then one on GPU 0 again; with GPU 1 made current for its product, and
without. A process may end by a signal or an exception: that is what is recorded. Exit status: 0, or 1 where ours is not right
every time, or 2 without two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Table, environment, number, package_version, try_driver_version, write_json
from gemm import LARGEST_ERROR, PACKAGES, try_peer
from problems import Shape, empty_output, random_operands, relative_errors

RESULT = Path(__file__).parent / "results" / "two_gpus.json"
SHAPE = Shape("dense", 1, 128, 128, 4096, 7168)
ORDER = (0, 1, 0)
LIMIT_S = 240
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): |CUDA_ERROR|CUDA error|terminate called")


@contextlib.contextmanager
def current(gpu: int, *, guarded: bool) -> Iterator[None]:
    """Make ``gpu`` current, or leave GPU 0 so."""
    with torch.cuda.device(gpu) if guarded else contextlib.nullcontext():
        yield


def run_here(side: str, *, guarded: bool) -> None:
    """Make the calls and print a line after each; whatever goes wrong ends this process as it will."""
    library = importlib.import_module("deepgemm_jit.ops") if side == "ours" else try_peer()
    if library is None:
        raise SystemExit("DeepGEMM is not here")
    for gpu in ORDER:
        device = torch.device("cuda", gpu)
        operands = random_operands(SHAPE, device)
        out = empty_output(SHAPE, operands)
        scales = operands.a_scale.T.contiguous().T  # as the kernels of both sides read them
        torch.cuda.synchronize(device)
        with current(gpu, guarded=guarded):
            library.fp8_gemm_nt((operands.a, scales), (operands.b, operands.b_scale), out)
        torch.cuda.synchronize(device)
        unwritten = int(out.isnan().sum())
        error = relative_errors(SHAPE, operands, [out])[0] if unwritten == 0 else None
        print(json.dumps({"gpu": gpu, "nan": unwritten / out.numel(), "relative_error": error}), flush=True)


def watch(side: str, *, guarded: bool) -> dict[str, Any]:
    """Run one side in a process of its own and return what came of it."""
    command = [sys.executable, __file__, "--run-here", side, *(["--guarded"] if guarded else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"side": side, "guarded": guarded, "calls": [], "exit_status": None, "ended_by": f"no end after {LIMIT_S} s"}
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"gpu"')]
    told = [line for line in done.stderr.splitlines() if _ERROR.search(line)]
    ended_by = None if done.returncode == 0 else told[0][:300] if told else f"exit status {done.returncode}"
    return {"side": side, "guarded": guarded, "calls": calls, "exit_status": done.returncode, "ended_by": ended_by}


def is_right(run: dict[str, Any]) -> bool:
    """Return whether all calls were made and gave the right result."""
    errors = [call["relative_error"] for call in run["calls"]]
    return run["exit_status"] == 0 and len(errors) == len(ORDER) and all(e is not None and e <= LARGEST_ERROR for e in errors)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--ours-only", action="store_true", help="leave DeepGEMM out")
    line.add_argument("--json", type=Path, default=RESULT, metavar="PATH", help="default: bench/results/two_gpus.json")
    line.add_argument("--run-here", choices=("ours", "deep_gemm"), help=argparse.SUPPRESS)
    line.add_argument("--guarded", action="store_true", help=argparse.SUPPRESS)
    return line


def main() -> int:
    options = parser().parse_args()
    if options.run_here:
        run_here(options.run_here, guarded=options.guarded)
        return 0
    if torch.cuda.device_count() < 2:
        print(f"bench/two_gpus.py needs two GPUs, and torch sees {torch.cuda.device_count()}.", file=sys.stderr)
        return 2
    peer = not options.ours_only and try_peer() is not None
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(0), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm") if peer else None
    table = Table(("side", 10), ("GPU 1 current", 13), ("error per call (GPU 0, 1, 0)", 40), ("ended by", 60))
    table.start(f"{SHAPE.label} on GPU 0, on GPU 1, and on GPU 0 again, in one process")
    runs = []
    for side in ("deep_gemm", "ours") if peer else ("ours",):
        for guarded in (True, False):
            run = watch(side, guarded=guarded)
            runs.append(run)
            shown = ", ".join("all NaN" if c["nan"] == 1 else number(c["relative_error"], 5) for c in run["calls"])
            table.row(side, "yes" if guarded else "no", shown or "-", run["ended_by"] or "its own end")
    write_json(options.json, {**record, "shape": SHAPE.label, "runs": runs})
    wrong = [run for run in runs if run["side"] == "ours" and not is_right(run)]
    for run in wrong:
        print(
            f"FAILED ours, GPU 1 {'current' if run['guarded'] else 'not current'}: {run['ended_by'] or run['calls']}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

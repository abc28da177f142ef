"""Plans and warm-ups of published models, as whole commands on this machine's CPU, with each reader. Needs no GPU.

A plan is timed with its proof of completeness; a warm-up into an empty store, then into the full one. What transformers costs by
itself, its import and the build of the architecture on the meta device, is timed in a process that does nothing else. Exit
status: 0, or 1 when a limit is exceeded, a plan is not complete or a warm-up fails, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import Table, environment, number, write_json

from deepgemm_jit.settings import PREFIX

PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cutlass", "torch", "transformers")
RESULT = Path(__file__).parent / "results" / "plan.json"
MODELS = Path(__file__).parents[1] / "tests" / "data" / "models"
READ_ONLY = "import sys; from deepgemm_jit.integrations.architectures import read_model; read_model(sys.argv[1])"
LIMITS_S = {"cold": 45.0, "warm": 1.0, "proof": 2.0}
"""Of a warm-up into an empty store, one into a full store (beside what transformers takes by itself), and a proof."""


def timed(arguments: list[str]) -> tuple[float, str]:
    """Run Python without the user's settings of this package; return the seconds of the whole process, and its stdout."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started, done.stdout


def measure(model: Path, reader: str, jobs: int, runs: int) -> dict[str, Any]:
    """Return the row of one model and reader: medians of ``runs`` processes, but one cold warm-up."""
    named = ["--arch", "sm_90a", "--model", str(model), "--reader", reader, "--json"]
    plans = [timed(["-m", "deepgemm_jit", "plan", *named]) for _ in range(runs)]
    proofs = [json.loads(text) for _, text in plans]
    with tempfile.TemporaryDirectory() as store:
        warmup = ["-m", "deepgemm_jit", "warmup", *named, "--jobs", str(jobs), "--cache-dir", store]
        cold_s, cold = timed(warmup)
        # In turn, so that other work on the machine meets both alike.
        alone, warm = [], []
        for _ in range(runs):
            alone.append(timed(["-c", READ_ONLY, str(model)])[0] if reader == "transformers" else 0.0)
            warm.append(timed(warmup))
    reports = [json.loads(text) for text in (cold, *(text for _, text in warm))]
    kernels = reports[0]["kernels"]
    complete = all(each["complete"]["ok"] for each in proofs)
    built = [each["compiled"] for each in reports] == [kernels] + [0] * runs and not any(each["failed"] for each in reports)
    return {
        "model": model.name,
        "reader": proofs[0]["reader"],
        "problems": len(proofs[0]["problems"]),
        "kernels": kernels,
        "plan_s": round(median(seconds for seconds, _ in plans), 3),
        "proof_s": median(each["complete"]["seconds"] for each in proofs),
        "cold_s": round(cold_s, 3),
        "warm_s": round(median(seconds for seconds, _ in warm), 3),
        "transformers_s": round(median(alone), 3),
        "warm_beside_transformers_s": round(median(whole - part for (whole, _), part in zip(warm, alone, strict=True)), 3),
        "complete": complete,
        "built": built,
    }


def faults_of(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with a row."""
    judged = {"cold": row["cold_s"], "warm": row["warm_beside_transformers_s"], "proof": row["proof_s"]}
    faults = [f"{name} {judged[name]:.2f} s, limit {limit:g} s" for name, limit in LIMITS_S.items() if judged[name] > limit]
    faults += [f"not {name}" for name in ("complete", "built") if not row[name]]
    return [f"{row['model']}, {row['reader']}: {fault}" for fault in faults]


def main() -> int:
    """Run the benchmark and return the exit status."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--runs", type=int, default=3, help="processes behind each median; default: 3")
    line.add_argument("--jobs", type=int, default=2, help="compile processes of a warm-up; default: 2")
    line.add_argument("--readers", default="builtin,transformers", help="default: builtin,transformers")
    line.add_argument("--json", type=Path, default=RESULT, help=f"default: {RESULT}")
    given = line.parse_args()
    if given.runs < 1 or given.jobs < 1:
        line.error("--runs and --jobs must be at least 1")
    table = Table(
        ("model", 24), ("reader", 20), ("kernels", 7), ("plan s", 7), ("proof s", 7), ("cold s", 7), ("warm s", 7), ("alone s", 7)
    )
    table.start("Whole commands (alone s: what transformers takes by itself, also in plan, cold and warm)")
    rows = []
    for reader, model in ((reader, model) for reader in given.readers.split(",") for model in sorted(MODELS.iterdir())):
        row = measure(model, reader, given.jobs, given.runs)
        rows.append(row)
        seconds = (number(row[key], 2) for key in ("plan_s", "proof_s", "cold_s", "warm_s", "transformers_s"))
        table.row(row["model"], row["reader"], row["kernels"], *seconds)
    faults = [fault for row in rows for fault in faults_of(row)]
    for fault in faults:
        print(f"FAILED: {fault}")
    record = {**environment(PACKAGES), "jobs": given.jobs, "runs": given.runs, "limits_s": LIMITS_S, "models": rows}
    write_json(given.json, record)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""All GPUs of a machine, one or many: one process over all of them, a rank for each of them, a model spread over them.

1. memory: one process uses every second GPU; the others get no context and no memory (two GPUs and more).
2. speed: one process, four threads for each GPU, the current device another one: every result right, each GPU as fast as alone.
3. ranks: a process for each GPU, all starting at once from an empty store: one compile per kernel, and when the slowest is done;
   the same with a warm store and with a pack, and DeepGEMM beside it, each of whose ranks compiles for itself.
4. model: tiny transformers models with a device map over all GPUs give the tokens of one.

Each part runs in processes of its own, so that none takes another along. ``--without-gpus N`` runs the ranks alone: N processes
that load what they compile into a pretended GPU. Exit status: 0, or 1 where anything is wrong, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cold_ranks
from common import Table, answer_of, environment, number, package_version, try_driver_version, without_settings, write_json

from deepgemm_jit.settings import PREFIX

HERE = Path(__file__).parent
RESULT = HERE / "results" / "many_gpus.json"
PACKAGES = ("torch", "transformers", "accelerate", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cutlass")
PARTS = ("memory", "speed", "ranks", "model")
LIMIT_S = 400.0

LEAST_RATIO = 0.97
"""Of the speed of a GPU alone."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of what was seen."""

    what: str
    seen: str
    faults: tuple[str, ...] = ()
    ran: bool = True

    @property
    def verdict(self) -> str:
        """Return one word for a table."""
        return "no" if self.faults else "yes" if self.ran else "-"


# --- what a part says


def claims_of(run: dict[str, Any]) -> list[Claim]:
    """Return what a run says, part by part."""
    claims: list[Claim] = []
    for part, result in run["parts"].items():
        if "not_run" in result:
            claims.append(Claim(part, f"not run: {result['not_run']}", ran=False))
        elif "fault" in result:
            claims.append(Claim(part, "failed", (result["fault"],)))
        else:
            claims += _CLAIMS[part](result, run)
    return claims


def _memory(result: dict[str, Any], _run: dict[str, Any]) -> list[Claim]:
    memory, unused, active = result["used_mib"], result["unused"], result["contexts_on_unused"]
    growth = [after - before for before, after in zip(memory["before_calls"], memory["after_calls"], strict=True)]
    grown = [growth[gpu] for gpu in unused]
    faults = [f"GPU {gpu} is not used and grew by {more} MiB" for gpu, more in zip(unused, grown, strict=True) if more]
    faults += [f"GPU {gpu} is not used and has a context" for gpu in active]
    blind = [gpu for gpu in result["used"] if growth[gpu] < result["held_mib"]]
    faults += [f"GPU {gpu} holds {result['held_mib']} MiB more, which its counter does not show" for gpu in blind]
    faults += [f"{result['different_elements']} elements differ"] if result["different_elements"] else []
    seen = f"{max(grown):+d} MiB, {len(active)} contexts; used ones {min(growth[gpu] for gpu in result['used']):+d} MiB and more"
    return [Claim(f"memory of GPUs that are not used ({', '.join(map(str, unused))})", seen, tuple(faults))]


def _speed(result: dict[str, Any], _run: dict[str, Any]) -> list[Claim]:
    rows, threads = result["gpus"], result["threads_per_gpu"]
    wrong = []
    for row in rows:
        for name, largest in result["largest_errors"].items():
            if row[name] is None or not row[name] <= largest:
                wrong.append(f"GPU {row['gpu']}: {name} {row[name]} is above {largest}")
        if row["different_elements"]:
            wrong.append(f"GPU {row['gpu']}: {row['different_elements']} elements differ from those of the first call")
    errors = " and ".join(f"{max(row[name] or 1 for row in rows):.1e}" for name in result["largest_errors"])
    rounds, different = (sum(row[name] for row in rows) for name in ("checked_rounds", "different_elements"))
    right = Claim(
        f"{threads} threads for each GPU, another one current",
        f"{rounds} rounds, {different} elements differ; first calls within {errors} of float64",
        tuple(wrong),
    )
    slow = [
        f"GPU {row['gpu']} has {row['ratio']:.3f} of its speed alone, required {LEAST_RATIO}"
        for row in rows
        if not row["ratio"] >= LEAST_RATIO
    ]
    ratios, alone = [row["ratio"] for row in rows], [row["alone_tflops"] for row in rows]
    seen = (
        f"{min(ratios):.3f} to {max(ratios):.3f}, alone {min(alone):.0f} to {max(alone):.0f} TFLOP/s; "
        f"host busy {result['host_share_alone']:.0%} for one, {result['host_share_together']:.0%} for all"
    )
    return [right, Claim("speed of a GPU, all at work / alone", seen, tuple(slow))]


def _ranks(result: dict[str, Any], run: dict[str, Any]) -> list[Claim]:
    claims = []
    for row in result["ours"]:
        compiles = sum(row["compiles"].values())
        seen = f"{row['kernels']} kernels, {compiles} compiles; slowest rank {number(row['slowest_s'], 2)} s"
        claims.append(Claim(f"{run['ranks']} ranks, {row['store']}, {row['work']}", seen, tuple(row["faults"])))
    peer = result.get("deep_gemm")
    if peer:
        compiles = sum(peer["kernels_per_rank"])
        seen = f"{compiles} compiles, {max(peer['kernels_per_rank'])} a rank; slowest rank {number(peer['slowest_s'], 2)} s"
        seen += f"; {'; '.join(peer['faults'])}" if peer["faults"] else ""  # the peer's faults are not ours
        claims.append(Claim(f"{run['ranks']} ranks, {peer['store']}, {peer['work']}", seen))
    return claims


def _model(result: dict[str, Any], run: dict[str, Any]) -> list[Claim]:
    claims = []
    for row in result["rows"]:
        faults = [f"other tokens, placed on {name}" for name, same in row["same_tokens"].items() if not same]
        faults += [] if row["finite"] else ["logits are not finite"]
        faults += [] if row["distinct_tokens"] > 1 else ["all tokens are the same, which tells nothing"]
        faults += [
            f"placed on {name}, it was on GPUs {row['gpus'][name]}"
            for name in ("all", "reversed")
            if row["gpus"][name] != list(range(run["gpus"]))
        ]
        seen = ("other tokens" if not all(row["same_tokens"].values()) else "same tokens") + (
            ", same bits of the logits" if all(row["same_logits"].values()) else ", other bits of the logits"
        )
        claims.append(Claim(f"{row['model']}, {row['activations']}, {row['layers']} layers over all GPUs", seen, tuple(faults)))
    return claims


_CLAIMS: dict[str, Callable[[dict[str, Any], dict[str, Any]], list[Claim]]] = {
    "memory": _memory,
    "speed": _speed,
    "ranks": _ranks,
    "model": _model,
}


# --- running


def run_part(part: str, options: argparse.Namespace, gpus: int, folder: Path) -> dict[str, Any]:
    """Run one part in processes of its own."""
    environ = without_settings() | {PREFIX + "CACHE_DIR": str(folder / "store"), PREFIX + "LOCK_DIR": str(folder / "locks")}
    if part == "ranks":
        return run_ranks(options, options.without_gpus or gpus, folder)
    if part == "memory" and gpus < 2:
        return {"not_run": "with one GPU none is left unused"}
    if part == "model":
        return answer_of([str(HERE / "spread_model.py"), str(gpus)], environ, LIMIT_S)
    return answer_of([str(HERE / "gpu_threads.py"), part, str(gpus), str(options.seconds)], environ, LIMIT_S)


def run_ranks(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Run the ranks of both sides."""
    works = ("load",) if options.without_gpus else ("forward", "gemms")
    result: dict[str, Any] = {"ours": cold_ranks.measure(works, ranks, folder / "ours")}
    if not options.without_gpus and not options.ours_only and find_spec("deep_gemm") is not None:
        result["deep_gemm"] = cold_ranks.measure_peer(ranks, folder / "deep_gemm")
    return result


def machine_of(gpus: int) -> dict[str, Any]:
    """Return the record of this machine and of the GPUs that are used."""
    record = environment(PACKAGES)
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm")
    if gpus:
        import torch

        names = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
        record["machine"] |= {"gpu": ", ".join(sorted(set(names))), "driver": try_driver_version(), "cuda": torch.version.cuda}
    return record


def keep(path: Path, run: dict[str, Any]) -> None:
    """Write a run into the results, in the place of those with as many GPUs and no other parts."""
    earlier = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    others = [other for other in earlier if other["gpus"] != run["gpus"] or other["parts"].keys() - run["parts"].keys()]
    write_json(path, {"runs": sorted([*others, run], key=lambda each: each["gpus"])})


def visible_gpus() -> int:
    """Return how many GPUs torch sees; 0 without torch."""
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def parts_of(text: str) -> tuple[str, ...]:
    """Read a list such as ``speed,ranks``."""
    if unknown := [word for word in text.split(",") if word not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is none of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in text.split(","))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--gpus", type=positive, metavar="N", help="use the first N; default: all that are visible")
    line.add_argument("--without-gpus", type=positive, metavar="N", help="run the ranks alone, as N processes without GPUs")
    line.add_argument("--parts", type=parts_of, default=PARTS, metavar="LIST", help=f"of {','.join(PARTS)}; default: all")
    line.add_argument("--seconds", type=float, default=3.0, help="of each pass of the speed; default: 3")
    line.add_argument("--ours-only", action="store_true", help="leave DeepGEMM out")
    line.add_argument("--json", type=Path, metavar="PATH", help="default: bench/results/many_gpus.json, and none without GPUs")
    return line


def main() -> int:
    options = parser().parse_args()
    visible = 0 if options.without_gpus else visible_gpus()
    gpus = options.gpus or visible
    if not options.without_gpus and not 0 < gpus <= visible:
        print(f"bench/many_gpus.py needs {max(gpus, 1)} GPUs, and torch sees {visible}; see --without-gpus.", file=sys.stderr)
        return 2
    path = options.json or (None if options.without_gpus else RESULT)
    run: dict[str, Any] = machine_of(gpus) | {"gpus": gpus, "ranks": options.without_gpus or gpus, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("ranks",) if options.without_gpus else options.parts:
            print(f"{part} ...", flush=True)
            run["parts"][part] = run_part(part, options, gpus, Path(folder))
            if path:  # after each part: what was measured stays, whatever becomes of the next one
                keep(path, run)
    claims = claims_of(run)
    faults = [f"FAILED {claim.what}: {fault}" for claim in claims for fault in claim.faults]
    if faults:
        print("\n".join(faults), file=sys.stderr, flush=True)
    table = Table(("part", 62), ("fine", 4), ("seen", 0))
    table.start(f"{gpus} GPUs" if gpus else f"{run['ranks']} processes without GPUs")
    for claim in claims:
        table.row(claim.what, claim.verdict, claim.seen)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every FP8 GEMM tile and split on problems of many sizes, and how far selection's choice is from the best of them.

``measure`` times the tiles on one Hopper GPU; ``judge`` needs none: it reads such a result and prints where the cost model of
``deepgemm_jit.spec.cost`` picks a slower tile, and its mean loss. Change the model's constants, judge again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Table, environment, geometric_mean, number, try_driver_version, write_json
from problems import Shape, shapes

from deepgemm_jit.spec import GemmProblem, Layout, Selected, limits_of, selected
from deepgemm_jit.spec.selection import choices

ARCH = "sm_90a"
LAYOUTS = {"dense": Layout.DENSE, "contiguous": Layout.CONTIGUOUS, "masked": Layout.MASKED}
DENSE_M = (1, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
MORE_SIZES = ((576, 7168), (1536, 2048), (5760, 2880), (2880, 2880))
"""Beside those of ``bench/gemm.py``: narrow outputs, and those of other models."""
WORTH_A_LINE = 1.03


def measured_shapes() -> Iterator[Shape]:
    """Yield the shapes of ``bench/gemm.py``, with more values of M between the dense ones and fuller groups beside the masked."""
    sizes = sorted({(shape.n, shape.k) for shape in shapes("dense")} | set(MORE_SIZES))
    yield from (Shape("dense", 1, m, m, n, k) for m in DENSE_M for n, k in sizes)
    yield from shapes("contiguous")
    yield from shapes("masked")
    yield Shape("masked", 32, 256, 256, 4096, 7168)
    for rows in (1, 16, 32, 64):
        yield Shape("masked", 128, 64, rows, 1536, 2048)
        yield Shape("masked", 32, 64, rows, 4096, 7168)
        yield Shape("masked", 8, 64, rows, 7168, 2048)


def problem_of(shape: Shape) -> GemmProblem:
    """Return the problem that a call with this shape poses."""
    m = shape.rows * shape.groups if shape.kind == "contiguous" else shape.rows
    return GemmProblem(m, shape.n, shape.k, shape.groups, LAYOUTS[shape.kind])


def label(choice: Selected) -> str:
    """Name a tile and its split in a result."""
    spec = choice.spec
    tile = f"{spec.family}_{spec.block[0]}x{spec.block[1]}" + (f"_c{spec.cluster}" if spec.cluster > 1 else "")
    return tile + (f"/{choice.split_k}" if choice.split_k > 1 else "")


def measure(path: Path, seconds: float) -> int:
    """Time every fitting tile on every shape and write the result."""
    import torch
    from gemm import FLUSH_BYTES, gemm_call, time_in_turn
    from problems import empty_output, random_operands

    from deepgemm_jit import ops
    from deepgemm_jit.ops import launching
    from deepgemm_jit.service import default_service

    record = environment(("cuda-bindings", "nvidia-cuda-nvrtc", "torch"))
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version()}
    limits = limits_of(ARCH, torch.cuda.get_device_properties(0).multi_processor_count)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    for shape in measured_shapes():
        x = random_operands(shape, flush.device)
        call = gemm_call(ops, shape, x, empty_output(shape, x))

        def forced(choice: Selected, call: Any = call) -> None:
            launching.selected = lambda _problem, _limits: choice  # type: ignore[assignment]
            default_service().forget_calls()  # or the call would be made again with the tile before
            call()

        tried = list(choices(problem_of(shape), limits))
        timings = time_in_turn([lambda choice=choice: forced(choice) for choice in tried], flush, seconds)  # type: ignore[misc]
        times = {label(choice): round(timing.device_us.median, 2) for choice, timing in zip(tried, timings, strict=True)}
        rows.append({"kind": shape.kind, "groups": shape.groups, "max_m": shape.max_m, "rows": shape.rows, "n": shape.n,
                     "k": shape.k, "us": times})  # fmt: skip
    write_json(path, record | {"sms": limits.sms, "rows": rows})
    return judge(path)


def judge(path: Path) -> int:
    """Print the shapes on which selection's tile is over 3 % slower than the best, and the mean loss."""
    result = json.loads(path.read_text())
    limits = limits_of(ARCH, result["sms"])
    table = Table(("shape", 34), ("chosen", 28), ("us", 8), ("best", 28), ("us", 8), ("loss", 6))
    table.start(f"{path}: choices over 3 % slower than the best tile")
    losses = []
    for row in result["rows"]:
        shape = Shape(row["kind"], row["groups"], row["max_m"], row["rows"], row["n"], row["k"])
        times: dict[str, float] = row["us"]
        chosen, best = label(selected(problem_of(shape), limits)), min(times, key=lambda name: times[name])
        losses.append(times[chosen] / times[best])
        if losses[-1] > WORTH_A_LINE:
            table.row(f"{shape.kind} {shape.label}", chosen, number(times[chosen]), best, number(times[best]),
                      number(losses[-1], 2))  # fmt: skip
    print(f"{len(losses)} shapes, mean loss {geometric_mean(losses) - 1:.2%}, worst {max(losses) - 1:.1%}")
    return 0


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("what", choices=("measure", "judge"))
    line.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "tiles.json", metavar="PATH")
    line.add_argument("--seconds", type=float, default=0.2, help="longest timing of one shape; default: 0.2")
    options = line.parse_args()
    return measure(options.json, options.seconds) if options.what == "measure" else judge(options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Every GEMM tile and split of one kind of operands on problems of many sizes, and how far selection's choice is from the best.

``measure`` times the tiles on one Hopper GPU; the others need none. ``judge`` reads such a result and prints where the cost model
of ``deepgemm_jit.spec.cost`` picks a slower tile, and its mean loss. ``fit`` prints constants of the tiles with which the model
comes closest to the times. Change the model's constants, judge again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Table, environment, geometric_mean, number, try_driver_version, write_json
from problems import Shape, shapes

from deepgemm_jit.spec import BF16_GEMM, N_MAJOR, GemmProblem, KernelSpec, Layout, Selected, limits_of, selected
from deepgemm_jit.spec.cost import Option, Work, options
from deepgemm_jit.spec.selection import choices

ARCH = "sm_90a"
LAYOUTS = {"dense": Layout.DENSE, "contiguous": Layout.CONTIGUOUS, "masked": Layout.MASKED}
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {"fp8": ("e4m3", ()), "bf16": ("bf16", ()), "bf16_nn": ("bf16", (N_MAJOR,))}
"""Dtype of A and B, and the flags of the kernels."""
DENSE_M = (1, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
MORE_SIZES = ((576, 7168), (1536, 2048), (5760, 2880), (2880, 2880))
"""Beside those of ``bench/gemm.py``: narrow outputs, and those of other models."""
WORTH_A_LINE = 1.03
EMPTY_US = 4.5
"""What an empty kernel reads behind a flush: it is in the times and not in the model."""


def measured_shapes(variant: str) -> Iterator[Shape]:
    """Yield the shapes of ``bench/gemm.py``, with more values of M between the dense ones and fuller groups beside the masked."""
    sizes = sorted({(shape.n, shape.k) for shape in shapes("dense")} | set(MORE_SIZES))
    yield from (Shape("dense", 1, m, m, n, k) for m in DENSE_M for n, k in sizes)
    yield from shapes("contiguous")
    if N_MAJOR in VARIANTS[variant][1]:
        return  # of masked groups there is no such operation
    yield from shapes("masked")
    yield Shape("masked", 32, 256, 256, 4096, 7168)
    for rows in (1, 16, 32, 64):
        yield Shape("masked", 128, 64, rows, 1536, 2048)
        yield Shape("masked", 32, 64, rows, 4096, 7168)
        yield Shape("masked", 8, 64, rows, 7168, 2048)


def problem_of(shape: Shape, variant: str = "fp8") -> GemmProblem:
    """Return the problem that a call with this shape poses."""
    m = shape.rows * shape.groups if shape.kind == "contiguous" else shape.rows
    dtype, flags = VARIANTS[variant]
    return GemmProblem(m, shape.n, shape.k, shape.groups, LAYOUTS[shape.kind], dtypes=(dtype, dtype, "bf16"), variant=flags)


def tile_of(spec: KernelSpec) -> str:
    """Name a tile in a table: rows x columns, stages, cluster."""
    return f"{'x'.join(str(size) for size in spec.block[:2])} s{spec.stages}" + (f" c{spec.cluster}" if spec.cluster > 1 else "")


def label(choice: Selected) -> str:
    """Name a tile and its split in a result."""
    spec = choice.spec
    tile = f"{spec.family}_{spec.block[0]}x{spec.block[1]}" + (f"_c{spec.cluster}" if spec.cluster > 1 else "")
    return tile + (f"/{choice.split_k}" if choice.split_k > 1 else "")


def call_of(shape: Shape, variant: str) -> Callable[[], object]:
    """Return a call of ours on random operands of a shape."""
    import bf16
    import gemm
    import problems
    import torch

    from deepgemm_jit import ops

    device = torch.device("cuda")
    if variant == "fp8":
        x = problems.random_operands(shape, device)
        return gemm.gemm_call(ops, shape, x, problems.empty_output(shape, x))
    y = bf16.random_operands(shape, device, n_major=N_MAJOR in VARIANTS[variant][1])
    return bf16.bf16_call(ops, shape, y, bf16.empty_output(shape, y))


def measure(path: Path, variant: str, seconds: float) -> int:
    """Time every fitting tile on every shape and write the result."""
    import torch
    from gemm import FLUSH_BYTES, time_in_turn

    from deepgemm_jit.ops import launching
    from deepgemm_jit.service import default_service

    record = environment(("cuda-bindings", "nvidia-cuda-nvrtc", "torch"))
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version()}
    limits = limits_of(ARCH, torch.cuda.get_device_properties(0).multi_processor_count)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    for shape in measured_shapes(variant):
        call = call_of(shape, variant)

        def forced(choice: Selected, call: Any = call) -> None:
            launching.selected = lambda _problem, _limits: choice  # type: ignore[assignment]
            default_service().forget_calls()  # or the call would be made again with the tile before
            call()

        tried = list(choices(problem_of(shape, variant), limits))
        timings = time_in_turn([lambda choice=choice: forced(choice) for choice in tried], flush, seconds)  # type: ignore[misc]
        times = {label(choice): round(timing.device_us.median, 2) for choice, timing in zip(tried, timings, strict=True)}
        rows.append({"kind": shape.kind, "groups": shape.groups, "max_m": shape.max_m, "rows": shape.rows, "n": shape.n,
                     "k": shape.k, "us": times})  # fmt: skip
    write_json(path, record | {"operands": variant, "sms": limits.sms, "rows": rows})
    return judge(path)


def judge(path: Path) -> int:
    """Print the shapes on which selection's tile is over 3 % slower than the best, and the mean loss."""
    result = json.loads(path.read_text())
    limits = limits_of(ARCH, result["sms"])
    table = Table(("shape", 34), ("chosen", 28), ("us", 8), ("best", 28), ("us", 8), ("loss", 6))
    table.start(f"{path}: choices over 3 % slower than the best tile")
    losses = []
    for row in result["rows"]:
        shape, times = shape_of(row), row["us"]
        chosen = label(selected(problem_of(shape, variant_of(result)), limits))
        best = min(times, key=lambda name: times[name])
        losses.append(times[chosen] / times[best])
        if losses[-1] > WORTH_A_LINE:
            table.row(f"{shape.kind} {shape.label}", chosen, number(times[chosen]), best, number(times[best]),
                      number(losses[-1], 2))  # fmt: skip
    print(f"{len(losses)} shapes, mean loss {geometric_mean(losses) - 1:.2%}, worst {max(losses) - 1:.1%}")
    return 0


def fit(path: Path) -> int:
    """Print for each tile of a BF16 result the constants with which the model comes closest to its times, and how close."""
    result = json.loads(path.read_text())
    if variant_of(result) == "fp8":
        print(f"{path} is of FP8 tiles, whose splits share constants: fit takes results of bf16 or bf16_nn.", file=sys.stderr)
        return 2
    table = Table(("tile", 28), ("shapes", 6), ("k-block ns", 10), ("tile ns", 8), ("was off by", 10), ("is off by", 10))
    table.start(f"{path}: constants of the cost model; off by: root mean square of the logarithms")
    for option in options(ARCH, (BF16_GEMM,), VARIANTS[variant_of(result)][1]):
        name = label(Selected(option.spec))
        timed = [(work_of(shape_of(row)), row, row["us"][name] - EMPTY_US) for row in result["rows"] if name in row["us"]]

        def error(constants: tuple[int, int], option: Option = option, timed: Any = timed) -> float:
            tried = option._replace(k_block_ns=constants[0], tile_ns=constants[1])
            return math.sqrt(math.fsum(
                math.log(tried.load(work, rows_of(row)).costs_ns([result["sms"]], whole=True)[0] / (us * 1e3)) ** 2
                for work, row, us in timed
            ) / len(timed))  # fmt: skip

        before = option.k_block_ns, option.tile_ns
        found = lowest(error, before)
        table.row(name, len(timed), *found, number(error(before), 3), number(error(found), 3))
    return 0


def lowest(error: Callable[[tuple[int, int]], float], start: tuple[int, int]) -> tuple[int, int]:
    """Return the constants of the least error that are found by steps, from a fifth of a constant down to single units."""
    best, least = start, error(start)
    step = 0.2
    while step > 1e-3:
        k_block, tile = (max(1, round(constant * step)) for constant in best)
        around = [(best[0] + i * k_block, best[1] + j * tile) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        nearest = min((constants for constants in around if min(constants) > 0), key=error)
        if error(nearest) < least:
            best, least = nearest, error(nearest)
        else:
            step /= 2
    return best


def shape_of(row: dict[str, Any]) -> Shape:
    return Shape(row["kind"], row["groups"], row["max_m"], row["rows"], row["n"], row["k"])


def variant_of(result: dict[str, Any]) -> str:
    return str(result.get("operands", "fp8"))


def rows_of(row: dict[str, Any]) -> int:
    """Return the rows that the model sees: of each group if masked, of all together otherwise."""
    return int(row["rows"] * (row["groups"] if row["kind"] == "contiguous" else 1))


def work_of(shape: Shape) -> Work:
    """Return what the model knows of a BF16 problem beside its rows."""
    return Work.of(shape.n, 2 * shape.k, shape.groups, masked=shape.kind == "masked")


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("what", choices=("measure", "judge", "fit"))
    line.add_argument("--operands", choices=tuple(VARIANTS), default="fp8", help="what to measure; default: fp8")
    line.add_argument("--json", type=Path, metavar="PATH", help="default: results/tiles.json here, tiles_bf16.json for bf16")
    line.add_argument("--seconds", type=float, default=0.2, help="longest timing of one shape; default: 0.2")
    given = line.parse_args()
    name = "tiles" if given.operands == "fp8" else f"tiles_{given.operands}"
    path = given.json or Path(__file__).parent / "results" / f"{name}.json"
    if given.what == "measure":
        return measure(path, given.operands, given.seconds)
    return judge(path) if given.what == "judge" else fit(path)


if __name__ == "__main__":
    sys.exit(main())

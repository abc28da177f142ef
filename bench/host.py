"""What a call costs the host: this package and DeepGEMM in turn, in one process on one Hopper GPU, and each part of our own.

Calls are made in bursts that the GPU's queue takes without making the host wait; a burst is timed from its first to its last
call, and the device is idle when it starts. The ratio is our time over DeepGEMM's: below 1 we are cheaper. Exit status: 0, or 1
for a ratio above ``--require`` or a context check above 1 us, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import Spread, Table, environment, number, package_version, try_driver_version, write_json
from gemm import PACKAGES, gemm_call, try_peer
from problems import Shape, empty_output, random_operands

from deepgemm_jit import ops
from deepgemm_jit.ops import checks, launching, prepared
from deepgemm_jit.runtime import keep
from deepgemm_jit.runtime.tensormap import BoxedTensor
from deepgemm_jit.service import default_service
from deepgemm_jit.spec import GemmProblem, Layout, select

Call = Callable[[], object]

RESULT = Path(__file__).parent / "results" / "host.json"
BURST = 100
"""Calls in a row: few enough for the queue of 1024 launches, also where a call is several."""
LARGEST_CONTEXT_CHECK_US = 1.0
LAUNCHING_PARTS = ("the whole call", "driver call", "spared: dispatcher, around the whole")
SHAPES = (
    Shape("dense", 1, 64, 64, 2112, 7168),
    Shape("contiguous", 4, 128, 128, 1536, 2048),
    Shape("masked", 4, 64, 16, 1536, 2048),
)
"""Short on the GPU: where launches queue up behind it, the driver takes longer to make one, on either side."""


def time_in_turn(calls: Sequence[Call], bursts: int, burst: int = BURST) -> list[Spread]:
    """Return the host's time of one call in us, over ``bursts`` of ``burst`` calls of each, in turn."""
    for call in calls:
        for _ in range(10):
            call()
    times: list[list[float]] = [[] for _ in calls]
    gc.disable()
    try:
        for _ in range(bursts):
            for call, costs in zip(calls, times, strict=True):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(burst):
                    call()
                costs.append((time.perf_counter() - started) / burst * 1e6)
        torch.cuda.synchronize()
    finally:
        gc.enable()
    return [Spread.of(costs) for costs in times]


def parts_of(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> dict[str, Call]:
    """Return the parts of ``ops.fp8_gemm_nt`` on these operands, which were multiplied before: first those of a repeated call.

    The last ones are what a repeated call is spared.
    """
    operands = (*a, *b, out)
    options = "fp8_gemm_nt", False
    device = out.get_device()
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    service = default_service()
    contexts, driver, maps = service.contexts, service.contexts.driver, service.maps
    context, entered = contexts.enter(device, stream)
    contexts.leave(entered)
    known = service.prepared(context)
    key = prepared._key_at(options, stream, operands)
    again: prepared.PreparedLaunch = known[key]
    whole: prepared.PreparedGemm = known[prepared._key_of(options, operands)]
    kernel = again.kernel
    problem = GemmProblem(out.shape[0], out.shape[1], operands[0].shape[1], 1, Layout.DENSE)
    n, k, rows = out.shape[1], operands[0].shape[1], kernel.spec.block[1]
    box = BoxedTensor(operands[2].data_ptr(), "u8", (k, n, 1), (k, k * n), (128, rows, 1), swizzled=True)

    def enter_and_leave() -> None:
        _, pushed = contexts.enter(device, stream)
        if pushed:
            contexts.leave(pushed)

    return {
        "whether anything watches": prepared.is_watched,
        "current stream": lambda: torch._C._cuda_getCurrentRawStream(device),
        "context check": enter_and_leave,
        "key of the call": lambda: prepared._key_at(options, stream, operands),
        "dictionary": lambda: known.get(key),
        "driver call": lambda: driver.launch_as(again.config_pointer, kernel._function, again.params_pointer),
        "spared: dispatcher, around the whole": lambda: torch.ops.deepgemm_jit.fp8_gemm(*operands, False),
        "spared: checks": lambda: checks.check_gemm("fp8_gemm_nt", operands[0], operands[2], out, (operands[1], operands[3])),
        "spared: selection": lambda: select(problem, service._home(context).limits),
        "spared: tensor map, encoded": lambda: maps._encoded(box),
        "spared: tensor map, kept": lambda: maps.map_for(box),
        "spared: maps and arguments": lambda: whole.prepare(whole.gemm),
        "spared: memory of their own": lambda: keep(whole.prepare(whole.gemm)),
        "spared: all, by new addresses": lambda: prepared._try_moved(whole, stream, *[t.data_ptr() for t in operands]),
        "spared: entering a call": lambda: _enter(out),
    }


def _enter(tensor: torch.Tensor) -> None:
    with launching.call_on(tensor):
        pass


def measure(shape: Shape, peer: SimpleNamespace | None, stream: torch.cuda.Stream, bursts: int) -> dict[str, Any]:
    """Return the row of one shape: both sides in turn on one stream."""
    operands = random_operands(shape, torch.device("cuda"))
    calls = [gemm_call(library, shape, operands, empty_output(shape, operands)) for library in (ops, peer) if library is not None]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        spreads = time_in_turn(calls, bursts)
    row: dict[str, Any] = {"kind": shape.kind, "shape": shape.label, "stream": "default" if stream.cuda_stream == 0 else "own"}
    row["ours"] = spreads[0].record("us")
    if peer is not None:
        row |= {"deep_gemm": spreads[1].record("us"), "ratio": round(spreads[0].median / spreads[1].median, 4)}
    return row


def measure_parts(bursts: int) -> dict[str, dict[str, float]]:
    """Return the cost of each part of a dense call on a stream of its own, which costs one question more than the default one."""
    shape = SHAPES[0]
    operands = random_operands(shape, torch.device("cuda"))
    a = (operands.a, ops.get_mn_major_tma_aligned_tensor(operands.a_scale))
    b, out = (operands.b, operands.b_scale), empty_output(shape, operands)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            ops.fp8_gemm_nt(a, b, out)
        parts = {"the whole call": lambda: ops.fp8_gemm_nt(a, b, out), **parts_of(a, b, out)}
        # What launches nothing is short: more of it makes a burst that the first few, with cold caches, do not decide.
        spreads: dict[str, Spread] = {}
        for launches, burst in ((True, BURST), (False, 20 * BURST)):
            some = [name for name in parts if (name in LAUNCHING_PARTS) == launches]
            spreads |= zip(some, time_in_turn([parts[name] for name in some], bursts, burst), strict=True)
    return {name: spread.record("us") for name, spread in spreads.items()}


def verdicts(rows: Sequence[dict[str, Any]], parts: dict[str, dict[str, float]], require: float) -> list[str]:
    """Return what misses its aim."""
    faults = [
        f"{row['kind']} on the {row['stream']} stream: {row['ratio']:.2f} of DeepGEMM's host time, required: {require}"
        for row in rows
        if row.get("ratio", 0) > require
    ]
    check_us = parts["context check"]["median_us"]
    if check_us > LARGEST_CONTEXT_CHECK_US:
        faults.append(f"the context check takes {check_us:.2f} us, required: {LARGEST_CONTEXT_CHECK_US}")
    return faults


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--ours-only", action="store_true", help="leave DeepGEMM out")
    line.add_argument("--bursts", type=int, default=200, help=f"bursts of {BURST} calls behind each median; default: 200")
    line.add_argument("--require", type=float, default=0.6, help="largest share of DeepGEMM's host time; default: 0.6")
    line.add_argument("--json", type=Path, default=RESULT, metavar="PATH", help="default: bench/results/host.json")
    return line


def main() -> int:
    options = parser().parse_args()
    if options.bursts < 1:
        parser().error("argument --bursts: must be at least 1")
    if not torch.cuda.is_available():
        print("bench/host.py needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    peer = None if options.ours_only else try_peer()
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm") if peer else None
    machine = record["machine"]
    load = machine["load_average_1_min"]
    print(f"{machine['gpu']}, driver {machine['driver']}, {machine['cpus']} CPUs ({machine['cpu']}), load {load}")
    sides = ("ours us", 8), ("p10-p90", 13), ("DeepGEMM us", 11), ("p10-p90", 13)
    table = Table(("call", 34), ("stream", 8), *sides, ("ratio", 6))
    rows = []
    with torch.no_grad():
        table.start(f"Host time of a call, medians of {options.bursts} bursts of {BURST}; ratio = ours / DeepGEMM")
        for shape in SHAPES:
            for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
                row = measure(shape, peer, stream, options.bursts)
                rows.append(row)
                cells = [cell for side in ("ours", "deep_gemm") for cell in _cells(row.get(side))]
                table.row(f"{row['kind']} {row['shape']}", row["stream"], *cells, number(row.get("ratio"), 2))
        parts = measure_parts(options.bursts)
    table = Table(("part of a dense call, stream of its own", 40), ("us", 7), ("p10-p90", 13))
    table.start("Our parts, each timed by itself: their sum is above the whole, which pays for one loop only")
    for name, part in parts.items():
        table.row(name, *_cells(part))
    write_json(options.json, {**record, "burst": BURST, "bursts": options.bursts, "calls": rows, "parts": parts})
    faults = verdicts(rows, parts, options.require)
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if faults else 0


def _cells(spread: dict[str, float] | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return number(spread["median_us"], 2), f"{number(spread['p10_us'], 2)}-{number(spread['p90_us'], 2)}"


if __name__ == "__main__":
    sys.exit(main())

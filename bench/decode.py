"""Dense FP8 GEMMs of few rows in CUDA graphs over cold weights: this package, DeepGEMM, and a pass that only reads the weights.

A graph holds calls on copies of the weights that together exceed the L2 cache several times, so each call finds its own cold.
Results are compared with float64 before they are timed. Every shape is timed without and with programmatic dependent launch, on
for both sides or off for both; ours also with weights that are promised to be constant, and so are read before a launch waits.
The pass over the weights is a Triton kernel and never overlaps. Exit status: 0, or 1 for a wrong result.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from common import Table, environment, geometric_mean, number, package_version, try_driver_version, write_json
from gemm import LARGEST_ERROR, PACKAGES, Call, gemm_call, try_peer
from problems import Shape, empty_output, random_operands, relative_errors, shapes

from deepgemm_jit import ops

ROWS = (1, 16, 64, 128)
COLD_BYTES = 200 * 2**20
"""Of the copies of the weights: more than three times the L2 cache."""
MOST_COPIES = 40
CALLS = 24
"""Of a graph, at least."""
REPLAYS = 9


@triton.jit  # type: ignore[untyped-decorator]
def read(source, sums, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Read words and keep nothing of them but one word a program."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(program * BLOCK, words, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        total = total ^ tl.load(source + place, mask=place < words, other=0)
    tl.store(sums + program, tl.max(total, 0))


def graph_us(calls: Sequence[Call]) -> float:
    """Return the time of one call of a graph of them, the median of some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


def measure(shape: Shape, peer: Any) -> dict[str, Any]:
    """Check and time one shape."""
    copies = min(max(3, COLD_BYTES // (shape.n * shape.k) + 1), MOST_COPIES)
    drawn = [random_operands(shape, torch.device("cuda")) for _ in range(copies)]
    outs = [empty_output(shape, x) for x in drawn]
    repeats = -(-CALLS // copies)
    sides = {"ours": ops} | ({"deep_gemm": peer} if peer else {})
    calls = {name: [gemm_call(side, shape, x, out) for x, out in zip(drawn, outs, strict=True)] for name, side in sides.items()}
    row: dict[str, Any] = {"m": shape.rows, "n": shape.n, "k": shape.k, "copies": copies}
    for name, some in calls.items():
        some[0]()
        row[f"{name}_relative_error"] = relative_errors(shape, drawn[0], [outs[0]])[0]
    sums = torch.empty(1024, dtype=torch.int32, device="cuda")
    words = [x.b.view(torch.int32) for x in drawn]
    streams = [lambda w=w: read[(528,)](w, sums, w.numel(), BLOCK=4096, num_warps=8) for w in words]  # type: ignore[misc]
    row["stream_us"] = round(graph_us(streams * repeats), 3)
    for dependent in (False, True):
        ops.set_pdl(dependent)
        if peer:
            sys.modules["deep_gemm"].set_pdl(dependent)
        suffix = "_dependent_us" if dependent else "_us"
        row |= {f"{name}{suffix}": round(graph_us(some * repeats), 3) for name, some in calls.items()}
    ops.set_pdl(True, constant_weights=True)
    row["ours_constant_weights_us"] = round(graph_us(calls["ours"] * repeats), 3)
    ops.set_pdl(False)
    if peer:
        sys.modules["deep_gemm"].set_pdl(False)
    return row


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "decode.json", metavar="PATH")
    options = line.parse_args()
    if not torch.cuda.is_available():
        print("bench/decode.py needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    peer = try_peer()
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm") if peer else None
    table = Table(("shape", 22), ("read us", 8), ("ours", 8), ("DeepGEMM", 8), ("ratio", 6), ("ours dep.", 9),
                  ("DeepGEMM dep.", 13), ("ratio", 6), ("ours const.", 11), ("ratio", 6), ("ours/read", 9))  # fmt: skip
    table.start("us a call in a graph, cold weights; ratio = DeepGEMM / ours; dep.: with programmatic dependent launch")
    rows = []
    for shape in shapes("dense"):
        if shape.rows not in ROWS:
            continue
        row = measure(shape, peer)
        rows.append(row)
        if peer:
            for suffix in ("", "_dependent"):
                row[f"ratio{suffix}"] = round(row[f"deep_gemm{suffix}_us"] / row[f"ours{suffix}_us"], 4)
            row["ratio_constant_weights"] = round(row["deep_gemm_dependent_us"] / row["ours_constant_weights_us"], 4)
        table.row(shape.label, number(row["stream_us"]), *(number(row.get(key), digits) for key, digits in (
            ("ours_us", 1), ("deep_gemm_us", 1), ("ratio", 2), ("ours_dependent_us", 1), ("deep_gemm_dependent_us", 1),
            ("ratio_dependent", 2), ("ours_constant_weights_us", 1), ("ratio_constant_weights", 2))),
            number(row["ours_us"] / row["stream_us"], 2))  # fmt: skip
    summary = {}
    for rows_of in ((1, 16), (64, 128)) if peer else ():
        some = [row for row in rows if row["m"] in rows_of]
        for key in ("ratio", "ratio_dependent", "ratio_constant_weights"):
            mean, worst = geometric_mean(row[key] for row in some), min(row[key] for row in some)
            summary[f"m in {rows_of}, {key}"] = {"geometric_mean": round(mean, 4), "worst": worst}
            print(f"M in {rows_of}, {key}: geometric mean {mean:.3f}, worst {worst:.3f}")
    write_json(options.json, record | {"summary": summary, "rows": rows})
    return 0 if all(row["ours_relative_error"] <= LARGEST_ERROR for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

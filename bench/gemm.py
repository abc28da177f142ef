"""FP8 GEMMs on one Hopper GPU: this package and DeepGEMM in turn, in one process, beside torch and the floors of the machine.

Every result is compared with a float64 reference before it is timed; a wrong one is not timed. A-scales lie as the kernels
read them on both sides, and the L2 cache is flushed before every call. The ratio is DeepGEMM's time over ours: above 1 we are
faster. Exit status: 0, or 1 for a wrong result or a geometric mean of a grouped kind below ``--require``, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import Spread, Table, environment, geometric_mean, number, package_version, try_driver_version, write_json
from problems import (
    KINDS,
    PEAK_BYTES_PER_S,
    PEAK_FLOPS_PER_S,
    Kind,
    Operands,
    Shape,
    empty_output,
    random_operands,
    relative_errors,
    sample,
    shapes,
)
from tiles import problem_of, tile_of

from deepgemm_jit import ops
from deepgemm_jit.errors import DeepGemmJitError
from deepgemm_jit.spec import Limits, arch_of, limits_of, select

Call = Callable[[], object]

LARGEST_ERROR = 2e-3
"""Frobenius norm of the difference over that of the reference, per group; rounding to bf16 alone gives 1.66e-3."""

FLUSH_BYTES = 512 * 2**20
"""Many times the L2 cache, and long enough on the GPU (over 120 us) to hide what a call costs on the host."""

MAX_ROUNDS = 1000
BASELINE_SHARE = 0.2
"""Of the seconds per shape, for torch: it is context, and no ratio is taken from it."""

SAMPLE = "sample"
"""Name of the shapes that are drawn, among the kinds."""

PEER_NAMES = {
    "fp8_gemm_nt": ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    "m_grouped_fp8_gemm_nt_contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    "m_grouped_fp8_gemm_nt_masked": ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"),
    "get_mn_major_tma_aligned_tensor": ("get_mn_major_tma_aligned_tensor",),
}
"""Functions of ours, and under which names DeepGEMM has had them."""

PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cutlass")


def gemm_call(library: Any, shape: Shape, operands: Operands, out: torch.Tensor) -> Call:
    """Return the call of ``library``, ours or DeepGEMM: names and argument order are the same. Lays out the A scales now."""
    a = (operands.a, library.get_mn_major_tma_aligned_tensor(operands.a_scale))
    b = (operands.b, operands.b_scale)
    if shape.kind == "dense":
        return partial(library.fp8_gemm_nt, a, b, out)
    if shape.kind == "contiguous":
        return partial(library.m_grouped_fp8_gemm_nt_contiguous, a, b, out, operands.group_data)
    return partial(library.m_grouped_fp8_gemm_nt_masked, a, b, out, operands.group_data, shape.rows)


def torch_calls(shape: Shape, operands: Operands) -> dict[str, Call]:
    """Return what torch offers for the shape: bf16, and FP8 with one scale per row where it takes the sizes."""
    x = operands
    calls: dict[str, Call] = {}
    if shape.kind == "dense":
        calls["torch_bf16"] = lambda: torch.mm(x.a16, x.b16.T)
        a_scale = torch.ones(shape.rows, 1, device=x.a.device)
        b_scale = torch.ones(1, shape.n, device=x.a.device)
        calls["torch_rowwise_fp8"] = lambda: torch._scaled_mm(x.a, x.b.T, a_scale, b_scale, out_dtype=torch.bfloat16)
    elif shape.kind == "contiguous":
        ends = torch.arange(1, shape.groups + 1, dtype=torch.int32, device=x.a.device) * shape.rows
        calls["torch_bf16"] = lambda: torch._grouped_mm(x.a16, x.b16.transpose(1, 2), offs=ends)
    for name, call in list(calls.items()):
        try:
            call()
        except (RuntimeError, AttributeError, NotImplementedError):
            del calls[name]  # not in this torch, or not for this size
    return calls


@dataclass(frozen=True, slots=True)
class Timing:
    """Device time of one call, and what it costs the host to make it."""

    device_us: Spread
    host_us: float


def time_in_turn(calls: Sequence[Call], flush: torch.Tensor, seconds: float) -> list[Timing]:
    """Time calls in turn, round by round, each behind a flush of the L2 cache.

    Events enclose the call alone. While the flush runs the host has time to queue the call, so that its own cost does not
    count; :attr:`Timing.host_us` says whether that holds.
    """
    stream = torch.cuda.current_stream()
    for _ in range(3):
        for call in calls:
            call()
    torch.cuda.synchronize()
    host_us: list[list[float]] = [[] for _ in calls]
    started = time.perf_counter()
    for _ in range(10):  # few enough that the queue never fills and makes the host wait
        for call, costs in zip(calls, host_us, strict=True):
            flush.zero_()
            before = time.perf_counter()
            call()
            costs.append((time.perf_counter() - before) * 1e6)
    torch.cuda.synchronize()
    round_s = (time.perf_counter() - started) / 10
    rounds = min(max(int(seconds / round_s), 10), MAX_ROUNDS)
    events = [[(_event(), _event()) for _ in range(rounds)] for _ in calls]
    gc.disable()
    try:
        for turn in range(rounds):
            for call, pairs in zip(calls, events, strict=True):
                start, end = pairs[turn]
                flush.zero_()
                start.record(stream)
                call()
                end.record(stream)
        torch.cuda.synchronize()
    finally:
        gc.enable()
    times = [[start.elapsed_time(end) * 1e3 for start, end in pairs] for pairs in events]
    return [Timing(Spread.of(t), Spread.of(h).median) for t, h in zip(times, host_us, strict=True)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def try_peer(names: Mapping[str, tuple[str, ...]] = PEER_NAMES) -> SimpleNamespace | None:
    """Return DeepGEMM's functions under the names that this package shares with it, or None with a line that says why."""
    try:
        module = importlib.import_module("deep_gemm")
        functions = {
            ours: next(getattr(module, name) for name in theirs if hasattr(module, name)) for ours, theirs in names.items()
        }
    except (ImportError, OSError, RuntimeError, AssertionError, StopIteration) as reason:
        print(f"DeepGEMM is not here ({type(reason).__name__}: {reason}): our times alone, and no ratio.")
        return None
    return SimpleNamespace(**functions)


@dataclass(slots=True)
class Row:
    """What is known of one shape."""

    shape: Shape
    tile: str
    ours_error: float = math.nan
    ours: Timing | None = None
    ours_first_s: float = 0.0
    peer_error: float = math.nan
    peer: Timing | None = None
    peer_first_s: float = 0.0
    torch_us: dict[str, float] | None = None
    fault: str | None = None
    sampled: bool = False

    @property
    def ratio(self) -> float | None:
        """DeepGEMM's time over ours."""
        return self.peer.device_us.median / self.ours.device_us.median if self.ours and self.peer else None

    @property
    def floor_share(self) -> float | None:
        """The higher floor over our time: 1 is as fast as the machine can be."""
        floor = max(self.shape.bytes_floor_us, self.shape.flops_floor_us)
        return floor / self.ours.device_us.median if self.ours else None

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **asdict(self.shape),
            "sampled": self.sampled,
            "tile": self.tile,
            "ours": _side(self.ours, self.ours_error, self.ours_first_s),
            "deep_gemm": _side(self.peer, self.peer_error, self.peer_first_s),
            "ratio": self.ratio,
            **{f"{name}_us": round(value, 3) for name, value in (self.torch_us or {}).items()},
            "bytes_floor_us": round(self.shape.bytes_floor_us, 3),
            "flops_floor_us": round(self.shape.flops_floor_us, 3),
            "fault": self.fault,
        }


def _side(timing: Timing | None, error: float, first_s: float) -> dict[str, Any] | None:
    if math.isnan(error) and timing is None:
        return None
    times = {} if timing is None else {**timing.device_us.record("us"), "host_us": round(timing.host_us, 2)}
    return {"relative_error": None if math.isnan(error) else error, "first_call_s": round(first_s, 3), **times}


def measure(
    shape: Shape, limits: Limits, peer: SimpleNamespace | None, flush: torch.Tensor, seconds: float, *, baselines: bool
) -> Row:
    """Check and time one shape."""
    row = Row(shape, tile_of(select(problem_of(shape), limits)))
    x = random_operands(shape, flush.device)
    outputs = [empty_output(shape, x)]
    try:
        ours = gemm_call(ops, shape, x, outputs[0])
        row.ours_first_s = first_call_s(ours)
    except DeepGemmJitError as error:
        row.fault = f"ours: {error}"
        return row
    theirs: Call | None = None
    if peer is not None:
        try:
            out = empty_output(shape, x)
            theirs = gemm_call(peer, shape, x, out)
            row.peer_first_s = first_call_s(theirs)
            outputs.append(out)
        except RuntimeError as error:
            row.fault = f"DeepGEMM: {error}"
            theirs = None
    row.ours_error, *peer_errors = relative_errors(shape, x, outputs)
    if not row.ours_error <= LARGEST_ERROR:
        row.fault = f"ours is wrong, relative error {row.ours_error:.3g}, and was not timed"
        return row
    calls = [ours]
    if theirs is not None:
        row.peer_error = peer_errors[0]
        if row.peer_error <= LARGEST_ERROR:
            calls.append(theirs)
        else:
            row.fault = f"DeepGEMM is wrong, relative error {row.peer_error:.3g}, and was not timed"
    row.ours, *timings = time_in_turn(calls, flush, seconds)
    row.peer = timings[0] if timings else None
    if baselines:
        calls_of_torch = torch_calls(shape, x)
        timings = time_in_turn(list(calls_of_torch.values()), flush, BASELINE_SHARE * seconds) if calls_of_torch else []
        row.torch_us = {name: timing.device_us.median for name, timing in zip(calls_of_torch, timings, strict=True)}
    return row


def first_call_s(call: Call) -> float:
    """Return the seconds of a call and of what it does on the device."""
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def this_device() -> Limits:
    """Return the limits of the current device."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return limits_of(arch_of((device.major, device.minor)).name, device.multi_processor_count)


def print_row(table: Table, row: Row) -> None:
    """Print one shape."""
    torch_us = row.torch_us or {}
    table.row(
        row.shape.label,
        row.tile,
        "-" if math.isnan(row.ours_error) else f"{row.ours_error:.2e}",
        *_cells(row.ours),
        *_cells(row.peer),
        number(row.ratio, 2),
        number(torch_us.get("torch_bf16")),
        number(torch_us.get("torch_rowwise_fp8")),
        number(row.shape.bytes_floor_us),
        number(row.shape.flops_floor_us),
        "-" if row.floor_share is None else f"{row.floor_share:.0%}",
    )
    if row.fault:
        print(f"    {row.fault}")
    host_us = max((timing.host_us for timing in (row.ours, row.peer) if timing), default=0.0)
    if host_us > FLUSH_BYTES / PEAK_BYTES_PER_S * 1e6:
        print(f"    a call costs the host {host_us:.0f} us, more than the flush can hide: the device times may hold some of it")


def _cells(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return "-", "-"
    return number(timing.device_us.median), f"{timing.device_us.p10:.1f}-{timing.device_us.p90:.1f}"


def summarize(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Print and return the geometric means of one kind, and its worst shape."""
    ratios = [(row.ratio, row) for row in rows if row.ratio is not None]
    mean = geometric_mean(ratio for ratio, _ in ratios)
    share = geometric_mean(row.floor_share for row in rows if row.floor_share is not None)
    text = f"{name}: {len(rows)} shapes, {number(share * 100, 0)}% of the floor"
    summary: dict[str, Any] = {"shapes": len(rows), "compared": len(ratios), "floor_share": None if math.isnan(share) else share}
    if ratios:
        ratio, row = min(ratios, key=lambda pair: pair[0])
        text += f"; DeepGEMM / ours, geometric mean of {len(ratios)}: {mean:.3f}, worst {ratio:.3f} at {row.shape.label}"
        summary |= {"geometric_mean": mean, "worst": {"ratio": ratio, "shape": row.shape.label}}
    print(text, flush=True)
    return summary


def verdicts(summaries: dict[str, dict[str, Any]], rows: Sequence[Row], require: float, *, compared: bool) -> list[str]:
    """Return what is wrong with a run: faults of ours, and grouped kinds that miss the required mean."""
    faults = [f"{row.shape.kind} {row.shape.label}: {row.fault}" for row in rows if row.ours is None]
    if compared:
        for name, summary in summaries.items():
            mean = summary.get("geometric_mean", math.nan)
            if name in ("contiguous", "masked") and not mean >= require:
                faults.append(f"{name}: the geometric mean {number(mean, 3)} is below the required {require}")
    return faults


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Read a list such as ``dense,masked``."""
    wanted = [word.strip() for word in text.split(",")]
    unknown = [word for word in wanted if word not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is none of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in wanted)


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--groups", type=parse_kinds, default=KINDS, metavar="LIST", help=f"of {','.join(KINDS)}; default: all")
    line.add_argument("--sample", type=int, default=0, metavar="COUNT", help="random shapes beside; default: none")
    line.add_argument("--ours-only", action="store_true", help="time neither DeepGEMM nor torch")
    line.add_argument("--seconds", type=positive, default=1.0, help="longest timing of one shape; default: 1")
    line.add_argument("--require", type=float, default=0.75, help="least geometric mean of a grouped kind; default: 0.75")
    line.add_argument("--json", type=Path, metavar="PATH", help="write the result here")
    return line


def main() -> int:
    options = parser().parse_args()
    if not torch.cuda.is_available():
        print("bench/gemm.py needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    try:
        limits = this_device()
    except DeepGemmJitError as error:
        print(f"bench/gemm.py: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    peer = None if options.ours_only else try_peer()
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm") if peer else None
    print(f"{record['machine']['gpu']}, driver {record['machine']['driver']}, CUDA {record['machine']['cuda']}")
    print(", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[Row] = []
    summaries: dict[str, dict[str, Any]] = {}
    lists: dict[str, list[Shape]] = {kind: list(shapes(kind)) for kind in options.groups}
    if options.sample:
        lists[SAMPLE] = list(sample(options.sample))
    try:
        for name, listed in lists.items():
            table = Table(
                ("shape", 30), ("tile", 10), ("error", 8), ("ours us", 8), ("p10-p90", 15), ("DeepGEMM us", 8), ("p10-p90", 15),
                ("ratio", 6), ("bf16 us", 8), ("rowwise us", 8), ("bytes us", 8), ("FLOPs us", 8), ("floor/ours", 8),
            )  # fmt: skip
            floors = f"{PEAK_BYTES_PER_S / 1e12} TB/s and {PEAK_FLOPS_PER_S / 1e12:.0f} TFLOP/s"
            table.start(f"{name}: ratio = DeepGEMM / ours, above 1 we are faster; floors of {floors}")
            first = len(rows)
            for shape in listed:
                row = measure(shape, limits, peer, flush, options.seconds, baselines=not options.ours_only)
                row.sampled = name == SAMPLE
                rows.append(row)
                print_row(table, row)
            summaries[name] = summarize(name, rows[first:])
    finally:  # a kernel that dies takes the process along: what was measured before stays
        elapsed_s = time.perf_counter() - started
        first_s = [sum(row.peer_first_s for row in rows), sum(row.ours_first_s for row in rows)]
        print(f"\n{elapsed_s:.0f} s in all, of them first calls: DeepGEMM {first_s[0]:.1f} s, ours {first_s[1]:.1f} s")
        record |= {"seconds": round(elapsed_s, 1), "summary": summaries, "rows": [row.record() for row in rows]}
        if options.json:
            write_json(options.json, record)
    faults = verdicts(summaries, rows, options.require, compared=peer is not None)
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""BF16 GEMMs on one Hopper GPU: this package, DeepGEMM and torch in turn, in one process, beside the floors of the machine.

Groups of contiguous rows with B either way (nt and nn), masked groups, and dense if asked for. Every result is compared with a
float64 reference before it is timed; a wrong one is not timed. The L2 cache is flushed before every call. The ratio is the time
of the fastest of the others over ours: above 1 we are faster than both. Exit status: 0, or 1 for a wrong result of ours or
contiguous nt shapes below what is required of them, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Table, environment, geometric_mean, number, package_version, try_driver_version, write_json
from gemm import FLUSH_BYTES, LARGEST_ERROR, PACKAGES, Call, first_call_s, positive, this_device, time_in_turn, try_peer
from problems import PEAK_BYTES_PER_S, Shape, shapes
from tiles import problem_of, tile_of

from deepgemm_jit import ops
from deepgemm_jit.errors import DeepGemmJitError
from deepgemm_jit.spec import Limits, select

PEAK_FLOPS_PER_S = 787e12
"""What one H200 reaches: cuBLASLt BF16 at 8192^3."""

REQUIRED_MEAN, REQUIRED_WORST = 1.0, 0.95
"""Of the ratios of the contiguous nt shapes."""

GROUPS = ("contiguous", "contiguous_nn", "masked", "dense")

_PEER_NAMES = {
    "bf16_gemm_nt": ("bf16_gemm_nt",),
    "m_grouped_bf16_gemm_nt_contiguous": ("m_grouped_bf16_gemm_nt_contiguous",),
    "m_grouped_bf16_gemm_nn_contiguous": ("m_grouped_bf16_gemm_nn_contiguous",),
    "m_grouped_bf16_gemm_nt_masked": ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
}


@dataclass(frozen=True, slots=True)
class Operands:
    """Random operands of one shape.

    Attributes:
        a: (M, K), or (G, max_m, K) when masked.
        b: (N, K), or (G, N, K) when grouped; (G, K, N) when N-major.
        group_data: int32, the group of each row (contiguous) or the rows of each group (masked).
        n_major: which way B lies.
    """

    a: torch.Tensor
    b: torch.Tensor
    group_data: torch.Tensor | None
    n_major: bool


def random_operands(shape: Shape, device: torch.device, *, n_major: bool = False) -> Operands:
    """Draw the operands of a shape."""
    rows = (shape.groups, shape.max_m) if shape.kind == "masked" else (shape.groups * shape.max_m,)
    lead = () if shape.kind == "dense" else (shape.groups,)
    a = torch.randn((*rows, shape.k), dtype=torch.bfloat16, device=device)
    b = torch.randn((*lead, *((shape.k, shape.n) if n_major else (shape.n, shape.k))), dtype=torch.bfloat16, device=device)
    group_data: torch.Tensor | None = None
    if shape.kind == "contiguous":
        group_data = torch.arange(shape.groups, dtype=torch.int32, device=device).repeat_interleave(shape.rows)
    elif shape.kind == "masked":
        group_data = torch.full((shape.groups,), shape.rows, dtype=torch.int32, device=device)
    return Operands(a, b, group_data, n_major)


def empty_output(shape: Shape, operands: Operands) -> torch.Tensor:
    """Return an output full of NaN, so that a row which nobody writes is seen."""
    return torch.full((*operands.a.shape[:-1], shape.n), math.nan, dtype=torch.bfloat16, device=operands.a.device)


def bf16_call(library: Any, shape: Shape, operands: Operands, out: torch.Tensor) -> Call:
    """Return the call of ``library``, ours or DeepGEMM: names and argument order are the same."""
    x = operands
    form = "nn" if x.n_major else "nt"
    if shape.kind == "dense":
        return partial(getattr(library, f"bf16_gemm_{form}"), x.a, x.b, out)
    if shape.kind == "contiguous":
        return partial(getattr(library, f"m_grouped_bf16_gemm_{form}_contiguous"), x.a, x.b, out, x.group_data)
    return partial(library.m_grouped_bf16_gemm_nt_masked, x.a, x.b, out, x.group_data, shape.rows)


def torch_call(shape: Shape, operands: Operands) -> Callable[[], torch.Tensor] | None:
    """Return torch's call, which makes its output; None for masked groups, of which torch multiplies every row."""
    b = operands.b if operands.n_major else operands.b.transpose(-1, -2)
    if shape.kind == "dense":
        return partial(torch.mm, operands.a, b)
    if shape.kind == "contiguous":
        ends = torch.arange(1, shape.groups + 1, dtype=torch.int32, device=b.device) * shape.rows
        return partial(torch._grouped_mm, operands.a, b, offs=ends)
    return None


def relative_errors(shape: Shape, operands: Operands, outputs: Sequence[torch.Tensor]) -> list[float]:
    """Return for each output its worst error over the groups against the float64 product."""
    a = operands.a.view(shape.groups, shape.max_m, shape.k)
    b = operands.b.view(shape.groups, *operands.b.shape[-2:])
    results = [output.view(shape.groups, shape.max_m, shape.n) for output in outputs]
    errors = []
    for group in range(shape.groups):
        right = b[group].double()
        reference = a[group, : shape.rows].double() @ (right if operands.n_major else right.T)
        size = torch.linalg.vector_norm(reference)
        errors.append(
            torch.stack([torch.linalg.vector_norm(d[group, : shape.rows].double() - reference) / size for d in results])
        )
    return [float(error) for error in torch.stack(errors).amax(0)]  # amax, not max(): a NaN must come through


def floors_us(shape: Shape) -> tuple[float, float]:
    """Return the shortest times in which the operands can be moved once, and the products be computed."""
    elements = shape.groups * (shape.rows * (shape.k + shape.n) + shape.n * shape.k)
    return 2 * elements / PEAK_BYTES_PER_S * 1e6, shape.flops / PEAK_FLOPS_PER_S * 1e6


def measure(
    shape: Shape, limits: Limits, peer: Any, flush: torch.Tensor, seconds: float, *, n_major: bool, ours_only: bool
) -> dict[str, Any]:
    """Check and time all sides of one shape."""
    x = random_operands(shape, flush.device, n_major=n_major)
    spec = select(problem_of(shape, "bf16_nn" if n_major else "bf16"), limits)
    bytes_us, flops_us = floors_us(shape)
    row: dict[str, Any] = {
        "kind": shape.kind, "groups": shape.groups, "max_m": shape.max_m, "rows": shape.rows, "n": shape.n, "k": shape.k,
        "n_major": n_major, "tile": tile_of(spec), "bytes_floor_us": round(bytes_us, 3), "flops_floor_us": round(flops_us, 3),
        "faults": {},
    }  # fmt: skip
    outputs: dict[str, torch.Tensor] = {}
    calls: dict[str, Call] = {}
    for side, library in (("ours", ops), ("deep_gemm", peer)):
        if library is not None:
            outputs[side] = empty_output(shape, x)
            calls[side] = bf16_call(library, shape, x, outputs[side])
    theirs = None if ours_only else torch_call(shape, x)
    if theirs is not None:
        calls["torch"] = theirs
    for side, call in list(calls.items()):
        try:
            row[f"{side}_first_call_s"] = round(first_call_s(call), 3)
            if side == "torch" and theirs is not None:
                outputs[side] = theirs()
        except (DeepGemmJitError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            row["faults"][side] = f"{type(error).__name__}: {error}"[:300]
            del calls[side]
            outputs.pop(side, None)
    for side, error in zip(outputs, relative_errors(shape, x, list(outputs.values())) if outputs else (), strict=True):
        row[f"{side}_relative_error"] = error
        if not error <= LARGEST_ERROR:
            row["faults"][side] = f"wrong, relative error {error:.3g}, and not timed"
            del calls[side]
    outputs.pop("torch", None)
    if "ours" in calls:
        for side, timing in zip(calls, time_in_turn(list(calls.values()), flush, seconds), strict=True):
            row[side] = {**timing.device_us.record("us"), "host_us": round(timing.host_us, 2)}
        others = {side: row[side]["median_us"] for side in calls if side != "ours"}
        if others:
            row["fastest_peer"] = min(others, key=lambda side: others[side])
            row["ratio"] = others[row["fastest_peer"]] / row["ours"]["median_us"]
    return row


TABLE = Table(
    ("shape", 30), ("tile", 14), ("error", 8), ("ours us", 8), ("p10-p90", 15), ("DeepGEMM us", 8), ("torch us", 8), ("ratio", 6),
    ("of", 9), ("bytes us", 8), ("FLOPs us", 8), ("floor/ours", 8),
)  # fmt: skip


def print_row(shape: Shape, row: dict[str, Any]) -> None:
    """Print one shape."""
    ours, error = row.get("ours"), row.get("ours_relative_error")
    TABLE.row(
        shape.label,
        row["tile"],
        "-" if error is None else f"{error:.2e}",
        number(ours and ours["median_us"]),
        f"{ours['p10_us']:.1f}-{ours['p90_us']:.1f}" if ours else "-",
        *(number(row[side]["median_us"] if side in row else None) for side in ("deep_gemm", "torch")),
        number(row.get("ratio"), 3),
        row.get("fastest_peer", "-"),
        number(row["bytes_floor_us"]),
        number(row["flops_floor_us"]),
        f"{max(row['bytes_floor_us'], row['flops_floor_us']) / ours['median_us']:.0%}" if ours else "-",
    )
    for side, fault in row["faults"].items():
        print(f"    {side}: {fault}")
    host_us = max((row[side]["host_us"] for side in ("ours", "deep_gemm", "torch") if side in row), default=0.0)
    if host_us > FLUSH_BYTES / PEAK_BYTES_PER_S * 1e6:
        print(f"    a call costs the host {host_us:.0f} us, more than the flush can hide: the device times may hold some of it")


def summarize(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the geometric mean of the ratios of a group, also of each peer's alone, and the worst."""
    compared = [row for row in rows if "ratio" in row]
    summary: dict[str, Any] = {"shapes": len(rows), "compared": len(compared)}
    text = f"{name}: {len(rows)} shapes"
    if compared:
        summary |= {
            "geometric_mean": geometric_mean(row["ratio"] for row in compared),
            "worst": min(r["ratio"] for r in compared),
        }
        text += f"; fastest peer / ours, geometric mean {summary['geometric_mean']:.3f}, worst {summary['worst']:.3f}"
        for side in ("deep_gemm", "torch"):
            some = [row[side]["median_us"] / row["ours"]["median_us"] for row in compared if side in row]
            if some:
                summary[side] = {"compared": len(some), "geometric_mean": geometric_mean(some), "worst": min(some)}
                text += f"; {side} alone {summary[side]['geometric_mean']:.3f}, worst {min(some):.3f}"
    print(text, flush=True)
    return summary


def shapes_of(group: str) -> Iterator[Shape]:
    """Yield the shapes of a group, which are those of ``bench/gemm.py``."""
    yield from shapes("dense" if group == "dense" else "masked" if group == "masked" else "contiguous")


def parse_groups(text: str) -> tuple[str, ...]:
    """Read a list such as ``contiguous,masked``."""
    wanted = [word.strip() for word in text.split(",")]
    unknown = [word for word in wanted if word not in GROUPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is none of {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in wanted)


def verdicts(summaries: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a run: faults of ours, and contiguous nt shapes below what is required."""
    faults = [f"{row['kind']} {row['n']} x {row['k']}: {row['faults']['ours']}" for row in rows if "ours" in row["faults"]]
    summary = summaries.get("contiguous", {})
    for name, required in (("geometric_mean", REQUIRED_MEAN), ("worst", REQUIRED_WORST)):
        if name in summary and not summary[name] >= required:
            faults.append(f"contiguous: {name.replace('_', ' ')} {summary[name]:.3f} is below the required {required}")
    return faults


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--groups", type=parse_groups, default=GROUPS[:3], metavar="LIST",
                      help=f"of {','.join(GROUPS)}; default: all but dense")  # fmt: skip
    line.add_argument("--ours-only", action="store_true", help="time neither DeepGEMM nor torch")
    line.add_argument("--seconds", type=positive, default=1.0, help="longest timing of one shape; default: 1")
    line.add_argument("--json", type=Path, metavar="PATH", help="write the result here")
    options = line.parse_args()
    if not torch.cuda.is_available():
        print("bench/bf16.py needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    try:
        limits = this_device()
    except DeepGemmJitError as error:
        print(f"bench/bf16.py: {error}", file=sys.stderr)
        return 2
    peer = None if options.ours_only else try_peer(_PEER_NAMES)
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm") if peer else None
    print(f"{record['machine']['gpu']}, driver {record['machine']['driver']}, CUDA {record['machine']['cuda']}")
    print(", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    summaries: dict[str, dict[str, Any]] = {}
    try:
        for group in options.groups:
            TABLE.start(f"{group}: ratio = fastest of the others / ours, above 1 we are faster")
            first = len(rows)
            for shape in shapes_of(group):
                n_major = group.endswith("_nn")
                row = measure(shape, limits, peer, flush, options.seconds, n_major=n_major, ours_only=options.ours_only)
                rows.append(row)
                print_row(shape, row)
            summaries[group] = summarize(group, rows[first:])
    finally:  # a kernel that dies takes the process along: what was measured before stays
        if options.json:
            write_json(options.json, record | {"summary": summaries, "rows": rows})
    faults = verdicts(summaries, rows)
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""One layer's experts forward on one Hopper GPU: this package, transformers with DeepGEMM, and bf16 grouped_mm, in one process.

Every forward is compared with float64 on some tokens before it is timed: eagerly, by what a call costs the host, and as a
replayed CUDA graph. Sides are timed in turn, each some times in a row; the first of a row, which finds caches and TLBs full of
the other side's operands, is told apart. The ratio is our graph's time over that of bf16 grouped_mm: below 1 we are faster.
FP4 weights are timed folded into FP8 and as they are, of which the ratio is the latter's graph over the former's.
Processes of their own measure the first forward, on an empty store and on a warm one. Exit status: 0, or 1 for a wrong result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import Table, environment, number, package_version, try_driver_version, write_json

from deepgemm_jit import ops

Forward = Callable[[], torch.Tensor]

TOKENS = (1, 16, 128, 1024, 8192)
MEMORY_TOKENS = 8192
PACKAGES = ("torch", "transformers", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cutlass")
SCALE_BLOCK = 128
CHECKED_TOKENS = 16
LARGEST_ERROR = 0.06
"""Frobenius norm of the difference over that of the reference, whose activations are not quantized: E4M3 alone costs 0.03."""
FIRST_LIMIT_S = 120
IN_A_ROW = 8
"""Calls of a side before it is the next one's turn."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer of experts."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int = 8


FP4_TOKENS = (1, 16, 64, 96)
FP4_GROUP = 32

LAYERS = (Layer("Qwen3-30B-A3B", 128, 2048, 768), Layer("DeepSeek-V3, 32 experts", 32, 7168, 2048))


@dataclass(frozen=True, slots=True)
class Weights:
    """FP8 weights with a scale per block, and what they mean in bf16."""

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    gate_up16: torch.Tensor
    down16: torch.Tensor


def random_weights(layer: Layer) -> Weights:
    """Draw weights of a size at which the output is neither tiny nor large; scales differ from block to block."""

    def matrices(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = torch.randn((layer.experts, n, k), dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
        blocks = (layer.experts, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
        scales = (torch.rand(blocks, device="cuda") + 0.5) * k**-0.5
        in_bf16 = torch.empty((layer.experts, n, k), dtype=torch.bfloat16, device="cuda")
        for expert in range(layer.experts):
            in_bf16[expert] = dequantized(values[expert], scales[expert])
        return values, scales, in_bf16

    gate_up, gate_up_scale, gate_up16 = matrices(2 * layer.intermediate, layer.hidden)
    down, down_scale, down16 = matrices(layer.hidden, layer.intermediate)
    return Weights(gate_up, gate_up_scale, down, down_scale, gate_up16, down16)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    spread = scales.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return values.float() * spread


@dataclass(frozen=True, slots=True)
class Tokens:
    """Hidden states and their routing."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


def random_tokens(layer: Layer, count: int) -> Tokens:
    scores = torch.rand((count, layer.experts), device="cuda")
    weights = torch.rand((count, layer.top_k), device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn((count, layer.hidden), device="cuda", dtype=torch.bfloat16)
    return Tokens(hidden, scores.topk(layer.top_k).indices, weights)


def relative_error(out: torch.Tensor, tokens: Tokens, weights: Weights) -> float:
    """Return the error on some tokens against the float64 forward with exact activations."""
    count = min(CHECKED_TOKENS, tokens.hidden.size(0))
    reference = torch.zeros((count, out.size(1)), dtype=torch.float64, device="cuda")
    for token in range(count):
        x = tokens.hidden[token].double()
        for choice in range(tokens.index.size(1)):
            expert = int(tokens.index[token, choice])
            up = dequantized(weights.gate_up[expert], weights.gate_up_scale[expert]).double() @ x
            gate, value = up.chunk(2)
            down = dequantized(weights.down[expert], weights.down_scale[expert]).double()
            reference[token] += tokens.weights[token, choice].double() * (down @ (torch.nn.functional.silu(gate) * value))
    return float(torch.linalg.vector_norm(out[:count].double() - reference) / torch.linalg.vector_norm(reference))


def random_fp4_experts(layer: Layer) -> tuple[dict[str, ops.Experts], Weights]:
    """Draw FP4 weights and prepare them folded only, and with fragments; the folded copy is what they mean."""

    def matrices(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.randint(-128, 128, (layer.experts, n, k // 2), dtype=torch.int8, device="cuda")
        exponents = torch.randint(-2, 2, (layer.experts, n, k // FP4_GROUP), device="cuda")
        return packed, (exponents + 127 - round(math.log2(3 * k**0.5))).to(torch.uint8)

    (up, up_scale), (down, down_scale) = (
        matrices(2 * layer.intermediate, layer.hidden),
        matrices(layer.hidden, layer.intermediate),
    )
    sides = {decode: ops.prepare_experts(up, down, up_scale, down_scale, decode=decode) for decode in ("fp8", "fp4")}
    folded = sides["fp8"].gate_up, sides["fp8"].down
    nothing = torch.empty(0)
    return sides, Weights(folded[0].weight, folded[0].scale, folded[1].weight, folded[1].scale, nothing, nothing)


# --- the sides


def ours(weights: Weights) -> Callable[[Tokens], torch.Tensor]:
    experts = ops.prepare_experts(weights.gate_up, weights.down, weights.gate_up_scale, weights.down_scale)
    return lambda tokens: ops.fp8_experts(tokens.hidden, tokens.index, tokens.weights, experts)


def bf16_grouped_mm(layer: Layer, weights: Weights) -> Callable[[Tokens], torch.Tensor]:
    """Return transformers' own forward of bf16 weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module = _module(layer, gate_up_proj=weights.gate_up16, down_proj=weights.down16)
    forward = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return lambda tokens: forward(module, tokens.hidden, tokens.index, tokens.weights)


def deep_gemm(layer: Layer, weights: Weights) -> Callable[[Tokens], torch.Tensor]:
    """Return transformers' DeepGEMM forward, its hub kernel exchanged for the installed DeepGEMM."""
    import deep_gemm as peer  # type: ignore[import-not-found]
    from transformers.integrations import deepgemm, finegrained_fp8

    known = {
        "fp8_fp4_matmul": ("fp8_fp4_gemm_nt", "fp8_gemm_nt"),
        "grouped_fp8_fp4_matmul_nt": ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous"),
        "grouped_bf16_matmul_nt": ("m_grouped_bf16_gemm_nt_contiguous",),
        "transform_sf_into_required_layout": ("transform_sf_into_required_layout",),
    }
    functions = {name: next((getattr(peer, n) for n in theirs if hasattr(peer, n)), None) for name, theirs in known.items()}
    functions |= {"per_token_cast_to_fp8": peer.utils.per_token_cast_to_fp8, "m_alignment": 128}
    bundle = deepgemm.DeepGEMM(**{field.name: functions.get(field.name) for field in dataclasses.fields(deepgemm.DeepGEMM)})
    for loader in ("load_deepgemm_kernel", "_load_deepgemm_kernel"):
        if hasattr(deepgemm, loader):
            setattr(deepgemm, loader, lambda: bundle)
    with torch.device("cuda"):
        module = finegrained_fp8.FP8Experts(_config(layer), block_size=(128, 128))
    for name, value in _FLAGS.items():
        if not hasattr(module, name):
            setattr(module, name, value)
    with torch.no_grad():
        module.gate_up_proj.copy_(weights.gate_up)
        module.down_proj.copy_(weights.down)
        module.gate_up_proj_scale_inv.copy_(weights.gate_up_scale)
        module.down_proj_scale_inv.copy_(weights.down_scale)
    return lambda tokens: deepgemm.deepgemm_fp8_fp4_experts_forward(module, tokens.hidden, tokens.index, tokens.weights)


PEERS = {"bf16": bf16_grouped_mm, "deep_gemm": deep_gemm}
SIDES = tuple(PEERS)

_FLAGS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
    "_is_expert_parallel": False, "has_post_expert_norm": False,
}  # fmt: skip
"""What transformers' forwards ask of a module of experts."""


def _config(layer: Layer) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate, num_experts=layer.experts,
        num_experts_per_tok=layer.top_k, experts_implementation="deepgemm",
    )  # fmt: skip


def _module(layer: Layer, **tensors: torch.Tensor) -> SimpleNamespace:
    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    return SimpleNamespace(
        **tensors, **_FLAGS, num_experts=layer.experts, config=_config(layer), act_fn=torch.nn.functional.silu,
        gate_up_proj_bias=None, down_proj_bias=None, _apply_gate=gated,
    )  # fmt: skip


# --- times


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of a call's device time in microseconds."""

    first_us: float
    """Right after another side, whose operands are in the caches and whose pages are in the TLBs."""
    us: float
    """After a call of its own."""


def in_turn(calls: Sequence[Callable[[], object]], seconds: float) -> list[Times]:
    """Time calls in turn, each some times in a row; the host is waited for before each."""
    firsts: list[list[float]] = [[] for _ in calls]
    others: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    end_at = time.perf_counter() + seconds
    while len(firsts[0]) < 5 or time.perf_counter() < end_at:
        for call, first, other in zip(calls, firsts, others, strict=True):
            for at in range(IN_A_ROW):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                (other if at else first).append(start.elapsed_time(end) * 1e3)
    return [Times(statistics.median(first), statistics.median(other)) for first, other in zip(firsts, others, strict=True)]


def host_us(call: Callable[[], object], rounds: int = 20) -> float:
    """Return what a call costs the host when the device is idle before it."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def captured(call: Forward) -> Callable[[], None]:
    """Return the replay of a graph of the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def stages(replay: Callable[[], None], rounds: int = 15) -> list[dict[str, Any]]:
    """Return when each kernel of a replay starts and ends, in microseconds after the first one's start; medians."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            replay()
            torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    of_one = len(kernels) // rounds
    replays = [kernels[first : first + of_one] for first in range(0, of_one * rounds, of_one)]
    return [
        {
            "kernel": name,
            "start_us": round(statistics.median(replayed[at][0] - replayed[0][0] for replayed in replays), 2),
            "end_us": round(statistics.median(replayed[at][1] - replayed[0][0] for replayed in replays), 2),
        }
        for at, (_, _, name) in enumerate(kernels[:of_one])
    ]


def extra_bytes(call: Forward) -> int:
    """Return the most memory that a forward has beyond what there was before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- the first forward


def first_forward(layer: Layer) -> None:
    """Print the seconds of this process's first forward, after torch has a context and the weights are prepared."""
    weights = random_weights(layer)
    forward = ours(weights)
    tokens = random_tokens(layer, 16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    forward(tokens)
    torch.cuda.synchronize()
    print(json.dumps(time.perf_counter() - started))


def first_forwards(layer: Layer) -> dict[str, float]:
    """Return the seconds of the first forward on an empty store and on the store that it left, each in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for store in ("cold", "warm"):
            child = subprocess.run(
                [sys.executable, __file__, "--first-forward", layer.name],
                env={**os.environ, "DEEPGEMM_JIT_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                timeout=FIRST_LIMIT_S,
                check=True,
            )
            found[store] = round(float(child.stdout.splitlines()[-1]), 3)
    return found


# --- one layer


def measure(layer: Layer, seconds: float, counts: Sequence[int], beside: Sequence[str]) -> list[dict[str, Any]]:
    """Check and time all sides of a layer at every number of tokens."""
    weights = random_weights(layer)
    sides: dict[str, Callable[[Tokens], torch.Tensor]] = {"ours": ours(weights)}
    for name in beside:
        try:
            sides[name] = PEERS[name](layer, weights)
        except (ImportError, OSError, AttributeError, TypeError, KeyError) as reason:
            print(f"{name} is not here ({type(reason).__name__}: {reason}): it is left out.")
    rows = []
    for count in counts:
        tokens = random_tokens(layer, count)
        row: dict[str, Any] = {"layer": layer.name, "tokens": count}
        calls: dict[str, Forward] = {}
        for name, forward in sides.items():
            call = partial(forward, tokens)
            try:
                row[f"{name}_error"] = relative_error(call(), tokens, weights)
            except RuntimeError as error:
                row[f"{name}_fault"] = str(error)[:300]
                continue
            if row[f"{name}_error"] <= LARGEST_ERROR:
                calls[name] = call
        eager = [
            in_turn([call], seconds)[0] for call in calls.values()
        ]  # each alone, as in a server: its code stays in the caches
        row |= _times("eager", calls, eager)
        row |= {f"{name}_host_us": round(host_us(call), 2) for name, call in calls.items()}
        replays = {}
        for name, call in calls.items():
            try:
                replays[name] = captured(call)
            except RuntimeError as error:  # a forward that reads something back cannot be captured
                row[f"{name}_graph_fault"] = str(error)[:300]
        graphs = in_turn(list(replays.values()), seconds)
        row |= _times("graph", replays, graphs)
        if {"ours", "bf16"} <= replays.keys():
            row["ratio"] = round(row["ours_graph_us"] / row["bf16_graph_us"], 4)
            row["ratio_first"] = round(row["ours_graph_first_us"] / row["bf16_graph_first_us"], 4)
        if count == MEMORY_TOKENS:
            row |= {f"{name}_extra_bytes": extra_bytes(call) for name, call in calls.items()}
        if "ours" in replays:
            row["ours_stages"] = stages(replays["ours"])
        rows.append(row)
        print_row(row)
    return rows


def measure_fp4(layer: Layer, seconds: float, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Check and time a layer of FP4 experts, folded into FP8 and as it is."""
    sides, weights = random_fp4_experts(layer)
    rows = []
    for count in counts:
        tokens = random_tokens(layer, count)
        row: dict[str, Any] = {"layer": layer.name, "tokens": count}
        calls = {
            name: partial(ops.fp8_experts, tokens.hidden, tokens.index, tokens.weights, side) for name, side in sides.items()
        }
        row |= {f"{name}_error": relative_error(call(), tokens, weights) for name, call in calls.items()}
        row |= _times("eager", calls, [in_turn([call], seconds)[0] for call in calls.values()])
        row |= _times("graph", calls, in_turn([captured(call) for call in calls.values()], seconds))
        row |= {f"ratio_{way}": round(row[f"fp4_{way}_us"] / row[f"fp8_{way}_us"], 4) for way in ("eager", "graph")}
        rows.append(row)
        errors = (f"{row[f'{name}_error']:.1e}" for name in calls)
        times = (number(row[f"{name}_{way}_us"]) for way in ("eager", "graph") for name in calls)
        FP4_TABLE.row(layer.name, count, *errors, *times, number(row["ratio_eager"], 3), number(row["ratio_graph"], 3))
    return rows


def _times(way: str, names: Iterable[str], times: Sequence[Times]) -> dict[str, float]:
    row = {}
    for name, of_one in zip(names, times, strict=True):
        row |= {f"{name}_{way}_us": round(of_one.us, 2), f"{name}_{way}_first_us": round(of_one.first_us, 2)}
    return row


TABLE = Table(
    ("layer", 24), ("tokens", 6), ("error", 8), ("ours us", 9), ("host", 7), ("graph", 9), ("bf16 us", 9), ("graph", 9),
    ("DeepGEMM us", 11), ("graph", 9), ("ratio", 6), ("first", 6),
)  # fmt: skip


FP4_TABLE = Table(
    ("layer of FP4", 24), ("tokens", 6), ("error 8", 8), ("error 4", 8), ("FP8 us", 9), ("FP4 us", 9), ("graph 8", 9),
    ("graph 4", 9), ("ratio", 6), ("graph", 6),
)  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    error = row.get("ours_error")
    keys = ("ours_eager_us", "ours_host_us", "ours_graph_us", "bf16_eager_us", "bf16_graph_us", "deep_gemm_eager_us")
    times = [number(row.get(key)) for key in (*keys, "deep_gemm_graph_us")]
    TABLE.row(row["layer"], row["tokens"], "-" if error is None else f"{error:.1e}", *times,
              number(row.get("ratio"), 3), number(row.get("ratio_first"), 3))  # fmt: skip
    for key, value in row.items():
        if key.endswith("fault"):
            print(f"    {key}: {value}")


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--seconds", type=float, default=0.3, help="longest timing of one kind of call; default: 0.3")
    line.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=TOKENS, metavar="LIST",
                      help=f"default: {','.join(map(str, TOKENS))}")  # fmt: skip
    line.add_argument("--sides", type=lambda text: tuple(text.split(",")), default=SIDES, metavar="LIST",
                      help=f"beside ours, of {','.join(SIDES)}; default: both")  # fmt: skip
    line.add_argument("--fp4-only", action="store_true", help="time nothing but layers of FP4 weights")
    line.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "experts.json", metavar="PATH")
    line.add_argument("--first-forward", choices=[layer.name for layer in LAYERS], help=argparse.SUPPRESS)
    options = line.parse_args()
    if not torch.cuda.is_available():
        print("bench/experts.py needs a CUDA device, and torch sees none.", file=sys.stderr)
        return 2
    if options.first_forward:
        first_forward(next(layer for layer in LAYERS if layer.name == options.first_forward))
        return 0
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    record["versions"]["deep_gemm"] = package_version("sgl-deep-gemm", "deep-gemm", "deep_gemm")
    rows: list[dict[str, Any]] = []
    fp4_rows: list[dict[str, Any]] = []
    layers = () if options.fp4_only else LAYERS
    first = {layer.name: first_forwards(layer) for layer in layers}
    print(f"first forward, s: {first}")
    try:
        with torch.no_grad():
            if layers:
                TABLE.start("us a forward; ratio = our graph / bf16 grouped_mm's graph")
            for layer in layers:
                rows += measure(layer, options.seconds, options.tokens, options.sides)
                torch.cuda.empty_cache()
            FP4_TABLE.start("us a forward; ratio = FP4 as it is / folded into FP8")
            for layer in LAYERS:
                fp4_rows += measure_fp4(layer, options.seconds, FP4_TOKENS)
                torch.cuda.empty_cache()
    finally:  # a kernel that dies takes the process along: what was measured before stays
        write_json(options.json, record | {"first_forward_s": first, "rows": rows, "fp4_rows": fp4_rows})
    errors = [row.get("ours_error", 1.0) for row in rows] + [row[f"{side}_error"] for row in fp4_rows for side in ("fp8", "fp4")]
    return 0 if all(error <= LARGEST_ERROR for error in errors) else 1


if __name__ == "__main__":
    sys.exit(main())

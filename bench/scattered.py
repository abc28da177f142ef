"""The GEMMs of experts forwards with every FP8 tile of one part of K, and how far selection's choice is from the best of them.

``measure`` times them on one Hopper GPU, inside forwards that are replayed as CUDA graphs: from the end of the kernel before to
their own. ``judge`` needs no GPU: it reads such a result and prints where the cost model of ``deepgemm_jit.spec.cost`` picks a
slower tile, and its mean loss. Change the model's constants, judge again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import Table, environment, number, try_driver_version, write_json
from tiles import ARCH, WORTH_A_LINE, label

from deepgemm_jit.spec import (
    SCATTERED_ALIGNMENT,
    GemmProblem,
    Layout,
    Selected,
    kernel_set,
    limits_of,
    scattered_rows,
    selected,
)
from deepgemm_jit.spec.kernel_set import is_gemm

TOP_K = 8
LAYERS = {"Qwen3-30B-A3B": (128, 2048, 768), "DeepSeek-V3, 32 experts": (32, 7168, 2048), "DeepSeek-V3": (256, 7168, 2048)}
"""Experts, hidden and intermediate sizes."""
ROWS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Of an expert on average."""
MOST_TOKENS = 8192
GEMM_ENDS = {"gate_up": 2, "down": 4}
"""Which of a forward's kernels, by what it multiplies."""


def problem_of(layer: str, which: str, tokens: int) -> GemmProblem:
    """Return the problem that a forward poses."""
    experts, hidden, intermediate = LAYERS[layer]
    n, k = (2 * intermediate, hidden) if which == "gate_up" else (hidden, intermediate)
    rows = scattered_rows(tokens * TOP_K, experts)
    return GemmProblem(rows, n, k, experts, Layout.PREFIX_SUMS, SCATTERED_ALIGNMENT)


def tiles() -> list[Selected]:
    """Return the FP8 tiles of the set that serve weights with a scale per block."""
    found = [spec for spec in kernel_set(ARCH) if is_gemm(spec) and spec.dtypes[:2] == ("e4m3", "e4m3") and not spec.flags]
    return [Selected(spec) for spec in found if spec.block[1] >= 64]


def measure(path: Path) -> int:
    """Time every tile on every problem and write the result."""
    import torch
    from experts import Layer, captured, random_tokens, stages

    from deepgemm_jit import ops
    from deepgemm_jit.ops import pipeline
    from deepgemm_jit.service import default_service

    chosen = pipeline.selected
    rows = []
    for name, (count, hidden, intermediate) in LAYERS.items():
        layer = Layer(name, count, hidden, intermediate, TOP_K)
        weights = [
            torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
            for shape in ((count, 2 * intermediate, hidden), (count, hidden, intermediate))
        ]
        for weight in weights:
            for expert in weight:
                expert.copy_(torch.randn(expert.shape, dtype=torch.bfloat16, device="cuda"))
        scales = [torch.rand((count, -(-w.shape[1] // 128), -(-w.shape[2] // 128)), device="cuda") for w in weights]
        experts = ops.prepare_experts(*weights, *scales)
        for each in ROWS:
            count_of_tokens = each * count // TOP_K
            if not 0 < count_of_tokens <= MOST_TOKENS:
                continue
            tokens = random_tokens(layer, count_of_tokens)
            for tile in tiles():
                pipeline.selected = lambda _problem, _limits, tile=tile: tile  # type: ignore[assignment]
                default_service().forget_calls()
                replay = captured(lambda t=tokens, e=experts: ops.fp8_experts(t.hidden, t.index, t.weights, e))
                ends = [stage["end_us"] for stage in stages(replay, rounds=7)]
                times = {which: round(ends[at] - ends[at - 1], 2) for which, at in GEMM_ENDS.items()}
                rows.append({"layer": name, "tokens": count_of_tokens, "tile": label(tile), **times})
            pipeline.selected = chosen
            print(f"{name}, {count_of_tokens} tokens: {len(tiles())} tiles", flush=True)
        del experts, weights, scales
        torch.cuda.empty_cache()
    record = environment(("torch", "cuda-bindings", "nvidia-cuda-nvrtc"))
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version()}
    write_json(path, record | {"rows": rows})
    return 0


def judge(path: Path) -> int:
    """Print where selection's choice is slower than the best tile, and by how much on average."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        for which in GEMM_ENDS:
            times.setdefault((row["layer"], which, row["tokens"]), {})[row["tile"]] = row[which]
    table = Table(("layer", 24), ("GEMM", 8), ("tokens", 6), ("chosen", 26), ("us", 8), ("best", 26), ("us", 8), ("loss", 6))
    table.start("where selection's choice is slower than the best tile")
    losses: list[float] = []
    limits = limits_of(ARCH)
    for (layer, which, tokens), by_tile in times.items():
        picked = label(selected(problem_of(layer, which, tokens), limits))
        best = min(by_tile, key=by_tile.__getitem__)
        loss = by_tile[picked] / by_tile[best]
        losses.append(loss)
        if loss > WORTH_A_LINE:
            cells: list[Any] = [picked, number(by_tile[picked]), best, number(by_tile[best]), number(loss, 3)]
            table.row(layer, which, tokens, *cells)
    print(f"\n{len(losses)} GEMMs: mean loss {sum(losses) / len(losses):.4f}, largest {max(losses):.3f}")
    return 0


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("action", choices=("measure", "judge"))
    line.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "scattered.json", metavar="PATH")
    options = line.parse_args()
    return measure(options.json) if options.action == "measure" else judge(options.json)


if __name__ == "__main__":
    sys.exit(main())

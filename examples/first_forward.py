"""The experts' GEMMs of Qwen3-30B-A3B from an empty cache: kernels compiled on the first call, errors and times printed.

Weights are random normals cast to FP8 with one scale per 128 x 128 block, tokens are routed at random. One forward is: gather the
tokens by expert, cast them, multiply by gate and up, SiLU(gate) * up, cast, multiply by down. Run it with:

    python examples/first_forward.py [--tokens N] [--cache-dir PATH]

The exit status is 1 if a GEMM is off by more than the tolerance. It needs torch and a Hopper GPU. With ``--cache-dir`` it uses a
store that is there, for example one that a machine without a GPU has filled; with ``DEEPGEMM_JIT_COMPILE=never`` nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from deepgemm_jit import ops

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
BLOCK = 128
FP8 = torch.float8_e4m3fn
DEVICE = "cuda"

RELATIVE_ERROR_LIMIT = 2e-3
"""Frobenius norm of the difference over that of the reference, for each expert of at least 512 elements."""
ELEMENTS_TO_AVERAGE = 512

Scaled = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Routing:
    """Which row of the grouped A each (token, expert) pair takes; each expert starts at a multiple of the alignment."""

    tokens: torch.Tensor
    rows: torch.Tensor
    m_indices: torch.Tensor
    slices: list[slice]


@dataclass(frozen=True)
class Product:
    """One grouped GEMM: operands and result."""

    name: str
    a: Scaled
    b: Scaled
    out: torch.Tensor


def random_weights(n: int, k: int) -> Scaled:
    """Return (experts, n, k) FP8 weights with (experts, n / 128, k / 128) scales; both sizes are multiples of 128."""
    values = torch.empty((EXPERTS, n, k), dtype=FP8, device=DEVICE)
    scales = torch.empty((EXPERTS, n // BLOCK, k // BLOCK), device=DEVICE)
    for expert in range(EXPERTS):
        blocks = torch.randn((n // BLOCK, BLOCK, k // BLOCK, BLOCK), device=DEVICE) * 0.02
        scales[expert] = blocks.abs().amax((1, 3)) / 448
        values[expert] = (blocks / scales[expert][:, None, :, None]).clamp(-448, 448).view(n, k).to(FP8)
    return values, scales


def random_routing(tokens: int) -> Routing:
    """Send each token to 8 of the 128 experts."""
    experts = torch.rand((tokens, EXPERTS), device=DEVICE).topk(TOP_K).indices.flatten()
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=EXPERTS)
    alignment = ops.get_mk_alignment_for_contiguous_layout()
    padded = (counts + alignment - 1) // alignment * alignment
    starts = padded.cumsum(0) - padded
    within = torch.arange(len(order), device=DEVICE) - (counts.cumsum(0) - counts)[experts[order]]
    rows = starts[experts[order]] + within
    m_indices = torch.full((int(padded.sum()),), -1, dtype=torch.int32, device=DEVICE)
    m_indices[rows] = experts[order].int()
    slices = [slice(start, start + count) for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
    return Routing(order // TOP_K, rows, m_indices, slices)


def forward(hidden: torch.Tensor, routing: Routing, gate_up: Scaled, down: Scaled) -> tuple[Product, Product]:
    """Run both grouped GEMMs of the experts, with what lies between."""
    gathered = hidden.new_zeros((len(routing.m_indices), HIDDEN))
    gathered[routing.rows] = hidden[routing.tokens]
    a = ops.per_token_cast_to_fp8(gathered)
    out = gathered.new_empty((len(gathered), 2 * INTERMEDIATE))
    ops.m_grouped_fp8_gemm_nt_contiguous(a, gate_up, out, routing.m_indices)

    gate, up = out.chunk(2, dim=-1)
    activated = ops.per_token_cast_to_fp8(silu(gate) * up)
    result = gathered.new_empty((len(gathered), HIDDEN))
    ops.m_grouped_fp8_gemm_nt_contiguous(activated, down, result, routing.m_indices)
    return Product("gate_up", a, gate_up, out), Product("down", activated, down, result)


def dequantized(scaled: Scaled, rows: int) -> torch.Tensor:
    """Return FP8 values times their scales, which cover ``rows`` x 128 values each, in float64."""
    values, scales = scaled
    return values.double() * scales.double().repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)


def errors_of(product: Product, slices: list[slice]) -> tuple[float, float, bool]:
    """Compare with float64 of the dequantized operands: error of all rows, of the worst expert, and whether all are tolerable.

    Every element must also lie within 2^-7 of its own magnitude plus 2^-9 of the largest magnitude of its row.
    """
    difference = total = worst = 0.0
    fine = True
    for expert, rows in enumerate(slices):
        if rows.start == rows.stop:
            continue
        a = dequantized((product.a[0][rows], product.a[1][rows]), 1)
        reference = a @ dequantized((product.b[0][expert], product.b[1][expert]), BLOCK).T
        off = product.out[rows].double() - reference
        bound = 2.0**-7 * reference.abs() + 2.0**-9 * reference.abs().amax(1, keepdim=True)
        fine = fine and bool((off.abs() <= bound).all())
        difference += float(off.square().sum())
        total += float(reference.square().sum())
        if reference.numel() >= ELEMENTS_TO_AVERAGE:
            worst = max(worst, float(off.norm() / reference.norm()))
    return (difference / total) ** 0.5, worst, fine and worst <= RELATIVE_ERROR_LIMIT


def timed_calls(tokens: int) -> tuple[list[float], tuple[Product, Product], Routing]:
    """Return the seconds of a first and a second forward of this process, the second's products, and the routing."""
    gate_up, down = random_weights(2 * INTERMEDIATE, HIDDEN), random_weights(HIDDEN, INTERMEDIATE)
    routing = random_routing(tokens)
    hidden = torch.randn((tokens, HIDDEN), dtype=torch.bfloat16, device=DEVICE)
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        products = forward(hidden, routing, gate_up, down)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, products, routing


def second_process(tokens: int) -> list[float]:
    """Run this file again with the same cache and return the seconds of its two forwards."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--only-times"]
    return list(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the forward (default: %(default)s)")
    parser.add_argument("--cache-dir", help="root of the store (default: an empty temporary one)")
    parser.add_argument("--only-times", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error("--tokens must be at least 1")
    if not torch.cuda.is_available():
        print("first_forward.py needs a Hopper GPU, and torch sees no GPU", file=sys.stderr)
        return 1
    if arguments.only_times:
        print(json.dumps(timed_calls(arguments.tokens)[0]))
        return 0

    with tempfile.TemporaryDirectory(prefix="deepgemm_jit_first_forward_") as cache:
        os.environ["DEEPGEMM_JIT_CACHE_DIR"] = arguments.cache_dir or cache
        here, products, routing = timed_calls(arguments.tokens)
        there = second_process(arguments.tokens)

    print(f"{arguments.tokens} tokens, {TOP_K} of {EXPERTS} experts each, on {torch.cuda.get_device_name()}\n")
    print(f"{'GEMM':<10}{'rows':>8}{'N':>7}{'K':>7}{'relative error':>17}{'worst expert':>15}  tolerance")
    all_fine = True
    for product in products:
        error, worst, fine = errors_of(product, routing.slices)
        all_fine = all_fine and fine
        n, k = product.b[0].shape[1:]
        print(
            f"{product.name:<10}{len(routing.rows):>8}{n:>7}{k:>7}{error:>17.2e}{worst:>15.2e}  {'met' if fine else 'EXCEEDED'}"
        )
    print(f"\n{'forward':<44}{'ms':>10}")
    for what, seconds in (
        ("first call" if arguments.cache_dir else "first call, empty cache: compiles", here[0]),
        ("second call", here[1]),
        ("second process, first call: loads the cache", there[0]),
        ("second process, second call", there[1]),
    ):
        print(f"{what:<44}{seconds * 1e3:>10.2f}")
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())

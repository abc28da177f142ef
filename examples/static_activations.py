"""FP8 experts with static activation scales in transformers.

What used to be met, with ``experts_implementation="deepgemm"``:

    NotImplementedError: DeepGEMM experts dispatch does not support static activation quantization.

and of a linear: ``DeepGEMM linear does not support static activation quantization.`` The script lets transformers raise both,
runs the same layers with ``experts_implementation="deepgemm_jit"`` and ``accelerate_linears``, and prints errors against float64:

    python examples/static_activations.py [--tokens N]

It needs torch, transformers and a Hopper GPU. The exit status is 1 if a layer is off.
"""

from __future__ import annotations

import argparse
import sys

import tiny_fp8
import torch
from torch import nn
from transformers.integrations import deepgemm
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.integrations import transformers as deepgemm_jit

AS_GOOD_AS_FLOAT64 = 1.05
"""Against the error that the scheme's own rounding makes, every product summed in float64."""


def refusals(experts: nn.Module, linear: nn.Module, call: tuple[torch.Tensor, ...]) -> list[str]:
    """Return what transformers says of both layers. The refusals stand before any kernel, so none has to be loaded for them."""
    load, deepgemm.load_deepgemm_kernel = deepgemm.load_deepgemm_kernel, lambda: None
    said = []
    try:
        experts.config._experts_implementation = "deepgemm"
        arguments = (linear.weight, linear.weight_scale_inv, linear.block_size)
        for refused in (
            lambda: experts(*call),
            lambda: deepgemm.deepgemm_fp8_fp4_linear(call[0], *arguments, activation_scale=linear.activation_scale),
        ):
            try:
                refused()
            except NotImplementedError as error:
                said.append(f"{type(error).__name__}: {error}")
    finally:
        deepgemm.load_deepgemm_kernel = load
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the forward (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("static_activations.py needs a Hopper GPU, and torch sees no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    experts = tiny_fp8.experts("static")
    with torch.device("meta"):
        linear = fp8.FP8Linear(1024, 2048, block_size=(128, 128), activation_scheme="static")
    linear = tiny_fp8.fill(linear, "cuda")
    call = tiny_fp8.tokens(experts, arguments.tokens)

    print("transformers, with DeepGEMM:")
    for said in refusals(experts, linear, call):
        print(f"    {said}")

    deepgemm_jit.register()
    experts.config._experts_implementation = "deepgemm_jit"
    with torch.no_grad(), deepgemm_jit.accelerate_linears(linear):
        out, linear_out = experts(*call), linear(call[0])

    exact = tiny_fp8.float64_forward(experts, *call, quantize=False)
    best = tiny_fp8.error(tiny_fp8.float64_forward(experts, *call, quantize=True), exact)
    wide = tiny_fp8.dequantized(linear.weight, linear.weight_scale_inv)
    x = call[0].double()
    linear_best = tiny_fp8.error(tiny_fp8.quantized(x, linear.activation_scale) @ wide.T, x @ wide.T)
    rows = (
        ("experts", tiny_fp8.error(out, exact), best),
        ("linear", tiny_fp8.error(linear_out, x @ wide.T), linear_best),
    )
    print(f"\ndeepgemm_jit, {arguments.tokens} tokens on {torch.cuda.get_device_name()}; relative errors against float64:")
    print(f"    {'':<10}{'ours':>12}{'rounding alone':>18}")
    for name, ours, rounding in rows:
        print(f"    {name:<10}{ours:>12.3e}{rounding:>18.3e}")
    return 0 if all(ours <= AS_GOOD_AS_FLOAT64 * rounding for _, ours, rounding in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

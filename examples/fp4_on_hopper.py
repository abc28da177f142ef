"""FP4 experts (e2m1 with UE8M0 scales per 32 columns) on a Hopper GPU.

What used to be met, with ``experts_implementation="deepgemm"``: a ``NotImplementedError`` that FP4 needs a Blackwell GPU. The
script lets transformers raise it, then runs the same experts with ``experts_implementation="deepgemm_jit"``: their weights are
folded into FP8 once, exactly, and the parameters keep their bytes. It prints the error against float64 and the bytes added:

    python examples/fp4_on_hopper.py [--tokens N]

It needs torch, transformers and a Hopper GPU. The exit status is 1 if the layer is off.
"""

from __future__ import annotations

import argparse
import sys

import tiny_fp8
import torch
from torch import nn

from deepgemm_jit.integrations import transformers as deepgemm_jit

AS_GOOD_AS_FLOAT64 = 1.05
"""Against the error that quantizing the activations makes, every product summed in float64."""


def refusal(experts: nn.Module, call: tuple[torch.Tensor, ...]) -> str:
    """Return what transformers says of these experts on this GPU."""
    experts.config._experts_implementation = "deepgemm"
    try:
        with torch.no_grad():
            experts(*call)
    except NotImplementedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing: it ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the forward (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("fp4_on_hopper.py needs a Hopper GPU, and torch sees no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    experts = tiny_fp8.experts(fp4=True)
    before = {name: parameter.clone() for name, parameter in experts.named_parameters()}
    call = tiny_fp8.tokens(experts, arguments.tokens)

    print(f"transformers, with DeepGEMM:\n    {refusal(experts, call)}")

    deepgemm_jit.register()
    experts.config._experts_implementation = "deepgemm_jit"
    added_bytes = deepgemm_jit.prepare(experts)  # without it the first forward folds, and keeps no fragments
    with torch.no_grad():
        out = experts(*call)

    exact = tiny_fp8.float64_forward(experts, *call, quantize=False)
    ours = tiny_fp8.error(out, exact)
    rounding = tiny_fp8.error(tiny_fp8.float64_forward(experts, *call, quantize=True), exact)
    kept = all(torch.equal(p.view(torch.uint8), before[name].view(torch.uint8)) for name, p in experts.named_parameters())
    held_bytes = sum(parameter.nbytes for parameter in before.values())
    print(f"\ndeepgemm_jit, {arguments.tokens} tokens on {torch.cuda.get_device_name()}; relative error against float64:")
    print(f"    ours {ours:.3e}, quantized activations alone {rounding:.3e}")
    state = "unchanged" if kept else "CHANGED"
    print(f"    parameters: {held_bytes / 2**20:.1f} MiB, {state}; added, folded and as fragments: {added_bytes / 2**20:.1f} MiB")
    return 0 if kept and ours <= AS_GOOD_AS_FLOAT64 * rounding else 1


if __name__ == "__main__":
    sys.exit(main())

"""One FP8 mixture-of-experts model over two GPUs of one process, by a device map.

What used to be met, with ``experts_implementation="deepgemm"``:

    RuntimeError: DeepGEMM experts selected on a model spanning multiple CUDA devices in one process; its kernels are bound to a
    single CUDA context and corrupt across devices. ...

The script lets transformers raise it, runs the same model with ``experts_implementation="deepgemm_jit"``, checks every experts
layer against float64, and compares logits with those of the model on one GPU, bit for bit:

    python examples/two_gpus.py [--tokens N]

It needs torch, transformers, accelerate and two Hopper GPUs. The exit status is 1 if a layer is off or a logit differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import textwrap

import tiny_fp8
import torch
from accelerate import dispatch_model
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.integrations import transformers as deepgemm_jit

AS_GOOD_AS_FLOAT64 = 1.05
"""Against the error that the scheme's own rounding makes, every product summed in float64."""


def over_two_gpus(model: nn.Module) -> nn.Module:
    """Place a copy of the model as ``from_pretrained`` does with this device map."""
    layers = len(model.model.layers)
    device_map = {f"model.layers.{layer}": int(layer >= layers // 2) for layer in range(layers)}
    device_map |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    placed = dispatch_model(copy.deepcopy(model), device_map)
    fp8._disable_deepgemm_on_multi_device(placed)  # what transformers does at the end of loading
    return placed


def refusal(model: nn.Module, prompt: torch.Tensor) -> str:
    """Return what transformers says of DeepGEMM on this model; the linears go to ours, so that the experts are reached."""
    model.set_experts_implementation("deepgemm")
    try:
        with torch.no_grad(), deepgemm_jit.accelerate_linears(model):
            model(prompt)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing: it ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print(f"two_gpus.py needs two Hopper GPUs, and torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    one = tiny_fp8.model()
    two = over_two_gpus(one)
    one = one.to("cuda:0")
    prompt = torch.randint(0, 512, (1, arguments.tokens), device="cuda:0")

    print("transformers, with DeepGEMM:")
    print(textwrap.indent(textwrap.fill(refusal(two, prompt), 110), "    "))

    deepgemm_jit.register()
    seen = []
    for module in two.modules():
        if isinstance(module, fp8.FP8Experts):
            module.register_forward_hook(lambda module, call, out: seen.append((module, call, out)))
    logits = []
    for model in (one, two):
        model.set_experts_implementation("deepgemm_jit")
        with torch.no_grad(), deepgemm_jit.accelerate_linears(model):
            logits.append(model(prompt).logits.to("cuda:0"))

    print(f"\ndeepgemm_jit, {arguments.tokens} tokens; relative errors of the experts against float64:")
    print(f"    {'layer':<8}{'device':<10}{'ours':>12}{'rounding alone':>18}")
    fine = True
    for layer, (module, call, out) in enumerate(seen):
        exact = tiny_fp8.float64_forward(module, *call, quantize=False)
        rounding = tiny_fp8.error(tiny_fp8.float64_forward(module, *call, quantize=True), exact)
        ours = tiny_fp8.error(out, exact)
        fine = fine and ours <= AS_GOOD_AS_FLOAT64 * rounding
        print(f"    {layer:<8}{out.device!s:<10}{ours:>12.3e}{rounding:>18.3e}")
    same = torch.equal(*logits)
    print(f"    logits of two GPUs and of one: {'the same bits' if same else 'DIFFERENT'}")
    return 0 if fine and same else 1


if __name__ == "__main__":
    sys.exit(main())

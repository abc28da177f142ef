"""What the transformers examples share: random FP8 modules, made by transformers itself, and their float64 forward.

Dequantized value = stored value x scale.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations.moe import use_experts_implementation

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK, FP4_BLOCK = 128, 32
WEIGHT_DEVIATION = 0.03


def config(layers: int = 2) -> Qwen3MoeConfig:
    """Return a small Qwen3-MoE: 16 experts of 1024 x 512, 4 for each token."""
    return Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=4,
        eos_token_id=None,
        pad_token_id=0,
    )


def experts(activation_scheme: str = "dynamic", *, fp4: bool = False, device: str = "cuda") -> nn.Module:
    """Return one layer's experts as transformers' FP8 quantizer makes them, with random weights."""
    configuration = config()
    options = {"block_size": (BLOCK, BLOCK), "activation_scheme": activation_scheme, "scale_fmt": "ue8m0" if fp4 else "float"}
    if fp4:  # some versions read it off the configuration, others take an argument
        configuration.expert_dtype = "fp4"
        if "expert_dtype" in inspect.signature(fp8.FP8Experts).parameters:
            options["expert_dtype"] = "fp4"
    made = use_experts_implementation(
        experts_class=type("FP8Experts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    with torch.device("meta"):
        module = made(configuration, **options)
    return fill(module, device)


def model(activation_scheme: str = "dynamic", layers: int = 4) -> nn.Module:
    """Return a whole model on the CPU, linears and experts in FP8, with random weights."""
    made = Qwen3MoeForCausalLM(config(layers)).to(torch.bfloat16).requires_grad_(False)
    quantization = FineGrainedFP8Config(activation_scheme=activation_scheme, weight_block_size=(BLOCK, BLOCK))
    fp8.replace_with_fp8_linear(made, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    return fill(made, "cpu").eval()


def fill(module: nn.Module, device: str) -> nn.Module:
    """Give all FP8 modules, which come without memory, random weights and the scales that go with them."""
    for part in module.modules():
        if not isinstance(part, (fp8.FP8Linear, fp8.FP8Experts)):
            continue
        for name, empty in list(part.named_parameters(recurse=False)):
            if name.endswith("activation_scale"):  # as if calibrated: an amax of 4.5 to 9, and experts differ
                value = 4.5 / E4M3_MAX * (1 + torch.rand(empty.shape, device=device))
            elif name.endswith("scale_inv"):
                value = random_scales(empty, device)
            elif empty.dtype == torch.int8:
                value = torch.randint(0, 256, empty.shape, dtype=torch.uint8, device=device).view(torch.int8)
            else:
                value = (torch.randn(empty.shape, device=device) * E4M3_MAX / 4.5).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
            setattr(part, name, nn.Parameter(value, requires_grad=False))
    return module


def random_scales(empty: torch.Tensor, device: str) -> torch.Tensor:
    """Return float32 or UE8M0 weight scales."""
    if empty.dtype == torch.float8_e8m0fnu:  # of FP4: values are up to 6
        return torch.randint(-8, -4, empty.shape, device=device).float().exp2().to(empty.dtype)
    return WEIGHT_DEVIATION * 4.5 / E4M3_MAX * (0.5 + torch.rand(empty.shape, device=device))


def tokens(module: nn.Module, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, top-k index and top-k weights on the device of an experts module."""
    device = module.down_proj.device
    hidden = torch.randn((count, module.hidden_dim), dtype=torch.bfloat16, device=device)
    scores, index = torch.randn((count, module.num_experts), device=device).softmax(-1).topk(module.config.num_experts_per_tok)
    return hidden, index, (scores / scores.sum(-1, keepdim=True)).to(torch.bfloat16)


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return one expert's (N, K) weights in float64."""
    if weight.dtype == torch.int8:
        codes = torch.stack([weight.view(torch.uint8) & 15, weight.view(torch.uint8) >> 4], dim=-1).flatten(-2).long()
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=weight.device)
        return table[codes] * scale.double().repeat_interleave(FP4_BLOCK, -1)
    n, k = weight.shape
    return weight.double() * scale.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def float64_forward(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, quantize: bool
) -> torch.Tensor:
    """Return the experts' output on dequantized weights, everything in float64.

    Args:
        module: the experts.
        hidden: (T, H).
        index: (T, k).
        weights: (T, k).
        quantize: round activations to FP8 as the scheme says, and to bfloat16 between the GEMMs.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in range(module.num_experts):
        rows, place = torch.where(index == expert)
        x = hidden[rows].double()
        for name in ("gate_up_proj", "down_proj"):
            if quantize:
                x = quantized(
                    x, getattr(module, f"{name}_activation_scale")[expert] if module.activation_scheme == "static" else None
                )
            x = x @ dequantized(getattr(module, name)[expert], getattr(module, f"{name}_scale_inv")[expert]).T
            x = x.to(torch.bfloat16).double() if quantize else x
            if name == "gate_up_proj":
                gate, up = x.chunk(2, dim=-1)
                x = nn.functional.silu(gate) * up
        out.index_add_(0, rows, x * weights[rows, place, None].double())
    return out


def quantized(x: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` as the FP8 values that stand for it."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = static if static is not None else blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX
    return ((blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).float().to(E4M3).double() * scale).flatten(-2)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of the reference."""
    return float((out.double() - reference).norm() / reference.norm())

"""Tiny random FP8 models made by transformers itself, and what to compare with: forwards on dequantized weights.

transformers' own FP8 kernels are fetched from a hub. Where they cannot be had, `eager_peer` puts a linear on dequantized weights
in the place of `fp8_linear`, which both `FP8Linear` and the eager experts call.

Dequantized value = stored value x scale, for weights and for static activations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import finegrained_fp8 as fp8
from transformers.integrations.moe import use_experts_implementation

from deepgemm_jit.ops.weights import Experts

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BLOCK = 32
NOISE = 2.0**-6.5
"""Relative, on what every layer gives: several times what another order of summation or a bf16 weight moves it by."""

# --- weights


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> torch.Tensor:
    """Return (..., N, K) weights times their scales; packed FP4 is unpacked, and its scales are per 32 of K."""
    values, scale = weight, as_numbers(scale).to(dtype)
    if weight.dtype == torch.int8:
        codes = torch.stack([weight.view(torch.uint8) & 15, weight.view(torch.uint8) >> 4], dim=-1).flatten(-2).long()
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=weight.device)
        values, block = table[codes], (1, FP4_BLOCK)
    n, k = values.shape[-2:]
    if scale.dim() < 2:
        scale = scale.reshape(*scale.shape, 1, 1)
    if block is None:
        block = (n // scale.shape[-2], k)
    wide = scale.repeat_interleave(block[0], -2)[..., :n, :].repeat_interleave(block[1], -1)[..., :k]
    return values.to(dtype) * wide


def as_numbers(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales of float32, UE8M0, or UE8M0 as bytes."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def quantize_at_random(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, device: Any) -> tuple[Any, Any]:
    """Return random values for a weight and a scale of these shapes and dtypes: dequantized, about normal of deviation 0.05."""
    if weight.dtype == torch.int8:
        values = torch.randint(0, 256, weight.shape, dtype=torch.uint8, device=device).view(torch.int8)
        return values, _power_of_two(torch.randint(-8, -4, scale.shape, device=device), scale.dtype)
    values = (torch.randn(weight.shape, device=device) * 80).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if scale.dtype == torch.float8_e8m0fnu:
        return values, _power_of_two(torch.randint(-12, -9, scale.shape, device=device), scale.dtype)
    return values, 0.05 / 80 * (0.5 + torch.rand(scale.shape, device=device))


def _power_of_two(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return exponents.float().exp2().to(dtype)


# --- models


class Softcapped(fp8.FP8Experts):
    """A class with a gate of its own."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate / 2) * 2 * up


def fill(model: nn.Module, device: Any = "cpu") -> nn.Module:
    """Give the FP8 modules of a model, which transformers makes without memory, random weights on ``device``."""
    for module in model.modules():
        if not isinstance(module, (fp8.FP8Linear, fp8.FP8Experts)):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name.endswith("scale_inv"):
                continue
            if name.endswith("activation_scale"):  # experts that differ, and of a size that clamps a few
                value = 0.005 + 0.005 * torch.rand(parameter.shape, device=device)
            elif name == "bias":
                value = torch.randn(parameter.shape, dtype=BF16, device=device) * 0.1
            else:
                scale_name = f"{name}_scale_inv"
                value, scale = quantize_at_random(parameter, getattr(module, scale_name), module.block_size, device)
                setattr(module, scale_name, nn.Parameter(scale, requires_grad=False))
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return model.eval()


def qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def deepseek_v3_config(**changes: Any) -> DeepseekV3Config:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return DeepseekV3Config(**(sizes | changes))


MODELS = {"qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe_config), "deepseek_v3": (DeepseekV3ForCausalLM, deepseek_v3_config)}


def fp8_model(
    kind: str, device: Any = "cpu", *, block: tuple[int, int] | None = (128, 128), scheme: str = "dynamic", **config: Any
) -> nn.Module:
    """Build a tiny random model and replace its linears and experts by transformers' FP8 modules."""
    make, config_for = MODELS[kind]
    model = make(config_for(experts_implementation="eager", **config)).to(BF16)
    nn.init.normal_(model.model.embed_tokens.weight, std=2.0)  # larger than what a layer adds: noise is damped
    quantization = quantization_config(block, scheme)
    # Called directly: without a GPU, from_pretrained dequantizes without a word.
    fp8.replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    return fill(_move(model, device), device)


def _move(model: nn.Module, device: Any) -> nn.Module:
    """Move all but the FP8 modules, which have no memory yet."""
    for module in model.modules():
        if not isinstance(module, (fp8.FP8Linear, fp8.FP8Experts)):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to(device), requires_grad=False))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
    return model


def spread(model: nn.Module, gpus: Sequence[int]) -> nn.Module:
    """Dispatch a copy of a model over GPUs: the embedding on the first, the layers in equal parts, the head on the last."""
    from accelerate import dispatch_model

    twin = copy.deepcopy(model)
    if len(set(gpus)) == 1:
        return twin.to(f"cuda:{gpus[0]}")
    layers = len(model.model.layers)
    device_map = {f"model.layers.{i}": gpus[i * len(gpus) // layers] for i in range(layers)}
    device_map |= {"model.embed_tokens": gpus[0], "model.rotary_emb": gpus[0], "model.norm": gpus[-1], "lm_head": gpus[-1]}
    fp8._disable_deepgemm_on_multi_device(dispatch_model(twin, device_map))  # what loading with a device map does
    return twin


def quantization_config(block: tuple[int, int] | None = (128, 128), scheme: str = "dynamic", **more: Any) -> FineGrainedFP8Config:
    return FineGrainedFP8Config(activation_scheme=scheme, weight_block_size=block, **more)


def fp8_experts(
    block: tuple[int, int] | None = (128, 128),
    scheme: str = "dynamic",
    device: Any = "cpu",
    *,
    base: type[nn.Module] | None = None,
    has_gate: bool = True,
    scale_fmt: str = "float",
    fp4: bool = False,
    **config: Any,
) -> nn.Module:
    """Build one experts module as transformers' quantizer does, filled at random."""
    made = qwen3_moe_config(**config)
    made._experts_implementation = "eager"
    options: dict[str, Any] = {"block_size": block, "activation_scheme": scheme, "scale_fmt": scale_fmt, "has_gate": has_gate}
    if fp4:  # read off the configuration by some versions, given as an argument in others
        made.expert_dtype = "fp4"
        if "expert_dtype" in inspect.signature(fp8.FP8Experts).parameters:
            options["expert_dtype"] = "fp4"
    # A class of its own each time: the decorator changes the class it is given.
    own = type("FP8Experts", (base or fp8.FP8Experts,), {})
    cls = use_experts_implementation(
        experts_class=own, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=has_gate
    )
    with torch.device("meta"):
        module = cls(made, **options)
    return fill(module, device)


def random_call(module: nn.Module, tokens: int, top_k: int = 2, device: Any = "cpu") -> tuple[torch.Tensor, ...]:
    """Draw hidden states, top-k index and top-k weights for an experts module."""
    hidden = torch.randn((tokens, module.hidden_dim), dtype=BF16, device=device)
    index = torch.rand((tokens, module.num_experts), device=device).topk(top_k).indices
    weights = torch.rand((tokens, top_k), dtype=BF16, device=device) + 0.1
    return hidden, index, weights


# --- peers


def quantized(x: torch.Tensor, static_scale: torch.Tensor | None, *, dynamic: bool) -> torch.Tensor:
    """Return ``x`` in float64 as the FP8 values that stand for it: by a scale given, or by one for each 128 of K, or as it is."""
    if static_scale is not None:
        scale = static_scale.float()
        return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).double() * scale.double()
    if not dynamic:
        return x.double()
    k = x.shape[-1]
    padded = nn.functional.pad(x.float(), (0, -k % 128)).unflatten(-1, (-1, 128))
    largest = padded.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = largest / torch.full_like(largest, E4M3_MAX)
    return ((padded / scale).to(E4M3).double() * scale.double()).flatten(-2)[..., :k]


@contextmanager
def eager_peer(*, dynamic: bool = False) -> Iterator[None]:
    """Put a linear on dequantized weights, summed in float64, in the place of transformers' FP8 kernels.

    Args:
        dynamic: quantize activations where no static scale is given, as FP8 kernels do.
    """

    def linear(
        input: torch.Tensor,  # noqa: A002  transformers' name
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        block_size: Any = None,
        bias: torch.Tensor | None = None,
        activation_scale: torch.Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> torch.Tensor:
        block = None if block_size is None else tuple(block_size)
        x = quantized(input, activation_scale, dynamic=dynamic)
        out = x @ dequantized(weight, weight_scale_inv, block, torch.float64).T
        return (out if bias is None else out + bias.double()).to(input.dtype)

    theirs, fp8.fp8_linear = fp8.fp8_linear, linear
    try:
        yield
    finally:
        fp8.fp8_linear = theirs


def grouped_kernel_double() -> SimpleNamespace:
    """Return what stands for the kernels that transformers' grouped forward loads, on dequantized weights."""

    def grouped_matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        offsets: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        block_size: Any,
    ) -> torch.Tensor:
        block = None if block_size is None else tuple(block_size)
        wide = dequantized(weight, scale, block, torch.float64)
        first, parts = 0, []
        for expert, end in enumerate(offsets.tolist()):
            parts.append(x[first:end].double() @ wide[expert].T)
            first = end
        return torch.cat(parts).to(x.dtype)

    return SimpleNamespace(grouped_matmul=grouped_matmul)


def float64_experts(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, rounded: bool = False
) -> torch.Tensor:
    """Run an experts module on dequantized weights in float64.

    Args:
        module: an FP8 experts module of transformers.
        hidden: (T, H) bfloat16.
        index: (T, k); what is no expert contributes nothing.
        weights: (T, k).
        rounded: round where a kernel does: quantized activations, bfloat16 between the GEMMs.

    Returns:
        (T, H) float64.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    static = module.activation_scheme == "static"
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in range(module.num_experts):
        rows, place = torch.where(index == expert)
        first, second = (
            dequantized(getattr(module, n)[expert], getattr(module, f"{n}_scale_inv")[expert], module.block_size, torch.float64)
            for n in (name, "down_proj")
        )
        s1, s2 = None, None
        if static and rounded:
            s1, s2 = module.gate_up_proj_activation_scale[expert], module.down_proj_activation_scale[expert]
        between = quantized(hidden[rows], s1, dynamic=rounded) @ first.T
        between = between.to(BF16).double() if rounded else between
        between = module._apply_gate(between) if module.has_gate else module.act_fn(between)
        between = between.to(BF16) if rounded else between
        result = quantized(between, s2, dynamic=rounded) @ second.T
        result = result.to(BF16).double() if rounded else result
        out.index_add_(0, rows, result * weights[rows, place, None].double())
    return out


def experts_on_floats(hidden: Any, index: Any, weights: Any, experts: Experts) -> torch.Tensor:
    """Do what `ops.fp8_experts` does with prepared experts, on dequantized weights in float64."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(experts.count):
        rows, place = torch.where(index == expert)
        x: Any = hidden[rows]
        for projection in (experts.gate_up, experts.down):
            static = None if projection.activation_scale is None else projection.activation_scale[expert]
            block = (128, 128) if projection.scale_kind == "block" else (1, 128)
            wide = dequantized(projection.weight[expert], projection.scale[expert], block, torch.float64)
            x = (quantized(x, static, dynamic=False) @ wide.T).to(BF16)
            if projection is experts.gate_up:
                x = _activated(x, experts)
        out.index_add_(0, rows, x.double() * weights[rows, place, None].double())
    return out.to(hidden.dtype)


def _activated(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    kind, limit, alpha, callback = experts.activation
    if kind == "callback":
        return callback(x)
    if not experts.gated:
        return nn.functional.silu(x)
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate) if alpha is not None else nn.functional.silu(gate) * up


# --- tokens


def random_prompts(device: Any = "cpu", count: int = 64) -> torch.Tensor:
    return torch.randint(1, 256, (count, 5), device=device)


def greedy(model: nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """Return prompts with the four tokens that follow."""
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=4, do_sample=False).cpu()


def decided_tokens(model: nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a peer's tokens, and which prompts are given the same ones when every layer is a little off.

    Where two experts or two tokens are nearly as good, another order of summation decides between them: such a prompt tells
    nothing about a forward.
    """
    tokens = greedy(model, prompt)
    decided = torch.ones(len(prompt), dtype=torch.bool)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) or "down_proj" in module._parameters]
    for _ in range(20):  # a near tie falls either way: each draw finds half of them
        handles = [layer.register_forward_hook(lambda _m, _x, out: out * (1 + NOISE * torch.randn_like(out))) for layer in layers]
        decided &= (greedy(model, prompt) == tokens).all(1)
        for handle in handles:
            handle.remove()
    assert decided.any(), "the peer decides nothing"
    return tokens, decided

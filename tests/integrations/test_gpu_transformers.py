"""Tiny random models of transformers on GPUs: layer by layer against float64, tokens against the eager peer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from ops.reference import assert_close, relative_error
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.errors import ContextMismatchError
from deepgemm_jit.integrations import linears
from deepgemm_jit.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' and torch's own

BF16 = torch.bfloat16
AS_GOOD_AS_TORCH = 1.05
AS_GOOD_OF_FEW = 1.5
"""Of one token: a few hundred numbers do not average out."""
ACTIVATIONS = ("dynamic", "static")


SCHEMES: dict[str, dict[str, Any]] = {
    "block_128_128": {},
    "block_1_128": {"block": (1, 128)},
    "per_tensor": {"block": None},
    "ue8m0": {"scale_fmt": "ue8m0"},
    "fp4": {"scale_fmt": "ue8m0", "fp4": True},
    "no_gate": {"has_gate": False},
    "limit_and_alpha": {"swiglu_limit": 0.4, "swiglu_alpha": 1.7},
    "gate_of_its_own": {"base": peers.Softcapped},
}


@pytest.fixture(autouse=True)
def compiled_anew(registered: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def ours(module: nn.Module) -> nn.Module:
    module.config._experts_implementation = integration.NAME
    return module


Seen = list[tuple[str, nn.Module, tuple[torch.Tensor, ...], torch.Tensor]]


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """Keep what each FP8 linear and each experts module of a model is given and gives."""
    seen: Seen = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: torch.Tensor) -> None:
            seen.append((name, module, tuple(x.clone() for x in given), out.clone()))

        return hook

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (fp8.FP8Linear, fp8.FP8Experts))]
    handles = [module.register_forward_hook(keep(name)) for name, module in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def assert_experts_are_right(module: nn.Module, call: tuple[torch.Tensor, ...], out: torch.Tensor, what: str) -> None:
    """Fail unless the error against float64 is at most 1.05 times that of a torch forward that rounds where we do."""
    exact = peers.float64_experts(module, *call)
    torch_error = relative_error(peers.float64_experts(module, *call, rounded=True).to(BF16), exact)
    error, factor = relative_error(out, exact), AS_GOOD_AS_TORCH if len(out) > 1 else AS_GOOD_OF_FEW
    assert 0 < error <= factor * torch_error, f"{what}: {error:.3e}, torch {torch_error:.3e}"


def assert_layers_are_right(seen: Seen) -> None:
    for name, module, given, out in seen:
        if isinstance(module, fp8.FP8Experts):
            assert_experts_are_right(module, given, out, name)
        elif linears.is_replaced(module):
            x = peers.quantized(given[0].flatten(0, -2), module.activation_scale, dynamic=True)
            wide = peers.dequantized(module.weight, module.weight_scale_inv, module.block_size, torch.float64)
            assert_close(out.flatten(0, -2), x @ wide.T, name)


# --- one GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_experts_module_is_as_near_to_float64_as_torch(scheme: str, activations: str, tokens: int) -> None:
    module = ours(peers.fp8_experts(scheme=activations, device="cuda", **SCHEMES[scheme]))
    call = peers.random_call(module, tokens, device="cuda")
    with torch.no_grad():
        out = module(*call)
        assert torch.equal(module(*call), out)
    assert (out.shape, out.dtype) == (call[0].shape, BF16)
    if tokens:
        assert_experts_are_right(module, call, out, scheme)


@pytest.mark.gpu
def test_an_index_of_another_rank_contributes_nothing() -> None:
    module = ours(peers.fp8_experts(device="cuda"))
    hidden, index, weights = peers.random_call(module, 77, device="cuda")
    index[::3, 0], index[1::5, 1] = module.num_experts, -1
    with torch.no_grad():
        out = module(hidden, index, weights)
    assert_experts_are_right(module, (hidden, index, weights), out, "sentinels")


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", peers.MODELS)
def test_a_model_is_right_layer_by_layer_and_gives_the_tokens_of_the_eager_peer(kind: str, activations: str) -> None:
    model, prompt = peers.fp8_model(kind, "cuda", scheme=activations), peers.random_prompts("cuda")
    with peers.eager_peer(dynamic=True):
        theirs, decided = peers.decided_tokens(model, prompt)
    model.set_experts_implementation(integration.NAME)
    with integration.accelerate_linears(model) as done:
        assert done.skipped == {}
        tokens = peers.greedy(model, prompt)
        with watched(model) as seen, torch.no_grad():
            model(prompt)
    assert torch.equal(tokens[decided], theirs[decided])
    assert len(seen) == sum(isinstance(m, (fp8.FP8Linear, fp8.FP8Experts)) for m in model.modules())
    assert_layers_are_right(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", peers.MODELS)
def test_from_pretrained_runs_with_the_name(kind: str, tmp_path: Any) -> None:
    make, config_for = peers.MODELS[kind]
    make(config_for()).to(BF16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=BF16,
        device_map="cuda",
        quantization_config=peers.quantization_config(),
        experts_implementation=integration.NAME,
    )
    with integration.accelerate_linears(model), watched(model) as seen, torch.no_grad():
        logits = model(peers.random_prompts("cuda")).logits
    assert logits.isfinite().all()
    assert [m for _, m, _, _ in seen if isinstance(m, fp8.FP8Experts)]
    assert_layers_are_right(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", peers.MODELS)
def test_a_bf16_model_gives_the_tokens_of_transformers_own_experts(kind: str) -> None:
    make, config_for = peers.MODELS[kind]
    model = make(config_for(experts_implementation="eager")).to(BF16).cuda().eval().requires_grad_(False)
    prompt = peers.random_prompts("cuda")
    theirs, decided = peers.decided_tokens(model, prompt)
    model.set_experts_implementation(integration.NAME)
    assert torch.equal(peers.greedy(model, prompt)[decided], theirs[decided])


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "prepared"])
@pytest.mark.parametrize("case", ["block_128_128", "fp4", "limit_and_alpha", "gate_of_its_own"])
def test_compiled_experts_are_one_graph_for_any_number_of_tokens(case: str, warm: bool) -> None:
    module = ours(peers.fp8_experts(device="cuda", **SCHEMES[case]))
    if warm:
        integration.prepare(module)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (77, 128, 1, 300):
            call = peers.random_call(module, tokens, device="cuda")
            out = compiled(*call)
            assert_experts_are_right(module, call, out, f"{case}, {tokens} tokens")
            if case != "gate_of_its_own":  # inductor rounds a callback's steps otherwise
                assert torch.equal(out, module(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_compiled_linears_are_one_graph_for_any_number_of_rows(activations: str) -> None:
    with torch.device("meta"):
        linear = fp8.FP8Linear(256, 200, block_size=(128, 128), activation_scheme=activations, has_bias=True)
    model = peers.fill(nn.Sequential(linear), "cuda")
    integration.accelerate_linears(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (77, 128, 1):
            x = torch.randn((2, rows, 256), dtype=BF16, device="cuda")
            assert relative_error(compiled(x), model(x).double()) < 4e-3  # a bias may be added before the rounding


@pytest.mark.gpu
def test_a_whole_model_compiles_to_one_graph() -> None:
    model, prompt = peers.fp8_model("qwen3_moe", "cuda"), peers.random_prompts("cuda")
    model.set_experts_implementation(integration.NAME)
    with integration.accelerate_linears(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(prompt, use_cache=False).logits, model(prompt, use_cache=False).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_captured_layer_replays_with_other_tokens(activations: str) -> None:
    model = peers.fp8_model("qwen3_moe", "cuda", scheme=activations)
    model.set_experts_implementation(integration.NAME)
    layer = model.model.layers[0]
    experts, linear = layer.mlp.experts, layer.self_attn.o_proj
    integration.accelerate_linears(model)
    integration.prepare(model)
    static = peers.random_call(experts, 77, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        linear(experts(*static))  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        out = linear(experts(*static))
    for _ in range(3):
        call = peers.random_call(experts, 77, device="cuda")
        for target, source in zip(static, call, strict=True):
            target.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, linear(experts(*call)))


@pytest.mark.gpu
def test_weights_on_another_device_than_the_tokens_are_refused() -> None:
    module = ours(peers.fp8_experts())
    with pytest.raises(ContextMismatchError, match=r"cpu.*cuda:0"), torch.no_grad():
        module(*peers.random_call(module, 3, device="cuda"))


@pytest.mark.gpu
def test_what_was_prepared_is_freed_with_the_module() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    module = ours(peers.fp8_experts(device="cuda", scale_fmt="ue8m0", fp4=True, base=peers.Softcapped))
    held = torch.cuda.memory_allocated()
    added_bytes = integration.prepare(module)
    assert added_bytes > 0 and torch.cuda.memory_allocated() - held >= added_bytes
    gc.disable()
    try:
        del module
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp4", "ue8m0", "per_tensor", "block_128_128"])
def test_a_captured_graph_follows_weights_loaded_in_place_and_prepared_again(scheme: str) -> None:
    module = ours(peers.fp8_experts(device="cuda", **SCHEMES[scheme]))
    call, graph = peers.random_call(module, 9, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        before = module(*call)
        with torch.cuda.graph(graph):
            out = module(*call)
        module.load_state_dict(peers.fp8_experts(device="cuda", **SCHEMES[scheme]).state_dict())
        integration.prepare(module)
        graph.replay()
        assert torch.equal(out, module(*call)) and not torch.equal(out, before)


@pytest.mark.gpu
def test_a_preparation_has_ended_when_its_call_returns() -> None:
    module = ours(peers.fp8_experts(device="cuda", fp4=True, num_experts=32, hidden_size=2048, moe_intermediate_size=1024))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert integration.prepare(module) > 0
    assert stream.query()


@pytest.mark.gpu
def test_what_was_prepared_is_freed_when_parameters_are_offloaded() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    module = ours(peers.fp8_experts(device="cuda", fp4=True))
    integration.prepare(module)
    module.to("meta")
    assert torch.cuda.memory_allocated() == before


# --- two GPUs


@pytest.mark.multigpu
@pytest.mark.skipif(find_spec("accelerate") is None, reason="a device map needs accelerate")
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", peers.MODELS)
def test_a_model_over_two_gpus_gives_the_tokens_and_layers_of_one(kind: str, activations: str) -> None:
    model = peers.fp8_model(kind, scheme=activations)
    model.set_experts_implementation(integration.NAME)
    models = {devices: peers.spread(model, devices) for devices in ((0, 0), (1, 1), (0, 1), (1, 0))}
    assert any(module._deepgemm_disabled for module in models[0, 1].modules() if isinstance(module, fp8.FP8Experts))
    prompt = peers.random_prompts()
    results = {}
    for devices, twin in models.items():
        integration.accelerate_linears(twin)
        tokens = peers.greedy(twin, prompt.to(devices[0]))
        with watched(twin) as seen, torch.no_grad():
            twin(prompt.to(devices[0]))
        if devices == (0, 1):
            assert {out.device.index for *_, out in seen} == {0, 1}
            assert_layers_are_right(seen)
        results[devices] = tokens, [out.cpu() for *_, out in seen]
    tokens, layers = results[0, 0]
    for other_tokens, other_layers in results.values():
        assert torch.equal(other_tokens, tokens)
        assert len(layers) == len(other_layers)
        assert all(torch.equal(a, b) for a, b in zip(layers, other_layers, strict=True))


@pytest.mark.multigpu
@pytest.mark.skipif(find_spec("accelerate") is None, reason="a device map needs accelerate")
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_two_hundred_forwards_alternate_between_gpus(activations: str) -> None:
    model = peers.fp8_model("qwen3_moe", scheme=activations)
    model.set_experts_implementation(integration.NAME)
    models = [(devices[0], peers.spread(model, devices)) for devices in ((0, 0), (0, 1), (1, 1), (1, 0))]
    for _, twin in models:
        integration.accelerate_linears(twin)
    prompt = peers.random_prompts()
    with torch.no_grad():
        first = model_logits(models[0], prompt)
        differing = [i for i in range(200) if not torch.equal(model_logits(models[i % 4], prompt), first)]
    assert differing == []


def model_logits(placed: tuple[int, nn.Module], prompt: torch.Tensor) -> torch.Tensor:
    device, model = placed
    return model(prompt.to(device)).logits.cpu()

"""How the experts forward is called: streams, CUDA graphs, torch.compile, and what torch asks of an operator."""

from __future__ import annotations

import gc
import shutil
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.experts_reference import (
    SCHEMES,
    ReferenceExperts,
    gelu_times_up,
    random_bf16_experts,
    random_experts,
    random_hidden,
    random_routing,
    with_sentinels,
)
from ops.gpu_memory import assert_untouched, occupy_free_memory

from deepgemm_jit import ops

pytestmark = pytest.mark.gpu

COUNT, K, HIDDEN, INTERMEDIATE = 16, 4, 512, 384
KINDS = ("blocks", "rows", "fp4_span_3", "static_per_expert", "callback", "bf16", "bf16_callback")

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer:
    """Experts and their forward."""

    def __init__(self, kind: str) -> None:
        self.reference: ReferenceExperts
        self._experts = None
        if kind.startswith("bf16"):
            self.reference = random_bf16_experts(COUNT, HIDDEN, INTERMEDIATE)
            callback = gelu_times_up if kind == "bf16_callback" else None
            self._activation = ops.Activation("silu" if callback is None else "callback", callback=callback)
        else:
            self.reference = random_experts(COUNT, HIDDEN, INTERMEDIATE, **SCHEMES[kind])
            self._experts = ops.prepare_experts(**self.reference.arguments)

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._experts is not None:
            return ops.fp8_experts(hidden, index, weights, self._experts)
        up, down = self.reference.gate_up.weight, self.reference.down.weight
        return ops.bf16_experts(hidden, index, weights, up, down, activation=self._activation)


def drawn(tokens: int) -> Given:
    hidden, (index, weights) = random_hidden(tokens, HIDDEN), random_routing(tokens, K, COUNT)
    return hidden, with_sentinels(index, COUNT, 0.1), weights


def bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16)


# --- streams


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_runs_on_the_current_stream(kind: str) -> None:
    forward, given = Layer(kind), drawn(300)
    expected = forward(*given)
    hidden, index, weights = (
        torch.full_like(given[0], torch.nan),
        torch.full_like(given[1], 1),
        torch.full_like(given[2], torch.nan),
    )
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms, in which a launch on another stream would meet NaN
        for late, right in zip((hidden, index, weights), given, strict=True):
            late.copy_(right)
        out = forward(hidden, index, weights)
    stream.synchronize()
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # is a prototype, torch says each time
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_never_waits_for_the_gpu(kind: str) -> None:
    forward, given = Layer(kind), drawn(300)
    expected = forward(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        busy = torch.cuda.Event()
        busy.record()
        out = forward(*given)
        waited = busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the forward came back only after earlier work on its stream"
    assert torch.equal(bits(out), bits(expected))


# --- CUDA graphs


class Captured:
    """A forward of a fixed number of tokens, captured, with inputs of its own."""

    def __init__(self, forward: Layer, tokens: int) -> None:
        self._inputs = drawn(tokens)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = forward(*self._inputs)

    def replay(self, given: Given) -> torch.Tensor:
        """Replay on the current stream with new inputs and a spoilt output; return the bits."""
        for own, new in zip(self._inputs, given, strict=True):
            own.copy_(new)
        self._out.fill_(torch.nan)
        self._graph.replay()
        return bits(self._out).clone()


def one_expert(given: Given) -> Given:
    return given[0], torch.full_like(given[1], COUNT - 1), given[2]


def no_expert(given: Given) -> Given:
    return given[0], torch.full_like(given[1], COUNT), given[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_forward_replays_with_new_tokens_and_routing_as_an_eager_one(kind: str) -> None:
    forward, inputs = Layer(kind), [drawn(77), one_expert(drawn(77)), no_expert(drawn(77)), drawn(77)]
    expected = [bits(forward(*given)) for given in inputs]  # and every kernel is loaded before the capture
    captured = Captured(forward, 77)
    for given, right in zip(inputs, expected, strict=True):
        assert torch.equal(captured.replay(given), right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_stays_right_when_forwards_grow_and_memory_is_reused(kind: str) -> None:
    forward, small, large = Layer(kind), drawn(33), drawn(900)
    right_small, right_large = bits(forward(*small)), bits(forward(*large))
    captured = Captured(forward, 33)
    assert torch.equal(captured.replay(small), right_small)
    assert torch.equal(bits(forward(*large)), right_large)
    grown = Captured(forward, 900)
    gc.collect()
    held = occupy_free_memory()
    for _ in range(2):
        assert torch.equal(grown.replay(large), right_large)
        assert torch.equal(captured.replay(small), right_small)
    assert_untouched(held)
    del held
    assert torch.equal(bits(forward(*large)), right_large)
    assert torch.equal(captured.replay(small), right_small)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_on_another_stream(kind: str) -> None:
    forward, given = Layer(kind), drawn(77)
    expected = bits(forward(*given))
    captured = Captured(forward, 77)
    assert torch.equal(captured.replay(given), expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = captured.replay(given)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_graphs_and_eager_calls_of_one_layer_run_in_turns() -> None:
    forward, inputs = Layer("blocks"), [drawn(5), drawn(64)]
    expected = [bits(forward(*given)) for given in inputs]
    graphs = [Captured(forward, given[0].shape[0]) for given in inputs]
    for turn in (0, 1, 1, 0, 1, 0):
        assert torch.equal(graphs[turn].replay(inputs[turn]), expected[turn])
        assert torch.equal(bits(forward(*inputs[1 - turn])), expected[1 - turn])


# --- torch.compile and operators


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, "aot_eager") for kind in ("blocks", "static_per_expert", "callback", "bf16")] + [("blocks", "inductor")],
)
def test_torch_compile_takes_a_whole_graph_with_any_number_of_tokens(kind: str, backend: str) -> None:
    if backend == "inductor" and (find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc"))):
        pytest.skip("inductor needs triton and a C compiler")
    import torch._inductor.config

    layer = Layer(kind)

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layer(hidden, index, weights)

    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
        for tokens in (77, 128, 1, 300):
            given = drawn(tokens)
            expected, out = forward(*given), compiled(*given)
            assert torch.equal(bits(out), bits(expected))
    torch._dynamo.reset()


def operands(kind: str) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the arguments of the two operators behind a forward."""
    hidden, index, weights = drawn(20)
    if kind == "bf16":
        reference = random_bf16_experts(COUNT, HIDDEN, INTERMEDIATE)
        up = (reference.gate_up.weight, None, None, False, False, False, None)
        down = (reference.down.weight, None, None, False, False, False, None)
    else:
        experts = ops.prepare_experts(**random_experts(COUNT, HIDDEN, INTERMEDIATE, **SCHEMES[kind]).arguments)
        up, down = (
            (each.weight, each.scale, each.activation_scale, each.scale_kind == "row", False, kind != "rows", each.fragments)
            for each in (experts.gate_up, experts.down)
        )
    gate_silu = 2
    first = (hidden, index, weights, down[0], *up, gate_silu)
    projected, rows, ends = torch.ops.deepgemm_jit.experts_up(*first)
    return first, (projected, index, weights, rows, ends, *down, gate_silu, False, torch.inf, 0.0)


@pytest.mark.filterwarnings("ignore")  # of torch's own checks
@pytest.mark.parametrize("kind", ["blocks", "rows", "fp4_span_3", "static_per_expert", "bf16"])
def test_the_operators_are_what_torch_expects(kind: str) -> None:
    up, down = operands(kind)
    # The first leaves rows of no token unwritten, so that two runs of it cannot be compared; a compiled forward is, above.
    # torch's check of schemas multiplies its inputs, which it cannot do in FP8: there the compiled forwards above stand in.
    checks = ("test_autograd_registration", "test_faketensor", *(("test_schema",) if kind == "bf16" else ()))
    more = ("test_aot_dispatch_dynamic",) if kind == "bf16" else ()
    torch.library.opcheck(torch.ops.deepgemm_jit.experts_up.default, up, test_utils=checks)
    torch.library.opcheck(torch.ops.deepgemm_jit.experts_down.default, down, test_utils=(*checks, *more))

"""The forwards without memory and under torch.compile, on a CPU: shapes, one graph, nothing of the preparation in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from integrations import peers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.integrations import finegrained_fp8 as fp8

from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.experts import prepared_experts

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of torch's own compiler

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def compiled_anew(registered: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CASES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"scheme": "static"},
    "block_1_128": {"block": (1, 128)},
    "fp4": {"fp4": True},
    "limit": {"swiglu_limit": 1.0},
    "callback": {"base": peers.Softcapped},
    "no_gate_gelu": {"has_gate": False, "hidden_act": "gelu"},
}


def ours(module: nn.Module) -> nn.Module:
    module.config._experts_implementation = integration.NAME
    return module


@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize("case", CASES)
def test_experts_given_fake_tensors_give_a_shape(case: str, tokens: int) -> None:
    module = ours(peers.fp8_experts(**CASES[case]))
    integration.prepare(module)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        out = module(*(mode.from_tensor(tensor) for tensor in peers.random_call(module, tokens)))
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == ((tokens, 256), BF16)


@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_linears_given_fake_tensors_give_a_shape(scheme: str, tokens: int) -> None:
    model = linear_model(scheme, (128, 128))
    integration.prepare(model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        out = model(torch.empty((tokens, 3, 256), dtype=BF16))
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == ((tokens, 3, 200), BF16)


def linear_model(scheme: str, block: tuple[int, int] | None) -> nn.Module:
    with torch.device("meta"):
        linear = fp8.FP8Linear(256, 200, block_size=block, activation_scheme=scheme, has_bias=True)
    model = peers.fill(nn.Sequential(linear))
    integration.accelerate_linears(model)
    return model


class _Recorder:
    """A backend of torch.compile that keeps the graphs and answers each with zeros, (rows of the input, columns)."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)

        def run(*given: Any) -> Any:
            rows = next(x.shape[0] for x in given if isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == BF16)
            return (torch.zeros((rows, self.columns), dtype=BF16),)

        return run

    def nodes(self) -> list[list[torch.fx.Node]]:
        return [[node for node in graph.graph.nodes if node.op not in ("placeholder", "output")] for graph in self.graphs]

    def operators(self) -> list[list[str]]:
        """Return the names of our operators, per graph."""
        names = [[str(node.target) for node in nodes] for nodes in self.nodes()]
        return [[name.split(".")[1].removesuffix("_nt") for name in graph if name.startswith("deepgemm_jit.")] for graph in names]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "prepared"])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_one_graph_for_any_number_of_tokens(case: str, warm: bool) -> None:
    module = ours(peers.fp8_experts(**CASES[case]))
    if warm:
        integration.prepare(module)
    recorder = _Recorder(module.hidden_dim)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=recorder)
    with torch.no_grad():
        for tokens in (77, 128, 5):
            assert compiled(*peers.random_call(module, tokens)).shape == (tokens, 256)
    assert recorder.operators() == [["experts_up", "experts_down"]]
    (nodes,) = recorder.nodes()
    assert not [node for node in nodes if "float8" in str(node) or node.op == "get_attr"]
    if case not in ("callback", "no_gate_gelu"):
        # All preparation is outside of the graph; a limit may be a number that the graph takes.
        assert {node.target for node in nodes if node.op == "call_method"} <= {"item"}


class _Seen:
    """A backend of torch.compile that keeps the FP8 tensors that each run reads, and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs: list[list[torch.Tensor]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.runs.append([x for x in given if isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn])
            return (torch.zeros((3, 256), dtype=BF16),)

        return run


def bits(tensors: list[torch.Tensor]) -> list[tuple[int, bytes]]:
    """Return address and content, in the order of addresses."""
    return sorted((t.data_ptr(), bytes(t.contiguous().view(torch.uint8).numpy().data)) for t in tensors)


def test_a_compiled_module_follows_weights_that_are_prepared_again() -> None:
    module, seen = ours(peers.fp8_experts(fp4=True)), _Seen()
    integration.prepare(module)
    compiled, call = torch.compile(module, fullgraph=True, dynamic=True, backend=seen), peers.random_call(module, 3)
    contents = []
    with torch.no_grad():
        for _ in range(2):
            compiled(*call)
            experts = prepared_experts(module)
            contents.append(bits(seen.runs[-1]))
            assert contents[-1] == bits([experts.gate_up.weight, experts.down.weight])
            module.load_state_dict(peers.fp8_experts(fp4=True).state_dict())
            integration.prepare(module)
    # The same memory with other values in it: a captured graph reads it too.
    assert seen.graphs == 1
    assert [address for address, _ in contents[0]] == [address for address, _ in contents[1]] and contents[0] != contents[1]


def test_a_compiled_module_reads_weights_that_lie_right_from_the_module() -> None:
    module, seen = ours(peers.fp8_experts()), _Seen()
    integration.prepare(module)
    compiled, call = torch.compile(module, fullgraph=True, dynamic=True, backend=seen), peers.random_call(module, 3)
    with torch.no_grad():
        for _ in range(2):
            compiled(*call)
            assert bits(seen.runs[-1]) == bits([module.gate_up_proj, module.down_proj])
            kept = module.down_proj  # its memory must not be taken by the next
            module.down_proj = nn.Parameter(kept.flip(0).contiguous(), requires_grad=False)
    assert len(seen.runs) == 2


LAYERS = 12
"""More than the compilations of one function that torch allows."""


@pytest.mark.parametrize("case", ["dynamic", "static", "block_1_128", "fp4", "limit"])
def test_layers_that_are_prepared_share_a_graph(case: str) -> None:
    torch.manual_seed(0)
    first = ours(peers.fp8_experts(**CASES[case]))
    layers = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(LAYERS - 1))])
    assert len({type(layer) for layer in layers}) == 1
    integration.prepare(layers)
    recorder = _Recorder(columns=256)
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True, backend=recorder)
    with torch.no_grad():
        for layer in layers:
            assert layer(*peers.random_call(first, 77)).shape == (77, 256)
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("block", [(128, 128), None], ids=str)
def test_linears_that_are_prepared_share_a_graph(scheme: str, block: tuple[int, int] | None) -> None:
    layers = nn.ModuleList(linear_model(scheme, block)[0] for _ in range(LAYERS))
    integration.prepare(layers)
    recorder = _Recorder(columns=200)
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True, dynamic=True, backend=recorder)
    with torch.no_grad():
        for layer in layers:
            assert compiled(layer, torch.randn((77, 256), dtype=BF16)).shape == (77, 200)
    assert len(recorder.graphs) == 1


def test_a_module_that_a_trace_prepared_can_be_prepared_and_traced_again() -> None:
    module, recorder = ours(peers.fp8_experts(fp4=True)), _Recorder(columns=256)
    compiled, call = torch.compile(module, fullgraph=True, dynamic=True, backend=recorder), peers.random_call(module, 7)
    with torch.no_grad():
        compiled(*call)
        weight = prepared_experts(module).down.weight
        module.down_proj.zero_()
        integration.prepare(module)
        compiled(*call)
    assert len(recorder.graphs) == 1
    assert prepared_experts(module).down.weight is weight and not weight.view(torch.uint8).any()


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("block", [(128, 128), None], ids=str)
def test_an_accelerated_linear_is_one_graph_for_any_number_of_rows(scheme: str, block: tuple[int, int] | None) -> None:
    recorder = _Recorder(columns=200)
    compiled = torch.compile(linear_model(scheme, block), fullgraph=True, dynamic=True, backend=recorder)
    with torch.no_grad():
        for rows in (77, 128, 5):
            assert compiled(torch.randn((rows, 256), dtype=BF16)).shape == (rows, 200)
    assert recorder.operators() == [[*(["per_token_cast_to_fp8"] if scheme == "dynamic" else []), "fp8_gemm"]]


class _SeenEnough(Exception):
    pass


@pytest.mark.parametrize(("kind", "linears", "layers"), [("qwen3_moe", 4, 2)])
def test_a_whole_model_is_one_graph(kind: str, linears: int, layers: int) -> None:
    model = peers.fp8_model(kind)
    model.set_experts_implementation(integration.NAME)
    integration.accelerate_linears(model)
    recorder = _Recorder(columns=256)

    def stop_after(graph: torch.fx.GraphModule, given: Any) -> Any:
        recorder(graph, given)

        def run(*_: Any) -> Any:
            raise _SeenEnough

        return run

    compiled = torch.compile(model.model, fullgraph=True, dynamic=True, backend=stop_after)
    with torch.no_grad(), pytest.raises(_SeenEnough):
        compiled(torch.randint(0, 256, (2, 9)), use_cache=False)
    layer = ["per_token_cast_to_fp8", "fp8_gemm"] * linears + ["experts_up", "experts_down"]
    assert recorder.operators() == [layer * layers]

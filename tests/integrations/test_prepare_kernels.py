"""The kernels of a model, found by the shapes of its modules, built and loaded ahead: by one process or by ranks of a group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from doubles.driver import DriverDouble
from integrations import peers
from torch import nn
from transformers.integrations import finegrained_fp8 as fp8

import deepgemm_jit
from deepgemm_jit.builder import Builder
from deepgemm_jit.errors import KernelNotBuiltError, OperandError, UnsupportedError
from deepgemm_jit.integrations import experts, problems
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.ops import pipeline
from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import (
    ACTIVATE,
    CAST_TO_FP8,
    COMBINE,
    FP4_GEMM_SWAP_AB,
    GATHER,
    ROUTE,
    GemmProblem,
    KernelSpec,
    limits_of,
    selected,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own

SMS = (132, 16)
MAX_TOKENS = 300
TOP_K = 4

SCHEMES: dict[str, dict[str, Any]] = {
    "block_128_128": {},
    "block_128_128_ragged": {"hidden_size": 320, "moe_intermediate_size": 192},
    "block_1_128": {"block": (1, 128)},
    "per_tensor": {"block": None},
    "per_tensor_ragged": {"block": None, "moe_intermediate_size": 80},
    "per_tensor_no_gate": {"block": None, "has_gate": False},
    "static": {"scheme": "static"},
    "ue8m0": {"scale_fmt": "ue8m0"},
    "fp4": {"scale_fmt": "ue8m0", "fp4": True},
    "no_gate": {"has_gate": False},
}


def families(specs: tuple[KernelSpec, ...]) -> set[str]:
    return {spec.family for spec in specs}


# --- what modules need


@pytest.mark.none
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_the_experts_forward_selects_is_in_what_its_module_needs(scheme: str, registered: None) -> None:
    module = peers.fp8_experts(**SCHEMES[scheme])
    needed = problems.kernels_for([problems.experts_needs(module, MAX_TOKENS)], "sm_90a", SMS)
    assert {ROUTE, GATHER, ACTIVATE, COMBINE} < families(needed)
    experts.prepare(module, fragments=True)
    given = experts.prepared_experts(module)
    kinds = [given.gate_up.scale_kind, given.down.scale_kind]
    for projection in (given.gate_up, given.down):
        by_rows, narrow = projection.scale_kind == "row", "row" not in kinds
        weight, scale = projection.weight, projection.scale
        for tokens, fragments in product(range(1, MAX_TOKENS + 1), {projection.fragments, None}):
            problem = pipeline.half_for(weight, scale, None, tokens * TOP_K, by_rows, False, narrow, fragments).problem
            for sms in SMS:
                assert selected(problem, limits_of("sm_90a", sms)).spec in needed, (tokens, sms)
    assert (FP4_GEMM_SWAP_AB in families(needed)) == (scheme == "fp4") == given.decodes_fp4


@pytest.mark.none
@pytest.mark.parametrize("transposed", [False, True])
def test_what_the_bf16_forward_selects_is_in_what_its_module_needs(transposed: bool) -> None:
    module = nn.Module()
    module.has_gate, module.has_bias, module.is_transposed = True, False, transposed
    shapes = {"gate_up_proj": (8, 384, 256), "down_proj": (8, 256, 192)}
    for name, (count, n, k) in shapes.items():
        shape = (count, k, n) if transposed else (count, n, k)
        module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    needed = problems.kernels_for([problems.experts_needs(module, MAX_TOKENS)], "sm_90a", SMS)
    for weight in (module.gate_up_proj, module.down_proj):
        for tokens in range(1, MAX_TOKENS + 1):
            problem = pipeline.half_for(weight, None, None, tokens * TOP_K, False, transposed, False).problem
            assert {selected(problem, limits_of("sm_90a", sms)).spec for sms in SMS} <= set(needed)


@pytest.mark.none
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_linears_need_a_dense_gemm_and_dynamic_ones_a_cast(scheme: str) -> None:
    model = peers.fp8_model("qwen3_moe", scheme=scheme)
    linear = next(module for module in model.modules() if isinstance(module, fp8.FP8Linear))
    n, k = linear.weight.shape
    needed = problems.kernels_for([problems.linear_needs(linear, MAX_TOKENS)], "sm_90a", SMS)
    for m in range(1, MAX_TOKENS + 1):
        assert {selected(GemmProblem(m, n, k), limits_of("sm_90a", sms)).spec for sms in SMS} <= set(needed)
    assert (CAST_TO_FP8 in families(needed)) == (scheme == "dynamic")


@pytest.mark.none
def test_shapes_are_enough_a_model_without_memory_needs_the_same() -> None:
    module = peers.fp8_experts()
    needs = problems.experts_needs(module, MAX_TOKENS)
    assert problems.experts_needs(module.to("meta"), MAX_TOKENS) == needs


@pytest.mark.none
def test_experts_without_a_kernel_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="grouped_mm"):
        problems.experts_needs(peers.fp8_experts(block=(64, 64)), MAX_TOKENS)


# --- a model


def tiny_model() -> nn.Module:
    model = peers.fp8_model("qwen3_moe")
    integration.register()
    model.config._experts_implementation = integration.NAME
    integration.accelerate_linears(model)
    return model


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> KernelService:
    """The service of the operations, on the driver double."""
    service = KernelService(driver=DriverDouble())
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    return service


@pytest.mark.nvrtc
def test_a_model_on_no_gpu_is_built_for_the_arch_that_is_named(registered: None, service: KernelService) -> None:
    model = tiny_model()
    with pytest.raises(OperandError, match="lies on no GPU"):
        integration.prepare_kernels(model)
    done = integration.prepare_kernels(model, arch="sm_90a", max_tokens=64, sms=[132])
    assert done.kernels == done.compiled == service.counts.compiles > 0
    assert not service.contexts.driver.calls  # type: ignore[attr-defined]
    sealed = Builder(read_settings(compile="never"))
    for module in model.modules():
        if isinstance(module, fp8.FP8Experts):
            for spec in problems.kernels_for([problems.experts_needs(module, 64)], "sm_90a", [132]):
                assert sealed.build(spec).outcome == "cached"
    assert integration.prepare_kernels(model, arch="sm_90a", max_tokens=64, sms=[132]).compiled == 0


@pytest.mark.none
def test_a_model_that_runs_nothing_of_ours_is_told(service: KernelService, caplog: pytest.LogCaptureFixture) -> None:
    assert integration.prepare_kernels(peers.fp8_model("qwen3_moe")).kernels == 0
    assert "no module of this Qwen3MoeForCausalLM runs with deepgemm_jit" in caplog.text


@pytest.mark.none
@pytest.mark.parametrize("max_tokens", [0, -1, True, 1.0, "64"])
def test_token_counts_that_are_none_are_refused(max_tokens: Any) -> None:
    with pytest.raises(OperandError, match="max_tokens"):
        integration.prepare_kernels(nn.Linear(1, 1), max_tokens=max_tokens)


@pytest.mark.none
@pytest.mark.parametrize("sms", [5, [0], [1.5], [True], [10**9], [-3], ["x"], "12"])
def test_sm_counts_that_are_none_are_refused(sms: Any) -> None:
    with pytest.raises(OperandError, match="sms = "):
        integration.prepare_kernels(nn.Linear(1, 1), arch="sm_90a", sms=sms)


# --- ranks

_RANK = """
import json, os, sys
from pathlib import Path

import torch.distributed as dist
from doubles.driver import DriverDouble

from deepgemm_jit.integrations.ranks import prepare_together
from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import KernelSpec, kernel_set

rank, size, case = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{case['meeting']}", rank=rank, world_size=size)
wanted = [KernelSpec.from_text(text) for text in case["wanted"][rank]]
service = KernelService(driver=DriverDouble())
if rank == case.get("broken"):
    import deepgemm_jit.builder as module
    from deepgemm_jit.errors import CompileError

    def refuse(**kernel):
        raise CompileError(kernel=kernel["entry"], options=[], log="error: broken here", source="x")

    module.compile_source = refuse
if rank in case.get("filled", ()):
    service.prepare(wanted, ())
before = service.counts.compiles
answer = {}
try:
    done = prepare_together(service, lambda: (wanted, [0]), None, dist.group.WORLD)
    answer["kernels"] = done.kernels
except Exception as error:
    answer["error"] = [type(error).__name__, str(error), getattr(error, "__notes__", [])]
answer["compiled"] = service.counts.compiles - before
answer["states"] = list(service.states(wanted, 0).values())
if "error" not in answer:
    service.seal()
    for spec in wanted:
        with service.call(0, 0) as call:
            call.kernel(spec)
print(json.dumps(answer))
dist.destroy_process_group()
"""


def run_ranks(script: str, cases: list[dict[str, Any]], environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Run a script as the ranks of a group, real processes, and return what each printed last."""
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), *sys.path]
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(len(cases)), json.dumps(case)],
            env={**common, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (case, environment) in enumerate(zip(cases, environments, strict=True))
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(cases), printed
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


SMALL = [spec for spec in deepgemm_jit.kernel_set("sm_90a") if spec.family in (CAST_TO_FP8, COMBINE, ROUTE, GATHER, ACTIVATE)]
RANKS = 3


@pytest.mark.nvrtc
@pytest.mark.parametrize("stores", ["one store", "a store each"])
def test_ranks_compile_each_kernel_once_between_them_and_all_have_all(stores: str, tmp_path: Path) -> None:
    case = {"meeting": str(tmp_path / "meeting"), "wanted": [[spec.text for spec in SMALL]] * RANKS}
    own = [{"DEEPGEMM_JIT_CACHE_DIR": str(tmp_path / f"store{rank}")} for rank in range(RANKS)]
    answers = run_ranks(_RANK, [case] * RANKS, own if stores == "a store each" else own[:1] * RANKS)
    compiled = [answer["compiled"] for answer in answers]
    assert sum(compiled) == len(SMALL)
    assert max(compiled) - min(compiled) <= 1, "the work is split"
    for answer in answers:
        assert answer["kernels"] == len(SMALL)
        assert answer["states"] == ["ready"] * len(SMALL)


@pytest.mark.nvrtc
def test_ranks_with_parts_of_their_own_get_those_and_what_one_had_is_not_compiled_again(tmp_path: Path) -> None:
    parts = [SMALL[:3], SMALL[2:5], []]
    case = {"meeting": str(tmp_path / "meeting"), "wanted": [[spec.text for spec in part] for part in parts], "filled": [0]}
    own = [{"DEEPGEMM_JIT_CACHE_DIR": str(tmp_path / f"store{rank}")} for rank in range(RANKS)]
    answers = run_ranks(_RANK, [case] * RANKS, own)
    assert sum(answer["compiled"] for answer in answers) == 2
    assert [answer["kernels"] for answer in answers] == [3, 3, 0]
    assert [answer["states"] for answer in answers] == [["ready"] * len(part) for part in parts]


@pytest.mark.nvrtc
@pytest.mark.parametrize("fault", ["a broken compiler", "never"])
def test_if_one_rank_fails_all_fail_and_none_waits(fault: str, tmp_path: Path) -> None:
    case: dict[str, Any] = {"meeting": str(tmp_path / "meeting"), "wanted": [[spec.text for spec in SMALL[:2]]] * 2}
    if fault == "a broken compiler":
        case["broken"] = 1
    answers = run_ranks(_RANK, [case] * 2, [{"DEEPGEMM_JIT_COMPILE": "never" if fault == "never" else "auto"}] * 2)
    name = KernelNotBuiltError.__name__ if fault == "never" else "CompileError"
    assert [answer["error"][0] for answer in answers] == [name] * 2
    if fault == "a broken compiler":
        assert "broken here" in answers[0]["error"][1]
        assert answers[0]["error"][2] == ["It was raised on rank 1 of the process group."]


_FAILING_RANK = """
import json, sys
from datetime import timedelta

import torch.distributed as dist
from doubles.driver import DriverDouble
from integrations import peers

import deepgemm_jit.builder as builder
import deepgemm_jit.service.service as home
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.service import KernelService

rank, size, case = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
meeting = f"file://{case['meeting']}"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=100))
service = home._DEFAULT["service"] = KernelService(driver=DriverDouble())
model = peers.fp8_model("qwen3_moe")
integration.register()
model.config._experts_implementation = integration.NAME
max_tokens, broken = 32, rank == 1


class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail(*_, **__):
    raise Unsendable("a disk", "is gone")


if broken and case["fault"] == "a module":
    for module in model.modules():
        if hasattr(module, "has_gate"):
            module.block_size = (64, 64)
elif broken and case["fault"] == "an argument":
    max_tokens = 0
elif broken and case["fault"] == "the store":
    builder.Builder.try_cached = fail
try:
    integration.prepare_kernels(model, arch="sm_90a", max_tokens=max_tokens, sms=[132], group=dist.group.WORLD)
    answer = None
except Exception as error:
    answer = [type(error).__name__, str(error), getattr(error, "__notes__", [])]
print(json.dumps({"error": answer}))
dist.destroy_process_group()
"""


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("fault", "raised", "elsewhere"),
    [
        ("a module", "UnsupportedError", "UnsupportedError"),
        ("an argument", "OperandError", "OperandError"),
        ("the store", "Unsendable", "RuntimeError"),
    ],
)
def test_whatever_fails_on_one_rank_is_raised_on_all(fault: str, raised: str, elsewhere: str, tmp_path: Path) -> None:
    case = {"meeting": str(tmp_path / "meeting"), "fault": fault}
    there, here = run_ranks(_FAILING_RANK, [case] * 2, [{}] * 2)
    assert (here["error"][0], there["error"][0]) == (raised, elsewhere)
    assert here["error"][1] in there["error"][1], "one that cannot be sent comes as its text"
    assert there["error"][2] == ["It was raised on rank 1 of the process group."]


_MODEL_RANK = """
import json, sys

import torch
import torch.distributed as dist
from doubles.driver import DriverDouble
from integrations import peers

import deepgemm_jit.service.service as home
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.service import KernelService

rank, size, case = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{case['meeting']}", rank=rank, world_size=size)
service = home._DEFAULT["service"] = KernelService(driver=DriverDouble())
model = peers.fp8_model("qwen3_moe")
integration.register()
model.config._experts_implementation = integration.NAME
done = integration.prepare_kernels(model, arch="sm_90a", max_tokens=32, sms=[132], group=dist.group.WORLD)
built = len(list(service.builder.store.entries()))
print(json.dumps({"kernels": done.kernels, "compiled": service.counts.compiles, "built": built}))
dist.destroy_process_group()
"""


@pytest.mark.nvrtc
def test_the_ranks_of_a_model_split_its_kernels(tmp_path: Path) -> None:
    case = {"meeting": str(tmp_path / "meeting")}
    own = [{"DEEPGEMM_JIT_CACHE_DIR": str(tmp_path / f"store{rank}")} for rank in range(2)]
    answers = run_ranks(_MODEL_RANK, [case] * 2, own)
    kernels = answers[0]["kernels"]
    assert [answer["kernels"] for answer in answers] == [answer["built"] for answer in answers] == [kernels] * 2
    assert sum(answer["compiled"] for answer in answers) == kernels
    assert min(answer["compiled"] for answer in answers) >= kernels // 2


# --- on a GPU


@pytest.mark.gpu
def test_a_prepared_model_runs_sealed_and_its_preparation_took_little_memory(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {})
    model = peers.fp8_model("qwen3_moe", "cuda")
    model.config._experts_implementation = integration.NAME
    integration.accelerate_linears(model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = integration.prepare_kernels(model, max_tokens=64)
    assert done.kernels > 0
    assert torch.cuda.max_memory_allocated() == before, "nothing of torch's is allocated"
    integration.prepare(model)
    default_service().seal()
    launched = default_service().counts
    for tokens in (1, 7, 33, 64):
        with torch.no_grad():
            assert model(torch.randint(0, 256, (1, tokens), device="cuda")).logits.isfinite().all()
    assert default_service().counts == launched


@pytest.mark.gpu
def test_the_kernels_of_large_experts_take_less_than_16_mib_of_a_gpu() -> None:
    """B32: N = K = 7168 and 256 experts, which dummy tensors would need 13 GB for."""
    service = KernelService()
    with torch.device("meta"):
        module = peers.fp8_experts(hidden_size=7168, moe_intermediate_size=3584, num_experts=256, device="meta")
    specs = problems.kernels_for([problems.experts_needs(module, 16384)], "sm_90a", [132])
    torch.zeros(1, device="cuda")
    service.prepare(specs[:1], [0])  # the driver's own first load
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    service.prepare(specs, [0])
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 16 << 20

"""Whole models read through transformers: what is found, by which shapes, what has no kernel, and that both readers agree."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
import transformers
from click.testing import CliRunner
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from deepgemm_jit.cli import main
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations import architectures, linears, problems
from deepgemm_jit.integrations import transformers as integration
from deepgemm_jit.integrations.architectures import read_model
from deepgemm_jit.ops import pipeline
from deepgemm_jit.spec import (
    ACTIVATE,
    BF16_GEMM,
    CAST_TO_FP8,
    COMBINE,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    GATHER,
    ROUTE,
    SCALE_LAYOUT,
    TRANSPOSE,
    Layout,
    limits_of,
    select,
)
from deepgemm_jit.warmup import Linear, Model, Plan, Scheme, plan_for, prove
from deepgemm_jit.warmup import read_model as read_builtin

pytestmark = [pytest.mark.none, pytest.mark.filterwarnings("ignore")]  # of transformers' own

MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = ("deepseek-v3", "deepseek-v4-flash", "qwen3-235b-a22b-fp8", "qwen3-30b-a3b-fp8")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
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
    "quantization_config": FP8,
}


@cache
def published(name: str) -> Model:
    return read_model(MODELS / name)


def tiny(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def experts_of(plan: Plan) -> list[tuple[Any, ...]]:
    return [(each.what, each.largest, each.kernels) for each in plan.problems if each.what.startswith("experts")]


def sizes(linears: tuple[Linear, ...]) -> dict[tuple[int, int], set[str]]:
    return {(linear.n, linear.k): {name.rpartition(".")[2] for name in linear.modules} for linear in linears}


# --- both readers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 8)])
def test_both_readers_agree_on_the_experts_of_published_models(name: str, tp: int, ep: int) -> None:
    whole, experts = (plan_for("sm_90a", model, tp=tp, ep=ep) for model in (published(name), read_builtin(MODELS / name)))
    assert experts_of(whole) == experts_of(experts) != []
    assert set(experts.kernels) <= set(whole.kernels)
    assert prove(whole) == prove(experts) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None},
        {"quantization_config": {**FP8, "modules_to_not_convert": ["mlp.experts"]}},
        {"quantization_config": {**FP8, "activation_scheme": "static"}},
        {"quantization_config": {**FP8, "weight_block_size": [1, 128]}},
        {"quantization_config": {**FP8, "weight_block_size": None}, "moe_intermediate_size": 720},
        {"quantization_config": {**FP8, "scale_fmt": "float32"}, "moe_intermediate_size": 1440},
        {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"},
    ],
    ids=["plain", "plain experts", "static", "row scales", "tensor", "blocks apart", "fp4"],
)
def test_both_readers_agree_on_the_experts_of_each_scheme(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny(tmp_path, **changes)
    whole, experts = (plan_for("sm_90a", model, sms=132) for model in (read_model(folder), read_builtin(folder)))
    assert experts_of(whole) == experts_of(experts) != []


@pytest.mark.parametrize("block", [[64, 128], [128, 64], [1, 32]])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_both_readers_refuse_blocks_without_kernels_alike(tmp_path: Path, block: list[int], scheme: str) -> None:
    quantization = {**FP8, "weight_block_size": block, "activation_scheme": scheme}
    folder = tiny(tmp_path, quantization_config=quantization)
    refusals = []
    for read in (read_model, read_builtin):
        with pytest.raises(UnsupportedError) as caught:
            read(folder)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]
    assert f"weight_block_size = {block}" in refusals[0] and '"grouped_mm"' in refusals[0] and '"eager"' in refusals[0]


# --- linears


def test_every_linear_of_deepseek_v3_is_found_by_its_shape() -> None:
    assert sizes(published("deepseek-v3").linears) == {
        (1536, 7168): {"q_a_proj"},
        (128 * (128 + 64), 1536): {"q_b_proj"},
        (512 + 64, 7168): {"kv_a_proj_with_mqa"},
        (128 * (128 + 128), 512): {"kv_b_proj"},
        (7168, 128 * 128): {"o_proj"},
        (18432, 7168): {"gate_proj", "up_proj"},
        (7168, 18432): {"down_proj"},
        (2048, 7168): {"gate_proj", "up_proj"},
        (7168, 2048): {"down_proj"},
    }


def test_a_dense_model_in_fp8_is_planned_for_its_linears(tmp_path: Path) -> None:
    folder = tiny(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_experts=None)
    plan = plan_for("sm_90a", read_model(folder), max_tokens=100, sms=132)
    assert {(each.what, each.largest.layout, each.largest.m) for each in plan.problems} == {("linear", Layout.DENSE, 100)}
    assert {(each.largest.n, each.largest.k) for each in plan.problems} == {(256, 256), (128, 256), (384, 256), (256, 384)}
    assert {spec.family for spec in plan.kernels} <= {FP8_GEMM, FP8_GEMM_SWAP_AB, CAST_TO_FP8, SCALE_LAYOUT, TRANSPOSE}
    with pytest.raises(OperandError, match="mixture-of-experts"):
        read_builtin(folder)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("block", [[128, 128], None, [1, 128]])
def test_what_is_planned_is_what_accelerate_linears_serves(tmp_path: Path, block: list[int] | None, scheme: str) -> None:
    quantization = {**FP8, "weight_block_size": block, "activation_scheme": scheme}
    folder = tiny(tmp_path, quantization_config=quantization, mlp_only_layers=[1])
    planned = {name for linear in read_model(folder).linears for name in linear.modules}
    model = architectures._built(transformers, {**TINY, "mlp_only_layers": [1]}, quantization)
    served = integration.accelerate_linears(model)
    assert planned == {name.replace(".0.", ".*.").replace(".1.", ".*.") for name in served.served}
    assert (planned == set()) == (block == [1, 128]) == bool(served.skipped)


def test_tensor_parallelism_shares_linears_as_the_architecture_says(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    plan = plan_for("sm_90a", read_model(tiny(tmp_path, **wide, mlp_only_layers=[1])), tp=2, sms=132)
    parts = {(each.largest.n, each.largest.k): len(each.modules) for each in plan.problems if each.what == "linear"}
    assert parts == {(256, 512): 3, (512, 256): 2}, "q, gate and up by rows; o and down by columns"
    (unsplit,) = (part for part in plan.uncovered if "k_proj" in part.what)
    assert "N = 128 does not split over tp = 2 into multiples of 128" in unsplit.reason and "v_proj" in unsplit.what


def test_what_an_architecture_does_not_share_each_rank_has_whole() -> None:
    plans = {tp: plan_for("sm_90a", published("deepseek-v3"), tp=tp, sms=132) for tp in (1, 2)}
    parts = {
        tp: {(each.largest.n, each.largest.k) for each in plan.problems if each.what == "linear"} for tp, plan in plans.items()
    }
    assert parts[1] - parts[2] == {(18432, 7168), (7168, 18432), (2048, 7168), (7168, 2048)}
    assert parts[2] - parts[1] == {(9216, 7168), (7168, 9216), (1024, 7168), (7168, 1024)}


# --- what has no kernel


def test_what_has_no_operation_is_named_with_the_reason_and_what_runs_instead() -> None:
    uncovered = published("deepseek-v4-flash").uncovered
    assert all(part.what and part.reason and part.instead for part in uncovered)
    reasons = {part.what.partition(" ")[0]: part.reason for part in uncovered}
    assert reasons["FP8GroupedLinear"] == "FP8GroupedLinear has a forward of its own"
    assert reasons["Embedding"] == "a look-up, no product"
    assert reasons["Linear"] == "not quantized; only FP8 linears run with us"
    assert {"DeepseekV4TopKRouter", "DeepseekV4HyperConnection"} <= set(reasons)
    assert any(part.what == "Linear 129280 x 4096, bfloat16: lm_head" for part in uncovered)


def test_a_skip_list_leaves_linears_out_and_experts_in(tmp_path: Path) -> None:
    kept = ["lm_head", "self_attn.q_proj", "model.layers.1.self_attn"]
    read = read_model(tiny(tmp_path, quantization_config={**FP8, "modules_to_not_convert": kept}))
    assert {name.rpartition(".")[2] for linear in read.linears for name in linear.modules} == {"k_proj", "v_proj", "o_proj"}
    plain = " ".join(part.what for part in read.uncovered if part.what.startswith("Linear"))
    assert "q_proj" in plain and "lm_head" in plain
    assert [layer.scheme for layer in read.experts] == [Scheme.BLOCKS]


def test_experts_of_one_layer_that_is_not_converted_are_planned_beside_the_others(tmp_path: Path) -> None:
    kept = ["model.layers.0.mlp.experts"]
    read = read_model(tiny(tmp_path, quantization_config={**FP8, "modules_to_not_convert": kept}))
    assert {layer.scheme for layer in read.experts} == {Scheme.BF16, Scheme.BLOCKS}
    families = {spec.family for spec in plan_for("sm_90a", read, sms=132).kernels}
    assert {FP8_GEMM, BF16_GEMM, ROUTE, GATHER, ACTIVATE, COMBINE} <= families


@pytest.mark.parametrize(
    ("changes", "reason", "instead"),
    [
        (
            {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8},
            "with biases",
            '"grouped_mm"',
        ),
        ({"dtype": "float16"}, "torch.float16 weights", '"grouped_mm"'),
    ],
    ids=["biases", "float16"],
)
def test_experts_without_a_kernel_are_named_and_a_warm_up_of_nothing_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str, instead: str
) -> None:
    folder = tiny(tmp_path, quantization_config=None, **changes)
    (part,) = (part for part in read_model(folder).uncovered if "mlp.experts" in part.what)
    assert reason in part.reason and instead in part.instead
    store = tmp_path / "elsewhere"
    arguments = ["warmup", "--arch", "sm_90a", "--model", str(folder), "--reader", "transformers", "--cache-dir", str(store)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and reason in result.stderr
    assert not store.exists()


# --- run time


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b-fp8"])
def test_what_the_experts_forward_asks_for_is_planned_for_any_number_of_tokens(name: str) -> None:
    plan, (layer,) = plan_for("sm_90a", published(name)), published(name).experts
    byte, scale = torch.zeros(1, dtype=torch.uint8), torch.ones(1, 1, 1)  # neither is read
    weights = [
        byte.expand(layer.experts, n, k) for n, k in ((2 * layer.width, layer.hidden_size), (layer.hidden_size, layer.width))
    ]
    tokens = (*range(1, 300), *range(300, 16384, 97), 16384)
    for count, weight, narrow in itertools.product(tokens, weights, (True, False)):
        half = pipeline.half_for(weight, scale, None, count * layer.per_token, False, False, narrow)
        assert select(half.problem, limits_of("sm_90a")) in plan.kernels, (count, half.problem)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "qwen3-30b-a3b-fp8"])
def test_what_is_prepared_of_a_model_is_in_its_plan(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    needs = set()
    for module in architectures._built(transformers, config, config["quantization_config"]).modules():
        if isinstance(module, FP8Experts):
            needs.add(problems.experts_needs(module, 16384))
        elif isinstance(module, FP8Linear) and linears.reason_against(module) is None:
            needs.add(problems.linear_needs(module, 16384))
    prepared = problems.kernels_for(needs, "sm_90a", (78, 132))
    assert set(prepared) <= set(plan_for("sm_90a", published(name)).kernels)
    assert len(prepared) > 10


# --- safety


def test_reading_a_model_starts_no_cuda_and_runs_no_code_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tiny(tmp_path, auto_map={"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"})
    (folder / "planted.py").write_text("raise SystemExit('planted code ran')\n")
    source = (
        "import sys, torch\n"
        "from deepgemm_jit.integrations.architectures import read_model\n"
        "print(len(read_model(sys.argv[1]).experts), torch.cuda.is_initialized(), 'planted' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source, str(folder)], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["1", "False", "False"], done.stderr


def test_reading_leaves_the_classes_of_transformers_as_they_were(tmp_path: Path) -> None:
    before = FP8Experts.__init__, FP8Experts.forward
    read_model(tiny(tmp_path))
    assert (FP8Experts.__init__, FP8Experts.forward) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "no_such_model"}, "model_type = 'no_such_model'"),
        ({"model_type": ["qwen3_moe"]}, "builds no model"),
        ({"hidden_act": "no_such_activation"}, "no_such_activation"),
        ({"num_experts": "many"}, "builds no model"),
    ],
)
def test_what_transformers_cannot_build_is_refused_with_its_reason(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match="--reader builtin") as caught:
        read_model(tiny(tmp_path, **changes))
    assert says in caught.value.given
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("layers", [0, -1, 1.5, True, "many", 1025, 1_000_000, 10**30])
def test_a_number_of_layers_that_is_none_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: Any
) -> None:
    monkeypatch.setattr(architectures, "_built", lambda *_: pytest.fail("it is built"))
    for changes in ({"num_hidden_layers": layers}, {"text_config": {"num_hidden_layers": layers}}):
        with pytest.raises(OperandError, match="needed: a whole number from 1 to 1024"):
            read_model(tiny(tmp_path, **changes))


# --- the command line


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_model_of_which_nothing_runs_with_us_is_refused_and_not_called_complete(tmp_path: Path, command: str) -> None:
    dense = tiny(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"], quantization_config=None)
    options = [command, "--arch", "sm_90a", "--model", str(dense), "--reader", "transformers", "--json"]
    result = CliRunner().invoke(main, options)
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["type"]) == (1, "UnsupportedError")
    assert "whose plan is empty" in error["message"] and "not quantized" in error["message"]


def test_plan_reads_through_transformers_where_it_is_installed(tmp_path: Path) -> None:
    answer = json.loads(CliRunner().invoke(main, ["plan", "--arch", "sm_90a", "--model", str(tiny(tmp_path)), "--json"]).stdout)
    assert answer["reader"] == f"transformers {transformers.__version__}"
    assert answer["complete"]["ok"]
    modules = {problem["what"].split()[0]: problem["modules"] for problem in answer["problems"]}
    assert modules["experts"] == ["model.layers.*.mlp.experts"]
    assert "model.layers.*.self_attn.o_proj" in {name for problem in answer["problems"] for name in problem["modules"]}


def test_a_model_that_transformers_does_not_know_is_planned_for_its_experts_and_said_so(tmp_path: Path) -> None:
    arguments = ["plan", "--arch", "sm_90a", "--model", str(tiny(tmp_path, model_type="no_such_model")), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert json.loads(result.stdout)["reader"] == "builtin"
    assert "Only the experts are planned" in result.stderr and "no_such_model" in result.stderr
    asked = CliRunner().invoke(main, [*arguments, "--reader", "transformers"])
    assert (asked.exit_code, json.loads(asked.stdout)["error"]["type"]) == (1, "UnsupportedError")


@pytest.mark.parametrize("given", [(), ("--reader", "auto")])
def test_the_commands_that_verify_and_pack_create_name_say_which_reader_found_what_is_missing(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    options = ["--arch", "sm_90a", "--model", str(tiny(tmp_path)), *given, "--cache-dir", str(tmp_path / "store")]
    answer = json.loads(CliRunner().invoke(main, ["verify", *options, "--json"]).stdout)
    assert "--reader transformers" in answer["missing"][0]["command"]
    built = tmp_path / "store"
    built.mkdir(mode=0o700)
    refused = CliRunner().invoke(main, ["pack", "create", str(tmp_path / "a.pack"), *options])
    assert "--reader transformers" in refused.stderr

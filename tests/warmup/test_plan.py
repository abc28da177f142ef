"""Plans: whatever run time selects is in them, they are small, and they refuse what cannot be split or served."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
    ACTIVATE,
    BF16_GEMM,
    CAST_TO_FP8,
    COMBINE,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    GATHER,
    ROUTE,
    ROW_SCALES,
    SCALE_LAYOUT,
    GemmProblem,
    Layout,
    StepProblem,
    arch_named,
    kernel_set,
    limits_of,
    select,
)
from deepgemm_jit.warmup import MOST_SMS, ExpertsLayer, Linear, Model, Plan, Scheme, plan_for, prove

pytestmark = pytest.mark.none

Varied = Callable[[dict[str, Any]], Path]
FP8_MODELS = ("deepseek-v3", "deepseek-v4-flash", "qwen3-235b-a22b-fp8", "qwen3-30b-a3b-fp8")
FP8, BF16 = ("e4m3", "e4m3", "bf16"), ("bf16", "bf16", "bf16")
STATIC = {"quantization_config.activation_scheme": "static"}
ROWS = {"quantization_config.weight_block_size": [1, 128]}
TENSOR = {"quantization_config.weight_block_size": None}
FP4 = {"expert_dtype": "fp4"}
FP4_DTYPES = ("e4m3", "e2m1", "bf16")
UNQUANTIZED: dict[str, Any] = {"quantization_config": ...}

SMS = (1, 16, 66, 78, 114, 132)
SPLITS = ((1, 1), (2, 8))


@cache
def _published_plan(name: str) -> Plan:
    return plan_for("sm_90a", Path(__file__).parents[1] / "data" / "models" / name)


@pytest.mark.parametrize("name", FP8_MODELS)
@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_every_kernel_that_run_time_selects_is_planned(models: Path, name: str, tp: int, ep: int) -> None:
    plan = plan_for("sm_90a", models / name, tp=tp, ep=ep)
    unplanned = {
        (problem.what, problem.largest.layout, m, sms)
        for problem, m, sms in itertools.product(plan.problems, range(1, 2049), SMS)
        if select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) not in problem.kernels
    }
    assert unplanned == set()


@given(st.sampled_from(FP8_MODELS), st.data())
def test_any_m_up_to_the_largest_on_any_device_is_planned(name: str, data: st.DataObject) -> None:
    plan = _published_plan(name)
    problem = data.draw(st.sampled_from(plan.problems))
    m = data.draw(st.integers(1, problem.largest.m))
    sms = data.draw(st.integers(1, arch_named("sm_90a").max_sms))
    assert select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) in problem.kernels


@pytest.mark.parametrize("hidden_size", [576, 1856, 2112, 4096])
def test_sizes_that_no_tile_divides_are_planned(varied: Varied, hidden_size: int) -> None:
    plan = plan_for("sm_90a", varied({"hidden_size": hidden_size}))
    assert {problem.largest.n for problem in plan.problems} == {1536, hidden_size}
    for problem, m, sms in itertools.product(plan.problems, (1, 7, 64, 65, 128, 4096), SMS):
        assert select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) in problem.kernels


def test_a_plan_is_a_small_part_of_the_set_however_many_tokens_it_is_for(models: Path) -> None:
    plans = [plan_for("sm_90a", models / "deepseek-v3", max_tokens=tokens) for tokens in (16384, 1_000_000)]
    assert plans[0].kernels == plans[1].kernels
    assert len(plans[0].kernels) <= 32
    assert set(plans[0].kernels) <= set(kernel_set("sm_90a"))


@pytest.mark.parametrize("name", FP8_MODELS)
def test_a_plan_covers_both_gemms_in_every_grouped_layout(models: Path, name: str) -> None:
    problems = plan_for("sm_90a", models / name).problems
    layouts = {(problem.what, problem.largest.layout) for problem in problems}
    grouped = (Layout.CONTIGUOUS, Layout.PREFIX_SUMS, Layout.MASKED)
    gemms = ("experts gate_up", "experts down")
    assert {(what, layout) for what, layout in layouts if not what.endswith(", few tokens")} == set(
        itertools.product(gemms, grouped)
    )


@pytest.mark.parametrize(
    ("name", "tp", "ep", "gate_up", "down", "groups"),
    [
        ("deepseek-v3", 1, 1, (4096, 7168), (7168, 2048), 256),
        ("deepseek-v3", 8, 1, (512, 7168), (7168, 256), 256),
        ("qwen3-235b-a22b-fp8", 4, 8, (768, 4096), (4096, 384), 16),
        ("qwen3-30b-a3b-fp8", 2, 1, (768, 2048), (2048, 384), 128),
        ("qwen3-30b-a3b-fp8", 1, 128, (1536, 2048), (2048, 768), 1),
    ],
)
def test_tensor_parallelism_splits_the_width_and_expert_parallelism_the_experts(
    models: Path, name: str, tp: int, ep: int, gate_up: tuple[int, int], down: tuple[int, int], groups: int
) -> None:
    problems = plan_for("sm_90a", models / name, tp=tp, ep=ep).problems
    sizes = {problem.what: (problem.largest.n, problem.largest.k) for problem in problems}
    assert sizes == {"experts gate_up": gate_up, "experts down": down}
    assert {problem.largest.groups for problem in problems} == {groups}


def test_rows_count_every_choice_of_every_token_and_the_padding_of_every_group(models: Path) -> None:
    problems = plan_for("sm_90a", models / "qwen3-30b-a3b-fp8", max_tokens=10).problems
    rows = {(problem.largest.layout, problem.largest.alignment): problem.largest.m for problem in problems}
    padded = {alignment: 10 * 8 + 128 * alignment for alignment in (16, 32, 64, 128, 256)}
    by_layout = {(layout, alignment): m for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) for alignment, m in padded.items()}
    assert rows == by_layout | {(Layout.MASKED, 128): 10}


@pytest.mark.parametrize("alignment", [16, 32, 48, 64, 96, 128, 192, 256, 384, 512])
def test_whatever_callers_align_groups_to_is_planned(models: Path, alignment: int) -> None:
    plan = plan_for("sm_90a", models / "deepseek-v3", ep=8)
    for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS):
        for n, k in ((4096, 7168), (7168, 2048)):
            for m in range(1, 4096, 64):
                for sms in (16, 78, 132):
                    assert select(GemmProblem(m, n, k, 32, layout, alignment), limits_of("sm_90a", sms)) in plan.kernels


@pytest.mark.parametrize("name", FP8_MODELS)
def test_the_casts_and_the_scale_layout_that_the_gemms_stand_on_are_planned(models: Path, name: str) -> None:
    plan = plan_for("sm_90a", models / name)
    limits = limits_of("sm_90a")
    assert {
        select(problem, limits)
        for problem in (
            StepProblem(CAST_TO_FP8, ("bf16", "e4m3")),
            StepProblem(CAST_TO_FP8, ("f32", "e4m3")),
            StepProblem(SCALE_LAYOUT, ("f32",)),
        )
    } <= set(plan.kernels)


@pytest.mark.parametrize("sms", [1, 78, 132, 200])
def test_a_known_sm_count_narrows_the_plan_to_what_that_device_selects(models: Path, sms: int) -> None:
    every, one = (plan_for("sm_90a", models / "qwen3-30b-a3b-fp8", sms=count) for count in (None, sms))
    assert sms > 132 or set(one.kernels) <= set(every.kernels)
    for problem in one.problems:
        reached = {select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) for m in range(1, 4097)}
        assert reached <= set(problem.kernels)
        assert set(problem.kernels) <= {
            select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) for m in range(1, problem.largest.m + 1, 16)
        }


def test_without_a_model_the_plan_is_the_whole_kernel_set() -> None:
    plan = plan_for("sm_90a")
    assert (plan.kernels, plan.model, plan.problems, plan.uncovered) == (kernel_set("sm_90a"), None, (), ())


@pytest.mark.parametrize(
    ("changes", "width", "gate_up", "down"),
    [
        ({}, 768, [()], [()]),
        (STATIC, 768, [()], [()]),
        (FP4, 768, [()], [()]),
        (FP4 | STATIC, 768, [()], [()]),
        (FP4, 720, [()], [()]),
        (TENSOR, 768, [()], [()]),
        (TENSOR | STATIC, 768, [()], [()]),
        # One scale for gate and one for up; their border lies inside of a block of 128 rows.
        (TENSOR, 720, [(), (ROW_SCALES,)], [()]),
        (TENSOR | STATIC, 1440, [(), (ROW_SCALES,)], [()]),
        # Blocks of gate and up that were counted apart are more than those of both together.
        ({}, 1440, [(), (ROW_SCALES,)], [()]),
        (STATIC, 1440, [(), (ROW_SCALES,)], [()]),
        ({}, 720, [()], [()]),
        (ROWS, 768, [(ROW_SCALES,)], [(ROW_SCALES,)]),
        (ROWS | STATIC, 720, [(ROW_SCALES,)], [(ROW_SCALES,)]),
    ],
)
def test_the_scheme_of_the_weights_decides_between_block_and_row_scales(
    varied: Varied, changes: dict[str, Any], width: int, gate_up: list[tuple[str, ...]], down: list[tuple[str, ...]]
) -> None:
    plan = plan_for("sm_90a", varied({**changes, "moe_intermediate_size": width}), sms=132)
    for what, variants in (("experts gate_up", gate_up), ("experts down", down)):
        problems = [problem for problem in plan.problems if problem.what.startswith(what) and "few" not in problem.what]
        assert {problem.largest.variant for problem in problems} == set(variants)
        assert {problem.largest.layout for problem in problems} == {Layout.CONTIGUOUS, Layout.PREFIX_SUMS, Layout.MASKED}
        assert len({problem.what for problem in problems}) == len(variants)
    few = {problem.what: problem.largest for problem in plan.problems if problem.largest.dtypes != FP8}
    if changes.get("expert_dtype") == "fp4":
        assert set(few) == {"experts gate_up, few tokens", "experts down, few tokens"}
        assert {(each.dtypes, each.layout, each.alignment) for each in few.values()} == {(FP4_DTYPES, Layout.PREFIX_SUMS, 16)}
        assert {spec for spec in kernel_set("sm_90a") if spec.family == FP4_GEMM_SWAP_AB} <= set(plan.kernels)
    else:
        assert not few and FP4_GEMM_SWAP_AB not in {spec.family for spec in plan.kernels}
    assert {spec.flags for spec in plan.kernels if spec.family == FP8_GEMM} == {*gate_up, *down}
    assert not any("experts" in part.what for part in plan.uncovered)


@pytest.mark.parametrize(
    "changes", [UNQUANTIZED, {"quantization_config.modules_to_not_convert": ["experts"]}], ids=["model", "experts"]
)
def test_experts_in_bfloat16_get_bf16_gemms_and_the_steps_without_quantization(varied: Varied, changes: dict[str, Any]) -> None:
    plan = plan_for("sm_90a", varied({**changes, "moe_intermediate_size": 712}), sms=132)
    sizes = {(p.largest.n, p.largest.k, p.largest.dtypes, p.largest.variant) for p in plan.problems}
    assert sizes == {(1424, 2048, BF16, ()), (2048, 712, BF16, ())}
    assert {spec.family for spec in plan.kernels} == {BF16_GEMM, ROUTE, GATHER, ACTIVATE, COMBINE}
    assert not any("e4m3" in spec.dtypes for spec in plan.kernels)
    for problem, m, sms in itertools.product(plan.problems, (1, 7, 64, 65, 128, 4096), (132,)):
        assert select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) in plan.kernels
    assert any("N-major" in part.what for part in plan.uncovered)


def test_kernels_are_planned_once_and_in_the_order_of_the_set(models: Path) -> None:
    kernels = plan_for("sm_90a", models / "deepseek-v3").kernels
    order = [kernel_set("sm_90a").index(spec) for spec in kernels]
    assert order == sorted(set(order))
    assert {CAST_TO_FP8, SCALE_LAYOUT} < {spec.family for spec in kernels}


@pytest.mark.parametrize(
    ("tp", "ep", "faults"),
    [
        (5, 1, ["moe_intermediate_size = 768", "tp = 5", "tp that fit: 1, 2, 3, 6"]),
        (4, 1, ["moe_intermediate_size = 768", "tp = 4", "multiples of 128", "a scale per 128 x 128 block"]),
        (1, 3, ["num_experts = 128", "ep = 3", "ep that fit: 1, 2, 4, 8, 16, 32, 64, 128"]),
        (1, 256, ["num_experts = 128", "ep = 256"]),
        (7, 7, ["moe_intermediate_size = 768", "num_experts = 128", "tp = 7", "ep = 7"]),
    ],
)
def test_sizes_that_do_not_split_are_refused_with_key_value_and_what_fits(
    models: Path, tp: int, ep: int, faults: list[str]
) -> None:
    with pytest.raises(OperandError) as caught:
        plan_for("sm_90a", models / "qwen3-30b-a3b-fp8", tp=tp, ep=ep)
    assert [fault for fault in faults if fault not in str(caught.value)] == []


def test_every_tp_that_a_refusal_calls_fitting_is_planned(models: Path) -> None:
    assert all(plan_for("sm_90a", models / "qwen3-30b-a3b-fp8", tp=tp, sms=132).kernels for tp in (1, 2, 3, 6))


@pytest.mark.parametrize(
    ("changes", "fitting"),
    [
        ({}, [2, 3, 6]),
        (ROWS, [2, 3, 6]),
        (FP4, [2, 3, 4, 6, 8, 12, 24]),
        (TENSOR, [2, 3, 4, 6, 8, 12, 16, 24, 48]),
        (UNQUANTIZED, [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
    ],
)
def test_the_width_splits_as_finely_as_the_scales_of_the_scheme(
    varied: Varied, changes: dict[str, Any], fitting: list[int]
) -> None:
    folder = varied(changes)
    for tp in range(2, 100):
        if tp in fitting:
            assert plan_for("sm_90a", folder, tp=tp, sms=132).kernels
        else:
            with pytest.raises(OperandError, match=f"tp = {tp} .*tp that fit: {', '.join(map(str, [1, *fitting]))};"):
                plan_for("sm_90a", folder, tp=tp, sms=132)


@pytest.mark.parametrize("size", [2**31, 2**63, 10**100])
@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"])
def test_a_huge_size_in_a_config_is_refused_by_its_key(varied: Varied, key: str, size: int) -> None:
    with pytest.raises(OperandError, match=f"{key} = {str(size)[:40]}"):
        plan_for("sm_90a", varied({key: size}))


@pytest.mark.parametrize("size", [2**31 - 1, 2**31 - 128, 2_095_133_040])
@pytest.mark.parametrize("key", ["moe_intermediate_size", "num_experts"])
@pytest.mark.parametrize("split", [1, 7, 2**31 - 2])
def test_the_largest_sizes_get_an_answer_at_once(varied: Varied, key: str, size: int, split: int) -> None:
    with pytest.raises((OperandError, UnsupportedError)) as caught:
        plan_for("sm_90a", varied({key: size}), tp=split, ep=split)
    assert len(str(caught.value)) < 2000


def test_of_many_sizes_that_fit_the_smallest_are_named(varied: Varied) -> None:
    with pytest.raises(OperandError, match="ep that fit: 1, 2, 3, 4, 5, 6, 7, 8, .* and 1584 more"):
        plan_for("sm_90a", varied({"num_experts": 2_095_133_040}), ep=23)


def test_more_rows_than_a_call_may_have_are_refused_with_what_they_come_from(varied: Varied) -> None:
    with pytest.raises(UnsupportedError, match="num_experts_per_tok = 8, .*max_tokens 2147483647") as caught:
        plan_for("sm_90a", varied({}), max_tokens=2**31 - 1)
    assert "M = " in caught.value.given


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 100), ("hidden_size", 2056), ("moe_intermediate_size", 100)])
def test_a_size_that_no_kernel_serves_is_refused_with_its_key_and_value(varied: Varied, key: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} = {value}"):
        plan_for("sm_90a", varied({key: value}))


def test_a_width_of_no_whole_scale_block_is_planned_unsplit(varied: Varied) -> None:
    problems = plan_for("sm_90a", varied({"hidden_size": 2880, "moe_intermediate_size": 2880})).problems
    assert {(problem.largest.n, problem.largest.k) for problem in problems} == {(5760, 2880), (2880, 2880)}


@pytest.mark.parametrize("name", ["tp", "ep", "max_tokens", "sms"])
@pytest.mark.parametrize(
    "value",
    [0, -1, 1.5, "2", True, 2**31, 2**63, 10**5000, [1], "\x1b"],
    ids=lambda value: ascii(value)[:12] if value != 10**5000 else "5001 digits",
)
@pytest.mark.parametrize("model", ["deepseek-v3", None])
def test_an_argument_that_is_no_count_is_refused_by_name(models: Path, name: str, value: Any, model: str | None) -> None:
    with pytest.raises(OperandError, match=f"{name} = ") as caught:
        plan_for("sm_90a", model and models / model, **{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("sms", [MOST_SMS + 1, 10**6])
def test_more_sms_than_any_gpu_has_are_refused_with_the_bound_and_the_largest_gpu(models: Path, sms: int) -> None:
    with pytest.raises(OperandError, match=f"needed: a whole number from 1 to {MOST_SMS}; the largest GPU of sm_90a has 132"):
        plan_for("sm_90a", models / "deepseek-v3", sms=sms)


def test_a_gpu_larger_than_the_largest_of_today_is_planned_for(models: Path) -> None:
    assert prove(plan_for("sm_90a", models / "deepseek-v3", sms=160)) == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a", "", "hopper"])
def test_an_unknown_arch_is_refused_with_the_known_ones(models: Path, arch: str) -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        plan_for(arch, models / "deepseek-v3")


# --- what serving meets


def _experts(**changes: Any) -> ExpertsLayer:
    known: dict[str, Any] = {"hidden_size": 7168, "width": 2048, "experts": 256, "per_token": 8, "scheme": Scheme.BLOCKS}
    return ExpertsLayer(width_name="width", experts_name="experts", **(known | changes))


def _model(*parts: ExpertsLayer | Linear) -> Model:
    layers = tuple(part for part in parts if isinstance(part, ExpertsLayer))
    return Model(Path("config.json"), "a test", layers, tuple(part for part in parts if isinstance(part, Linear)), ())


def test_a_plan_for_every_m_up_to_16384_is_complete_and_of_few_kernels() -> None:
    plan = plan_for("sm_90a", _model(_experts()), max_tokens=16384, sms=132)
    assert len(plan.kernels) <= 20
    (gate_up,) = (each for each in plan.problems if (each.what, each.largest.layout) == ("experts gate_up", Layout.MASKED))
    assert (gate_up.largest.n, gate_up.largest.k, gate_up.largest.groups) == (4096, 7168, 256)
    limits = limits_of("sm_90a", 132)
    assert {select(replace(gate_up.largest, m=m), limits) for m in range(1, 16385)} <= set(plan.kernels)
    assert prove(plan) == ()


@pytest.mark.parametrize("n", [576, 1856, 2112, 4096])
@pytest.mark.parametrize("scheme", [Scheme.BLOCKS, Scheme.ROWS, Scheme.TENSOR, Scheme.FP4, Scheme.BF16])
def test_whatever_an_operation_can_be_asked_for_is_planned(n: int, scheme: Scheme) -> None:
    linears = [Linear(n, 2048, Scheme.BLOCKS, None, ("linear",)), Linear(2048, n, Scheme.TENSOR, None, ("linear",))]
    fp8 = scheme is not Scheme.BF16
    layers = [_experts(hidden_size=n, width=n // 2, experts=8, scheme=scheme, n_major=False)]
    layers += [] if fp8 else [_experts(hidden_size=n, width=n // 2, experts=8, scheme=scheme, n_major=True)]
    plan = plan_for("sm_90a", _model(*layers, *(linears if fp8 else ())))
    steps = [*itertools.product((ROUTE,), [("i32",)]), *itertools.product((COMBINE,), [("bf16",)])]
    steps += itertools.product((GATHER, ACTIVATE), [("bf16", "e4m3" if fp8 else "bf16")])
    steps += [(CAST_TO_FP8, ("bf16", "e4m3")), (CAST_TO_FP8, ("f32", "e4m3")), (SCALE_LAYOUT, ("f32",))] if fp8 else []
    assert {select(StepProblem(family, dtypes), limits_of("sm_90a")) for family, dtypes in steps} <= set(plan.kernels)
    assert {problem.largest.layout for problem in plan.problems} == set(Layout) - (set() if fp8 else {Layout.DENSE})
    for problem, m, sms in itertools.product(plan.problems, (1, 7, 64, 65, 128, 4096), SMS):
        assert select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) in plan.kernels
    assert prove(plan) == ()


def test_a_plan_that_lost_a_kernel_is_not_complete() -> None:
    plan = plan_for("sm_90a", _model(_experts(), Linear(2112, 7168, Scheme.BLOCKS, None, ("linear",))))
    gemms = [spec for spec in plan.kernels if spec.family.startswith("fp8_gemm")]
    for lost in gemms:
        short = replace(plan, kernels=tuple(spec for spec in plan.kernels if spec != lost))
        assert any(lost.name in gap.reason for _problem, gap in prove(short))


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("block", "planned"),
    [([128, 128], True), ([1, 128], True), (None, True), ([64, 128], False), ([128, 64], False), ([1, 32], False)],
)
def test_a_scheme_is_planned_or_refused_with_what_runs_it(
    varied: Varied, activations: str, block: list[int] | None, planned: bool
) -> None:
    folder = varied({"quantization_config.weight_block_size": block, "quantization_config.activation_scheme": activations})
    if planned:
        assert prove(plan_for("sm_90a", folder, sms=132)) == ()
        return
    with pytest.raises(UnsupportedError, match=r'experts_implementation="grouped_mm", or "eager"') as caught:
        plan_for("sm_90a", folder)
    assert f"weight_block_size = {block}" in caught.value.given


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("size", [767, 760, 9])
def test_fp4_experts_whose_packed_columns_no_kernel_reads_are_refused_by_their_size(varied: Varied, key: str, size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} = {size}"):
        plan_for("sm_90a", varied(FP4 | {key: size}))


def test_experts_without_a_gate_have_a_first_gemm_of_half_the_rows() -> None:
    plan = plan_for("sm_90a", _model(_experts(gated=False)), sms=132)
    assert {(each.largest.n, each.largest.k) for each in plan.problems} == {(2048, 7168), (7168, 2048)}


def test_linears_of_one_size_are_one_problem() -> None:
    linears = [Linear(512, 7168, Scheme.BLOCKS, split, (name,)) for name, split in (("a", None), ("b", None), ("c", "n"))]
    plan = plan_for("sm_90a", _model(*linears), tp=2)
    assert [(each.largest.n, each.modules) for each in plan.problems] == [(512, ("a", "b")), (256, ("c",))]

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
    CAST_TO_FP8,
    SCALE_LAYOUT,
    GemmProblem,
    Layout,
    StepProblem,
    arch_named,
    kernel_set,
    limits_of,
    select,
)
from deepgemm_jit.warmup import Plan, plan_for

pytestmark = pytest.mark.none

Varied = Callable[[dict[str, Any]], Path]
FP8_MODELS = ("deepseek-v3", "qwen3-235b-a22b-fp8", "qwen3-30b-a3b-fp8")
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
    assert layouts == set(itertools.product(("experts gate_up", "experts down"), grouped))


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
    padded = {alignment: 10 * 8 + 128 * alignment for alignment in (64, 128, 256)}
    by_layout = {(layout, alignment): m for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS) for alignment, m in padded.items()}
    assert rows == by_layout | {(Layout.MASKED, 128): 10}


@pytest.mark.parametrize("alignment", [64, 128, 192, 256, 384, 512])
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
            select(replace(problem.largest, m=m), limits_of("sm_90a", sms)) for m in range(1, problem.largest.m + 1, 64)
        }


def test_without_a_model_the_plan_is_the_whole_kernel_set() -> None:
    plan = plan_for("sm_90a")
    assert (plan.kernels, plan.model, plan.problems, plan.uncovered) == (kernel_set("sm_90a"), None, (), ())


def test_experts_without_kernels_leave_an_empty_plan_and_their_reason(models: Path) -> None:
    plan = plan_for("sm_90a", models / "deepseek-v4-flash")
    assert (plan.problems, plan.kernels) == ((), ())
    assert any("fp4" in part.reason for part in plan.uncovered)


def test_kernels_are_planned_once_and_in_the_order_of_the_set(models: Path) -> None:
    kernels = plan_for("sm_90a", models / "deepseek-v3").kernels
    order = [kernel_set("sm_90a").index(spec) for spec in kernels]
    assert order == sorted(set(order))
    assert {CAST_TO_FP8, SCALE_LAYOUT} < {spec.family for spec in kernels}


@pytest.mark.parametrize(
    ("tp", "ep", "faults"),
    [
        (5, 1, ["moe_intermediate_size = 768", "tp = 5", "tp that fit: 1, 2, 3, 6"]),
        (4, 1, ["moe_intermediate_size = 768", "tp = 4", "128-wide scale blocks"]),
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


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 100), ("hidden_size", 2056), ("moe_intermediate_size", 100)])
def test_a_size_that_no_kernel_serves_is_refused_with_its_key_and_value(varied: Varied, key: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} = {value}"):
        plan_for("sm_90a", varied({key: value}))


def test_a_width_of_no_whole_scale_block_is_planned_unsplit(varied: Varied) -> None:
    problems = plan_for("sm_90a", varied({"hidden_size": 2880, "moe_intermediate_size": 2880})).problems
    assert {(problem.largest.n, problem.largest.k) for problem in problems} == {(5760, 2880), (2880, 2880)}


@pytest.mark.parametrize("name", ["tp", "ep", "max_tokens", "sms"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_an_argument_that_is_no_count_is_refused_by_name(models: Path, name: str, value: object) -> None:
    with pytest.raises(OperandError, match=f"{name} = "):
        plan_for("sm_90a", models / "deepseek-v3", **{name: value})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a", "", "hopper"])
def test_an_unknown_arch_is_refused_with_the_known_ones(models: Path, arch: str) -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        plan_for(arch, models / "deepseek-v3")

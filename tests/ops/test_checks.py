"""What operations refuse: every fault of a call at once, before anything is built, with sizes that would do."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.spec import GemmProblem, Layout, limits_of, select

pytestmark = pytest.mark.none

E4M3, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
M, N, K, GROUPS = 77, 264, 1040, 3

Operands = dict[str, Any]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def operands(layout: str, m: int = M, n: int = N, k: int = K) -> Operands:
    """Return right operands of a call; inside of FakeTensorMode they are tensors without memory."""
    k_blocks, n_blocks = ceil_div(k, 128), ceil_div(n, 128)
    a_lead = (GROUPS, m) if layout == "masked" else (m,)
    b_lead = () if layout == "dense" else (GROUPS,)
    made: Operands = {
        "a": torch.empty((*a_lead, k), dtype=E4M3),
        "a_scale": torch.empty((*a_lead, k_blocks), dtype=F32),
        "b": torch.empty((*b_lead, n, k), dtype=E4M3),
        "b_scale": torch.empty((*b_lead, n_blocks, k_blocks), dtype=F32),
        "out": torch.empty((*a_lead, n), dtype=BF16),
    }
    if layout == "masked":
        made |= {"masked_m": torch.empty(GROUPS, dtype=I32), "expected_m": m}
    elif layout != "dense":
        psum = layout == "prefix_sums"
        made |= {"m_indices": torch.empty(GROUPS if psum else m, dtype=I32), "use_psum_layout": psum, "alignment": 128}
    return made


def call(layout: str, given: Operands) -> None:
    pairs = (given["a"], given["a_scale"]), (given["b"], given["b_scale"]), given["out"]
    if layout == "dense":
        ops.fp8_gemm_nt(*pairs)
    elif layout == "masked":
        ops.m_grouped_fp8_gemm_nt_masked(*pairs, given["masked_m"], given["expected_m"])
    else:
        rest = {name: given[name] for name in ("use_psum_layout", "alignment")}
        ops.m_grouped_fp8_gemm_nt_contiguous(*pairs, given["m_indices"], **rest)


def faults_of(layout: str, given: Operands) -> tuple[str, ...]:
    """Return the faults of the one error that a call raises."""
    with pytest.raises(OperandError) as caught:
        call(layout, given)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


LAYOUTS = ("dense", "row_index", "prefix_sums", "masked")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_operands_pass(layout: str) -> None:
    with FakeTensorMode():
        call(layout, operands(layout))


# --- sizes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("k", "n", "wrong"),
    [
        (577, 7168, {"K": (576, 592)}),
        (7168, 100, {"N": (96, 104)}),
        (100, 100, {"K": (96, 112), "N": (96, 104)}),
        (0, 128, {"K": (16,)}),
        (128, 0, {"N": (8,)}),
        (8, 3, {"K": (16,), "N": (8,)}),
    ],
)
def test_bad_sizes_are_all_named_with_the_nearest_that_pass(
    layout: str, k: int, n: int, wrong: dict[str, tuple[int, ...]]
) -> None:
    with FakeTensorMode():
        faults = faults_of(layout, operands(layout, n=n, k=k))
        offered = {fault[0]: tuple(map(int, re.findall(r"\d+", fault.partition("nearest: ")[2]))) for fault in faults}
        assert offered == wrong
        given = {"K": (k,), "N": (n,)} | offered
        for good_k in given["K"]:
            for good_n in given["N"]:
                call(layout, operands(layout, n=good_n, k=good_k))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k", "n"), [(16, 8), (576, 64), (2880, 5760), (7168, 2112)])
def test_sizes_that_occur_pass(layout: str, k: int, n: int) -> None:
    with FakeTensorMode():
        call(layout, operands(layout, n=n, k=k))


# --- dtypes, ranks, shapes, strides: each alone, then all at once

FLAWS: dict[str, tuple[Operands, str]] = {
    "a of another dtype": ({"a": ((M, K), BF16)}, r"a must be torch\.float8_e4m3fn, not torch\.bfloat16"),
    "a of one dimension": ({"a": ((K,), E4M3)}, r"a must have 2 dimensions, not shape \(1040,\)"),
    "scales of another dtype": ({"a_scale": ((M, 9), BF16)}, r"a_scale must be torch\.float32, not torch\.bfloat16"),
    "too few scales of a": (
        {"a_scale": ((M, 8), F32)},
        r"a_scale must have shape \(M, .*\) = \(77, 9\), not \(77, 8\)",
    ),
    "scales of b per row": ({"b_scale": ((N, 9), F32)}, r"b_scale must have shape .* = \(3, 9\), not \(264, 9\)"),
    "b of another k": ({"b": ((N, 1024), E4M3)}, r"b must have shape \(N, K\) = \(264, 1040\), not \(264, 1024\)"),
    "out of another dtype": ({"out": ((M, N), F32)}, r"out must be torch\.bfloat16, not torch\.float32"),
    "out of another m": ({"out": ((M + 1, N), BF16)}, r"out must have shape \(M, N\) = \(77, 264\), not \(78, 264\)"),
}


def with_flaws(*flaws: str) -> Operands:
    given = operands("dense")
    for flaw in flaws:
        for name, (shape, dtype) in FLAWS[flaw][0].items():
            given[name] = torch.empty(shape, dtype=dtype)
    return given


@pytest.mark.parametrize("flaw", FLAWS)
def test_one_flaw_is_one_fault(flaw: str) -> None:
    with FakeTensorMode():
        (fault,) = faults_of("dense", with_flaws(flaw))
    assert re.search(FLAWS[flaw][1], fault), fault


def test_every_fault_of_a_call_is_listed_at_once() -> None:
    flaws = ("a of another dtype", "too few scales of a", "scales of b per row", "out of another m")
    with FakeTensorMode():
        faults = faults_of("dense", with_flaws(*flaws))
    assert len(faults) == len(flaws)
    for flaw in flaws:
        assert any(re.search(FLAWS[flaw][1], fault) for fault in faults), f"{flaw} not in {faults}"


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("a", lambda: transposed((M, K), E4M3), "a must have its last dimension contiguous"),
        ("b", lambda: transposed((N, K), E4M3), "b must have its last dimension contiguous"),
        ("out", lambda: transposed((M, N), BF16), "out must have its last dimension contiguous"),
        ("b_scale", lambda: transposed((3, 9), F32), "b_scale must have its last dimension contiguous"),
        ("a", lambda: torch.empty((M, K + 8), dtype=E4M3)[:, :K], "a must have strides that are positive multiples of 16"),
        ("out", lambda: torch.empty((M, N + 4), dtype=BF16)[:, :N], "out must have strides that are positive multiples of 8"),
        ("out", lambda: torch.empty((1, N), dtype=BF16).expand(M, N), "out must have strides that are positive multiples of 8"),
    ],
)
def test_strides_that_a_kernel_cannot_read_are_refused(name: str, tensor: Any, text: str) -> None:
    with FakeTensorMode():
        (fault,) = faults_of("dense", operands("dense") | {name: tensor()})
    assert fault.startswith(text)


def test_strides_of_single_rows_mean_nothing() -> None:
    with FakeTensorMode():
        one = operands("dense", m=1)
        one["a"] = torch.empty_strided((1, K), (7, 1), dtype=E4M3)
        one["out"] = torch.empty_strided((1, N), (3, 1), dtype=BF16)
        call("dense", one)


@pytest.mark.parametrize(
    ("layout", "name", "shape", "dtype", "text"),
    [
        ("row_index", "m_indices", (M,), torch.int64, "m_indices must be torch.int32, not torch.int64"),
        ("row_index", "m_indices", (GROUPS,), I32, "m_indices must have shape (M,) = (77,), not (3,)"),
        ("prefix_sums", "m_indices", (M,), I32, "m_indices must have shape (G,) = (3,), not (77,)"),
        ("masked", "masked_m", (GROUPS + 1,), I32, "masked_m must have shape (G,) = (3,), not (4,)"),
        ("masked", "masked_m", (GROUPS, 1), I32, "masked_m must have 1 dimensions, not shape (3, 1)"),
    ],
)
def test_group_data_of_another_kind_is_refused(layout: str, name: str, shape: Any, dtype: Any, text: str) -> None:
    with FakeTensorMode():
        assert faults_of(layout, operands(layout) | {name: torch.empty(shape, dtype=dtype)}) == (text,)


@pytest.mark.parametrize(
    ("expected_m", "alignment"), [(None, 128), (0, 16), (1, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128), (9999, 128)]
)
def test_the_alignment_proposed_for_a_group_is_that_of_the_first_tile_that_holds_it(
    expected_m: int | None, alignment: int
) -> None:
    assert ops.get_mk_alignment_for_contiguous_layout(expected_m) == alignment
    with pytest.raises(OperandError, match="expected_m must be a whole number"):
        ops.get_mk_alignment_for_contiguous_layout(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 7, 16, 64, 127, 128, 129])
def test_groups_placed_by_the_alignment_of_the_query_get_a_tile_that_lies_in_one_group(rows: int) -> None:
    alignment = ops.get_mk_alignment_for_contiguous_layout(rows)
    for given in {alignment, ops.get_mk_alignment_for_contiguous_layout()}:
        with FakeTensorMode():
            call("row_index", operands("row_index", m=GROUPS * checks.round_up(rows, given)) | {"alignment": given})
        for layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS):
            problem = GemmProblem(GROUPS * checks.round_up(rows, given), N, K, GROUPS, layout, given)
            # Under prefix sums and narrow alignments a tile may reach into the next group: it knows where its own ends.
            narrow = layout is Layout.PREFIX_SUMS and given % 64
            assert narrow or given % select(problem, limits_of("sm_90a")).block[0] == 0


@pytest.mark.parametrize("alignment", [-128, 0, 1, 8, 100])
def test_an_alignment_that_no_tile_divides_is_refused(alignment: int) -> None:
    with FakeTensorMode():
        (fault,) = faults_of("row_index", operands("row_index") | {"alignment": alignment})
        assert fault.startswith(f"alignment = {alignment} must be a multiple of 16")


@pytest.mark.parametrize("what", [None, "tensor", (1, 2, 3)])
def test_an_operand_that_is_no_pair_is_refused(what: object) -> None:
    with pytest.raises(OperandError, match=r"a must be a pair \(tensor, scales\)"):
        ops.fp8_gemm_nt(what, (torch.empty(0), torch.empty(0)), torch.empty(0))  # type: ignore[arg-type]


# --- devices and gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_in_host_memory_are_refused(layout: str) -> None:
    given = operands(layout)
    faults = faults_of(layout, given)
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    assert faults == tuple(f"{name} must be on a CUDA device, not cpu" for name in names)


def test_the_cast_and_the_scale_layout_refuse_host_memory() -> None:
    with pytest.raises(OperandError, match="x must be on a CUDA device, not cpu"):
        ops.per_token_cast_to_fp8(torch.ones(4, 128))
    with pytest.raises(OperandError, match="scales must be on a CUDA device, not cpu"):
        ops.get_mn_major_tma_aligned_tensor(torch.ones(4, 2))


@pytest.mark.parametrize("name", ["a_scale", "b_scale", "out"])
def test_an_operand_that_requires_grad_is_refused_unless_grad_is_off(name: str) -> None:
    with FakeTensorMode():
        given = operands("dense")
        given[name].requires_grad_()
        (fault,) = faults_of("dense", given)
        assert fault.startswith(f"{name} requires grad, and this operation has no backward; call it under torch.no_grad()")
        with torch.no_grad():
            call("dense", given)


def test_the_cast_of_an_input_that_requires_grad_is_refused_unless_grad_is_off() -> None:
    with FakeTensorMode():
        x = torch.empty((4, 128), requires_grad=True)
        with pytest.raises(OperandError, match=r"x requires grad.*detach x"):
            ops.per_token_cast_to_fp8(x)
        with torch.no_grad():
            ops.per_token_cast_to_fp8(x)
        ops.per_token_cast_to_fp8(x.detach())


@pytest.mark.parametrize("stray", ["a_scale", "b", "b_scale", "out", "m_indices"])
def test_operands_on_two_gpus_are_a_context_mismatch(stray: str) -> None:
    with FakeTensorMode():
        given = {name: value.to("cuda:0") for name, value in operands("row_index").items() if isinstance(value, torch.Tensor)}
        given[stray] = given[stray].to("cuda:1")
        groups = checks.GroupData("m_indices", given.pop("m_indices"), per_row=True)
        scales = given.pop("a_scale"), given.pop("b_scale")
        with pytest.raises(ContextMismatchError) as caught:
            checks.check_gemm("grouped", **given, scales=scales, groups=groups)
    assert caught.value.belongs_to == "cuda:1"
    assert f"{stray} of grouped" in str(caught.value) and "cuda:0" in str(caught.value)


# --- the cast


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (lambda: torch.empty((4, 100)), r"K = 100 must be a multiple of 16; nearest: 96 or 112"),
        (lambda: torch.empty((4, 8)), r"K = 8 must be a multiple of 16; nearest: 16"),
        (lambda: torch.empty((4, 128), dtype=torch.float16), r"x must be torch\.bfloat16, not torch\.float16"),
        (lambda: torch.empty((2, 4, 128)), r"x must have 2 dimensions, not shape \(2, 4, 128\)"),
        (lambda: torch.empty((128, 4)).T, r"x must have its last dimension contiguous"),
        (lambda: torch.empty((4, 131))[:, :128], r"x must have strides that are positive multiples of 4"),
    ],
)
def test_what_the_cast_cannot_read_is_refused(x: Any, text: str) -> None:
    with FakeTensorMode(), pytest.raises(OperandError, match=text):
        ops.per_token_cast_to_fp8(x())

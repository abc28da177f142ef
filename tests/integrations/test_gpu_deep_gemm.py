"""DeepGEMM by name on a GPU: each form against float64, and its casts against those of the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import Output, assert_close, dequantize, group_rows, product, random_a, random_b, used_rows

from deepgemm_jit.integrations import deep_gemm

pytestmark = pytest.mark.gpu

M, N, K, GROUPS = 129, 264, 528, 3
FORMS = ("nt", "nn", "tn", "tt")


def turned(operand: Any, *, copied: bool = False) -> Any:
    if isinstance(operand, tuple):
        return tuple(turned(part, copied=copied) for part in operand)
    return operand.mT.contiguous() if copied else operand.mT


@pytest.mark.parametrize("copied", [False, True], ids=["b_k_major", "b_n_major"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_dense_forms_are_right(fp8: bool, form: str, copied: bool) -> None:
    a, b = random_a(M, K), random_b(N, K)
    exact = product(a, b)
    given: Any = (a.pair, b.pair)
    if not fp8:
        wide = dequantize(a.values, a.scales, 1).bfloat16(), dequantize(b.values, b.scales, 128).bfloat16()
        given, exact = wide, wide[0].double() @ wide[1].double().T
    left, right = given
    if form[1] == "n":
        right = turned(right, copied=copied)
    elif copied:
        right = turned(turned(right, copied=True))
    out = Output(M, N)
    getattr(deep_gemm, f"{'fp8' if fp8 else 'bf16'}_gemm_{form}")(turned(left) if form[0] == "t" else left, right, out.tensor)
    assert_close(out.tensor, exact)
    out.assert_written()


@pytest.mark.parametrize("psum", [False, True], ids=["row_index", "prefix_sums"])
@pytest.mark.parametrize("alignment", [16, 128])
def test_contiguous_groups_at_the_alignment_that_was_set_are_right(alignment: int, psum: bool) -> None:
    rows = group_rows((5, 0, 70), alignment)
    a, b = random_a(rows.total, K), random_b(GROUPS, N, K)
    out = torch.full((rows.total, N), torch.nan, dtype=torch.bfloat16, device="cuda")
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        layout = rows.ends() if psum else rows.m_indices()
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a.pair, b.pair, out, layout, use_psum_layout=psum)
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    for group, part in enumerate(rows.slices):
        if part.start < part.stop:
            assert_close(out[part], product(a[part], b[group]), f"group {group}")


def test_masked_groups_are_right() -> None:
    counts = (3, 0, M)
    a, b = random_a(GROUPS, M, K), random_b(GROUPS, N, K)
    out = Output(GROUPS, M, N)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    deep_gemm.fp8_m_grouped_gemm_nt_masked(a.pair, b.pair, out.tensor, masked_m, 64, disable_ue8m0_cast=True)
    used = used_rows(counts, M)
    for group, count in enumerate(counts):
        if count:
            assert_close(out.tensor[group, :count], product(a[group][:count], b[group]), f"group {group}")
    out.assert_written(used, may=~used)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_casts_of_both_operands_give_the_product(ue8m0: bool) -> None:
    x, weight = torch.randn((M, K), device="cuda").bfloat16(), torch.randn((N, K), device="cuda").bfloat16()
    a, b = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=ue8m0), deep_gemm.per_block_cast_to_fp8(weight, use_ue8m0=ue8m0)
    on_cpu = deep_gemm.per_block_cast_to_fp8(weight.cpu(), use_ue8m0=ue8m0)
    assert torch.equal(b[0].cpu().view(torch.uint8), on_cpu[0].view(torch.uint8)) and torch.equal(b[1].cpu(), on_cpu[1])
    out = torch.empty((M, N), dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, out)
    assert_close(out, dequantize(*a, 1) @ dequantize(*b, 128).T)


def test_the_sm_count_is_kept_and_put_back() -> None:
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(before - 8)
    try:
        assert deep_gemm.get_num_sms() == before - 8
        a, b, out = random_a(M, K), random_b(N, K), torch.empty((M, N), dtype=torch.bfloat16, device="cuda")
        deep_gemm.fp8_gemm_nt(a.pair, b.pair, out)
        assert_close(out, product(a, b))
    finally:
        deep_gemm.set_num_sms(None)
    assert deep_gemm.get_num_sms() == before

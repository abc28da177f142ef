"""Products of groups of rows with a matrix each, under DeepGEMM's names.

``compiled_dims`` and ``disable_ue8m0_cast`` are taken and mean nothing, as in the dense products. Neither does
``ensure_zero_padding``: whatever it says, rows of no group may hold anything afterwards inside a group's last tile and keep
what they held elsewhere; DeepGEMM's kernels for Hopper do not read it either. ``expected_m_for_psum_layout`` is a mere hint.
"""

from __future__ import annotations

from typing import Any

import torch

from deepgemm_jit import ops
from deepgemm_jit.integrations.deep_gemm.dense import OperandRecipe, Recipe
from deepgemm_jit.integrations.deep_gemm.layouts import get_mk_alignment_for_contiguous_layout
from deepgemm_jit.integrations.deep_gemm.operands import Operand, multiply, turned
from deepgemm_jit.integrations.deep_gemm.refusals import require_plain_output, require_scales_we_read


def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Write ``A[rows of g] @ B[g].T`` to the same rows of ``d`` for every group g.

    Groups start at multiples of :func:`get_mk_alignment_for_contiguous_layout` rows; see
    :func:`deepgemm_jit.ops.m_grouped_fp8_gemm_nt_contiguous` for shapes, dtypes and errors.

    Args:
        a: (M, K) and (M, ceil(K / 128)) scales.
        b: (G, N, K) and (G, ceil(N / 128), ceil(K / 128)) scales.
        d: (M, N) bfloat16.
        grouped_layout: (M,) int32, the group of each row, negative for rows of none; with ``use_psum_layout`` (G,) int32, the
            end row of each group.
        recipe: (1, 128, 128) or None.
        recipe_a: (1, 128) or None.
        recipe_b: (128, 128) or None.
        compiled_dims: means nothing here.
        disable_ue8m0_cast: means nothing here.
        use_psum_layout: read ``grouped_layout`` as end rows.
        ensure_zero_padding: means nothing here.
        expected_m_for_psum_layout: means nothing here.

    Raises:
        UnsupportedError: FP4 values, packed scales, other recipes, a float32 ``d``, an M-major A.
    """
    _fp8_contiguous("m_grouped_fp8_gemm_nt_contiguous", a, b, d, grouped_layout, use_psum_layout, recipe, recipe_a, recipe_b)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """Write ``A[rows of g] @ B[g]`` for every group g: B is (G, K, N); all else as :func:`m_grouped_fp8_gemm_nt_contiguous`."""
    operation, b = "m_grouped_fp8_gemm_nn_contiguous", turned(b)
    _fp8_contiguous(operation, a, b, d, grouped_layout, use_psum_layout, recipe, recipe_a, recipe_b)


m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs: Operand, rhs: Operand, out: torch.Tensor, m_indices: torch.Tensor) -> None:
    """Do what :func:`m_grouped_fp8_gemm_nt_contiguous` does, under the name and the arguments of DeepGEMM 1."""
    _fp8_contiguous("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", lhs, rhs, out, m_indices, use_psum_layout=False)


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Write ``A[rows of g] @ B[g].T`` for every group g: (M, K), (G, N, K) and (M, N) bfloat16.

    Rows, ``grouped_layout`` and what means nothing are those of :func:`m_grouped_fp8_gemm_nt_contiguous`.
    """
    _bf16_contiguous("m_grouped_bf16_gemm_nt_contiguous", a, b, d, grouped_layout, use_psum_layout)


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """Write ``A[rows of g] @ B[g]`` for every group g: B is (G, K, N); all else as :func:`m_grouped_bf16_gemm_nt_contiguous`."""
    _bf16_contiguous("m_grouped_bf16_gemm_nn_contiguous", a, turned(b), d, grouped_layout, use_psum_layout)


def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``A[g, :masked_m[g]] @ B[g].T`` to ``d[g, :masked_m[g]]`` for every group g.

    See :func:`deepgemm_jit.ops.m_grouped_fp8_gemm_nt_masked` for shapes, dtypes and errors.

    Args:
        a: (G, M, K) and (G, M, ceil(K / 128)) scales.
        b: (G, N, K) and (G, ceil(N / 128), ceil(K / 128)) scales.
        d: (G, M, N) bfloat16.
        masked_m: (G,) int32, the rows of each group.
        expected_m: rows to expect in a group; a hint, never a bound.
        recipe: (1, 128, 128) or None.
        recipe_a: (1, 128) or None.
        recipe_b: (128, 128) or None.
        compiled_dims: means nothing here.
        disable_ue8m0_cast: means nothing here.

    Raises:
        UnsupportedError: FP4 values, packed scales, other recipes, a float32 ``d``.
    """
    _fp8_masked("m_grouped_fp8_gemm_nt_masked", a, b, d, masked_m, expected_m, recipe, recipe_a, recipe_b)


m_grouped_fp8_fp4_gemm_nt_masked = fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Operand, rhs: Operand, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """Do what :func:`m_grouped_fp8_gemm_nt_masked` does, under the name and the arguments of DeepGEMM 1."""
    _fp8_masked("m_grouped_gemm_fp8_fp8_bf16_nt_masked", lhs, rhs, out, masked_m, expected_m)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """Write ``A[g, :masked_m[g]] @ B[g].T`` for every group g: (G, M, K), (G, N, K) and (G, M, N) bfloat16."""
    require_plain_output("m_grouped_bf16_gemm_nt_masked", d)
    ops.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m)


bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


def _fp8_contiguous(
    operation: str,
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    use_psum_layout: bool,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
) -> None:
    require_scales_we_read(operation, a, b, recipe, recipe_a, recipe_b)
    require_plain_output(operation, d)
    nt, nn = ops.m_grouped_fp8_gemm_nt_contiguous, ops.m_grouped_fp8_gemm_nn_contiguous
    alignment = get_mk_alignment_for_contiguous_layout()
    multiply(operation, nt, nn, a, b, d, grouped_layout, use_psum_layout=use_psum_layout, alignment=alignment)


def _bf16_contiguous(
    operation: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor, use_psum_layout: bool
) -> None:
    require_plain_output(operation, d)
    nt, nn = ops.m_grouped_bf16_gemm_nt_contiguous, ops.m_grouped_bf16_gemm_nn_contiguous
    alignment = get_mk_alignment_for_contiguous_layout()
    multiply(operation, nt, nn, a, b, d, grouped_layout, use_psum_layout=use_psum_layout, alignment=alignment)


def _fp8_masked(
    operation: str,
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
) -> None:
    require_scales_we_read(operation, a, b, recipe, recipe_a, recipe_b)
    require_plain_output(operation, d)
    ops.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m)

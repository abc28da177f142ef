"""Dense products ``D = A @ B`` under DeepGEMM's names. Its letters say which operand is given turned: n as it is, t turned.

Hopper multiplies FP8 along K only, so memory decides: A must lie with K contiguous in all four forms; B may lie either way,
and FP8 B with N contiguous is first transposed by a kernel, in every call. ``compiled_dims`` and ``disable_ue8m0_cast`` are taken
and mean nothing: kernels are never compiled for sizes, and scales never cast.
"""

from __future__ import annotations

from typing import Any

import torch

from deepgemm_jit import ops
from deepgemm_jit.integrations.deep_gemm.operands import Operand, multiply, turned
from deepgemm_jit.integrations.deep_gemm.refusals import require_plain_output, require_scales_we_read

Recipe = tuple[int, int, int] | None
OperandRecipe = tuple[int, int] | None


def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``A @ B.T`` to ``d``; see :func:`deepgemm_jit.ops.fp8_gemm_nt` for shapes, dtypes and errors.

    Args:
        a: (M, K) and (M, ceil(K / 128)) scales.
        b: (N, K) and (ceil(N / 128), ceil(K / 128)) scales.
        d: (M, N) bfloat16.
        c: None.
        recipe: (1, 128, 128) or None.
        recipe_a: (1, 128) or None.
        recipe_b: (128, 128) or None.
        compiled_dims: means nothing here.
        disable_ue8m0_cast: means nothing here.

    Raises:
        UnsupportedError: FP4 values, packed scales, other recipes, ``c``, a float32 ``d``, an M-major A.
    """
    _fp8("fp8_gemm_nt", a, b, d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_nn(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``A @ B`` to ``d``: B is (K, N) with (ceil(K / 128), ceil(N / 128)) scales; all else as :func:`fp8_gemm_nt`."""
    _fp8("fp8_gemm_nn", a, turned(b), d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_tn(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``A.T @ B`` to ``d``: A is (K, M), a view of memory with K contiguous; B as in :func:`fp8_gemm_nn`."""
    _fp8("fp8_gemm_tn", turned(a), turned(b), d, c, recipe, recipe_a, recipe_b)


def fp8_gemm_tt(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: OperandRecipe = None,
    recipe_b: OperandRecipe = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``A.T @ B.T`` to ``d``: A is (K, M), a view of memory with K contiguous; B as in :func:`fp8_gemm_nt`."""
    _fp8("fp8_gemm_tt", turned(a), b, d, c, recipe, recipe_a, recipe_b)


fp8_fp4_gemm_nt, fp8_fp4_gemm_nn = fp8_gemm_nt, fp8_gemm_nn
fp8_fp4_gemm_tn, fp8_fp4_gemm_tt = fp8_gemm_tn, fp8_gemm_tt


def gemm_fp8_fp8_bf16_nt(lhs: Operand, rhs: Operand, out: torch.Tensor) -> None:
    """Do what :func:`fp8_gemm_nt` does, under the name and the arguments of DeepGEMM 1."""
    _fp8("gemm_fp8_fp8_bf16_nt", lhs, rhs, out)


def bf16_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = ""
) -> None:
    """Write ``A @ B.T`` to ``d``: (M, K), (N, K) and (M, N) bfloat16; see :func:`deepgemm_jit.ops.bf16_gemm_nt`.

    Raises:
        UnsupportedError: ``c``, a float32 ``d``, an M-major A.
    """
    _bf16("bf16_gemm_nt", a, b, d, c)


def bf16_gemm_nn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = ""
) -> None:
    """Write ``A @ B`` to ``d``: B is (K, N); all else as :func:`bf16_gemm_nt`."""
    _bf16("bf16_gemm_nn", a, turned(b), d, c)


def bf16_gemm_tn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = ""
) -> None:
    """Write ``A.T @ B`` to ``d``: A is (K, M), a view of memory with K contiguous; B is (K, N)."""
    _bf16("bf16_gemm_tn", turned(a), turned(b), d, c)


def bf16_gemm_tt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = ""
) -> None:
    """Write ``A.T @ B.T`` to ``d``: A is (K, M), a view of memory with K contiguous; B is (N, K)."""
    _bf16("bf16_gemm_tt", turned(a), b, d, c)


def _fp8(
    operation: str,
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: Any = None,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
) -> None:
    require_scales_we_read(operation, a, b, recipe, recipe_a, recipe_b)
    require_plain_output(operation, d, c)
    multiply(operation, ops.fp8_gemm_nt, ops.fp8_gemm_nn, a, b, d)


def _bf16(operation: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: Any) -> None:
    require_plain_output(operation, d, c)
    multiply(operation, ops.bf16_gemm_nt, ops.bf16_gemm_nn, a, b, d)

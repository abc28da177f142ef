"""How operands lie: DeepGEMM's four forms of a product are two of ours on views of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from deepgemm_jit.errors import UnsupportedError

Operand: TypeAlias = Any
"""A tensor, or a pair of values and scales; what is neither is left to the checks of the operations."""


def turned(operand: Operand) -> Operand:
    """Return an operand with its last two dimensions exchanged: views of values and scales."""
    if isinstance(operand, (tuple, list)):
        return tuple(turned(part) for part in operand)
    return operand.mT if isinstance(operand, torch.Tensor) and operand.dim() >= 2 else operand


def multiply(
    operation: str, nt: Callable[..., None], nn: Callable[..., None], a: Operand, b: Operand, *rest: Any, **options: Any
) -> None:
    """Run ``A @ B.T`` on B as it lies: by ``nt`` where its rows are contiguous, by ``nn`` where its columns are.

    Args:
        operation: what the caller called.
        nt: takes B as (..., N, K).
        nn: takes B as (..., K, N).
        a: (..., M, K), rows contiguous.
        b: (..., N, K).
        rest: what follows A and B.
        options: by keyword.

    Raises:
        UnsupportedError: the columns of A are contiguous.
    """
    if _lies_turned(a):
        raise UnsupportedError(
            given=f"{operation} with an A whose columns are contiguous (M-major)",
            supported="rows of K contiguous elements",
            advice="Copy A so that K is contiguous; the shape may stay as it is",
        )
    if _lies_turned(b):
        nn(a, _with_rows(turned(b)), *rest, **options)
    else:
        nt(a, _with_rows(b), *rest, **options)


def _lies_turned(operand: Operand) -> bool:
    values = operand[0] if isinstance(operand, (tuple, list)) and operand else operand
    return isinstance(values, torch.Tensor) and values.dim() >= 2 and values.stride(-1) != 1 and values.stride(-2) == 1


def _with_rows(operand: Operand) -> Operand:
    """Return an operand whose scales have contiguous rows: they are few, and turning a weight turns them too."""
    if isinstance(operand, (tuple, list)) and len(operand) == 2 and isinstance(operand[1], torch.Tensor):
        scales = operand[1]
        if scales.dim() >= 2 and scales.size(-1) > 1 and scales.stride(-1) != 1:
            return operand[0], scales.contiguous()
    return operand

"""Layouts of scales, and where groups start."""

from __future__ import annotations

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations.deep_gemm.refusals import numbers
from deepgemm_jit.ops.checks import SCALE_BLOCK, require_tensors, round_up, whole_number

__all__ = [
    "align",
    "ceil_div",
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]

_TMA_BYTES = 16
_ROW_STEP = 16
_alignment = [ops.get_mk_alignment_for_contiguous_layout()]


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return the first multiple of y that is not below x."""
    return round_up(x, y)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Return A scales M-major with columns padded to 16 bytes; see :func:`deepgemm_jit.ops.get_mn_major_tma_aligned_tensor`."""
    return ops.get_mn_major_tma_aligned_tensor(sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor
"""The name that DeepGEMM 1 gave it."""


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the multiple of rows at which groups of the contiguous layouts start, 128 unless it was set."""
    return _alignment[0]


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Let groups of the contiguous layouts start at multiples of this many rows, in every call of this process from now on.

    Raises:
        OperandError: no positive multiple of 16.
    """
    rows = whole_number("set_mk_alignment_for_contiguous_layout", "new_value", new_value)
    if rows <= 0 or rows % _ROW_STEP:
        fault = f"new_value = {rows} must be a positive multiple of {_ROW_STEP}; of 64 for BF16 operands"
        raise OperandError(operation="set_mk_alignment_for_contiguous_layout", faults=[fault])
    _alignment[0] = rows


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """Return the alignment that pads FP8 groups of ``expected_m`` rows least, to be set before the calls."""
    return ops.get_mk_alignment_for_contiguous_layout(expected_m)


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """Return ``mn`` rounded up to elements of ``element_size`` bytes that fill multiples of 16 bytes.

    Raises:
        OperandError: an element size that does not divide 16.
    """
    if element_size < 1 or _TMA_BYTES % element_size:
        fault = f"element_size = {element_size} must divide {_TMA_BYTES}"
        raise OperandError(operation="get_tma_aligned_size", faults=[fault])
    return align(mn, _TMA_BYTES // element_size)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """Return scales as the GEMMs of a Hopper GPU read them; no value is changed.

    Args:
        sf: float32 scales, (ceil(mn / rows), ceil(k / 128)), with ``num_groups`` in front where that is given.
        mn: rows of the operand.
        k: columns of the operand.
        recipe: rows and columns that share a scale, (1, 128) or (128, 128); or DeepGEMM's three numbers, of A, of B and
            along K, of which ``is_sfa`` chooses one.
        num_groups: matrices in a stack.
        is_sfa: with three numbers, whether these are scales of A.
        disable_ue8m0_cast: means nothing here, as scales are never cast.

    Returns:
        Scales per row M-major with columns padded to 16 bytes; scales per block as they are.

    Raises:
        OperandError: no tensor, a shape or a dtype that does not fit, or a recipe without ``is_sfa``.
        UnsupportedError: other blocks, or packed scales.
    """
    operation = "transform_sf_into_required_layout"
    require_tensors(operation, sf=sf)
    sizes = {"mn": mn, "k": k, **({} if num_groups is None else {"num_groups": num_groups})}
    mn, k, *groups = (whole_number(operation, name, size) for name, size in sizes.items())
    rows, columns = _granularity(numbers(operation, "recipe", recipe), is_sfa)
    if sf.dtype == torch.int32:
        raise UnsupportedError(
            given="scales packed as UE8M0 in int32",
            supported="float32 scales",
            advice="Only Blackwell's kernels read packed ones; keep the float32 scales",
        )
    if (rows, columns) not in ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK)):
        raise UnsupportedError(given=f"scales per {rows} x {columns}", supported="scales per 1 x 128 and per 128 x 128")
    shape = (*groups, ceil_div(mn, rows), ceil_div(k, columns))
    if tuple(sf.shape) != shape or sf.dtype != torch.float32:
        fault = f"sf must be {torch.float32} of shape {shape}, not {sf.dtype} of {tuple(sf.shape)}"
        raise OperandError(operation=operation, faults=[fault])
    if rows == 1:
        return get_mn_major_tma_aligned_tensor(sf)
    return sf if sf.stride(-1) == 1 or sf.size(-1) == 1 else sf.contiguous()


def _granularity(recipe: tuple[int, ...], is_sfa: bool | None) -> tuple[int, int]:
    if len(recipe) == 2 and is_sfa is None:
        return recipe[0], recipe[1]
    if len(recipe) == 3 and is_sfa is not None:
        return recipe[0 if is_sfa else 1], recipe[2]
    fault = f"recipe {recipe} with is_sfa={is_sfa}: three numbers need is_sfa, two must go without"
    raise OperandError(operation="transform_sf_into_required_layout", faults=[fault])

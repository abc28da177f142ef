"""The casts to FP8: a scale is the largest magnitude of its block, at least 1e-4, over 448, and the values follow from it."""

from __future__ import annotations

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.integrations.deep_gemm.refusals import numbers
from deepgemm_jit.ops.checks import SCALE_BLOCK, require_tensors, round_up
from deepgemm_jit.ops.ue8m0 import expand_blocks, power_of_two_above

__all__ = ["per_block_cast_to_fp8", "per_custom_dims_cast_to_fp8", "per_token_cast_to_fp8"]

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_LEAST_MAGNITUDE = 1e-4


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast activations on a GPU to FP8 with one scale per row and 128 columns, in one kernel.

    Args:
        x: (M, K) bfloat16 or float32, K a multiple of 16.
        use_ue8m0: round scales up to powers of two; the values follow.
        gran_k: 128.
        use_packed_ue8m0: False.

    Returns:
        (M, K) float8_e4m3fn, and (M, ceil(K / 128)) float32 scales: M-major, as the GEMMs read them.

    Raises:
        OperandError: what is wrong with ``x``.
        UnsupportedError: another ``gran_k``, or packed scales.
    """
    _require_block("per_token_cast_to_fp8", gran_k)
    if use_packed_ue8m0:
        raise UnsupportedError(
            given="per_token_cast_to_fp8 with use_packed_ue8m0=True",
            supported="float32 scales",
            advice="Only Blackwell's kernels read packed ones; use_ue8m0=True gives the same powers of two in float32",
        )
    return ops.per_token_cast_to_fp8(x, use_ue8m0)


def per_block_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a weight to FP8 with one scale per block of 128 x 128, on any device.

    Args:
        x: (N, K), any floating dtype.
        use_ue8m0: round scales up to powers of two; the values follow.
        gran_k: 128.

    Returns:
        (N, K) float8_e4m3fn, and (ceil(N / 128), ceil(K / 128)) float32 scales.

    Raises:
        OperandError: ``x`` is no matrix.
        UnsupportedError: another ``gran_k``.
    """
    _require_block("per_block_cast_to_fp8", gran_k)
    require_tensors("per_block_cast_to_fp8", x=x)
    if x.dim() != 2:
        fault = f"x must have 2 dimensions, not shape {tuple(x.shape)}"
        raise OperandError(operation="per_block_cast_to_fp8", faults=[fault])
    n, k = x.shape
    rows, columns = round_up(n, SCALE_BLOCK), round_up(k, SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float().abs(), (0, columns - k, 0, rows - n))
    blocks = padded.view(rows // SCALE_BLOCK, SCALE_BLOCK, columns // SCALE_BLOCK, SCALE_BLOCK)
    scales = _scales(blocks.amax((1, 3)), use_ue8m0)
    return (x.float() / expand_blocks(scales, n, k)).to(_E4M3), scales


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to FP8 with one scale for each index of some dimensions, on any device.

    Args:
        x: any shape and floating dtype.
        dims: the dimensions that keep scales of their own; all others share one.
        use_ue8m0: round scales up to powers of two; the values follow.

    Returns:
        float8_e4m3fn of the shape of ``x``, and float32 scales, without dimensions of size 1.

    Raises:
        OperandError: ``x`` is no tensor, or lacks one of the dimensions.
    """
    operation = "per_custom_dims_cast_to_fp8"
    require_tensors(operation, x=x)
    faults = [
        f"dims names dimension {dim}, and x of shape {tuple(x.shape)} has {x.dim()}"
        for dim in numbers(operation, "dims", dims)
        if not -x.dim() <= dim < x.dim()
    ]
    if faults:
        raise OperandError(operation=operation, faults=faults)
    kept = {dim % x.dim() for dim in dims}
    shared = tuple(dim for dim in range(x.dim()) if dim not in kept)
    magnitudes = x.float().abs()
    scales = _scales(magnitudes.amax(shared, keepdim=True) if shared else magnitudes, use_ue8m0)
    return (x.float() / scales).to(_E4M3), scales.squeeze()


def _scales(largest: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    # Clamped first and rounded then, so that no scale is 0. By a tensor: torch divides by a number through its reciprocal on a
    # GPU, which rounds otherwise.
    clamped = largest.clamp(min=_LEAST_MAGNITUDE)
    scales = clamped / torch.full_like(clamped, _LARGEST)
    return power_of_two_above(scales) if use_ue8m0 else scales


def _require_block(operation: str, gran_k: int) -> None:
    if gran_k != SCALE_BLOCK:
        raise UnsupportedError(
            given=f"{operation} with gran_k={gran_k!r}",
            supported="gran_k=128",
            advice="The GEMMs of a Hopper GPU read scales of 128 columns",
        )

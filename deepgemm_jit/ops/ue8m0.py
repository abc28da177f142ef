"""UE8M0 scales: a byte b stands for 2^(b - 127), and 255 for NaN (OCP Microscaling Formats, version 1.0, section 5.4.1).

Reading them is exact. The way back is exact for powers of two alone, and a scale that is none is never rounded on behalf of the
caller: a rounded scale over unchanged values moves the weight by up to a factor of two, finitely and silently.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from deepgemm_jit.errors import OperandError
from deepgemm_jit.ops.checks import SCALE_BLOCK, ceil_div

DTYPES = (torch.uint8, torch.float8_e8m0fnu)
NAN = 255
BIAS = 127
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_SMALLEST = 1 << 22
"""The float32 bits of 2^-127, a subnormal: the exponent field of byte 0 alone would read as zero."""
_FLOAT32_NAN = 0x7FC00000


def float_from_ue8m0(stored: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of UE8M0 bytes (uint8 or float8_e8m0fnu, any shape), exactly."""
    codes = stored.view(torch.uint8).int()
    bits = (codes << _MANTISSA_BITS).masked_fill(codes == 0, _SMALLEST).masked_fill(codes == NAN, _FLOAT32_NAN)
    return bits.view(torch.float32)


def codes_of(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the UE8M0 bytes of float32 scales, and where a byte stands for exactly the scale: elsewhere it means nothing."""
    bits = scale.view(torch.int32)
    codes = (bits >> _MANTISSA_BITS).clamp(0, NAN).to(torch.uint8)
    return codes, (float_from_ue8m0(codes).view(torch.int32) == bits) & (codes != NAN)


def to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales that are powers of two as UE8M0, exactly.

    Args:
        scale: float32 of any shape, each a power of two from 2^-127 to 2^127.

    Returns:
        float8_e8m0fnu of the same shape.

    Raises:
        OperandError: a scale is no power of two (the first is named), or not float32.
    """
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        given = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise OperandError(operation="to_ue8m0", faults=[f"scale must be {torch.float32}, not {given}"])
    scale = scale.detach()
    codes, exact = codes_of(scale)
    index = try_first(~exact)
    if index is not None:
        fault = (
            f"scale{list(index)} = {float(scale[index])!r} is no power of two from 2^-127 to 2^127; rounding it alone would "
            "change the weight: requantize_ue8m0 makes new scales and new values"
        )
        raise OperandError(operation="to_ue8m0", faults=[fault])
    return codes.view(torch.float8_e8m0fnu)


def requantize_ue8m0(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an FP8 weight with scales rounded up to powers of two, and values rounded anew to match.

    Scales grow by less than a factor of two, so that values shrink and none overflows. Each lies within 2^-4 of what it was, or
    within 2^-10 scales where it becomes subnormal. Blocks whose scale is a power of two keep their bytes.

    Args:
        weight: (..., N, K) float8_e4m3fn.
        scale: (..., ceil(N / 128), ceil(K / 128)) float32, finite and not negative, at most 2^127.

    Returns:
        A new weight of the same shape, and float32 scales of the same shape, all powers of two.

    Raises:
        OperandError: all that is wrong with dtypes, shapes and scales.
    """
    _check_requantize(weight, scale)
    weight, scale = weight.detach(), scale.detach()
    rounded = power_of_two_above(scale)
    ratio = scale / rounded
    out = torch.empty_like(weight)
    for index in product(*(range(size) for size in weight.shape[:-2])):  # a matrix at a time: float32 is four times as large
        out[index] = (weight[index].float() * expand_blocks(ratio[index], *weight.shape[-2:])).to(weight.dtype)
    return out, rounded


def power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales that are not negative rounded up to powers of two from 2^-127 on; NaN and infinity stay.

    For who makes values anew with them: rounding a scale alone changes what its values mean.
    """
    bits = scale.view(torch.int32)
    codes = ((bits + _MANTISSA) >> _MANTISSA_BITS).masked_fill(bits <= _SMALLEST, 0).to(torch.uint8)
    return torch.where(scale.isfinite(), float_from_ue8m0(codes), scale)


def expand_blocks(blocks: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return (ceil(n / 128), ceil(k / 128)) values per block as (n, k) values per element."""
    return blocks.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]


def try_first(mask: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first true element, or None. Waits for the device."""
    if not mask.any():
        return None
    return tuple(mask.nonzero()[0].tolist())


def _check_requantize(weight: Any, scale: Any) -> None:
    faults = []
    for name, value, dtype in (("weight", weight, torch.float8_e4m3fn), ("scale", scale, torch.float32)):
        if not isinstance(value, torch.Tensor):
            faults.append(f"{name} must be a tensor, not {type(value).__name__}")
        elif value.dtype != dtype:
            faults.append(f"{name} must be {dtype}, not {value.dtype}")
        elif value.dim() < 2:
            faults.append(f"{name} must have at least 2 dimensions, not shape {tuple(value.shape)}")
    if not faults:
        *lead, n, k = weight.shape
        shape = (*lead, ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK))
        if tuple(scale.shape) != shape:
            faults.append(f"scale must have shape (..., ceil(N / 128), ceil(K / 128)) = {shape}, not {tuple(scale.shape)}")
        index = try_first(~((scale >= 0) & (scale <= 2.0**127)))
        if index is not None:
            faults.append(f"scale{list(index)} = {float(scale[index])!r} must be finite, not negative and at most 2^127")
    if faults:
        raise OperandError(operation="requantize_ue8m0", faults=faults)

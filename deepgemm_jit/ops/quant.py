"""The per-token cast to FP8 and the layout of A scales."""

from __future__ import annotations

import torch

from deepgemm_jit.ops import checks
from deepgemm_jit.ops.library import define
from deepgemm_jit.runtime import CastCall, Matrices, ScaleLayoutCall, prepare_cast, prepare_scale_layout
from deepgemm_jit.service import Call, default_service
from deepgemm_jit.spec import CastProblem, ScaleLayoutProblem, select

_SCALE_ALIGNMENT = 4
"""Floats to which the columns of M-major scales are padded: 16 bytes, as tensor maps need."""


def per_token_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast activations to FP8 with one scale per row and 128 columns.

    A scale is the largest magnitude of its block, at least 1e-4, over 448 (the largest E4M3), and ``x / scale`` is rounded to
    nearest. NaN and infinity in a block show in its scale: the block's values then dequantize to NaN.

    Args:
        x: (M, K) bfloat16 or float32, K a multiple of 16, rows at multiples of 16 bytes.
        use_ue8m0: round scales up to powers of two.

    Returns:
        (M, K) float8_e4m3fn, and (M, ceil(K / 128)) float32 scales, M-major with columns padded to 16 bytes: what the GEMMs read.

    Raises:
        OperandError: what is wrong with ``x``.
        UnsupportedError: the GPU has no kernels.
        KernelNotBuiltError: the compile policy is "never" and the kernel is not built.
    """
    values, scales = torch.ops.deepgemm_jit.per_token_cast_to_fp8(x, use_ue8m0)
    return values, scales


def get_mn_major_tma_aligned_tensor(scales: torch.Tensor) -> torch.Tensor:
    """Return A scales in the layout that the GEMMs read: M-major, columns padded to 16 bytes.

    Args:
        scales: (M, K blocks) or (G, M, K blocks) float32 with any strides. Scales that lie so already are returned as they are.

    Raises:
        OperandError, UnsupportedError, KernelNotBuiltError: as :func:`per_token_cast_to_fp8`.
    """
    # torch.compile traces this line, where tensors have no address: a GEMM lays out what starts at an odd one.
    if isinstance(scales, torch.Tensor) and _lies_m_major(scales):
        checks.check_scales("get_mn_major_tma_aligned_tensor", scales)
        return scales
    turned: torch.Tensor = torch.ops.deepgemm_jit.get_mn_major_tma_aligned_tensor(scales)
    return turned


def column_stride(scales: torch.Tensor) -> int:
    """Return the floats between the columns of M-major scales; of a single column, a number that a tensor map takes."""
    return scales.stride(-1) if scales.size(-1) > 1 else checks.round_up(scales.size(-2), _SCALE_ALIGNMENT)


def try_as_m_major(scales: torch.Tensor) -> torch.Tensor | None:
    """Return ``scales`` if the copy engine can read them as they lie, or None."""
    return scales if _lies_m_major(scales) and scales.data_ptr() % 16 == 0 else None


def with_m_major_scales(call: Call, scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales`` laid out anew by the ``scale_layout`` kernel, on the stream of ``call``."""
    turned = _empty_m_major(scales)
    if scales.size(-1) > 1 and scales.stride(-1) != 1:
        scales = scales.contiguous()  # neither layout: rare enough for a copy
    spec = select(ScaleLayoutProblem(), call.limits)
    m, k_blocks = scales.shape[-2:]
    layout = ScaleLayoutCall(
        input=Matrices(scales.data_ptr(), _group_stride(scales), scales.stride(-2)),
        output=Matrices(turned.data_ptr(), _group_stride(turned), column_stride(turned)),
        m=m,
        k_blocks=k_blocks,
        groups=scales.shape[0] if scales.dim() == 3 else 1,
    )
    if scales.numel():
        launch = prepare_scale_layout(spec, layout)
        call.kernel(spec).launch(launch.grid, launch.block, call.stream, launch.params_pointer)
    return turned


def _lies_m_major(scales: torch.Tensor) -> bool:
    # Strides of dimensions of size 1 mean nothing.
    if scales.dim() not in (2, 3):
        return False
    rows_follow = scales.size(-2) == 1 or scales.stride(-2) == 1
    columns_align = scales.size(-1) == 1 or (scales.stride(-1) >= scales.size(-2) and scales.stride(-1) % _SCALE_ALIGNMENT == 0)
    groups_align = scales.dim() == 2 or scales.size(0) == 1 or (scales.stride(0) > 0 and scales.stride(0) % _SCALE_ALIGNMENT == 0)
    return rows_follow and columns_align and groups_align


def _group_stride(scales: torch.Tensor) -> int:
    return scales.stride(0) if scales.dim() == 3 else 0


def _empty_m_major(scales: torch.Tensor) -> torch.Tensor:
    *groups, m, k_blocks = scales.shape
    column = checks.round_up(max(m, 1), _SCALE_ALIGNMENT)
    strides = (*(column * k_blocks for _ in groups), 1, column)
    return torch.empty_strided(scales.shape, strides, dtype=torch.float32, device=scales.device)


def _empty_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m, k = x.shape
    values = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    column = checks.round_up(max(m, 1), _SCALE_ALIGNMENT)
    shape = (m, checks.ceil_div(k, checks.SCALE_BLOCK))
    return values, torch.empty_strided(shape, (1, column), dtype=torch.float32, device=x.device)


def _cast(x: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_cast("per_token_cast_to_fp8", x)
    values, scales = _empty_cast(x)
    m, k = x.shape
    if m == 0:
        return values, scales
    device = x.device.index
    with default_service().call(device, torch._C._cuda_getCurrentRawStream(device)) as call:
        kernel = call.kernel(select(CastProblem(checks.dtype_name(x.dtype)), call.limits))
        cast = CastCall(
            input=x.data_ptr(),
            output=values.data_ptr(),
            scales=scales.data_ptr(),
            input_stride=x.stride(0),
            scales_stride=column_stride(scales),
            m=m,
            k=k,
            power_of_two=use_ue8m0,
            input_element_bytes=x.element_size(),
        )
        launch = prepare_cast(cast)
        kernel.launch(launch.grid, launch.block, call.stream, launch.params_pointer)
    return values, scales


def _cast_fake(x: torch.Tensor, _use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_cast("per_token_cast_to_fp8", x, fake=True)
    return _empty_cast(x)


def _lay_out(scales: torch.Tensor) -> torch.Tensor:
    checks.check_scales("get_mn_major_tma_aligned_tensor", scales)
    device = scales.device.index
    with default_service().call(device, torch._C._cuda_getCurrentRawStream(device)) as call:
        return with_m_major_scales(call, scales)


def _lay_out_fake(scales: torch.Tensor) -> torch.Tensor:
    checks.check_scales("get_mn_major_tma_aligned_tensor", scales, fake=True)
    return _empty_m_major(scales)


define("per_token_cast_to_fp8(Tensor x, bool use_ue8m0) -> (Tensor, Tensor)", _cast, _cast_fake)
define("get_mn_major_tma_aligned_tensor(Tensor scales) -> Tensor", _lay_out, _lay_out_fake)

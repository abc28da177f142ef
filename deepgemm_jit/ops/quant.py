"""The per-token cast to FP8, and the layouts of FP8 operands."""

from __future__ import annotations

import torch

from deepgemm_jit.ops import checks
from deepgemm_jit.ops.launching import call_on, column_stride, empty_m_major, group_stride, lies_m_major, run
from deepgemm_jit.ops.library import define
from deepgemm_jit.runtime import Matrices
from deepgemm_jit.runtime.steps import (
    CastCall,
    ScaleLayoutCall,
    TransposeCall,
    prepare_cast,
    prepare_scale_layout,
    prepare_transpose,
)
from deepgemm_jit.service import Call
from deepgemm_jit.spec import CAST_TO_FP8, SCALE_LAYOUT, TRANSPOSE, StepProblem, select


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
    values, scales = torch.ops.deepgemm_jit.per_token_cast_to_fp8(x, bool(use_ue8m0))
    return values, scales


def get_mn_major_tma_aligned_tensor(scales: torch.Tensor) -> torch.Tensor:
    """Return A scales in the layout that the GEMMs read: M-major, columns padded to 16 bytes.

    Args:
        scales: (M, K blocks) or (G, M, K blocks) float32 with any strides. Scales that lie so already are returned as they are.

    Raises:
        OperandError, UnsupportedError, KernelNotBuiltError: as :func:`per_token_cast_to_fp8`.
    """
    # torch.compile traces this line, where tensors have no address: a GEMM lays out what starts at an odd one.
    if isinstance(scales, torch.Tensor) and scales.dim() in (2, 3) and lies_m_major(scales):
        checks.check_scales("get_mn_major_tma_aligned_tensor", scales, fake=scales.is_meta)
        return scales
    turned: torch.Tensor = torch.ops.deepgemm_jit.get_mn_major_tma_aligned_tensor(scales)
    return turned


def as_m_major(call: Call, scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales`` as the copy engine can read them: as they lie, or laid out anew on the stream of ``call``."""
    if lies_m_major(scales) and scales.data_ptr() % 16 == 0:
        return scales
    return _laid_out(call, scales)


def transposed_bytes(call: Call, b: torch.Tensor) -> torch.Tensor:
    """Return (..., K, N) one-byte values as (..., N, K), through the ``transpose`` kernel: reads and writes each byte once."""
    *groups, k, n = b.shape
    turned = torch.empty((*groups, n, k), dtype=b.dtype, device=b.device)
    spec = select(StepProblem(TRANSPOSE, ("u8",)), call.limits)
    source = Matrices(b.data_ptr(), group_stride(b), b.stride(-2))
    transpose = TransposeCall(source, turned.data_ptr(), rows=k, columns=n, groups=b.shape[0] if groups else 1)
    run(call, spec, prepare_transpose(spec, transpose))
    return turned


def _laid_out(call: Call, scales: torch.Tensor) -> torch.Tensor:
    turned = empty_m_major(tuple(scales.shape), scales.device)
    if scales.numel() == 0:
        return turned
    if scales.size(-1) > 1 and scales.stride(-1) != 1:
        scales = scales.contiguous()  # neither layout: rare enough for a copy
    spec = select(StepProblem(SCALE_LAYOUT, ("f32",)), call.limits)
    m, k_blocks = scales.shape[-2:]
    layout = ScaleLayoutCall(
        input=Matrices(scales.data_ptr(), group_stride(scales), scales.stride(-2)),
        output=Matrices(turned.data_ptr(), group_stride(turned), column_stride(turned)),
        m=m,
        k_blocks=k_blocks,
        groups=scales.shape[0] if scales.dim() == 3 else 1,
    )
    run(call, spec, prepare_scale_layout(spec, layout))
    return turned


def _empty_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m, k = x.shape
    values = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    return values, empty_m_major((m, checks.ceil_div(k, checks.SCALE_BLOCK)), x.device)


def _cast(x: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_cast("per_token_cast_to_fp8", x)
    values, scales = _empty_cast(x)
    m, k = x.shape
    if m == 0:
        return values, scales
    with call_on(x) as call:
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
        run(call, select(StepProblem(CAST_TO_FP8, (checks.dtype_name(x.dtype), "e4m3")), call.limits), prepare_cast(cast))
    return values, scales


def _cast_fake(x: torch.Tensor, _use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    checks.check_cast("per_token_cast_to_fp8", x, fake=True)
    return _empty_cast(x)


def _lay_out(scales: torch.Tensor) -> torch.Tensor:
    checks.check_scales("get_mn_major_tma_aligned_tensor", scales)
    with call_on(scales) as call:
        return _laid_out(call, scales)


def _lay_out_fake(scales: torch.Tensor) -> torch.Tensor:
    checks.check_scales("get_mn_major_tma_aligned_tensor", scales, fake=True)
    return empty_m_major(tuple(scales.shape), scales.device)


define("per_token_cast_to_fp8(Tensor x, bool use_ue8m0) -> (Tensor, Tensor)", _cast, _cast_fake)
define("get_mn_major_tma_aligned_tensor(Tensor scales) -> Tensor", _lay_out, _lay_out_fake)

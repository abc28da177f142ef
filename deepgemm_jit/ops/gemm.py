"""FP8 GEMMs ``D = A @ B.T``, dense and grouped, under DeepGEMM's names."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch

from deepgemm_jit.errors import OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.library import define
from deepgemm_jit.ops.quant import column_stride, try_as_m_major, with_m_major_scales
from deepgemm_jit.runtime import GemmCall, Matrices, prepare_gemm
from deepgemm_jit.service import default_service
from deepgemm_jit.spec import GemmProblem, Layout, select

Scaled: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A tensor and its scales: dequantized value = stored value x scale."""

ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the multiple of rows at which groups start in the contiguous layouts, unless a call says otherwise."""
    return ALIGNMENT


def fp8_gemm_nt(a: Scaled, b: Scaled, out: torch.Tensor) -> None:
    """Write ``A @ B.T`` to ``out``.

    Args:
        a: (M, K) float8_e4m3fn, and (M, ceil(K / 128)) float32 scales, one per row and 128 columns, row-major or M-major.
        b: (N, K) float8_e4m3fn, and (ceil(N / 128), ceil(K / 128)) float32 scales, one per block of 128 x 128.
        out: (M, N) bfloat16. N is a multiple of 8, K one of 16, rows start at multiples of 16 bytes. M = 0 launches nothing.

    Raises:
        OperandError: what is wrong with the operands, all at once.
        ContextMismatchError: operands on different devices, or a stream of a foreign context.
        UnsupportedError: the GPU has no kernels.
        KernelNotBuiltError: the compile policy is "never" and the kernel is not built.
    """
    (a_data, a_scale), (b_data, b_scale) = _pair("fp8_gemm_nt", "a", a), _pair("fp8_gemm_nt", "b", b)
    torch.ops.deepgemm_jit.fp8_gemm_nt(a_data, a_scale, b_data, b_scale, out)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    use_psum_layout: bool = False,
    alignment: int = ALIGNMENT,
) -> None:
    """Write ``A[rows of g] @ B[g].T`` to the same rows of ``out`` for every group g.

    Groups start at multiples of ``alignment`` rows. Rows that belong to no group may hold anything, also NaN, and never change
    another row; inside a group's last tile they may hold anything afterwards, elsewhere they keep what they held.

    Args:
        a: (M, K) float8_e4m3fn and (M, ceil(K / 128)) float32 scales, row-major or M-major.
        b: (G, N, K) float8_e4m3fn and (G, ceil(N / 128), ceil(K / 128)) float32 scales.
        out: (M, N) bfloat16.
        m_indices: (M,) int32, the group of each row, negative for rows of none; with ``use_psum_layout`` (G,) int32, the end row
            of each group, which starts at the first multiple of ``alignment`` after the end before.
        use_psum_layout: read ``m_indices`` as end rows.
        alignment: 64, 128 or a multiple.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_contiguous"
    (a_data, a_scale), (b_data, b_scale) = _pair(name, "a", a), _pair(name, "b", b)
    torch.ops.deepgemm_jit.m_grouped_fp8_gemm_nt_contiguous(
        a_data, a_scale, b_data, b_scale, out, m_indices, use_psum_layout, alignment
    )


def m_grouped_fp8_gemm_nt_masked(a: Scaled, b: Scaled, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
    """Write ``A[g, :masked_m[g]] @ B[g].T`` to ``out[g, :masked_m[g]]`` for every group g.

    Other rows of ``out`` keep what they held, and what other rows of ``a`` hold never matters.

    Args:
        a: (G, M, K) float8_e4m3fn and (G, M, ceil(K / 128)) float32 scales, row-major or M-major per group.
        b: (G, N, K) float8_e4m3fn and (G, ceil(N / 128), ceil(K / 128)) float32 scales.
        out: (G, M, N) bfloat16.
        masked_m: (G,) int32 on the device, rows used of each group, 0 to M.
        expected_m: rows to expect in a group; a hint for the choice of kernel, never a bound.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_masked"
    (a_data, a_scale), (b_data, b_scale) = _pair(name, "a", a), _pair(name, "b", b)
    torch.ops.deepgemm_jit.m_grouped_fp8_gemm_nt_masked(a_data, a_scale, b_data, b_scale, out, masked_m, expected_m)


def _pair(operation: str, name: str, value: object) -> Scaled:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise OperandError(operation=operation, faults=[f"{name} must be a pair (tensor, scales), not {type(value).__name__}"])
    return value[0], value[1]


def _dense(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out: torch.Tensor, *, fake: bool = False
) -> None:
    checks.check_gemm("fp8_gemm_nt", a, a_scale, b, b_scale, out, fake=fake)
    if not fake:
        _run(a, a_scale, b, b_scale, out, None, Layout.DENSE, a.shape[0], ALIGNMENT)


def _contiguous(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    use_psum_layout: bool,
    alignment: int,
    *,
    fake: bool = False,
) -> None:
    groups = checks.GroupData("m_indices", m_indices, per_row=not use_psum_layout)
    name = "m_grouped_fp8_gemm_nt_contiguous"
    checks.check_gemm(name, a, a_scale, b, b_scale, out, groups, alignment=alignment, fake=fake)
    if not fake:
        layout = Layout.PREFIX_SUMS if use_psum_layout else Layout.CONTIGUOUS
        _run(a, a_scale, b, b_scale, out, m_indices, layout, a.shape[0], alignment)


def _masked(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    fake: bool = False,
) -> None:
    groups = checks.GroupData("masked_m", masked_m, per_row=False)
    checks.check_gemm("m_grouped_fp8_gemm_nt_masked", a, a_scale, b, b_scale, out, groups, masked=True, fake=fake)
    if not fake:
        _run(a, a_scale, b, b_scale, out, masked_m, Layout.MASKED, min(max(expected_m, 1), max(a.shape[1], 1)), ALIGNMENT)


def _run(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    group_data: torch.Tensor | None,
    layout: Layout,
    selection_m: int,
    alignment: int,
) -> None:
    m, k = a.shape[-2], a.shape[-1]
    n = b.shape[-2]
    groups = 1 if layout is Layout.DENSE else b.shape[0]
    if m == 0 or groups == 0:
        return  # nothing to write: no launch, no compile
    problem = GemmProblem(selection_m, n, k, groups, layout, alignment)
    service = default_service()
    device = a.device.index
    with service.call(device, torch._C._cuda_getCurrentRawStream(device)) as call:
        spec = select(problem, call.limits)
        kernel = call.kernel(spec)
        scales = try_as_m_major(a_scale)
        if scales is None:
            scales = with_m_major_scales(call, a_scale)
        gemm = GemmCall(
            a=_matrices(a),
            a_scales=Matrices(scales.data_ptr(), scales.stride(0) if scales.dim() == 3 else 0, column_stride(scales)),
            b=_matrices(b),
            b_scales=_matrices(b_scale),
            d=_matrices(out),
            group_data=0 if group_data is None else group_data.data_ptr(),
            m=m,
            n=n,
            k=k,
            groups=groups,
            layout=layout,
            alignment=alignment,
        )
        launch = prepare_gemm(spec, call.limits.sms, service.maps, gemm)
        kernel.launch(launch.grid, launch.block, call.stream, launch.params_pointer)


def _matrices(tensor: torch.Tensor) -> Matrices:
    strides = tensor.stride()
    # One row has no row stride: torch reports anything there, and a map wants a multiple of 16 bytes.
    row_stride = strides[-2] if tensor.size(-2) > 1 else checks.round_up(tensor.size(-1), 16)
    return Matrices(tensor.data_ptr(), strides[0] if len(strides) == 3 else 0, row_stride)


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(d!) out"

define(f"fp8_gemm_nt({_OPERANDS}) -> ()", _dense, partial(_dense, fake=True))
define(
    f"m_grouped_fp8_gemm_nt_contiguous({_OPERANDS}, Tensor m_indices, bool use_psum_layout, int alignment) -> ()",
    _contiguous,
    partial(_contiguous, fake=True),
)
define(
    f"m_grouped_fp8_gemm_nt_masked({_OPERANDS}, Tensor masked_m, int expected_m) -> ()",
    _masked,
    partial(_masked, fake=True),
)

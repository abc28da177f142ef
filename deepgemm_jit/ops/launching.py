"""From tensors to launches: what the operations share once their operands are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from deepgemm_jit.errors import DriverError, OperandError
from deepgemm_jit.ops.checks import round_up
from deepgemm_jit.runtime import GemmCall, Launch, LoadedKernel, Matrices, prepare_gemm
from deepgemm_jit.service import Call, default_service
from deepgemm_jit.spec import GemmProblem, KernelSpec, Layout, Overlap, selected
from deepgemm_jit.spec.kernel_set import blocks_per_sm

_SCALE_ALIGNMENT = 4
"""Floats to which the columns of M-major scales are padded: 16 bytes, as tensor maps need."""


def call_on(tensor: torch.Tensor) -> Call:
    """Return the context that a call on a tensor's device and torch's current stream there means, to be entered with ``with``."""
    device = tensor.device.index
    return default_service().call(device, torch._C._cuda_getCurrentRawStream(device))


def set_num_sms(num_sms: int | None) -> None:
    """Let GEMMs take at most this many SMs of a GPU, from the next call on; None lifts the limit.

    Raises:
        OperandError: no positive whole number.
    """
    default_service().limit_sms(num_sms)


def get_num_sms() -> int:
    """Return the SMs that a GEMM on the current device and stream may take.

    Raises:
        DriverError: no GPU that torch can use.
    """
    try:
        device = torch.cuda.current_device()
    except (AssertionError, RuntimeError) as cause:  # the first is torch's word for a build without CUDA
        raise DriverError(call="torch.cuda.current_device", result="no device", detail=str(cause)) from cause
    with default_service().call(device, torch._C._cuda_getCurrentRawStream(device)) as call:
        return call.limits.sms


def set_pdl(enabled: bool, *, constant_weights: bool = False) -> None:
    """Let GEMMs start while the kernels before them in the stream end (programmatic dependent launch), from the next call on.

    A GEMM waits for the kernels before it before it reads or writes anything, except B under ``constant_weights``. Off by
    default; a kernel of someone else's that asks for it itself may start while our GEMMs end in either case. Selection knows the
    setting: with few rows, or few columns, it may choose another kernel or another split of K, with which last bits may differ.

    Args:
        enabled: whether they may.
        constant_weights: B of dense GEMMs is never written by work that is still in the stream, as is so for the weights of a
            model that serves: FP8 GEMMs of few rows then read it before they wait. Wrong results where that does not hold.

    Raises:
        OperandError: something other than True and False.
    """
    faults = [
        f"{name} must be True or False, not {given!r}"
        for name, given in (("enabled", enabled), ("constant_weights", constant_weights))
        if not isinstance(given, bool)
    ]
    if faults:
        raise OperandError(operation="set_pdl", faults=faults)
    default_service().overlap_launches(enabled, constant_weights)


def get_pdl() -> bool:
    """Return what :func:`set_pdl` was last given."""
    return default_service().overlaps


def blocks_for(call: Call, spec: KernelSpec) -> int:
    """Return how many persistent blocks of a GEMM kernel a call may launch."""
    return call.limits.blocks(blocks_per_sm(spec))


def run(call: Call, spec: KernelSpec, launch: Launch) -> None:
    """Launch a kernel on the stream of a call, built and loaded first if need be."""
    call.launch(spec, launch)


class Chosen(NamedTuple):
    """A kernel in the context of a call, and how it is launched."""

    kernel: LoadedKernel
    split_k: int = 1


def kernel_for(call: Call, problem: GemmProblem, *, own_b: bool = False) -> Chosen:
    """Return the kernel that selection finds for ``problem``, built and loaded first if need be.

    ``own_b``: as in :func:`run_gemm`.
    """
    limits = call.limits
    if own_b and limits.overlap is Overlap.WEIGHTS:
        limits = replace(limits, overlap=Overlap.START)
    spec, split_k = selected(problem, limits)
    return Chosen(call.kernel(spec), split_k)


def run_gemm(
    call: Call,
    chosen: Chosen,
    problem: GemmProblem,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    group_data: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    own_b: bool = False,
) -> tuple[GemmCall, Callable[[GemmCall], Launch]]:
    """Run a GEMM kernel on ``problem``. A scales are M-major, and so are B scales of one per row.

    ``own_b``: B is a copy that was made just before, so that no promise about the caller's B holds for it.

    Returns:
        What the kernel was given, and the function that prepares a launch on other addresses.
    """
    row_scales = bool(problem.variant) and scales is not None
    gemm = GemmCall(
        a=matrices(a),
        b=matrices(b),
        d=matrices(out),
        group_data=0 if group_data is None else group_data.data_ptr(),
        m=a.shape[-2],
        n=problem.n,
        k=problem.k,
        groups=problem.groups,
        layout=problem.layout,
        alignment=problem.alignment,
        a_scales=None if scales is None else m_major_matrices(scales[0]),
        b_scales=None if scales is None else m_major_matrices(scales[1]) if row_scales else matrices(scales[1]),
    )
    spec, overlap = chosen.kernel.spec, call.limits.overlap
    prepare = partial(
        prepare_gemm, spec, blocks_for(call, spec), default_service().maps,
        split_k=chosen.split_k,
        dependent=overlap is not Overlap.NONE,
        waits_for_tokens=overlap is Overlap.WEIGHTS and problem.layout is Layout.DENSE and not own_b,
    )  # fmt: skip
    call.launch(spec, prepare(gemm))
    return gemm, prepare


def column_stride(scales: torch.Tensor) -> int:
    """Return the floats between the columns of M-major scales; of a single column, a number that a tensor map takes."""
    return scales.stride(-1) if scales.size(-1) > 1 else padded_rows(scales.size(-2))


def group_stride(tensor: torch.Tensor) -> int:
    """Return the elements between the matrices of a stack; 0 for a single matrix."""
    return tensor.stride(0) if tensor.dim() == 3 else 0


def lies_m_major(scales: torch.Tensor) -> bool:
    """Return whether the copy engine can read scales by their strides; those of dimensions of size 1 mean nothing."""
    rows_follow = scales.size(-2) == 1 or scales.stride(-2) == 1
    columns_align = scales.size(-1) == 1 or (scales.stride(-1) >= scales.size(-2) and scales.stride(-1) % _SCALE_ALIGNMENT == 0)
    groups_align = scales.dim() == 2 or scales.size(0) == 1 or (scales.stride(0) > 0 and scales.stride(0) % _SCALE_ALIGNMENT == 0)
    return rows_follow and columns_align and groups_align


def empty_m_major(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return unwritten float32 scales of (..., M, columns), M-major with columns padded to 16 bytes."""
    *groups, m, columns = shape
    column = padded_rows(max(m, 1))
    strides = (*(column * columns for _ in groups), 1, column)
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=device)


def padded_rows(rows: int) -> int:
    """Return the floats that a column of M-major scales takes."""
    return round_up(rows, _SCALE_ALIGNMENT)


def m_major_matrices(scales: torch.Tensor) -> Matrices:
    """Return what a launch is told of M-major scales."""
    return Matrices(scales.data_ptr(), group_stride(scales), column_stride(scales))


def matrices(tensor: torch.Tensor) -> Matrices:
    """Return what a launch is told of a matrix or a stack of them."""
    # One row has no row stride: torch reports anything there, and a map wants a multiple of 16 bytes.
    row_stride = tensor.stride(-2) if tensor.size(-2) > 1 else round_up(tensor.size(-1), 16)
    return Matrices(tensor.data_ptr(), group_stride(tensor), row_stride)

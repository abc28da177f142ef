"""GEMMs ``D = A @ B.T`` (nt) and ``D = A @ B`` (nn), dense and grouped, FP8 and BF16, under DeepGEMM's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from deepgemm_jit.errors import OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.launching import call_on, kernel_for, run_gemm
from deepgemm_jit.ops.library import define
from deepgemm_jit.ops.prepared import Operands, are_plain, is_watched, remember, try_again
from deepgemm_jit.ops.quant import as_m_major, transposed_bytes
from deepgemm_jit.spec import N_MAJOR, GemmProblem, Layout

Scaled: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A tensor and its scales: dequantized value = stored value x scale."""

ALIGNMENT = 128
NARROW_ALIGNMENTS = (16, 32, 64)
"""For groups of few rows, so that a tile is not mostly padding; below 64 for FP8 with a scale per block only."""
_FP8 = ("e4m3", "e4m3", "bf16")
_BF16 = ("bf16", "bf16", "bf16")


def get_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """Return the multiple of rows at which groups start in the contiguous layouts, unless a call says otherwise.

    Args:
        expected_m: rows to expect in a group of an FP8 call; with it, the alignment that pads such a group least while its tile
            still holds it, which is then to be given to the calls.

    Raises:
        OperandError: no whole number.
    """
    if expected_m is None:
        return ALIGNMENT
    rows = checks.whole_number("get_mk_alignment_for_contiguous_layout", "expected_m", expected_m)
    return next((alignment for alignment in NARROW_ALIGNMENTS if rows <= alignment), ALIGNMENT)


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
    _call("fp8_gemm_nt", _fp8, "fp8_gemm", (*_taken_apart("fp8_gemm_nt", a, b), out), False)


def fp8_gemm_nn(a: Scaled, b: Scaled, out: torch.Tensor) -> None:
    """Write ``A @ B`` to ``out``.

    Hopper multiplies FP8 K-major only: every call first transposes B, which reads and writes it once.

    Args:
        a: as in :func:`fp8_gemm_nt`.
        b: (K, N) float8_e4m3fn, and (ceil(K / 128), ceil(N / 128)) float32 scales. For weights, transpose once instead.
        out: (M, N) bfloat16.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    _call("fp8_gemm_nn", _fp8, "fp8_gemm", (*_taken_apart("fp8_gemm_nn", a, b), out), True)


def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``A @ B.T`` to ``out``: (M, K), (N, K) and (M, N) bfloat16, float32 accumulation, K and N multiples of 8.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    _call("bf16_gemm_nt", _bf16, "bf16_gemm", (a, b, out), False)


def bf16_gemm_nn(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``A @ B`` to ``out``: (M, K), (K, N) and (M, N) bfloat16; as :func:`bf16_gemm_nt`, the tensor core transposes B."""
    _call("bf16_gemm_nn", _bf16, "bf16_gemm", (a, b, out), True)


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
        alignment: a multiple of 16; see :func:`get_mk_alignment_for_contiguous_layout`.

    Every block reads ``m_indices`` as it goes: nothing else may write it until the call is done on the device.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_contiguous"
    operands = (*_taken_apart(name, a, b), out, m_indices)
    options = bool(use_psum_layout), checks.whole_number(name, "alignment", alignment), False
    _call(name, _fp8_contiguous, "m_grouped_fp8_gemm_contiguous", operands, *options)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Scaled,
    b: Scaled,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    use_psum_layout: bool = False,
    alignment: int = ALIGNMENT,
) -> None:
    """Write ``A[rows of g] @ B[g]`` for every group g; each call first transposes all of B, see :func:`fp8_gemm_nn`.

    B is (G, K, N) float8_e4m3fn with (G, ceil(K / 128), ceil(N / 128)) float32 scales; all else is as in
    :func:`m_grouped_fp8_gemm_nt_contiguous`.
    """
    name = "m_grouped_fp8_gemm_nn_contiguous"
    operands = (*_taken_apart(name, a, b), out, m_indices)
    options = bool(use_psum_layout), checks.whole_number(name, "alignment", alignment), True
    _call(name, _fp8_contiguous, "m_grouped_fp8_gemm_contiguous", operands, *options)


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    use_psum_layout: bool = False,
    alignment: int = ALIGNMENT,
) -> None:
    """Write ``A[rows of g] @ B[g].T`` for every group g: (M, K), (G, N, K) and (M, N) bfloat16, K and N multiples of 8.

    The rows are those of :func:`m_grouped_fp8_gemm_nt_contiguous`, and so are ``m_indices``, the options and the errors.
    """
    name = "m_grouped_bf16_gemm_nt_contiguous"
    options = bool(use_psum_layout), checks.whole_number(name, "alignment", alignment), False
    _call(name, _bf16_contiguous, "m_grouped_bf16_gemm_contiguous", (a, b, out, m_indices), *options)


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    use_psum_layout: bool = False,
    alignment: int = ALIGNMENT,
) -> None:
    """Write ``A[rows of g] @ B[g]`` for every group g: (M, K), (G, K, N) and (M, N) bfloat16, K and N multiples of 8."""
    name = "m_grouped_bf16_gemm_nn_contiguous"
    options = bool(use_psum_layout), checks.whole_number(name, "alignment", alignment), True
    _call(name, _bf16_contiguous, "m_grouped_bf16_gemm_contiguous", (a, b, out, m_indices), *options)


def m_grouped_fp8_gemm_nt_masked(a: Scaled, b: Scaled, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
    """Write ``A[g, :masked_m[g]] @ B[g].T`` to ``out[g, :masked_m[g]]`` for every group g.

    Other rows of ``out`` keep what they held, and what other rows of ``a`` hold never matters.

    Args:
        a: (G, M, K) float8_e4m3fn and (G, M, ceil(K / 128)) float32 scales, row-major or M-major per group.
        b: (G, N, K) float8_e4m3fn and (G, ceil(N / 128), ceil(K / 128)) float32 scales.
        out: (G, M, N) bfloat16.
        masked_m: (G,) int32 on the device, rows used of each group, 0 to M. Every block reads it as it starts: nothing else may
            write it until the call is done on the device.
        expected_m: rows to expect in a group; a hint for the choice of kernel, never a bound.

    Raises:
        OperandError, ContextMismatchError, UnsupportedError, KernelNotBuiltError: as :func:`fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_masked"
    expected_m = checks.whole_number(name, "expected_m", expected_m)
    operands = (*_taken_apart(name, a, b), out, masked_m)
    _call(name, _fp8_masked, "m_grouped_fp8_gemm_masked", operands, expected_m)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """Write ``A[g, :masked_m[g]] @ B[g].T`` for every group g: (G, M, K), (G, N, K) and (G, M, N) bfloat16.

    ``masked_m``, ``expected_m`` and the errors are those of :func:`m_grouped_fp8_gemm_nt_masked`.
    """
    name = "m_grouped_bf16_gemm_nt_masked"
    expected_m = checks.whole_number(name, "expected_m", expected_m)
    _call(name, _bf16_masked, "m_grouped_bf16_gemm_masked", (a, b, out, masked_m), expected_m)


_MATRICES = ("a", "b", "out")
_SCALED_MATRICES = ("a", "a_scale", "b", "b_scale", "out")


def _taken_apart(operation: str, a: Scaled, b: Scaled) -> Operands:
    """Return A and B of an FP8 operation, each followed by its scales."""
    if type(a) is type(b) is tuple and len(a) == len(b) == 2:
        return a + b
    faults = []
    given: tuple[tuple[str, object], ...] = (("a", a), ("b", b))
    for name, pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            faults.append(f"{name} must be a pair (tensor, scales), not {type(pair).__name__}")
    if faults:
        raise OperandError(operation=operation, faults=faults)
    return a[0], a[1], b[0], b[1]


def _call(operation: str, run: Callable[..., None], operator: str, operands: Operands, *options: object) -> None:
    """Run an operator: through torch's dispatcher only where somebody traces or watches."""
    if not is_watched():
        if try_again((operation, *options), operands):
            return
        if are_plain(operands):
            run(*operands, *options)
            return
    names = _SCALED_MATRICES if len(operands) > len(_MATRICES) + 1 else _MATRICES
    group_data = "masked_m" if operation.endswith("masked") else "m_indices"
    checks.require_tensors(operation, **dict(zip((*names, group_data), operands, strict=False)))
    getattr(torch.ops.deepgemm_jit, operator)(*operands, *options)


def _gemm(
    options: tuple[str, *tuple[object, ...]],
    operands: Operands,
    *,
    layout: Layout = Layout.DENSE,
    expected_m: int | None = None,
    n_major: bool = False,
    alignment: int = ALIGNMENT,
    fake: bool = False,
) -> None:
    """Check and run any of the operations above; ``options`` are its name and all that it is told beside its operands."""
    if not fake and try_again(options, operands):
        return
    grouped, masked = layout is not Layout.DENSE, layout is Layout.MASKED
    matrices = operands[:-1] if grouped else operands
    scales = None if len(matrices) == len(_MATRICES) else (matrices[1], matrices[3])
    a, b, out = matrices if scales is None else matrices[::2]
    groups = None
    if grouped:
        groups = checks.GroupData("masked_m" if masked else "m_indices", operands[-1], per_row=layout is Layout.CONTIGUOUS)
    checks.check_gemm(options[0], a, b, out, scales, groups, masked=masked, n_major=n_major, alignment=alignment, fake=fake)
    m, n, k = a.shape[-2], out.shape[-1], a.shape[-1]
    count = b.shape[0] if grouped else 1
    if fake or m == 0 or count == 0:
        return  # nothing to write: no launch, no compile
    # Hints may say anything; what a group can hold bounds them.
    rows = m if expected_m is None else min(max(expected_m, 1), m)
    variant = (N_MAJOR,) if n_major and scales is None else ()
    problem = GemmProblem(rows, n, k, count, layout, alignment, _BF16 if scales is None else _FP8, variant)
    with call_on(a) as call:
        copied = n_major and scales is not None
        chosen = kernel_for(call, problem, own_b=copied)  # first: if it cannot be had, nothing is launched
        given = scales
        if scales is not None:
            a_scale, b_scale = scales
            if n_major:
                b, b_scale = transposed_bytes(call, b), b_scale.transpose(-1, -2).contiguous()
            scales = as_m_major(call, a_scale), b_scale
        group_data = None if groups is None else groups.tensor
        gemm, prepare = run_gemm(call, chosen, problem, a, b, out, group_data, scales, own_b=copied)
        if given is None or (scales is not None and scales[0] is given[0] and scales[1] is given[1]):
            remember(call, options, operands, chosen.kernel, gemm, prepare)


def _fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    n_major: bool,
    *,
    fake: bool = False,
) -> None:
    options = "fp8_gemm_nn" if n_major else "fp8_gemm_nt", n_major
    _gemm(options, (a, a_scale, b, b_scale, out), n_major=n_major, fake=fake)


def _bf16(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n_major: bool, *, fake: bool = False) -> None:
    options = "bf16_gemm_nn" if n_major else "bf16_gemm_nt", n_major
    _gemm(options, (a, b, out), n_major=n_major, fake=fake)


def _contiguous(dtype: str, operands: Operands, use_psum_layout: bool, alignment: int, n_major: bool, fake: bool) -> None:
    operation = f"m_grouped_{dtype}_gemm_{'nn' if n_major else 'nt'}_contiguous"
    layout = Layout.PREFIX_SUMS if use_psum_layout else Layout.CONTIGUOUS
    options = operation, use_psum_layout, alignment, n_major
    _gemm(options, operands, layout=layout, n_major=n_major, alignment=alignment, fake=fake)


def _fp8_contiguous(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    use_psum_layout: bool,
    alignment: int,
    n_major: bool,
    *,
    fake: bool = False,
) -> None:
    _contiguous("fp8", (a, a_scale, b, b_scale, out, m_indices), use_psum_layout, alignment, n_major, fake)


def _bf16_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    use_psum_layout: bool,
    alignment: int,
    n_major: bool,
    *,
    fake: bool = False,
) -> None:
    _contiguous("bf16", (a, b, out, m_indices), use_psum_layout, alignment, n_major, fake)


def _fp8_masked(
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
    options = "m_grouped_fp8_gemm_nt_masked", expected_m
    operands = (a, a_scale, b, b_scale, out, masked_m)
    _gemm(options, operands, layout=Layout.MASKED, expected_m=expected_m, fake=fake)


def _bf16_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    fake: bool = False,
) -> None:
    options = "m_grouped_bf16_gemm_nt_masked", expected_m
    _gemm(options, (a, b, out, masked_m), layout=Layout.MASKED, expected_m=expected_m, fake=fake)


_FP8_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(d!) out"
_BF16_OPERANDS = "Tensor a, Tensor b, Tensor(d!) out"
_CONTIGUOUS = "Tensor m_indices, bool use_psum_layout, int alignment, bool n_major"
_MASKED = "Tensor masked_m, int expected_m"

for _schema, _run in (
    (f"fp8_gemm({_FP8_OPERANDS}, bool n_major) -> ()", _fp8),
    (f"bf16_gemm({_BF16_OPERANDS}, bool n_major) -> ()", _bf16),
    (f"m_grouped_fp8_gemm_contiguous({_FP8_OPERANDS}, {_CONTIGUOUS}) -> ()", _fp8_contiguous),
    (f"m_grouped_bf16_gemm_contiguous({_BF16_OPERANDS}, {_CONTIGUOUS}) -> ()", _bf16_contiguous),
    (f"m_grouped_fp8_gemm_masked({_FP8_OPERANDS}, {_MASKED}) -> ()", _fp8_masked),
    (f"m_grouped_bf16_gemm_masked({_BF16_OPERANDS}, {_MASKED}) -> ()", _bf16_masked),
):
    define(_schema, _run, partial(_run, fake=True))

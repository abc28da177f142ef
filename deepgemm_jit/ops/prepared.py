"""Calls like one that was made before: nothing is checked, selected or encoded again, and torch's dispatcher is not asked.

A call is like another when the operation, its options and the metadata of all tensors are the same, in the same context. What
was checked and selected then holds for any addresses; what depends on those is looked at once for each set of them. Nothing here
holds a tensor: memory that is freed and used again under another shape is another call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack

from deepgemm_jit.errors import UnloadedKernelError
from deepgemm_jit.runtime import GemmCall, KeptLaunch, Launch, LoadedKernel, Matrices, keep
from deepgemm_jit.service import Call, default_service
from deepgemm_jit.spec import KernelSpec

Key = tuple[object, ...]
"""Of a call: the name of its operation and its options; and what its operands are."""
Operands = tuple[torch.Tensor, ...]
"""A, B and D, after A and B their scales where they have any, and the group data where there are groups."""

_CAPACITY = 4096
"""What is kept for a context: the shapes of a model times numbers of rows, and each with its addresses. Some 2 KB each, for an
experts forward up to 32."""
_COPY_ALIGNMENT_BYTES = 16

_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGemm:
    """All of a GEMM call but its addresses and its stream.

    Attributes:
        kernel: loaded in the context of the call.
        prepare: prepares its launch.
        gemm: sizes and strides; the addresses in it are those of the call that was prepared and mean nothing.
        out_bytes: from the first to behind the last byte of D.
        group_bytes: of the group data.
    """

    kernel: LoadedKernel
    prepare: Callable[[GemmCall], Launch]
    gemm: GemmCall
    out_bytes: int
    group_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLaunch:
    """A launch with its parameters laid out, tensor maps included, on one stream; ``kept`` and ``config`` own them."""

    kernel: LoadedKernel
    kept: KeptLaunch
    config: Any
    config_pointer: int
    params_pointer: int


def is_watched() -> bool:
    """Return whether something traces or watches, so that calls must go through torch's dispatcher."""
    if torch.compiler.is_compiling():  # first: the questions below are none that a trace could follow
        return True
    watched = _len_torch_dispatch_stack() or _len_torch_function_stack() or _get_tracing_state() is not None
    return bool(watched) or peek_interpreter_stack() is not None or _profiler_enabled()


def are_plain(operands: Operands) -> bool:
    """Return whether an operator may be run on these without torch's dispatcher, as long as nothing watches.

    Tensors that torch has yet to negate are not: its dispatcher does that.
    """
    return all(type(operand) in _PLAIN_TENSORS and not operand.is_neg() for operand in operands)


def _are_lazily_negated(operands: Operands) -> bool:
    """Return whether scales are: FP8, bfloat16 as torch multiplies it, and integers never are."""
    return len(operands) > 4 and (operands[1].is_neg() or operands[3].is_neg())


def try_again(options: Key, operands: Operands) -> bool:
    """Launch a call like one that was made before; return whether it was one.

    Raises:
        ContextMismatchError: the current stream belongs to a foreign context.
        DriverError: the driver refused the launch.
    """
    differentiates = torch.is_grad_enabled()
    for operand in operands:
        if type(operand) not in _PLAIN_TENSORS or (differentiates and operand.requires_grad):
            return False  # the dispatcher takes it, or the checks have an error for it
    if not operands[0].is_cuda or _are_lazily_negated(operands):
        return False
    device = operands[0].get_device()
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    service = default_service()
    context, pushed = service.contexts.enter(device, stream)
    try:
        known = service.prepared(context)
        key = _key_at(options, stream, operands)
        prepared: PreparedLaunch | None = known.get(key)
        if prepared is None:
            gemm: PreparedGemm | None = known.get(_key_of(options, operands))
            prepared = None if gemm is None else _try_moved(gemm, stream, *[t.data_ptr() for t in operands])
            if prepared is None:
                return False
            keep_in(known, key, prepared)
        prepared.kernel.launch_entered(context, prepared.config_pointer, prepared.params_pointer)
    except UnloadedKernelError:
        return False
    finally:
        if pushed:
            service.contexts.leave(pushed)
    return True


def remember(
    call: Call,
    options: Key,
    operands: Operands,
    kernel: LoadedKernel,
    gemm: GemmCall,
    prepare: Callable[[GemmCall], Launch],
) -> None:
    """Keep a call that was checked and launched, so that :func:`try_again` finds it."""
    out, groups = operands[4 if gemm.a_scales else 2], operands[-1]
    span = sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True)) + 1
    group_bytes = groups.numel() * groups.element_size() if gemm.group_data else 0
    prepared = PreparedGemm(kernel, prepare, gemm, span * out.element_size(), group_bytes)
    keep_in(call.prepared, _key_of(options, operands), prepared)


def _key_of(options: Key, operands: Operands) -> Key:
    """Return all that the checks, the selection and the launch of a call depend on, beside addresses and context."""
    return options, *[(t.shape, t.stride(), t.dtype, t.get_device()) for t in operands]


def _key_at(options: Key, stream: int, operands: Operands) -> Key:
    """Return the same with the stream and the addresses: all that is encoded into maps, arguments and configuration.

    Flat and written out, because every launch makes and hashes one. Strides are asked for where the shape does not tell them.
    """
    group_data: Key = ()
    if len(operands) in (4, 6):
        g = operands[-1]
        group_data = g.data_ptr(), g.shape, g.is_contiguous() or g.stride(), g.dtype, g.get_device()
    if len(operands) < 5:
        a, b, d, *_ = operands
        scales: Key = ()
    else:
        a, p, b, q, d, *_ = operands
        scales = (
            p.data_ptr(), p.shape, p.is_contiguous() or p.stride(), p.dtype, p.get_device(),
            q.data_ptr(), q.shape, q.is_contiguous() or q.stride(), q.dtype, q.get_device(),
        )  # fmt: skip
    return (
        options, stream,
        a.data_ptr(), a.shape, a.is_contiguous() or a.stride(), a.dtype, a.get_device(),
        b.data_ptr(), b.shape, b.is_contiguous() or b.stride(), b.dtype, b.get_device(),
        d.data_ptr(), d.shape, d.is_contiguous() or d.stride(), d.dtype, d.get_device(),
        *scales, *group_data,
    )  # fmt: skip


def keep_in(known: dict[Any, Any], key: object, value: object, capacity: int | None = None) -> None:
    """Keep what a call left for the next one like it; ``capacity`` is that of a context unless given."""
    if len(known) >= (_CAPACITY if capacity is None else capacity):
        known.clear()  # rare, and what is used comes back at once
    known[key] = value


def prepared_on(call: Call, spec: KernelSpec, prepare: Callable[[], Launch]) -> PreparedLaunch:
    """Return a launch on the stream of a call, its kernel built and loaded first if need be."""
    kernel = call.kernel(spec)
    return _prepared(kernel, keep(prepare()), call.stream)


def _prepared(kernel: LoadedKernel, kept: KeptLaunch, stream: int) -> PreparedLaunch:
    config = kernel.config_for(kept.launch, stream)
    return PreparedLaunch(kernel, kept, config, config.getPtr(), kept.launch.params_pointer)


def _try_moved(prepared: PreparedGemm, stream: int, *addresses: int) -> PreparedLaunch | None:
    """Return the launch on operands at these addresses; None where the checks must look at them again."""
    gemm = prepared.gemm
    a_scale = b_scale = 0
    if gemm.a_scales is None:
        a, b, d, *groups = addresses
    else:
        a, a_scale, b, b_scale, d, *groups = addresses
    group_data = groups[0] if groups else 0
    needed = (a, b, d) if gemm.a_scales is None else (a, a_scale, b, b_scale, d)
    if not all(needed) or any(address % _COPY_ALIGNMENT_BYTES for address in (a, a_scale, b, d)):
        return None  # memory that is gone, or lies askew: the checks have an error for it
    if group_data < d + prepared.out_bytes and d < group_data + prepared.group_bytes:
        return None
    moved = gemm._replace(
        a=_moved(gemm.a, a),
        b=_moved(gemm.b, b),
        d=_moved(gemm.d, d),
        group_data=group_data,
        a_scales=gemm.a_scales and _moved(gemm.a_scales, a_scale),
        b_scales=gemm.b_scales and _moved(gemm.b_scales, b_scale),
    )
    return _prepared(prepared.kernel, keep(prepared.prepare(moved)), stream)


def _moved(matrices: Matrices, address: int) -> Matrices:
    return Matrices(address, matrices.group_stride, matrices.row_stride)

"""Launches of the kernels without tiles: casts, layouts, and the steps of the experts forward.

The ``struct`` formats mirror the argument structs of ``kernels_src``. Strides are in elements, addresses those of the device.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

from deepgemm_jit.runtime.launch import Matrices
from deepgemm_jit.runtime.params import Launch, lay_out
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.spec.kernel_set import threads

_PAIRS = "QQIII4x"
_CAST = struct.Struct("<QQQqqIII4x")
_SCALE_LAYOUT = struct.Struct("<QQqqqqII")
_TRANSPOSE = struct.Struct("<QQqqII")
_ROUTE = struct.Struct(f"<{_PAIRS}QQII")
_GATHER = struct.Struct(f"<QQQQ{_PAIRS}qqI4x")
_ACTIVATE = struct.Struct(f"<QQQQ{_PAIRS}qqIIIff4x")
_COMBINE = struct.Struct(f"<QQQ{_PAIRS}qII")

_WARP = 32
_WARPS = 8
_LANE_BYTES = 16
_ROUTED_BY_A_BLOCK = 2048
"""Pairs that one block routes sooner than a cluster has met."""
_ROUTE_CLUSTER = 8
_LEAST_ROUTE_WARPS = 4


class Gate(Enum):
    """What stands between the two GEMMs of an expert; the value is what the device code is given."""

    PASS = 0
    SILU = 1
    SILU_GATE = 2
    CLAMPED_GATE = 3
    ALPHA_GATE = 4


class Pairs(NamedTuple):
    """The (token, choice) pairs of a forward; see ``dj::Pairs``."""

    experts: int
    rows: int
    total: int
    top_k: int
    wide_experts: bool


class CastCall(NamedTuple):
    """Operands and sizes of one cast; see ``dj::CastArguments``."""

    input: int
    output: int
    scales: int
    input_stride: int
    scales_stride: int
    m: int
    k: int
    power_of_two: bool
    input_element_bytes: int


class ScaleLayoutCall(NamedTuple):
    """Operands and sizes of one change of scale layout; the ``row_stride`` of the output is the distance between its columns."""

    input: Matrices
    output: Matrices
    m: int
    k_blocks: int
    groups: int


class TransposeCall(NamedTuple):
    """Operands and sizes of one transpose of byte matrices; see ``dj::TransposeArguments``."""

    input: Matrices
    output: int
    rows: int
    columns: int
    groups: int


class RouteCall(NamedTuple):
    """Operands and sizes of one routing; ``pairs.rows`` is written."""

    pairs: Pairs
    ends: int
    experts: int
    alignment: int


class RowsCall(NamedTuple):
    """Operands and sizes of one gather or activation: each pair's row from ``input`` to ``output``."""

    input: int
    output: int
    scales: int
    static_scales: int
    pairs: Pairs
    input_stride: int
    scales_stride: int
    columns: int
    gate: Gate = Gate.PASS
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 0.0


class CombineCall(NamedTuple):
    """Operands and sizes of one combination; see ``dj::CombineArguments``."""

    input: int
    weights: int
    output: int
    pairs: Pairs
    input_stride: int
    columns: int
    bf16_weights: bool


def prepare_cast(call: CastCall) -> Launch:
    """Prepare a ``per_token_cast_to_fp8`` launch: a warp per row and 512 bytes of it."""
    params = lay_out(_CAST, call[:-1])
    columns = _WARP * _LANE_BYTES // call.input_element_bytes
    return Launch((-(-call.m // _WARPS), -(-call.k // columns), 1), (_WARP, _WARPS, 1), params)


def prepare_scale_layout(spec: KernelSpec, call: ScaleLayoutCall) -> Launch:
    """Prepare a ``scale_layout`` launch: a block per tile of scales."""
    rows, columns = spec.block
    source, target = call.input, call.output
    values = (source.address, target.address, source.group_stride, source.row_stride, target.group_stride, target.row_stride)
    params = lay_out(_SCALE_LAYOUT, (*values, call.m, call.k_blocks))
    return Launch((-(-call.m // rows), -(-call.k_blocks // columns), call.groups), (threads(spec), 1, 1), params)


def prepare_transpose(spec: KernelSpec, call: TransposeCall) -> Launch:
    """Prepare a ``transpose`` launch: a block per tile of bytes."""
    rows, columns = spec.block
    values = (call.input.address, call.output, call.input.group_stride, call.input.row_stride, call.rows, call.columns)
    grid = (-(-call.rows // rows), -(-call.columns // columns), call.groups)
    return Launch(grid, (threads(spec), 1, 1), lay_out(_TRANSPOSE, values))


def prepare_route(spec: KernelSpec, call: RouteCall, dependent: bool = False) -> Launch:
    """Prepare a ``route`` launch: one block, or a cluster where there are many pairs; a warp for each 32 of them."""
    params = lay_out(_ROUTE, (*call.pairs, call.pairs.rows, call.ends, call.experts, call.alignment))
    blocks = 1 if call.pairs.total <= _ROUTED_BY_A_BLOCK else _ROUTE_CLUSTER
    warps = min(max(-(-call.pairs.total // (blocks * _WARP)), _LEAST_ROUTE_WARPS), threads(spec) // _WARP)
    return Launch((blocks, 1, 1), (warps * _WARP, 1, 1), params, blocks, dependent)


def prepare_gather(spec: KernelSpec, call: RowsCall, dependent: bool = True) -> Launch:
    """Prepare a ``gather`` launch: a block per token and 2048 columns."""
    values = (call.input, call.output, call.scales, call.static_scales, *call.pairs, call.input_stride, call.scales_stride)
    return _by_tokens(spec, call.pairs, call.columns, lay_out(_GATHER, (*values, call.columns)), dependent)


def prepare_activate(spec: KernelSpec, call: RowsCall, dependent: bool = True) -> Launch:
    """Prepare an ``activate`` launch: a warp per pair and 512 columns of the result."""
    values = (call.input, call.output, call.scales, call.static_scales, *call.pairs, call.input_stride, call.scales_stride)
    gate = (call.gate.value, call.interleaved, call.limit, call.alpha)
    params = lay_out(_ACTIVATE, (*values, call.columns, *gate))
    grid = (-(-call.pairs.total // _WARPS), -(-call.columns // spec.block[0]), 1)
    return Launch(grid, (_WARP, _WARPS, 1), params, 1, dependent)


def prepare_combine(spec: KernelSpec, call: CombineCall, dependent: bool = True) -> Launch:
    """Prepare a ``combine`` launch: a block per token and 2048 columns."""
    values = (call.input, call.weights, call.output, *call.pairs, call.input_stride, call.columns, call.bf16_weights)
    return _by_tokens(spec, call.pairs, call.columns, lay_out(_COMBINE, values), dependent)


def _by_tokens(spec: KernelSpec, pairs: Pairs, columns: int, params: int, dependent: bool) -> Launch:
    grid = (pairs.total // pairs.top_k, -(-columns // spec.block[0]), 1)
    return Launch(grid, (threads(spec), 1, 1), params, 1, dependent)

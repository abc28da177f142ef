"""The argument structs of the device code and the formats that fill them: the same size, and each member in its place."""

from __future__ import annotations

import ctypes
from typing import cast

import pytest

from deepgemm_jit.compiler import compile_options, compile_source
from deepgemm_jit.errors import CompileError
from deepgemm_jit.frontend.sources import included_headers
from deepgemm_jit.runtime import GemmCall, Matrices, launch, params, prepare_gemm, steps
from deepgemm_jit.runtime.tensormap import BoxedTensor, TensorMaps
from deepgemm_jit.spec import BF16_GEMM, FP4_GEMM_SWAP_AB, FP8_GEMM, FP8_GEMM_SWAP_AB, KernelSpec, Layout, kernel_set
from deepgemm_jit.spec.kernel_set import is_gemm

pytestmark = pytest.mark.nvrtc

ARCH = "sm_90a"
STRUCTS = {
    "dj::Fp8GemmArguments": ("dj/kernels/fp8_arguments.cuh", launch._FP8_GEMM),
    "dj::Fp4GemmArguments": ("dj/kernels/fp4_gemm_swap_ab.cuh", launch._FP8_GEMM),
    "dj::Bf16GemmArguments": ("dj/kernels/bf16_gemm.cuh", launch._BF16_GEMM),
    "dj::CastArguments": ("dj/kernels/per_token_cast_to_fp8.cuh", steps._CAST),
    "dj::ScaleLayoutArguments": ("dj/kernels/scale_layout.cuh", steps._SCALE_LAYOUT),
    "dj::TransposeArguments": ("dj/kernels/transpose.cuh", steps._TRANSPOSE),
    "dj::RouteArguments": ("dj/kernels/experts/route.cuh", steps._ROUTE),
    "dj::GatherArguments": ("dj/kernels/experts/gather.cuh", steps._GATHER),
    "dj::ActivateArguments": ("dj/kernels/experts/activate.cuh", steps._ACTIVATE),
    "dj::CombineArguments": ("dj/kernels/experts/combine.cuh", steps._COMBINE),
}


def compile_check(header: str, name: str, size: int) -> None:
    compile_source_of(header, f"static_assert(sizeof({name}) == {size});")


def compile_source_of(header: str, checks: str) -> None:
    source = f'#include "{header}"\nextern "C" __global__ void sizes() {{ {checks} }}\n'
    headers = included_headers(source, {})
    compile_source(source=source, headers=headers, entry="sizes", arch=ARCH, options=compile_options(ARCH))


# Members in their order, and what `sent_to` sends for each: no two the same.
FP8_MEMBERS = (
    ("a_scales.data", 21), ("a_scales.group_stride", 22), ("a_scales.column_stride", 23),
    ("b_scales", 31), ("b_scales_group_stride", 32), ("b_scales_row_stride", 33),
)  # fmt: skip
FP4_MEMBERS = (*FP8_MEMBERS[:3], ("fragments", 41), ("group_stride", 42), ("row_block_stride", 43))
WAITS = ("waits_for_tokens", 1)
COMMON_MEMBERS = (
    ("d.data", 51), ("d.group_stride", 52), ("d.row_stride", 53), ("shape.group_data", 61), ("shape.m", 384), ("shape.n", 264),
    ("shape.groups", 3), ("shape.layout", 2), ("shape.alignment", 128),
)  # fmt: skip
STRUCT_OF = {
    FP8_GEMM: ("dj::Fp8GemmArguments", (*FP8_MEMBERS, WAITS)),
    FP8_GEMM_SWAP_AB: ("dj::Fp8GemmArguments", (*FP8_MEMBERS, WAITS)),
    FP4_GEMM_SWAP_AB: ("dj::Fp4GemmArguments", (*FP4_MEMBERS, WAITS)),
    BF16_GEMM: ("dj::Bf16GemmArguments", ()),
}


class NoMaps:
    """Tensor maps of nothing: what a launch tells its kernel beside them is looked at."""

    def __init__(self) -> None:
        self.asked = 0

    def map_for(self, _box: BoxedTensor) -> bytes:
        self.asked += 1
        return bytes(params.MAP_BYTES)


def sent_to(spec: KernelSpec, size: int) -> bytes:
    """Return the arguments of a launch of a GEMM kernel on three groups of rows."""
    maps = NoMaps()
    call = GemmCall(
        a=Matrices(11, 12, 13), b=Matrices(41, 42, 43), d=Matrices(51, 52, 53), group_data=61, m=384, n=264, k=656,
        groups=3, layout=Layout.PREFIX_SUMS, alignment=128, a_scales=Matrices(21, 22, 23), b_scales=Matrices(31, 32, 33),
    )  # fmt: skip
    prepared = prepare_gemm(spec, 132, cast("TensorMaps", maps), call, waits_for_tokens=True)
    pointers = (ctypes.c_void_p * (maps.asked + 1)).from_address(prepared.params_pointer)
    return ctypes.string_at(pointers[maps.asked] or 0, size)


@pytest.mark.parametrize("spec", [spec for spec in kernel_set(ARCH) if is_gemm(spec)], ids=lambda spec: spec.name)
def test_a_launch_tells_its_kernel_each_argument_where_it_looks_for_it(spec: KernelSpec) -> None:
    name, own = STRUCT_OF[spec.family]
    header, layout = STRUCTS[name]
    members = (*own, *COMMON_MEMBERS, ("k_blocks", -(-656 // spec.block[2])))
    sent = sent_to(spec, layout.size)
    checks = []
    for member, value in members:
        at = next(at for at in range(0, layout.size, 4) if int.from_bytes(sent[at : at + 4], "little") == value)
        checks.append(f"static_assert(__builtin_offsetof({name}, {member}) == {at});")
    compile_source_of(header, "\n".join(checks))


@pytest.mark.parametrize("name", STRUCTS)
def test_the_arguments_of_a_launch_fit_the_memory_that_is_kept_for_them(name: str) -> None:
    assert STRUCTS[name][1].size <= params._MOST_ARGUMENT_BYTES


@pytest.mark.parametrize("name", STRUCTS)
def test_a_format_is_as_large_as_the_struct_it_fills(name: str) -> None:
    header, layout = STRUCTS[name]
    compile_check(header, name, layout.size)
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_check(header, name, layout.size + 8)

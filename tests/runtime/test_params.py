"""The argument structs of the device code and the formats that fill them have the same size."""

from __future__ import annotations

import pytest

from deepgemm_jit.compiler import compile_options, compile_source
from deepgemm_jit.errors import CompileError
from deepgemm_jit.frontend.sources import included_headers
from deepgemm_jit.runtime import launch, steps

pytestmark = pytest.mark.nvrtc

ARCH = "sm_90a"
STRUCTS = {
    "dj::Fp8GemmArguments": ("dj/kernels/fp8_arguments.cuh", launch._FP8_GEMM),
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
    source = f'#include "{header}"\nextern "C" __global__ void sizes() {{ static_assert(sizeof({name}) == {size}); }}\n'
    headers = included_headers(source, {})
    compile_source(source=source, headers=headers, entry="sizes", arch=ARCH, options=compile_options(ARCH))


@pytest.mark.parametrize("name", STRUCTS)
def test_a_format_is_as_large_as_the_struct_it_fills(name: str) -> None:
    header, layout = STRUCTS[name]
    compile_check(header, name, layout.size)
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_check(header, name, layout.size + 8)

"""The instruction contract: checked on the CPU from what the compiler made, and shown to fail where it must."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import contract, sass

from deepgemm_jit.compiler import Compiled, compile_options, compile_source
from deepgemm_jit.frontend import render
from deepgemm_jit.spec import ARCHES, CAST_TO_FP8, FP8_GEMM, KernelSpec, kernel_set

pytestmark = pytest.mark.nvrtc

SPECS = [spec for arch in ARCHES for spec in kernel_set(arch)]


@pytest.fixture(scope="session")
def nvdisasm() -> Path:
    path = sass.try_nvdisasm()
    if path is None:
        pytest.skip(f"package {sass.PACKAGE} of the test extra is not installed")
    return path


def test_every_family_has_a_contract() -> None:
    assert {spec.family for spec in SPECS} == set(contract.EXPECTED)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_kernel_keeps_its_contract(spec: KernelSpec, built: Callable[[KernelSpec], Compiled], nvdisasm: Path) -> None:
    compiled = built(spec)
    assert contract.faults(spec, compiled, sass.instructions(compiled.cubin.image, nvdisasm)) == []


def _spec(family: str, *block: int) -> KernelSpec:
    """Return the first kernel of a family whose block sizes begin so."""
    return next(spec for spec in SPECS if spec.family == family and spec.block[: len(block)] == block)


# Each makes a kernel worse: the spec, a pattern of its sources, what to put there, faults to be found.
MUTATIONS = {
    "spills": (
        _spec(FP8_GEMM, 64, 64),
        r"__launch_bounds__\([^)]*\)",
        "__launch_bounds__(1024, 1)",
        ["LDL", "STL", "local_memory_bytes", "spill_store_bytes", "spill_load_bytes", "ptxas advises"],
    ),
    "a product missing": (
        _spec(FP8_GEMM, 128, 128),
        r"for \(uint32_t k = 0; k < (kBlockK / \w+); \+\+k\)",
        r"for (uint32_t k = 0; k + 1 < \1; ++k)",
        ["12 QGMMA"],
    ),
    "a load missing": (_spec(FP8_GEMM, 128, 128), r"load_box\([^;]*scales[^;]*;", "", ["3 UTMALDG"]),
    "a group the compiler sees through": (
        _spec(FP8_GEMM, 128, 128),
        r"row \+ \(lane_id\(\) < shape_\.m - row \? lane_id\(\) : 0\)",
        "row",
        ["LDG awaited"],
    ),
    "a group broadcast at once": (
        _spec(FP8_GEMM, 128, 128),
        r"listed_group_ = (load\(.*\));",
        r"listed_group_ = static_cast<int32_t>(warp_uniform(static_cast<uint32_t>(\1)));",
        ["LDG awaited"],
    ),
    "no launch bound": (_spec(FP8_GEMM, 128, 128), r"__launch_bounds__\([^)]*\)", "", ["registers, at most 168", "C7508"]),
    "narrow loads": (
        _spec(CAST_TO_FP8),
        r"__ldg\(reinterpret_cast<const uint4\*>\((\w+)\)\)",
        r"uint4{((const unsigned*)\1)[0], ((const unsigned*)\1)[1], ((const unsigned*)\1)[2], ((const unsigned*)\1)[3]}",
        ["0 LDG.E.128", "4 LDG,"],
    ),
    "a product not asked for": (
        _spec(CAST_TO_FP8),
        r"(__global__ .*\n[^{]*\{)",
        r"""\1
    unsigned d = threadIdx.x, e = threadIdx.y;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%0, %0, %0, %0}, {%1, %1}, {%0, %1};"
                 : "+r"(d), "+r"(e));
    *reinterpret_cast<unsigned*>(uint64_t(d)) = e;""",
        ["HMMA"],
    ),
}


@pytest.mark.parametrize(("spec", "pattern", "replacement", "expected"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_worse_kernel_breaks_it(spec: KernelSpec, pattern: str, replacement: str, expected: list[str], nvdisasm: Path) -> None:
    source = render(spec)
    texts = {"": source.text, **source.headers}
    worse = {name: re.sub(pattern, replacement, text, count=1) for name, text in texts.items()}
    assert worse != texts
    compiled = compile_source(
        source=worse.pop(""), headers=worse, entry=spec.name, arch=spec.arch, options=compile_options(spec.arch)
    )
    found = contract.faults(spec, compiled, sass.instructions(compiled.cubin.image, nvdisasm))
    assert [part for part in expected if not any(part in fault for fault in found)] == [], found

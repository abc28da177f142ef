"""What each kernel must look like once compiled: the instructions meant, in the number that its structure gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deepgemm_jit.compiler import Compiled
from deepgemm_jit.spec import ARCHES, CAST_TO_FP8, FP8_GEMM, SCALE_LAYOUT, KernelSpec
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes, threads

REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255
LOCAL_MEMORY = ("LDL", "STL")


def _fp8_gemm(spec: KernelSpec) -> dict[str, int]:
    # kernels_src/include/dj/kernels/fp8_gemm_1d2d.cuh
    block_m, block_n, block_k = spec.block
    consumers = threads(spec) // 128 - 1
    waves = block_m // (64 * consumers)
    overlaps = waves == 1 and block_n <= 128
    issues = 4 if overlaps else waves  # places that issue a k-block: first, twice in the loop, last; or one per wave
    stores = waves * block_n // 16  # 16 rows of block_n bf16 per warp, 16 bytes per lane
    return {
        f"QGMMA.64x{block_n}x32.F32.E4M3.E4M3": issues * block_k // 32,
        "UTMALDG.3D": 3,  # A, B, A scales
        "UTMACCTL.PF": 3,
        "LDGSTS.E": 1 if 128 % block_n == 0 else 2,  # B scales that a tile meets
        "USETMAXREG.DEALLOC": consumers // 2,  # with one consumer warpgroup no register moves
        "USETMAXREG.TRY_ALLOC": consumers // 2,
        "STSM.16.M88.4": stores,
        "STG.E.128": stores,
        "STG": stores,  # and no narrower one
    }


def _cast_to_fp8(spec: KernelSpec) -> dict[str, int]:
    # 16 bytes in per lane, FP8 out in words of 4, a scale.
    elements = {"bf16": 8, "f32": 4}[spec.dtypes[0]]
    return {"LDG.E.128": 1, "LDG": 1, "STG": elements // 4 + 1}


def _scale_layout(spec: KernelSpec) -> dict[str, int]:
    # One loop in, one out, through padded shared memory: rows need not be aligned, so single floats.
    return {"LDG.E": 1, "LDG": 1, "STS": 1, "LDS": 1, "STG": 1}


EXPECTED: dict[str, Callable[[KernelSpec], dict[str, int]]] = {
    FP8_GEMM: _fp8_gemm,
    CAST_TO_FP8: _cast_to_fp8,
    SCALE_LAYOUT: _scale_layout,
}


def _is(instruction: str, wanted: str) -> bool:
    return instruction == wanted or instruction.startswith(f"{wanted}.")


def faults(spec: KernelSpec, compiled: Compiled, instructions: Counter[str]) -> list[str]:
    """Return in what a compiled kernel breaks its contract.

    Args:
        spec: what was to be compiled; its family stands in ``EXPECTED``.
        compiled: what the compiler made of it.
        instructions: how often each instruction stands in the cubin.
    """

    def count(wanted: str) -> int:
        return sum(number for name, number in instructions.items() if _is(name, wanted))

    expected = EXPECTED[spec.family](spec)
    found = [f"{count(name)} {name}, expected {number}" for name, number in expected.items() if count(name) != number]
    products = [name for name in sorted(instructions) if name.partition(".")[0].endswith("MMA")]
    found += [f"{name}: a product not asked for" for name in products if not any(_is(name, wanted) for wanted in expected)]
    found += [f"{count(name)} {name}: a local memory access" for name in LOCAL_MEMORY if count(name)]

    facts = compiled.cubin.facts
    found += [
        f"{getattr(facts, name)} {name}, expected none"
        for name in ("local_memory_bytes", "spill_store_bytes", "spill_load_bytes")
        if getattr(facts, name)
    ]
    bound = min(MAX_REGISTERS, REGISTERS_PER_SM // threads(spec) // 8 * 8)
    if facts.registers > bound:
        found.append(f"{facts.registers} registers, at most {bound} with {threads(spec)} threads")
    shared = facts.shared_memory_bytes + dynamic_shared_memory_bytes(spec)
    if shared > ARCHES[spec.arch].shared_memory_bytes:
        found.append(f"{shared} bytes of shared memory, at most {ARCHES[spec.arch].shared_memory_bytes}")
    if compiled.advisories:
        found.append(f"ptxas advises: {', '.join(compiled.advisories)}")
    return found

"""What each kernel must look like once compiled: the instructions meant, in the number that its structure gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from contract.sass import (
    ARRIVALS_BESIDE_PRODUCTS,
    AWAITED_LOADS,
    FROM_REGISTERS,
    LOADS_AT_ARRIVALS,
    MOVED_DESCRIPTORS,
    STORES_BESIDE_PRODUCTS,
)

from deepgemm_jit.compiler import Compiled
from deepgemm_jit.spec import (
    ACTIVATE,
    ARCHES,
    BF16_GEMM,
    CAST_TO_FP8,
    COMBINE,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    GATHER,
    N_MAJOR,
    ROUTE,
    ROW_SCALES,
    SCALE_LAYOUT,
    TRANSPOSE,
    KernelSpec,
)
from deepgemm_jit.spec.kernel_set import blocks_per_sm, dynamic_shared_memory_bytes, threads

REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255
LOCAL_MEMORY = ("LDL", "STL")


def _fp8_gemm(spec: KernelSpec) -> dict[str, int]:
    # kernels_src/include/dj/kernels/fp8_gemm_1d2d.cuh
    block_m, block_n, block_k = spec.block
    consumers = threads(spec) // 128 - 1
    waves = block_m // (64 * consumers)
    row_scales = ROW_SCALES in spec.flags
    overlaps = waves == 1 and block_n <= 128 and not row_scales
    issues = 4 if overlaps else waves  # places that issue a k-block: first, twice in the loop, last; or one per wave
    maps = 4 if row_scales else 3  # A, B, A scales, B scales per row
    return {
        f"QGMMA.64x{block_n}x32.F32.E4M3.E4M3": issues * block_k // 32,
        "UTMALDG.3D": maps + 1,  # B as what is read once, or as usual
        "UTMACCTL.PF": maps,
        "LDGSTS": 0 if row_scales else 1 if 128 % block_n == 0 else 2,  # B scales that a tile meets
        "LDS.64": block_n // 8 if row_scales else 0,  # B scales of two columns each
        **_roles(consumers),
        **_output(waves * block_n),
        **_UNIFORM,
    }


def _fp8_gemm_swap_ab(spec: KernelSpec) -> dict[str, int]:
    # kernels_src/include/dj/kernels/fp8_gemm_swap_ab.cuh: tokens are the columns of a product, and a warp's columns of D leave in
    # chunks of 8 rows: each in its place if K is whole, in a loop over those that have crossed the cluster if it is split.
    block_m, _block_n, block_k = spec.block
    chunks = block_m // 8
    return {
        f"QGMMA.64x{block_m}x32.F32.E4M3.E4M3": 4 * block_k // 32,
        "UTMALDG.3D": 3,  # A; B as what is read once, or as usual
        "UTMACCTL.PF": 2,
        "LDGSTS": 2,  # scales of both
        "STAS.128": chunks,
        "STSM.16.MT88.2": chunks + 1,
        "STG.E.128": chunks + 1,
        "STG": chunks + 1,
        **_roles(0),
        **_UNIFORM,
        "ACQBULK": 2,  # all wait, or one warp while weights arrive
    }


def _fp4_gemm_swap_ab(spec: KernelSpec) -> dict[str, int]:
    # kernels_src/include/dj/kernels/fp4_gemm_swap_ab.cuh: one place issues a k-block, whose weights are unpacked in registers.
    block_m, block_n, block_k = spec.block
    chunks, products = block_m // 8, block_k // 32
    return {
        f"QGMMA.64x{block_m}x32.F32.E4M3.E4M3": products,
        "UTMALDG.3D": 1,
        "UTMACCTL.PF": 1,
        "UBLKCP": 2 * block_n // 64,  # fragments of each warpgroup as what is read once, or as usual
        "LDGSTS": 1,  # scales of A
        "STSM.16.MT88.2": chunks,
        "STG.E.128": chunks,
        "STG": chunks,
        **_roles(0),
        **_UNIFORM,
        FROM_REGISTERS: products,
        "ACQBULK": 2,  # all wait, or one warp while weights arrive
    }


def _bf16_gemm(spec: KernelSpec) -> dict[str, int]:
    # kernels_src/include/dj/kernels/bf16_gemm.cuh: the first k-block starts the sums, the loop adds to them. A tile is stored
    # beside the first products of the next, or after all.
    block_m, block_n, block_k = spec.block
    consumers = threads(spec) // 128 - 1
    waves = block_m // (64 * consumers)
    # An N-major B comes in boxes of 64 columns; any other as what is read once, or as usual.
    boxes = block_n // 64 if N_MAJOR in spec.flags else 2
    return {
        f"HGMMA.64x{block_n}x16.F32.BF16": 2 * waves * block_k // 16,
        "UTMALDG.3D": 1 + boxes,
        "UTMACCTL.PF": 2,
        "LDGSTS": 0,
        **_roles(consumers),
        **_output(2 * waves * block_n),
        **_UNIFORM,
        STORES_BESIDE_PRODUCTS: waves * block_n // 16,
    }


# Descriptors are made in uniform registers: moving them there costs each product more than it takes. Each GEMM waits once for the
# kernels before it, gives no stage back from which it still loads or multiplies, and waits for the group of a tile when it takes
# the tile.
_UNIFORM = {
    MOVED_DESCRIPTORS: 0,
    FROM_REGISTERS: 0,
    "ACQBULK": 1,
    LOADS_AT_ARRIVALS: 0,
    ARRIVALS_BESIDE_PRODUCTS: 0,
    AWAITED_LOADS: 0,
    STORES_BESIDE_PRODUCTS: 0,
}


def _roles(consumers: int) -> dict[str, int]:
    # With one consumer warpgroup no register moves.
    return {"USETMAXREG.DEALLOC": consumers // 2, "USETMAXREG.TRY_ALLOC": consumers // 2}


def _output(columns: int) -> dict[str, int]:
    # 16 rows of bf16 per warp, 16 bytes per lane, and no narrower store.
    return {"STSM.16.M88.4": columns // 16, "STG.E.128": columns // 16, "STG": columns // 16}


def _cast_to_fp8(spec: KernelSpec) -> dict[str, int]:
    # 16 bytes in per lane, FP8 out in words of 4, a scale.
    elements = {"bf16": 8, "f32": 4}[spec.dtypes[0]]
    return {"LDG.E.128": 1, "LDG": 1, "STG": elements // 4 + 1}


def _scale_layout(spec: KernelSpec) -> dict[str, int]:
    # One loop in, one out, through padded shared memory: rows need not be aligned, so single floats.
    return {"LDG.E": 1, "LDG": 1, "STS": 1, "LDS": 1, "STG": 1}


def _transpose(spec: KernelSpec) -> dict[str, int]:
    # 8 bytes per lane and step on both sides.
    return {"LDG.E.64": 1, "LDG": 1, "STG.E.64": 1, "STG": 1}


def _route(spec: KernelSpec) -> dict[str, int]:
    # Two passes over the pairs, eight times 32 in a step: a match of equal experts each, and then a row; ends of experts.
    return {"MATCH.ANY": 16, "STG": 9}


def _gather(spec: KernelSpec) -> dict[str, int]:
    # 16 bytes in per lane; 8 bytes of FP8 out and a scale, or 16 bytes of bf16.
    return {"LDG.E.128": 1, **_rows_out(spec)}


def _activate(spec: KernelSpec) -> dict[str, int]:
    # Gate and up, twice.
    return {"LDG.E.128": 4, **_rows_out(spec, parts=2)}


def _rows_out(spec: KernelSpec, parts: int = 1) -> dict[str, int]:
    if spec.dtypes[1] == "e4m3":
        return {"STG.E.64": parts, "STG": 2 * parts}
    return {"STG.E.128": parts, "STG": parts}


def _combine(spec: KernelSpec) -> dict[str, int]:
    return {"STG.E.128": 1, "STG": 1}


EXPECTED: dict[str, Callable[[KernelSpec], dict[str, int]]] = {
    FP8_GEMM: _fp8_gemm,
    FP8_GEMM_SWAP_AB: _fp8_gemm_swap_ab,
    FP4_GEMM_SWAP_AB: _fp4_gemm_swap_ab,
    BF16_GEMM: _bf16_gemm,
    TRANSPOSE: _transpose,
    ROUTE: _route,
    GATHER: _gather,
    ACTIVATE: _activate,
    COMBINE: _combine,
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
    bound = min(MAX_REGISTERS, REGISTERS_PER_SM // blocks_per_sm(spec) // threads(spec) // 8 * 8)
    if facts.registers > bound:
        found.append(f"{facts.registers} registers, at most {bound} with {threads(spec)} threads")
    shared = facts.shared_memory_bytes + dynamic_shared_memory_bytes(spec)
    if shared > ARCHES[spec.arch].shared_memory_bytes:
        found.append(f"{shared} bytes of shared memory, at most {ARCHES[spec.arch].shared_memory_bytes}")
    if compiled.advisories:
        found.append(f"ptxas advises: {', '.join(compiled.advisories)}")
    return found

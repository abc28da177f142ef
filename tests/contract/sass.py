"""A kernel's instructions, as nvdisasm of the package nvidia-cuda-nvdisasm lists them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"

MOVED_DESCRIPTORS = "R2UR among products"
"""Moves to uniform registers between the first and the last product of a listing."""

FROM_REGISTERS = "products with A in registers"

# "QGMMA.64x16x32.F32.E4M3.E4M3 R48, R56, gdesc[UR4], RZ, !UPT": sums, A, B; where A lies in shared memory, it has none.
_FROM_REGISTERS = re.compile(r"GMMA[\w.]*\s+R\d+, R\d+, gdesc")

AWAITED_LOADS = "LDG awaited where it stands"
"""Loads of what other kernels wrote (group data) whose value a move or a broadcast waits for within a few instructions."""
_FEW_INSTRUCTIONS = 16
LOADS_AT_ARRIVALS = "LDS under way at an arrival"
"""Arrivals at shared-memory barriers in front of which nothing has waited for a load from shared memory."""

ARRIVALS_BESIDE_PRODUCTS = "SYNCS.ARRIVE beside products"
"""Arrivals at barriers between a product and the next wait for products: of a stage that it may still be reading."""

STORES_BESIDE_PRODUCTS = "STSM beside products"
"""Stores of a finished tile between a product and the next wait for products: the tensor core works meanwhile."""

# "/*0a40*/   @!P0 LDG.E.128.CONSTANT R4, ...": offset, perhaps a predicate, the instruction with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*[\w.]*)", re.MULTILINE)
_STRONG_LOAD = re.compile(r"\bLDG\.E\.STRONG\.\w+ (R\d+),")
_ENCODED = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\n\s*/\* (0x[0-9a-f]{16}) \*/", re.MULTILINE)


def try_nvdisasm() -> Path | None:
    """Return the path of nvdisasm, or None when its package is not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def instructions(image: bytes, nvdisasm: Path) -> Counter[str]:
    """Return how often each instruction, with its modifiers, stands in a cubin; and those of its products, if it has any."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        listing = subprocess.run(
            [nvdisasm, "-c", "-hex", file.name], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    listed = _INSTRUCTION.findall(listing)
    if "EXIT" not in listed:
        raise ValueError(f"nvdisasm listed no kernel:\n{listing[:500]}")
    found = Counter(listed)
    products = [place for place, name in enumerate(listed) if name.partition(".")[0].endswith("GMMA")]
    if products:
        found[FROM_REGISTERS] = len(_FROM_REGISTERS.findall(listing))
        found[MOVED_DESCRIPTORS] = listed[products[0] : products[-1]].count("R2UR")
        found[LOADS_AT_ARRIVALS] = _loads_at_arrivals(listing)
        found[AWAITED_LOADS] = _awaited_loads(listing)
        found[STORES_BESIDE_PRODUCTS] = _beside_products(listed, "STSM")
        found[ARRIVALS_BESIDE_PRODUCTS] = _beside_products(listed, "SYNCS.ARRIVE")
    return found


def _beside_products(listed: list[str], instruction: str) -> int:
    beside, found = False, 0
    for name in listed:
        if name.partition(".")[0].endswith("GMMA"):
            beside = True
        elif name.startswith("WARPGROUP.DEPBAR"):
            beside = False
        else:
            found += beside and name.startswith(instruction)
    return found


def _awaited_loads(listing: str) -> int:
    instructions = [instruction for instruction, _word in _ENCODED.findall(listing)]
    found = 0
    for place, instruction in enumerate(instructions):
        loaded = _STRONG_LOAD.search(instruction)
        if loaded:
            waits = re.compile(rf"\b(?:R2UR|SHFL)\b.*\b{loaded[1]}\b")
            found += any(waits.search(later) for later in instructions[place + 1 : place + 1 + _FEW_INSTRUCTIONS])
    return found


def _loads_at_arrivals(listing: str) -> int:
    # The upper word has a scoreboard's number for what the instruction will write, and a mask of those that it waits for.
    under_way: set[int] = set()
    found = 0
    for instruction, word in _ENCODED.findall(listing):
        control = int(word, 16) >> 41
        written, awaited = control >> 5 & 7, control >> 11 & 63
        under_way -= {number for number in range(6) if awaited >> number & 1}
        if "SYNCS.ARRIVE" in instruction:
            found += bool(under_way)
        elif "LDS" in instruction and written < 6:
            under_way.add(written)
        # What follows a branch is reached from elsewhere. A fence.proxy.async, by PTX, orders the loads before it; that its
        # instruction waits for them is taken from that.
        elif instruction.startswith(("BRA", "FENCE.VIEW.ASYNC")):
            under_way = set()
    return found

"""A kernel's instructions, as nvdisasm of the package nvidia-cuda-nvdisasm lists them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"

# "/*0a40*/   @!P0 LDG.E.128.CONSTANT R4, ...": offset, perhaps a predicate, the instruction with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*[\w.]*)", re.MULTILINE)


def try_nvdisasm() -> Path | None:
    """Return the path of nvdisasm, or None when its package is not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def instructions(image: bytes, nvdisasm: Path) -> Counter[str]:
    """Return how often each instruction, with its modifiers, stands in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        listing = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True, timeout=120).stdout
    found = Counter(_INSTRUCTION.findall(listing))
    if "EXIT" not in found:
        raise ValueError(f"nvdisasm listed no kernel:\n{listing[:500]}")
    return found

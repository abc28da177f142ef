"""The WGMMA instruction wrappers of CUTLASS: one struct is cut out of the installed header, nothing else of it is compiled."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deepgemm_jit.errors import ToolchainError

PACKAGE = "nvidia-cutlass"
HEADER = "cute/arch/mma_sm90_gmma.hpp"
WIDTHS_HEADER = "cute/arch/mma_sm90_gmma_ext.hpp"
"""Of products whose width is neither a power of two nor 96 or 192."""
_USUAL_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
_END = "\n};\n"
_FIX = f"Install it with: pip install '{PACKAGE}>=4.2,<5'"
_FIX_BROKEN = f"Reinstall it with: pip install --force-reinstall '{PACKAGE}>=4.2,<5'"


def header_path(header: str = HEADER) -> Path:
    """Return the path of a header that holds wrappers.

    Raises:
        ToolchainError: the package is not installed, or its header is missing.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as cause:
        raise ToolchainError(missing=f"package {PACKAGE}", looked_for=header, fix=_FIX) from cause
    for file in files:
        if file.as_posix().endswith("/include/" + header):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ToolchainError(missing=f"header {header} of package {PACKAGE}", looked_for=header, fix=_FIX_BROKEN)


@cache
def _text_of(header: str) -> str:
    path = header_path(header)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        what = f"header {header} of package {PACKAGE} is broken ({cause}) and"
        raise ToolchainError(missing=what, looked_for=str(path), fix=_FIX_BROKEN) from cause


def wrapper_name(dtype: str, columns: int) -> str:
    """Return the name of the wrapper for products of 64 x ``columns`` and 32 bytes of K, both operands in shared memory."""
    return {"e4m3": f"MMA_64x{columns}x32_F32E4M3E4M3_SS_TN", "bf16": f"MMA_64x{columns}x16_F32BF16BF16_SS"}[dtype]


@cache
def wrapper_for(name: str) -> str:
    """Return the text of one wrapper struct with its template line.

    Raises:
        ToolchainError: the header cannot be read, or does not hold the wrapper as expected.
    """
    width = re.match(r"MMA_64x(\d+)x", name)
    header = HEADER if width is None or int(width[1]) in _USUAL_WIDTHS else WIDTHS_HEADER
    text = _text_of(header)
    start = re.search(rf"^template <[^<>;{{}}]*>\nstruct {re.escape(name)}\n", text, re.MULTILINE)
    end = text.find(_END, start.end()) if start else -1
    if start is None or end < 0:
        what = f"struct {name} in {header} of package {PACKAGE}"
        raise ToolchainError(missing=what, looked_for=str(header_path(header)), fix=_FIX_BROKEN)
    return text[start.start() : end + len(_END)]

"""The WGMMA instruction wrappers of CUTLASS: one struct is cut out of the installed header, nothing else of it is compiled."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deepgemm_jit.errors import ToolchainError

PACKAGE = "nvidia-cutlass"
HEADER = "cute/arch/mma_sm90_gmma.hpp"
_END = "\n};\n"
_FIX = f"Install it with: pip install '{PACKAGE}>=4.2,<5'"
_FIX_BROKEN = f"Reinstall it with: pip install --force-reinstall '{PACKAGE}>=4.2,<5'"


def header_path() -> Path:
    """Return the path of the header that holds the wrappers.

    Raises:
        ToolchainError: the package is not installed, or its header is missing.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as cause:
        raise ToolchainError(missing=f"package {PACKAGE}", looked_for=HEADER, fix=_FIX) from cause
    for file in files:
        if file.as_posix().endswith("/include/" + HEADER):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ToolchainError(missing=f"header {HEADER} of package {PACKAGE}", looked_for=HEADER, fix=_FIX_BROKEN)


@cache
def _header() -> str:
    path = header_path()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        what = f"header {HEADER} of package {PACKAGE} is broken ({cause}) and"
        raise ToolchainError(missing=what, looked_for=str(path), fix=_FIX_BROKEN) from cause


def wrapper_name(dtype: str, columns: int, *, registers: bool = False) -> str:
    """Return the name of the wrapper for products of 64 x ``columns`` and 32 bytes of K.

    The columns are read from shared memory, and so are the 64 rows unless they come from ``registers``.
    """
    read = "RS" if registers else "SS"
    return {"e4m3": f"MMA_64x{columns}x32_F32E4M3E4M3_{read}_TN", "bf16": f"MMA_64x{columns}x16_F32BF16BF16_{read}"}[dtype]


@cache
def wrapper_for(name: str) -> str:
    """Return the text of one wrapper struct with its template line.

    Raises:
        ToolchainError: the header cannot be read, or does not hold the wrapper as expected.
    """
    text = _header()
    start = re.search(rf"^template <[^<>;{{}}]*>\nstruct {re.escape(name)}\n", text, re.MULTILINE)
    end = text.find(_END, start.end()) if start else -1
    if start is None or end < 0:
        what = f"struct {name} in {HEADER} of package {PACKAGE}"
        raise ToolchainError(missing=what, looked_for=str(header_path()), fix=_FIX_BROKEN)
    return text[start.start() : end + len(_END)]

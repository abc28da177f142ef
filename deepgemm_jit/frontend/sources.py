"""The device sources of this package, read as text, and the headers that a translation unit may include."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from deepgemm_jit.errors import ToolchainError
from deepgemm_jit.resources import data_dir

# Both forms: NVRTC searches no folder for either, but it does open an absolute path.
_INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]""", re.MULTILINE)


def templates_dir() -> Path:
    """Return the folder of the kernel templates."""
    return data_dir("kernels_src") / "templates"


@cache
def _device_headers() -> Mapping[str, str]:
    root = data_dir("kernels_src") / "include"
    headers = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.cuh"))}
    if not headers:
        raise ToolchainError(missing="device headers", looked_for="*.cuh", fix="Reinstall deepgemm-jit: its package data is gone")
    return MappingProxyType(headers)


def included_headers(source: str, generated: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that ``source`` includes, directly or not, by name: all that the compiler will be given.

    Args:
        source: a rendered translation unit.
        generated: headers made for this unit, which have no file.

    Raises:
        ToolchainError: an included header is neither generated nor shipped.
    """
    available = {**_device_headers(), **generated}
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if name not in available:
            raise ToolchainError(missing=f"device header {name}", looked_for=name, fix="Reinstall deepgemm-jit")
        found[name] = available[name]
        waiting.extend(_INCLUDE.findall(available[name]))
    return MappingProxyType(dict(sorted(found.items())))

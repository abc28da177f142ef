"""A kernel-compilation service for FP8 mixture-of-experts models.

Importing this package does nothing: no CUDA, no torch, no folders. Names are resolved on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from deepgemm_jit.__about__ import __version__

if TYPE_CHECKING:
    from deepgemm_jit.builder import build
    from deepgemm_jit.cubin import Cubin
    from deepgemm_jit.service import KernelService
    from deepgemm_jit.spec import KernelSpec, is_supported, kernel_set, select
    from deepgemm_jit.warmup import WarmupReport, warm_up

# The application decides what becomes of the log. Without a handler of its own, a library's warnings go to stderr.
logging.getLogger("deepgemm_jit").addHandler(logging.NullHandler())

_HOMES = {
    "Cubin": "deepgemm_jit.cubin",
    "KernelService": "deepgemm_jit.service",
    "KernelSpec": "deepgemm_jit.spec",
    "WarmupReport": "deepgemm_jit.warmup",
    "build": "deepgemm_jit.builder",
    "is_supported": "deepgemm_jit.spec",
    "kernel_set": "deepgemm_jit.spec",
    "select": "deepgemm_jit.spec",
    "warm_up": "deepgemm_jit.warmup",
}

__all__ = [
    "Cubin",
    "KernelService",
    "KernelSpec",
    "WarmupReport",
    "__version__",
    "build",
    "is_supported",
    "kernel_set",
    "select",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

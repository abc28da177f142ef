"""Where the data files of this package lie: device sources and the reviewed kernel facts.

An installed package carries them as ``_kernels_src`` and ``_cache``; a checkout (an editable install) has them at its top
level, where an editor and a reviewer expect them.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """Return the folder of package data called ``name`` ("kernels_src" or "cache")."""
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name

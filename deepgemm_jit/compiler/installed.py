"""Which NVRTC packages are installed: several of one CUDA major leave it to the import path which one compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepgemm_jit.compiler.nvrtc import PACKAGE

_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")


@dataclass(frozen=True, slots=True)
class InstalledNvrtc:
    """A library of NVRTC that a package brought."""

    package: str
    version: str
    cuda_major: int
    path: Path


def installed_nvrtcs() -> tuple[InstalledNvrtc, ...]:
    """Return the NVRTC libraries of all installed packages, each once, in the order of the import path; loads none."""
    found: dict[Path, InstalledNvrtc] = {}
    for distribution in metadata.distributions():
        try:
            name = distribution.name
            if name.startswith(PACKAGE):
                for path, cuda_major in _libraries(distribution):
                    found.setdefault(path, InstalledNvrtc(name, distribution.version, cuda_major, path))
        except Exception:  # noqa: BLE001, S112 - broken metadata of whatever package; pip is the one to tell of it
            continue
    return tuple(found.values())


def _libraries(distribution: metadata.Distribution) -> Iterator[tuple[Path, int]]:
    for file in distribution.files or ():
        library = _LIBRARY.fullmatch(file.name)
        path = Path(str(distribution.locate_file(file)))
        if library is not None and path.exists():
            yield path.resolve(), int(library[1])

"""The compiled form of one kernel, as a value every layer above may hold."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CubinFacts:
    """What the compiler made of a kernel; counts are per thread unless the name says otherwise."""

    registers: int
    shared_memory_bytes: int
    """Static shared memory per block; the dynamic part belongs to the spec."""
    local_memory_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Compiled bytes with their facts: one spec, one cubin, one entry."""

    image: bytes = field(repr=False)
    arch: str
    entry: str
    nvrtc_version: str
    """``major.minor`` of the NVRTC that built it."""
    options: tuple[str, ...]
    facts: CubinFacts

    @property
    def digest(self) -> str:
        """SHA-256 of the image, in hex: its name in the store."""
        return hashlib.sha256(self.image).hexdigest()

    @property
    def cuda_major(self) -> int:
        """The CUDA major version that a driver must reach to load the image."""
        return int(self.nvrtc_version.split(".")[0])

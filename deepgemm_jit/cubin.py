"""The compiled form of one kernel, as a value every layer above may hold."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

_ELF64_HEADER_BYTES = 64
_EM_CUDA = 190
_ABI_WITH_ARCH_IN_SECOND_BYTE = 8
"""Cubins of CUDA 13 (ABI version 8) keep the SM number in bits 8 to 15 of e_flags, older ones in bits 0 to 7."""


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

    def faults(self) -> list[str]:
        """Return in what the image is not the cubin that the fields beside it describe; empty when it is.

        A look at the ELF header and at the name of the kernel's section, cheap enough for every read: what lies about its
        arch or its kernel must not reach the driver, which would launch it with another kernel's arguments.
        """
        image = self.image
        if len(image) < _ELF64_HEADER_BYTES or not image.startswith(b"\x7fELF\x02\x01"):
            return ["image is not a 64-bit ELF file"]
        if (machine := int.from_bytes(image[18:20], "little")) != _EM_CUDA:
            return [f"image is an ELF file for machine {machine}, not a cubin"]
        flags = int.from_bytes(image[48:52], "little")
        sm = (flags >> 8 if image[8] >= _ABI_WITH_ARCH_IN_SECOND_BYTE else flags) & 0xFF
        faults = []
        # The ELF does not keep the suffix of an arch.
        if re.fullmatch(rf"sm_{sm}[a-z]?", self.arch) is None:
            faults.append(f"image is one for sm_{sm}, not for {self.arch}")
        if b"\0.text." + self.entry.encode() + b"\0" not in image:
            faults.append(f"image holds no kernel {self.entry}")
        return faults

    @property
    def digest(self) -> str:
        """SHA-256 of the image, in hex: its name in the store."""
        return hashlib.sha256(self.image).hexdigest()

    @property
    def cuda_major(self) -> int:
        """The CUDA major version that a driver must reach to load the image."""
        return int(self.nvrtc_version.split(".")[0])

"""What a cubin's ELF says of the kernel in it: arch, entries, registers, local memory."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

_EM_CUDA = "EM_CUDA"
_ABI_WITH_ARCH_IN_SECOND_BYTE = 8
"""Cubins of CUDA 13 (ABI version 8) keep the SM number in bits 8 to 15 of e_flags, older ones in bits 0 to 7."""

# Attributes of .nv.info, each followed by (symbol index, value): cuobjdump --dump-elf names them so.
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_SIZED_VALUE = 0x04


@dataclass(frozen=True, slots=True)
class CubinElf:
    """Facts read from the ELF; counts are per thread."""

    arch: str
    """``sm_90``: the ELF does not keep the arch-specific suffix."""
    entries: tuple[str, ...]
    registers: int
    frame_bytes: int


def read_cubin_elf(image: bytes) -> CubinElf:
    """Read the facts of a cubin with one kernel.

    Raises:
        ValueError: the bytes are not a cubin, or one of no kernel.
    """
    try:
        elf = ELFFile(io.BytesIO(image))
        if elf["e_machine"] != _EM_CUDA:
            raise ValueError(f"an ELF for {elf['e_machine']}")
        if _end(elf) > len(image):
            raise ValueError(f"{len(image)} of {_end(elf)} bytes")
        table = elf.get_section_by_name(".symtab")
        info = elf.get_section_by_name(".nv.info")
        if not isinstance(table, SymbolTableSection) or info is None:
            raise ValueError("no symbols")
        symbols = list(table.iter_symbols())
        attributes = _attributes(info.data())
        flags, abi = elf["e_flags"], elf["e_ident"]["EI_ABIVERSION"]
    except (ELFError, struct.error, LookupError, ArithmeticError, UnicodeDecodeError) as cause:
        # A damaged header points anywhere: offsets beyond what a stream can seek, entries of no size, strings of no table.
        raise ValueError(str(cause) or type(cause).__name__) from cause
    kernels = {
        index: symbol.name
        for index, symbol in enumerate(symbols)
        if symbol["st_info"]["type"] == "STT_FUNC"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and symbol["st_shndx"] != "SHN_UNDEF"  # what a kernel calls (printf) is no kernel
    }
    if not kernels:
        raise ValueError("no kernel")
    index = min(kernels)
    if (_REGISTER_COUNT, index) not in attributes:
        raise ValueError("no register count")
    sm = (flags >> 8 if abi >= _ABI_WITH_ARCH_IN_SECOND_BYTE else flags) & 0xFF
    return CubinElf(
        f"sm_{sm}", tuple(kernels.values()), attributes[_REGISTER_COUNT, index], attributes.get((_FRAME_SIZE, index), 0)
    )


def _end(elf: ELFFile) -> int:
    """Return how many bytes the headers and what they point to take."""
    tables = (elf[f"e_{kind}off"] + elf[f"e_{kind}num"] * elf[f"e_{kind}entsize"] for kind in ("ph", "sh"))
    sections = (s["sh_offset"] + s["sh_size"] for s in elf.iter_sections() if s["sh_type"] != "SHT_NOBITS")
    return int(max(*tables, *sections))


def _attributes(data: bytes) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    at = 0
    while at + 4 <= len(data):
        layout, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout != _SIZED_VALUE:
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<II", data, at)
            found[attribute, symbol] = value
        at += size
    return found

"""Cubins in tests/data/cubins are the scale-layout kernel as NVRTC 12.9 (ABI version 7) and 13.5 (version 8) built it."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepgemm_jit.compiler.elf import CubinElf, read_cubin_elf

pytestmark = pytest.mark.none

CUBINS = {path.stem.partition("-")[2]: path.read_bytes() for path in (Path(__file__).parents[1] / "data/cubins").iterdir()}
ABI_VERSION = 8  # offset in the ELF header
SECTION_TABLE = 40
images = st.sampled_from(list(CUBINS.values()))


def _reads_or_refuses(image: bytes) -> None:
    """Pass when the reader gives facts or a ValueError; any other error fails the test."""
    try:
        elf = read_cubin_elf(image)
    except ValueError:
        return
    assert elf.entries


@pytest.mark.parametrize(("version", "abi", "registers"), [("12.9", 7, 14), ("13.5", 8, 16)])
def test_cubins_of_both_forms_are_read(version: str, abi: int, registers: int) -> None:
    image = CUBINS[version]
    assert image[ABI_VERSION] == abi
    assert read_cubin_elf(image) == CubinElf("sm_90", ("sm_90a_scale_layout_f32_64x32",), registers, 0)


def _elf_of_this_machine() -> bytes:
    return Path(sys.executable).resolve().read_bytes()[:100_000]


@pytest.mark.parametrize(
    "image",
    [b"", b"\x7fELF", bytes(6000), random.Random(1).randbytes(6000), b"\x7fELF\x02\x01\x01" + random.Random(2).randbytes(6000)],
    ids=["empty", "magic", "zeros", "random", "random after the magic"],
)
def test_garbage_is_refused(image: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_cubin_elf(image)


def test_an_elf_of_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="an ELF for EM_"):
        read_cubin_elf(_elf_of_this_machine())


@pytest.mark.parametrize("version", CUBINS)
def test_every_part_of_a_cubin_is_refused(version: str) -> None:
    image = CUBINS[version]
    for size in [*range(0, len(image), 11), *range(len(image) - 300, len(image))]:
        with pytest.raises(ValueError, match=r"."):
            read_cubin_elf(image[:size])


@given(images, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_changed_anywhere_raise_nothing_but_value_error(image: bytes, changes: list[tuple[int, int]]) -> None:
    changed = bytearray(image)
    for place, value in changes:
        changed[place % len(image)] = value
    _reads_or_refuses(bytes(changed))


@given(images, st.integers(0, 63), st.integers(0, 255), st.integers(0, 1 << 20), st.integers(0, 255))
def test_bytes_changed_in_the_headers_raise_nothing_but_value_error(
    image: bytes, place: int, value: int, section_place: int, section_value: int
) -> None:
    (table,) = struct.unpack_from("<Q", image, SECTION_TABLE)
    count = struct.unpack_from("<H", image, 60)[0]
    changed = bytearray(image)
    changed[table + section_place % (count * 64)] = section_value
    _reads_or_refuses(bytes(changed))
    changed[place] = value
    _reads_or_refuses(bytes(changed))


@pytest.mark.parametrize("version", CUBINS)
@pytest.mark.parametrize("value", [0, 0x7F, 0xFF])
def test_any_one_byte_of_the_file_header_may_be_wrong(version: str, value: int) -> None:
    for place in range(64):
        changed = bytearray(CUBINS[version])
        changed[place] = value
        _reads_or_refuses(bytes(changed))

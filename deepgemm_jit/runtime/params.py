"""Parameters of kernels: the memory in which a thread lays out those of the launch it is making.

The driver copies parameters during the launch call, so one buffer per thread is reused.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

MAP_BYTES = 128
_MOST_MAPS = 4
_MOST_ARGUMENT_BYTES = 128
_MAP_ALIGNMENT = 64
_POINTERS = struct.Struct(f"@{_MOST_MAPS + 1}P")
"""To each map and to the arguments behind the last; a kernel reads as many as it has parameters."""


class Launch(NamedTuple):
    """What a launch needs beside a kernel and a stream; the parameters last until this thread prepares its next launch.

    The blocks of a cluster are neighbours in the first dimension of the grid. A dependent launch starts while the kernels
    before it in the stream end, and waits for them itself.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params_pointer: int
    cluster: int = 1
    dependent: bool = False


class KeptLaunch(NamedTuple):
    """A launch whose parameters last as long as this value, whatever the thread prepares next; threads may share it."""

    launch: Launch
    memory: object
    """Owns what the launch points to."""


class _Buffer(threading.local):
    def __init__(self) -> None:
        size = _MOST_MAPS * MAP_BYTES + _MOST_ARGUMENT_BYTES
        self._memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT - 1)
        address = ctypes.addressof(self._memory)
        offset = -address % _MAP_ALIGNMENT
        base = self.base = address + offset
        self.view = memoryview(self._memory).cast("B")[offset : offset + size]
        # Arrays of pointers, by number of maps: to each map, and to the arguments behind them.
        self._pointers = [
            (ctypes.c_void_p * (maps + 1))(*(base + at * MAP_BYTES for at in range(maps + 1))) for maps in range(_MOST_MAPS + 1)
        ]
        self.pointers = [ctypes.addressof(array) for array in self._pointers]


_buffer = _Buffer()


def lay_out(layout: struct.Struct, values: Sequence[int | float], maps: Sequence[bytes] = ()) -> int:
    """Lay out tensor maps and one struct of arguments; return the address of the array of pointers to them."""
    view = _buffer.view
    at = 0
    for encoded in maps:
        view[at : at + MAP_BYTES] = encoded
        at += MAP_BYTES
    layout.pack_into(view, at, *values)
    return _buffer.pointers[len(maps)]


def keep(launch: Launch) -> KeptLaunch:
    """Copy the parameters of the launch that this thread prepared last into memory of their own."""
    maps = _buffer.pointers.index(launch.params_pointer)
    size = maps * MAP_BYTES + _MOST_ARGUMENT_BYTES
    memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT - 1 + _POINTERS.size)
    address = ctypes.addressof(memory)
    base = address + -address % _MAP_ALIGNMENT
    ctypes.memmove(base, _buffer.base, size)
    pointers = base + size
    _POINTERS.pack_into(memory, pointers - address, *range(base, base + _MOST_MAPS * MAP_BYTES + 1, MAP_BYTES))
    return KeptLaunch(launch._replace(params_pointer=pointers), memory)

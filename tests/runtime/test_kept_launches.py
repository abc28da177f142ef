"""Launches that are kept have parameters of their own, laid out as a thread lays out those of its next launch."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest

from deepgemm_jit.runtime import KeptLaunch, Launch, keep
from deepgemm_jit.runtime.params import MAP_BYTES, lay_out

pytestmark = pytest.mark.none

LAYOUT = struct.Struct("<QQI4x")
GRID, BLOCK = (132, 1, 1), (384, 1, 1)


def prepared(maps: int, seed: int) -> Launch:
    return Launch(
        GRID, BLOCK, lay_out(LAYOUT, (seed, seed + 1, seed + 2), [bytes([seed + number]) * MAP_BYTES for number in range(maps)])
    )


def assert_holds(launch: Launch, maps: int, seed: int) -> None:
    addresses = list((ctypes.c_void_p * (maps + 1)).from_address(launch.params_pointer))
    assert all(address % 64 == 0 for address in addresses[:maps])
    assert [ctypes.string_at(address, MAP_BYTES) for address in addresses[:maps]] == [
        bytes([seed + number]) * MAP_BYTES for number in range(maps)
    ]
    assert LAYOUT.unpack(ctypes.string_at(addresses[maps], LAYOUT.size)) == (seed, seed + 1, seed + 2)


@pytest.mark.parametrize("maps", range(5))
def test_what_is_kept_outlasts_the_next_launches_of_the_thread(maps: int) -> None:
    kept = [keep(prepared(maps, seed)) for seed in range(1, 60)]
    assert prepared(maps, 99).params_pointer == prepared(maps, 98).params_pointer, "a thread has one buffer"
    for seed, one in enumerate(kept, 1):
        assert (one.launch.grid, one.launch.block) == (GRID, BLOCK)
        assert_holds(one.launch, maps, seed)


def test_a_launch_kept_by_one_thread_is_whole_in_another_after_the_first_has_ended() -> None:
    made: list[KeptLaunch] = []
    thread = threading.Thread(target=lambda: made.append(keep(prepared(3, 7))))
    thread.start()
    thread.join()
    prepared(3, 99)
    assert_holds(made[0].launch, 3, 7)

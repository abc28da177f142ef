"""The memo of tensor maps: encoded once, those used last stay, and threads agree."""

from __future__ import annotations

import threading

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.errors import DriverError
from deepgemm_jit.runtime import TensorMaps, tensormap
from deepgemm_jit.runtime.tensormap import BoxedTensor

pytestmark = pytest.mark.none


def boxed(address: int, rows: int = 64) -> BoxedTensor:
    return BoxedTensor(address, "u8", (128, rows, 1), (128, 128), (128, 64, 1), swizzled=True)


@pytest.fixture
def driver() -> DriverDouble:
    return DriverDouble()


def test_a_map_is_encoded_once_for_each_different_tensor(driver: DriverDouble) -> None:
    maps = TensorMaps(driver)
    first = maps.map_for(boxed(0x100))
    assert len(first) == 128
    assert maps.map_for(boxed(0x100)) is first
    assert maps.map_for(boxed(0x200)) != first
    assert maps.map_for(boxed(0x100, rows=65)) != first
    assert driver.calls["encode_tiled_map"] == 3


def test_what_is_used_again_and_again_outlives_passing_addresses(driver: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "_CAPACITY", 8)
    maps, weights = TensorMaps(driver), boxed(0x100)
    kept = maps.map_for(weights)
    for passing in range(100):
        maps.map_for(boxed(0x1000 + 0x100 * passing))
        assert maps.map_for(weights) is kept
    assert driver.calls["encode_tiled_map"] == 101
    maps.map_for(boxed(0x1000))  # one that had to go is encoded again
    assert driver.calls["encode_tiled_map"] == 102


def test_a_refusal_is_not_kept(driver: DriverDouble) -> None:
    maps = TensorMaps(driver)
    driver.fail_next("encode_tiled_map", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        maps.map_for(boxed(0x100))
    assert len(maps.map_for(boxed(0x100))) == 128


def test_threads_get_the_right_maps_while_others_are_thrown_out(driver: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "_CAPACITY", 4)
    maps = TensorMaps(driver)
    expected = {address: TensorMaps(driver).map_for(boxed(address)) for address in range(0x100, 0xB00, 0x100)}
    wrong: list[object] = []

    def ask() -> None:
        try:
            wrong.extend(address for _ in range(50) for address in expected if maps.map_for(boxed(address)) != expected[address])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

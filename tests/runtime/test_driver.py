"""Driver: nothing before the first call, and a typed error for whatever goes wrong after it."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings.driver import (  # the real ones: plain memory, which needs no driver
    CUlaunchAttribute,
    CUlaunchAttributeID,
    CUlaunchConfig,
    CUstream,
)
from doubles.driver import DriverDouble
from doubles.fork import holds_in_fork

from deepgemm_jit.errors import DriverError, ToolchainError
from deepgemm_jit.runtime import Driver, driver_report
from deepgemm_jit.runtime.report import Gpu

pytestmark = pytest.mark.none


RESULTS = {
    0: "CUDA_SUCCESS",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    100: "CUDA_ERROR_NO_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}


class Result(int):
    """A CUresult as the bindings give it: an int with a name."""

    @property
    def name(self) -> str:
        return RESULTS[self]


def returns(code: int, *values: Any) -> Any:
    return lambda *arguments: (Result(code), *values)


def lacks(*arguments: Any) -> Any:
    raise RuntimeError('Function "that" not found')


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Bindings whose calls a test writes itself; CUDA starts."""
    fake = SimpleNamespace(
        cuInit=returns(0),
        cuGetErrorString=returns(0, b"what the driver says"),
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16),
        cuDeviceGetAttribute=returns(0, 132),
    )
    monkeypatch.setattr(cuda.bindings, "driver", fake, raising=False)
    return fake


def test_a_missing_driver_is_asked_for_once_and_named_every_time(bindings: SimpleNamespace) -> None:
    attempts = []

    def no_libcuda(flags: int) -> Any:
        attempts.append(flags)
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings.cuInit = no_libcuda
    driver = Driver()
    for _ in range(3):
        with pytest.raises(DriverError, match=r"cuInit returned no driver .*libcuda\.so\.1") as refused:
            driver.device_count()
        assert isinstance(refused.value.__cause__, RuntimeError)
    assert attempts == [0]


def test_no_visible_gpu_points_to_the_variable_that_hides_them(bindings: SimpleNamespace) -> None:
    bindings.cuInit = returns(100)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_NO_DEVICE .*CUDA_VISIBLE_DEVICES"):
        Driver().start()


def test_missing_bindings_name_the_package_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError, match="cuda-python"):
        Driver().driver_version()


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig as cuda.h has it."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def attributes_at(address: int, number: int) -> tuple[int, tuple[int, ...]]:
    """Return the id of a CUlaunchAttribute and the first three words of its value, as cuda.h lays them out."""
    words = (ctypes.c_uint * 18).from_address(address + 72 * number)
    return words[0], tuple(words[2:5])


@pytest.fixture
def launches(bindings: SimpleNamespace) -> list[tuple[Any, ...]]:
    """What cuLaunchKernelEx is given, at its C signature; it fails with the number of a function."""
    seen: list[tuple[Any, ...]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(config: int, function: int, params: int, extra: int) -> int:
        given = LaunchConfig.from_address(config)
        sizes = tuple(given.grid), tuple(given.block), given.shared_memory_bytes
        attributes = [attributes_at(given.attributes, number) for number in range(given.attribute_count)]
        seen.append((*sizes, given.stream, attributes, params, extra))
        return function or 0

    asked: list[tuple[Any, ...]] = []

    def address_of(*arguments: Any) -> Any:
        asked.append(arguments)
        assert asked == [(b"cuLaunchKernelEx", 11080, 1)], "asked for once, and for the entry of the legacy stream"
        return Result(0), ctypes.cast(launch, ctypes.c_void_p).value, 0

    bindings.CUlaunchConfig, bindings.CUstream, bindings.CUresult = CUlaunchConfig, CUstream, Result
    bindings.CUlaunchAttribute, bindings.CUlaunchAttributeID = CUlaunchAttribute, CUlaunchAttributeID
    bindings.CUdriverProcAddress_flags = SimpleNamespace(CU_GET_PROC_ADDRESS_LEGACY_STREAM=1)
    bindings.cuGetProcAddress = address_of
    bindings.keep = launch
    return seen


def test_a_launch_gives_the_driver_what_it_was_given(bindings: SimpleNamespace, launches: list[tuple[Any, ...]]) -> None:
    driver = Driver()
    for stream in (0, 0x7F00_0000_1230, 0):
        driver.launch(0, (132, 2, 3), (384, 4, 5), 232448, stream, 0x7F00_0000_0040)
    for sizes, stream in zip(launches, (None, 0x7F00_0000_1230, None), strict=True):
        assert sizes == ((132, 2, 3), (384, 4, 5), 232448, stream, [], 0x7F00_0000_0040, None)


@pytest.mark.parametrize(
    ("cluster", "dependent", "attributes"),
    [(1, False, []), (4, False, [(4, (4, 1, 1))]), (1, True, [(6, (1, 0, 0))]), (2, True, [(4, (2, 1, 1)), (6, (1, 0, 0))])],
)
def test_clusters_and_dependent_launches_are_attributes(
    launches: list[tuple[Any, ...]], cluster: int, dependent: bool, attributes: list[tuple[int, Any]]
) -> None:
    Driver().launch(0, (132, 1, 1), (384, 1, 1), 0, 0, 0, cluster, dependent)
    assert launches[0][4] == attributes


def test_a_failed_call_names_itself_its_result_and_the_drivers_words(bindings: SimpleNamespace, launches: list[Any]) -> None:
    with pytest.raises(DriverError) as refused:
        Driver().launch(400, (1, 1, 1), (32, 1, 1), 0, 0, 0)
    assert (refused.value.call, refused.value.result) == ("cuLaunchKernelEx", "CUDA_ERROR_INVALID_HANDLE")
    assert refused.value.detail == "what the driver says"


@pytest.mark.parametrize("answer", [lacks, returns(801, None)], ids=["no entry point", "not supported"])
def test_what_an_older_driver_lacks_has_a_stand_in(bindings: SimpleNamespace, answer: Any) -> None:
    bindings.cuCtxGetDevResource = bindings.cuStreamGetGreenCtx = bindings.cuFuncLoad = answer
    driver = Driver()
    assert driver.context_sms(1, 0) == 132
    assert not driver.stream_is_green(0)
    driver.finish_loading(1)


def test_a_refused_question_about_sms_is_an_error_not_the_whole_gpu(bindings: SimpleNamespace) -> None:
    bindings.cuCtxGetDevResource = returns(400, None)
    with pytest.raises(DriverError, match="cuCtxGetDevResource returned CUDA_ERROR_INVALID_HANDLE"):
        Driver().context_sms(1, 0)


def test_the_sms_are_those_of_the_context(bindings: SimpleNamespace) -> None:
    bindings.cuCtxGetDevResource = returns(0, SimpleNamespace(sm=SimpleNamespace(smCount=16)))
    assert Driver().context_sms(1, 0) == 16


@pytest.mark.parametrize(("code", "context_id"), [(0, 7), (201, None), (709, None)])
def test_a_context_that_is_gone_has_no_id(bindings: SimpleNamespace, code: int, context_id: int | None) -> None:
    bindings.cuCtxGetId = returns(code, 7)
    assert Driver().try_context_id(0x10) == context_id
    assert Driver().try_current_context_id() == context_id


def test_any_other_failure_to_tell_a_context_is_an_error(bindings: SimpleNamespace) -> None:
    bindings.cuCtxGetId = returns(400, None)
    with pytest.raises(DriverError, match="cuCtxGetId"):
        Driver().try_current_context_id()


@pytest.mark.parametrize("names", [["cuDeviceGetUuid", "cuDeviceGetUuid_v2"], ["cuDeviceGetUuid"]], ids=["CUDA 12", "CUDA 13"])
def test_the_uuid_is_the_one_that_tells_mig_instances_apart(bindings: SimpleNamespace, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        setattr(bindings, name, returns(0, SimpleNamespace(bytes=bytes([number]) * 16)))
    digit = str(len(names))
    assert Driver().device_uuid(0) == "-".join(("0" + digit) * count for count in (4, 2, 2, 2, 6))


def test_a_fork_after_cuda_was_started_is_told_from_other_failures(bindings: SimpleNamespace) -> None:
    bindings.cuDeviceGetCount = returns(0, 1)
    driver = Driver()
    assert driver.device_count() == 1
    parent = os.getpid()

    def in_child() -> bool:
        bindings.cuDeviceGetCount = returns(3, None)
        try:
            driver.device_count()
        except DriverError as error:
            return f"started in process {parent} before it forked" in str(error) and "spawn" in str(error)
        return False

    assert holds_in_fork(in_child)


def test_the_report_says_what_there_is() -> None:
    report = driver_report(DriverDouble(gpus=2))
    assert (report.version, report.error, len(report.gpus)) == ((13, 0), None, 2)
    assert report.gpus[1] == Gpu(1, "NVIDIA H200", (9, 0), "00000000-0000-0000-0000-000000000001")


def test_the_report_asks_for_no_context() -> None:
    double = DriverDouble(gpus=2)
    driver_report(double)
    assert not double.calls.keys() & {"retain_primary", "push_context", "primary_is_active"}


def test_the_report_of_a_machine_without_a_driver_is_the_error(bindings: SimpleNamespace) -> None:
    bindings.cuInit = lacks
    report = driver_report()
    assert (report.version, report.gpus) == (None, ())
    assert report.error is not None and "cuInit" in report.error


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(value) for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


def test_the_double_stands_in_for_every_method() -> None:
    real, double = methods(Driver), methods(DriverDouble)
    assert real.keys() <= double.keys()
    assert {name: list(double[name].parameters) for name in real} == {name: list(real[name].parameters) for name in real}

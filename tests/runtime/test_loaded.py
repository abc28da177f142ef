"""A loaded kernel launches in its own context only; every refusal comes before the driver is reached."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
from doubles.driver import DriverDouble
from doubles.fork import holds_in_fork

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import (
    CaptureError,
    ContextMismatchError,
    DriverError,
    ForkedProcessError,
    StaleContextError,
    UnloadedKernelError,
)
from deepgemm_jit.runtime import Contexts, Launch, LoadedKernel, load_kernel
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

pytestmark = pytest.mark.none

GEMM = max((spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM), key=dynamic_shared_memory_bytes)
SMALL = next(spec for spec in kernel_set("sm_90a") if dynamic_shared_memory_bytes(spec) == 0)


@pytest.fixture
def driver() -> DriverDouble:
    double = DriverDouble(gpus=2)
    double.push_context(double.retain_primary(0))
    return double


@pytest.fixture
def contexts(driver: DriverDouble) -> Contexts:
    return Contexts(driver)


def load(contexts: Contexts, spec: KernelSpec = GEMM) -> LoadedKernel:
    facts = CubinFacts(registers=168, shared_memory_bytes=0, local_memory_bytes=0, spill_store_bytes=0, spill_load_bytes=0)
    cubin = Cubin(image=b"cubin", arch=spec.arch, entry=spec.name, nvrtc_version="13.0", options=(), facts=facts)
    return load_kernel(contexts, contexts.current(), spec, cubin)


def launch(kernel: LoadedKernel, stream: int = 0) -> None:
    kernel.launch((kernel.sms, 1, 1), (384, 1, 1), stream, 0)


def assert_untouched(driver: DriverDouble) -> None:
    assert driver.calls["launch"] == 0
    assert driver.launches == []


def test_it_launches_in_its_context_with_its_shared_memory(driver: DriverDouble, contexts: Contexts) -> None:
    stream = driver.create_stream(driver.current_context())
    launch(load(contexts), stream)
    (done,) = driver.launches
    assert (done.grid, done.block, done.stream) == ((132, 1, 1), (384, 1, 1), stream)
    assert done.shared_memory_bytes == dynamic_shared_memory_bytes(GEMM) > 200_000


def test_the_driver_itself_would_not_have_caught_it_early(driver: DriverDouble, contexts: Contexts) -> None:
    # What the double does with a foreign function, so that the tests below show more than the double's own refusal.
    kernel = load(contexts, SMALL)
    driver.push_context(driver.create_context(0))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
        driver.launch(kernel._function, (1, 1, 1), (32, 1, 1), 0, 0, 0)


@pytest.mark.parametrize("other", ["a second context of the GPU", "a second GPU"])
@pytest.mark.parametrize("direction", ["loaded in the first", "loaded in the second"])
def test_another_context_is_refused_and_both_are_named(
    driver: DriverDouble, contexts: Contexts, other: str, direction: str
) -> None:
    first = driver.current_context()
    second = driver.create_context(0) if other == "a second context of the GPU" else driver.retain_primary(1)
    home, away = (first, second) if direction == "loaded in the first" else (second, first)
    driver.push_context(home)
    kernel = load(contexts)
    driver.push_context(away)
    with pytest.raises(ContextMismatchError) as refused:
        launch(kernel)
    assert refused.value.what == f"kernel {GEMM.name}"
    assert refused.value.belongs_to == kernel.context.describe()
    assert refused.value.used_in == contexts.current().describe() != refused.value.belongs_to
    assert_untouched(driver)
    driver.push_context(home)
    launch(kernel)
    assert len(driver.launches) == 1


def test_a_green_context_is_another_context(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    driver.push_context(driver.create_green_context(0, sms=16))
    with pytest.raises(ContextMismatchError, match="green"):
        launch(kernel)
    assert_untouched(driver)
    assert load(contexts).sms == 16


def test_a_stream_of_another_context_is_refused_and_both_are_named(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    foreign = driver.retain_primary(1)
    stream = driver.create_stream(foreign)
    with pytest.raises(ContextMismatchError) as refused:
        launch(kernel, stream)
    assert refused.value.what == f"stream {stream:#x}"
    assert "of GPU 1" in refused.value.belongs_to
    assert kernel.context.describe() in refused.value.used_in
    assert_untouched(driver)


def test_a_thread_without_a_context_is_refused(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    driver.pop_context()
    with pytest.raises(ContextMismatchError, match="a thread without a CUDA context"):
        launch(kernel)
    assert_untouched(driver)


@pytest.mark.parametrize("retained_again", [False, True], ids=["nothing there", "the next context is current"])
def test_a_reset_context_is_stale_although_its_address_is_the_same(
    driver: DriverDouble, contexts: Contexts, retained_again: bool
) -> None:
    kernel = load(contexts)
    driver.reset_primary(0)
    if retained_again:
        assert driver.retain_primary(0) == kernel.context.handle == driver.current_context()
    with pytest.raises(StaleContextError) as refused:
        launch(kernel)
    assert refused.value.belongs_to == kernel.context.describe()
    assert_untouched(driver)


def test_a_destroyed_context_is_stale(driver: DriverDouble, contexts: Contexts) -> None:
    own = driver.create_context(0)
    driver.push_context(own)
    kernel = load(contexts)
    driver.pop_context()
    driver.destroy_context(own)
    with pytest.raises(StaleContextError, match="own"):
        launch(kernel)
    assert_untouched(driver)


def test_a_kernel_carried_over_a_fork_is_refused_without_touching_the_driver(driver: DriverDouble, contexts: Contexts) -> None:
    kernel, parent = load(contexts), os.getpid()

    def in_child() -> bool:
        driver.calls.clear()
        try:
            launch(kernel)
        except ForkedProcessError as error:
            return (error.loaded_pid, error.pid) == (parent, os.getpid()) and not driver.calls
        return False

    assert holds_in_fork(in_child)
    launch(kernel)
    assert len(driver.launches) == 1


# --- unloading


def test_an_unloaded_kernel_is_refused_and_its_code_is_gone(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    launch(kernel)
    kernel.unload()
    assert driver.libraries_loaded == 0
    assert driver.calls["synchronize"] == 1
    for use in (lambda: launch(kernel), kernel.unload):
        with pytest.raises(UnloadedKernelError, match=GEMM.name):
            use()
    assert len(driver.launches) == driver.calls["launch"] == 1


def test_unloading_waits_for_a_launch_on_its_way_and_refuses_the_next(driver: DriverDouble, contexts: Contexts) -> None:
    kernel, home = load(contexts), driver.current_context()
    launching, go_on = threading.Event(), threading.Event()

    def in_launch() -> None:
        launching.set()
        assert go_on.wait(60)

    def in_the_context(work: Callable[[], None]) -> threading.Thread:
        def entered() -> None:
            driver.push_context(home)
            work()

        thread = threading.Thread(target=entered)
        thread.start()
        return thread

    driver.in_launch = in_launch
    first = in_the_context(lambda: launch(kernel))
    assert launching.wait(60)
    second = in_the_context(kernel.unload)
    while not kernel._use.closed:
        time.sleep(0.001)
    with pytest.raises(UnloadedKernelError):
        launch(kernel)
    assert driver.libraries_loaded == 1, "unloaded under a launch"
    go_on.set()
    for thread in (first, second):
        thread.join()
    assert (driver.libraries_loaded, len(driver.launches)) == (0, 1)


def test_unloading_under_a_capture_is_refused_and_the_kernel_stays(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    stream = driver.create_stream(driver.current_context())
    driver.begin_capture(stream)
    with pytest.raises(CaptureError, match=GEMM.name):
        kernel.unload()
    launch(kernel, stream)
    driver.end_capture(stream)
    kernel.unload()
    assert driver.libraries_loaded == 0


def test_unloading_in_another_context_or_process_is_refused(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)

    def in_child() -> bool:
        try:
            kernel.unload()
        except ForkedProcessError:
            return True
        return False

    assert holds_in_fork(in_child)
    driver.push_context(driver.retain_primary(1))
    with pytest.raises(ContextMismatchError):
        kernel.unload()
    driver.reset_primary(0)
    with pytest.raises(StaleContextError):
        kernel.unload()
    assert driver.libraries_loaded == 1


def test_the_entered_context_must_be_the_kernels_own(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    entered, pushed = contexts.enter(1, 0)
    with pytest.raises(ContextMismatchError) as refused:
        kernel.launch_entered(entered, kernel.config_for(Launch((1, 1, 1), (32, 1, 1), 0), 0).getPtr(), 0)
    contexts.leave(pushed)
    assert refused.value.used_in == entered.describe()
    assert_untouched(driver)
    entered, pushed = contexts.enter(0, 0)
    kernel.launch_entered(entered, kernel.config_for(Launch((1, 1, 1), (32, 1, 1), 0), 0).getPtr(), 0)
    contexts.leave(pushed)
    assert len(driver.launches) == 1


def test_the_shared_memory_attribute_is_set_once_in_each_context(driver: DriverDouble, contexts: Contexts) -> None:
    for device in (0, 1):
        driver.push_context(driver.retain_primary(device))
        kernel = load(contexts)
        launch(kernel)
        launch(kernel)
    assert driver.calls["set_dynamic_shared_memory"] == 2
    assert len(driver.launches) == 4


def test_a_kernel_without_dynamic_shared_memory_sets_nothing(driver: DriverDouble, contexts: Contexts) -> None:
    launch(load(contexts, SMALL))
    assert driver.calls["set_dynamic_shared_memory"] == 0


@pytest.mark.parametrize("step", ["library_kernel", "kernel_function", "set_dynamic_shared_memory", "finish_loading"])
def test_a_load_that_fails_in_any_step_leaves_nothing_behind(driver: DriverDouble, contexts: Contexts, step: str) -> None:
    driver.fail_next(step, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        load(contexts)
    assert driver.libraries_loaded == 0


def test_loading_leaves_nothing_for_the_first_launch(driver: DriverDouble, contexts: Contexts) -> None:
    kernel = load(contexts)
    driver.calls.clear()
    launch(kernel)
    assert driver.calls.keys() == {"start", "try_current_context_id", "launch"}


def test_a_load_under_capture_works_where_the_driver_allows_it(driver: DriverDouble, contexts: Contexts) -> None:
    stream = driver.create_stream(driver.current_context())
    driver.begin_capture(stream)
    launch(load(contexts), stream)
    assert len(driver.launches) == 1


def test_a_load_that_a_capture_forbids_names_the_kernel_and_can_be_made_later(driver: DriverDouble, contexts: Contexts) -> None:
    driver.refuses_load_in_capture = True
    stream = driver.create_stream(driver.current_context())
    driver.begin_capture(stream)
    with pytest.raises(CaptureError) as refused:
        load(contexts)
    assert (refused.value.kernel, refused.value.result) == (GEMM.name, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    assert "KernelService.kernel" in str(refused.value)
    assert_untouched(driver)
    driver.end_capture(stream)
    kernel = load(contexts)
    driver.begin_capture(stream)
    launch(kernel, stream)
    assert len(driver.launches) == 1

"""The service: one build per kernel, one load per context, and nothing but a look-up after that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.driver import DriverDouble
from doubles.fork import holds_in_fork

from deepgemm_jit.builder import Builder
from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import (
    CaptureError,
    CompileError,
    ContextMismatchError,
    DriverError,
    ForkedProcessError,
    KernelNotBuiltError,
    OperandError,
    UnsupportedError,
)
from deepgemm_jit.runtime import Launch
from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, Limits, Overlap, kernel_set

pytestmark = pytest.mark.none

GEMM = next(spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM)


class CountingBuilder:
    """Builds at once and counts: what the service asks of its builder is the thing under test."""

    def __init__(self) -> None:
        self.built: list[tuple[KernelSpec, int | None]] = []
        self.settings = read_settings()
        self.policy = "auto"
        self.failure: Exception | None = None
        self.pause_s = 0.0
        """Time for other threads to come to the same kernel."""

    def set_policy(self, policy: str, origin: str = "") -> None:
        self.policy = policy

    def build(self, spec: KernelSpec, max_cuda_major: int | None = None, caller: str = "") -> Any:
        self.built.append((spec, max_cuda_major))
        time.sleep(self.pause_s)
        if self.policy == "never":
            raise KernelNotBuiltError(kernel=spec.name, store="here", command="deepgemm-jit warmup --arch sm_90a")
        if self.failure is not None:
            raise self.failure
        facts = CubinFacts(registers=168, shared_memory_bytes=0, local_memory_bytes=0, spill_store_bytes=0, spill_load_bytes=0)
        cubin = Cubin(image=b"cubin", arch=spec.arch, entry=spec.name, nvrtc_version="13.0", options=(), facts=facts)
        return SimpleNamespace(cubin=cubin, outcome="cached")

    def request(self, spec: KernelSpec) -> Any:
        return SimpleNamespace(key=spec.name)


@pytest.fixture
def driver() -> DriverDouble:
    return DriverDouble(gpus=2)


@pytest.fixture
def builder() -> CountingBuilder:
    return CountingBuilder()


@pytest.fixture
def service(driver: DriverDouble, builder: CountingBuilder) -> KernelService:
    return KernelService(builder=builder, driver=driver)  # type: ignore[arg-type]


def run(service: KernelService, device: int, stream: int = 0) -> None:
    """Do what an operation does."""
    with service.call(device, stream) as call:
        call.kernel(GEMM).launch((call.limits.sms, 1, 1), (384, 1, 1), stream, 0)


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """Run ``work(0)``, ``work(1)``, ... at once in as many threads; return what they raised."""
    barrier, raised = threading.Barrier(count), []

    def one(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_making_a_service_touches_neither_driver_nor_disk(driver: DriverDouble, cache_dir: Path) -> None:
    KernelService(driver=driver)
    assert not driver.calls
    assert not cache_dir.exists()


def test_both_gpus_of_a_process_get_a_load_each_of_one_build(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    for device in (0, 1, 0, 1):
        run(service, device)
    assert builder.built == [(GEMM, 13)]
    assert driver.calls["load_library"] == driver.calls["set_dynamic_shared_memory"] == 2
    first, second = driver.launches[:2]
    assert first.function != second.function
    assert [done.function for done in driver.launches] == [first.function, second.function] * 2
    assert driver.current_context() == 0


def test_a_hit_asks_for_the_context_and_launches_and_nothing_else(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.push_context(driver.retain_primary(0))
    run(service, 0)
    builder.built.clear()
    driver.calls.clear()
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "nonsense")  # would raise if a setting were read
    run(service, 0)
    assert builder.built == []
    assert driver.calls.keys() == {"start", "try_current_context_id", "launch"}


def test_eight_threads_at_first_touch_build_once_and_load_once(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    builder.pause_s = 0.05
    assert in_threads(8, lambda number: run(service, 0)) == []
    assert len(builder.built) == driver.calls["load_library"] == 1
    assert len(driver.launches) == 8


def test_eight_threads_on_two_gpus_build_once_and_load_twice(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    builder.pause_s = 0.05
    assert in_threads(8, lambda number: run(service, number % 2)) == []
    assert len(builder.built) == 1
    assert driver.calls["load_library"] == 2


def test_the_current_context_has_its_own_kernel(driver: DriverDouble, service: KernelService) -> None:
    driver.push_context(driver.create_context(0))
    own = service.kernel(GEMM)
    driver.push_context(driver.retain_primary(0))
    primary = service.kernel(GEMM)
    assert own is not primary
    assert service.kernel(GEMM) is primary
    with pytest.raises(ContextMismatchError):
        own.launch((1, 1, 1), (384, 1, 1), 0, 0)
    assert driver.launches == []


@pytest.mark.parametrize("fails", ["kernel", "launch"])
def test_the_callers_context_is_restored_when_the_call_raises(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService, fails: str
) -> None:
    home = driver.retain_primary(0)
    driver.push_context(home)
    if fails == "kernel":
        builder.failure = RuntimeError("no")
    else:
        driver.fail_next("launch", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    with pytest.raises(RuntimeError):
        run(service, 1)
    assert driver.current_context() == home


def test_after_a_reset_the_kernel_is_loaded_again_and_not_built(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    run(service, 0)
    driver.reset_primary(0)
    run(service, 0)
    assert len(builder.built) == 1
    assert driver.calls["load_library"] == 2
    assert driver.launches[0].context_id != driver.launches[1].context_id


def test_a_failed_attribute_is_an_error_and_is_set_again_next_time(driver: DriverDouble, service: KernelService) -> None:
    driver.fail_next("set_dynamic_shared_memory", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        run(service, 0)
    assert driver.launches == []
    run(service, 0)
    assert driver.calls["set_dynamic_shared_memory"] == 2
    assert len(driver.launches) == 1


def test_a_cold_kernel_under_a_capture_that_forbids_loads_is_refused_and_a_warm_one_launches(
    driver: DriverDouble, service: KernelService
) -> None:
    driver.refuses_load_in_capture = True
    stream = driver.create_stream(driver.retain_primary(0))
    driver.begin_capture(stream)
    with pytest.raises(CaptureError, match=GEMM.name):
        run(service, 0, stream)
    assert driver.launches == []
    driver.end_capture(stream)
    run(service, 0, stream)
    driver.begin_capture(stream)
    run(service, 0, stream)
    assert len(driver.launches) == 2


def test_a_capture_goes_on_after_a_cold_kernel_was_refused_in_it(driver: DriverDouble, service: KernelService) -> None:
    driver.refuses_load_in_capture = True
    stream = driver.create_stream(driver.retain_primary(0))
    run(service, 0, stream)
    driver.begin_capture(stream)
    cold = next(spec for spec in kernel_set("sm_90a") if spec != GEMM)
    for _ in range(2):
        with service.call(0, stream) as call, pytest.raises(CaptureError, match=cold.name):
            call.kernel(cold)
        run(service, 0, stream)
    assert len(driver.launches) == 3
    driver.end_capture(stream)
    with service.call(0, stream) as call:
        assert call.kernel(cold).spec == cold


def test_limits_are_those_of_the_context_and_asked_for_once(driver: DriverDouble, service: KernelService) -> None:
    driver.push_context(driver.retain_primary(0))
    assert service.limits() == Limits("sm_90a", 132, 227 * 1024)
    driver.push_context(driver.create_green_context(0, sms=16))
    assert service.limits() == Limits("sm_90a", 16, 227 * 1024)
    asked = driver.calls["context_sms"]
    assert service.limits().sms == 16
    assert driver.calls["context_sms"] == asked == 2


def test_a_call_on_a_green_stream_gets_the_green_sm_count(driver: DriverDouble, service: KernelService) -> None:
    driver.retain_primary(0)
    stream = driver.create_stream(driver.create_green_context(0, sms=16))
    run(service, 0, stream)
    run(service, 0)
    assert [done.grid[0] for done in driver.launches] == [16, 132]


def test_a_compile_error_is_told_again_without_another_compile(builder: CountingBuilder, service: KernelService) -> None:
    builder.failure = CompileError(kernel=GEMM.name, options=["-std=c++20"], log="error: no", source="x")
    raised = []
    for device in (0, 1, 0):
        with pytest.raises(CompileError, match="error: no") as refused:
            run(service, device)
        raised.append(refused.value)
    assert len(builder.built) == 1
    assert len({id(error) for error in raised}) == 3  # a fresh one each time: a traceback belongs to one raise


def test_a_compile_error_that_is_told_again_has_its_cause(builder: CountingBuilder, service: KernelService) -> None:
    cause = ValueError("no cubin")
    builder.failure = CompileError(kernel=GEMM.name, options=[], log="error: no", source="x")
    builder.failure.__cause__ = cause
    for _ in range(3):
        with pytest.raises(CompileError) as refused:
            run(service, 0)
        assert refused.value.__cause__ is cause


def test_threads_that_wait_for_a_failing_compile_get_its_error(builder: CountingBuilder, service: KernelService) -> None:
    builder.failure = CompileError(kernel=GEMM.name, options=[], log="error: no", source="x")
    raised = in_threads(8, lambda number: run(service, 0))
    assert [type(error) for error in raised] == [CompileError] * 8
    assert len(builder.built) == 1


def test_a_kernel_that_was_not_built_is_asked_for_again(builder: CountingBuilder, service: KernelService) -> None:
    service.seal()
    for _ in range(2):
        with pytest.raises(KernelNotBuiltError, match=GEMM.name):
            run(service, 0)
    builder.set_policy("auto")
    run(service, 0)
    assert len(builder.built) == 3


def test_a_sealed_service_still_serves_what_it_has(driver: DriverDouble, service: KernelService) -> None:
    run(service, 0)
    service.seal()
    run(service, 0)
    run(service, 1)  # loads in another context, from the bytes it kept
    assert len(driver.launches) == 3


def test_sealing_sets_the_policy_of_a_real_builder(driver: DriverDouble) -> None:
    service = KernelService(settings=read_settings(compile="auto"), driver=driver)
    service.seal()
    assert service.builder.settings.compile == "never"
    with pytest.raises(KernelNotBuiltError, match=GEMM.name):
        run(service, 0)


def test_a_seal_is_not_lost_to_a_builder_that_another_thread_is_making(
    driver: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, sealed = threading.Event(), threading.Event()
    main = threading.current_thread()

    def slowly_elsewhere(settings: Any) -> Builder:
        if threading.current_thread() is not main:
            making.set()
            assert sealed.wait(60)
        return Builder(settings)

    monkeypatch.setattr("deepgemm_jit.service.service.Builder", slowly_elsewhere)
    service = KernelService(driver=driver)
    thread = threading.Thread(target=lambda: service.builder)
    thread.start()
    assert making.wait(60)
    service.seal()
    sealed.set()
    thread.join()
    assert service.builder.settings.compile == "never"


def test_a_gpu_without_kernels_is_refused_with_those_that_have(builder: CountingBuilder) -> None:
    driver = DriverDouble(capability=(8, 0))
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.0; supported: sm_90a"):
        run(KernelService(builder=builder, driver=driver), 0)  # type: ignore[arg-type]
    assert driver.current_context() == 0
    assert builder.built == []


def test_a_kernel_of_another_arch_is_refused_before_it_is_built(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    foreign = KernelSpec(FP8_GEMM, "sm_100a", GEMM.dtypes, GEMM.block, GEMM.stages)
    driver.push_context(driver.retain_primary(0))
    with pytest.raises(UnsupportedError, match=r"sm_100a.* in context .* of GPU 0 .*sm_90a"):
        service.kernel(foreign)
    assert builder.built == []


def test_a_fork_of_a_process_that_used_cuda_is_refused(driver: DriverDouble, service: KernelService) -> None:
    driver.push_context(driver.retain_primary(0))
    kernel = service.kernel(GEMM)

    def in_child() -> bool:
        try:
            kernel.launch((1, 1, 1), (384, 1, 1), 0, 0)
        except ForkedProcessError:
            driver.calls.clear()
            try:
                run(service, 0)
            except ForkedProcessError as error:
                return error.pid == os.getpid() and not driver.launches and not driver.calls
        return False

    assert holds_in_fork(in_child)
    run(service, 0)
    assert len(driver.launches) == 1


def test_a_fork_of_a_process_that_did_not_use_cuda_loads_for_itself(driver: DriverDouble, service: KernelService) -> None:
    def in_child() -> bool:
        run(service, 0)
        return len(driver.launches) == 1

    assert holds_in_fork(in_child)
    run(service, 0)
    assert len(driver.launches) == 1


def test_cubins_built_before_a_fork_serve_the_child(builder: CountingBuilder, service: KernelService) -> None:
    run(service, 0)
    assert len(builder.built) == 1
    fresh = DriverDouble()  # as if the parent had only built

    def in_child() -> bool:
        service.contexts.driver = fresh
        run(service, 0)
        return len(builder.built) == 1 and len(fresh.launches) == 1

    assert holds_in_fork(in_child)


def test_a_fork_made_while_another_thread_builds_does_not_wait_for_that_thread(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    building, forked, build = threading.Event(), threading.Event(), builder.build

    def slow_build(spec: KernelSpec, max_cuda_major: int | None = None, caller: str = "") -> Any:
        building.set()
        assert forked.wait(60)
        return build(spec, max_cuda_major)

    builder.build = slow_build  # type: ignore[method-assign]
    fresh = DriverDouble()

    def in_child() -> bool:
        builder.build = build  # type: ignore[method-assign]
        service.contexts.driver = fresh
        run(service, 0)
        return len(fresh.launches) == 1

    thread = threading.Thread(target=run, args=(service, 0))
    thread.start()
    assert building.wait(60)
    try:
        assert holds_in_fork(in_child)
    finally:
        forked.set()
        thread.join()
    assert len(driver.launches) == 1


# --- unloading and limits


def test_only_the_kernels_of_the_current_context_are_unloaded_and_come_back(
    driver: DriverDouble, builder: CountingBuilder, service: KernelService
) -> None:
    for device in (0, 1):
        run(service, device)
    driver.push_context(driver.retain_primary(1))
    assert service.unload() == 1
    assert driver.libraries_loaded == 1
    assert service.unload() == service.unload(GEMM) == 0
    for device in (0, 1):
        run(service, device)
    assert driver.calls["load_library"] == 3
    assert len(builder.built) == 1
    assert service.unload(GEMM) == 1


def test_a_context_without_a_kernel_unloads_none_and_a_thread_without_a_context_is_told(
    driver: DriverDouble, service: KernelService
) -> None:
    with pytest.raises(DriverError, match="no CUDA context is current"):
        service.unload()
    driver.push_context(driver.retain_primary(0))
    assert service.unload(GEMM) == 0


def test_threads_that_launch_while_kernels_are_unloaded_never_notice(driver: DriverDouble, service: KernelService) -> None:
    done = threading.Event()
    driver.in_launch = lambda: time.sleep(0.0002)  # long enough to be met by an unload, which the double refuses

    def work(number: int) -> None:
        if number == 0:
            unloaded = 0
            with service.call(0, 0):
                while unloaded < 20:
                    unloaded += service.unload()
            done.set()
            return
        while not done.is_set():
            with service.call(0, 0) as call:
                call.launch(GEMM, Launch((1, 1, 1), (384, 1, 1), 0))

    assert in_threads(4, work) == []
    assert driver.calls["launch"] == len(driver.launches)


def test_what_a_reset_context_held_is_dropped(driver: DriverDouble, service: KernelService) -> None:
    for _ in range(5):
        run(service, 0)
        run(service, 1)
        driver.reset_primary(0)
    assert len(service._homes) == 2


def test_threads_that_meet_a_context_at_once_keep_one_home_for_it(driver: DriverDouble, service: KernelService) -> None:
    driver.push_context(driver.retain_primary(0))
    context = service.contexts.current()
    barrier, homes = threading.Barrier(4), []

    class MetAtOnce(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            barrier.wait(60)
            return found

    service._homes = MetAtOnce()
    assert in_threads(4, lambda number: homes.append(service._home(context))) == []
    assert len({id(home) for home in homes}) == len(service._homes) == 1


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "16"])
def test_a_limit_that_is_no_count_is_refused(service: KernelService, limit: Any) -> None:
    with pytest.raises(OperandError, match="at least 1, or None"):
        service.limit_sms(limit)


def test_a_limit_holds_in_contexts_seen_before_and_after_and_never_adds_sms(driver: DriverDouble, service: KernelService) -> None:
    driver.retain_primary(0)
    green = driver.create_stream(driver.create_green_context(0, sms=16))
    run(service, 0)
    service.limit_sms(24)
    run(service, 0)
    run(service, 1)
    run(service, 0, green)
    service.limit_sms(None)
    run(service, 0)
    assert [done.grid[0] for done in driver.launches] == [132, 24, 24, 16, 132]


def test_selection_is_told_how_launches_overlap_in_contexts_seen_before_and_after(service: KernelService) -> None:
    def seen(device: int) -> Overlap:
        with service.call(device, 0) as call:
            return call.limits.overlap

    assert seen(0) is Overlap.NONE
    service.overlap_launches(overlap=True)
    assert (seen(0), seen(1)) == (Overlap.START, Overlap.START)
    service.overlap_launches(overlap=True, constant_weights=True)
    assert (seen(0), seen(1)) == (Overlap.WEIGHTS, Overlap.WEIGHTS)
    service.overlap_launches(overlap=False, constant_weights=True)
    assert seen(0) is Overlap.NONE


def test_settings_that_come_while_limits_are_made_are_not_lost(service: KernelService, monkeypatch: pytest.MonkeyPatch) -> None:
    made, limits_of_context = [], service._limits_of

    def made_late(context: Any) -> Limits:
        limits = limits_of_context(context)
        made.append(limits)
        if len(made) == 2:  # between what it says and what is done with it
            service.limit_sms(24)
            service.overlap_launches(overlap=True)
        return limits

    monkeypatch.setattr(service, "_limits_of", made_late)
    with service.call(0, 0) as call:
        assert (call.limits.sms, call.limits.overlap) == (24, Overlap.START)


def test_no_promise_of_constant_weights_is_left_over_from_launches_that_did_not_overlap(service: KernelService) -> None:
    service.overlap_launches(overlap=False, constant_weights=True)
    service.overlap_launches(overlap=True)
    with service.call(0, 0) as call:
        assert call.limits.overlap is Overlap.START


def test_all_threads_share_one_default_service() -> None:
    services: list[KernelService] = []
    assert in_threads(8, lambda number: services.append(default_service())) == []
    assert len(services) == 8
    assert {id(service) for service in services} == {id(default_service())}

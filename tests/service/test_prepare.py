"""Kernels are built and loaded ahead, other threads go on meanwhile, and who asks for a compile afterwards is named."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.fork import holds_in_fork

import deepgemm_jit
from deepgemm_jit.builder import Builder
from deepgemm_jit.errors import CompileError, DriverError, KernelNotBuiltError, OperandError, UnsupportedError
from deepgemm_jit.service import Counts, KernelEvent, KernelService, KernelState, Phase
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import CAST_TO_FP8, COMBINE, FP8_GEMM, ROUTE, KernelSpec, kernel_set

WHOLE_SET = kernel_set("sm_90a")
SPECS = [spec for spec in WHOLE_SET if spec.family == FP8_GEMM]
SMALL = [spec for spec in WHOLE_SET if spec.family in (CAST_TO_FP8, COMBINE, ROUTE)]
"""Quick to compile."""
HELD_S = 60


class HeldBuilder(InstantBuilder):
    """Has every cubin at once, but for the kernels that a test holds back or lets fail."""

    def __init__(self) -> None:
        self.built: list[KernelSpec] = []
        self.held: dict[KernelSpec, threading.Event] = {}
        self.reached = threading.Event()
        self.failures: dict[KernelSpec, Exception] = {}

    def build(self, spec: KernelSpec, max_cuda_major: int | None = None, caller: str = "") -> Any:
        self.built.append(spec)
        if spec in self.held:
            self.reached.set()
            assert self.held[spec].wait(HELD_S)
        if spec in self.failures:
            raise self.failures[spec]
        return super().build(spec, max_cuda_major, caller)


@pytest.fixture
def driver() -> DriverDouble:
    return DriverDouble(gpus=2)


@pytest.fixture
def builder() -> HeldBuilder:
    return HeldBuilder()


@pytest.fixture
def service(driver: DriverDouble, builder: HeldBuilder) -> KernelService:
    return KernelService(builder=builder, driver=driver)  # type: ignore[arg-type]


def launch(service: KernelService, spec: KernelSpec, gpu: int = 0) -> None:
    """Do what an operation does."""
    with service.call(gpu, 0) as call:
        call.kernel(spec).launch((1, 1, 1), (384, 1, 1), 0, 0)


# --- what a preparation does


@pytest.mark.none
def test_kernels_are_loaded_on_every_gpu_that_is_named_and_nothing_is_left_to_a_first_call(
    driver: DriverDouble, builder: HeldBuilder, service: KernelService
) -> None:
    done = service.prepare([*SPECS, *SPECS], [0, 1], jobs=3)
    assert (done.kernels, done.compiled) == (len(SPECS), 0)
    assert sorted(builder.built) == sorted(SPECS)
    assert driver.calls["load_library"] == 2 * len(SPECS)
    for gpu in (0, 1):
        for spec in SPECS:
            launch(service, spec, gpu)
    assert driver.calls["load_library"] == driver.calls["set_dynamic_shared_memory"] == 2 * len(SPECS)
    assert len(driver.launches) == 2 * len(SPECS)
    assert driver.current_context() == 0


@pytest.mark.none
def test_by_default_the_current_context_gets_the_kernels(driver: DriverDouble, service: KernelService) -> None:
    own = driver.create_context(1)
    driver.push_context(own)
    service.prepare(SPECS[:2])
    assert service.kernel(SPECS[0]).context.handle == driver.current_context() == own
    assert driver.calls["load_library"] == 2


@pytest.mark.none
def test_without_a_context_or_a_gpu_nothing_is_built(builder: HeldBuilder, service: KernelService) -> None:
    with pytest.raises(DriverError, match="no CUDA context is current"):
        service.prepare(SPECS)
    assert builder.built == []


@pytest.mark.none
def test_for_no_gpu_kernels_are_only_built_and_cuda_is_not_started(
    driver: DriverDouble, builder: HeldBuilder, service: KernelService
) -> None:
    assert service.prepare(SPECS, []).kernels == len(SPECS)
    assert sorted(builder.built) == sorted(SPECS)
    assert not driver.calls
    assert set(service.states(SPECS).values()) == {"cold"}


@pytest.mark.none
def test_a_preparation_loads_kernels_and_takes_nothing_else_of_a_gpu(driver: DriverDouble, service: KernelService) -> None:
    """B32: warm-ups that launch GEMMs on dummy tensors run out of memory; here there is neither a tensor nor a launch."""
    service.call(0, 0).__enter__().__exit__(None, None, None)
    before = Counter(driver.calls)
    service.prepare(WHOLE_SET, [0])
    did = {name for name, times in driver.calls.items() if times > before[name]}
    assert did <= {
        "start", "driver_version", "try_current_context_id", "current_context", "push_context", "pop_context", "relaxed_capture",
        "load_library", "library_kernel", "kernel_function", "set_dynamic_shared_memory", "finish_loading",
    }  # fmt: skip
    assert driver.libraries_loaded == len(WHOLE_SET)


@pytest.mark.none
def test_what_fails_does_not_keep_the_others_from_being_ready(
    driver: DriverDouble, builder: HeldBuilder, service: KernelService
) -> None:
    for spec in SPECS[1:4]:
        builder.failures[spec] = CompileError(kernel=spec.name, options=[], log="error: no", source="x")
    with pytest.raises(CompileError) as raised:
        service.prepare(SPECS, [0], jobs=2)
    assert raised.value.kernel == SPECS[1].name
    assert raised.value.__notes__ == [f"2 other kernels failed too: {SPECS[2].name}, {SPECS[3].name}"]
    states = service.states(SPECS)
    assert [spec for spec in SPECS if states[spec] == "failed"] == SPECS[1:4]
    assert [spec for spec in SPECS if states[spec] == "ready"] == [SPECS[0], *SPECS[4:]]
    assert driver.current_context() == 0


@pytest.mark.none
def test_preparations_in_two_threads_build_and_load_once_between_them(
    driver: DriverDouble, builder: HeldBuilder, service: KernelService
) -> None:
    builder.held[SPECS[0]] = threading.Event()
    threads = [threading.Thread(target=service.prepare, args=(SPECS, [0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert builder.reached.wait(HELD_S)
    builder.held[SPECS[0]].set()
    for thread in threads:
        thread.join()
    assert sorted(builder.built) == sorted(SPECS)
    assert driver.calls["load_library"] == len(SPECS)


@pytest.mark.none
@pytest.mark.parametrize("jobs", [0, -1, True, 1.5, "2"])
def test_jobs_that_are_no_count_are_refused(jobs: Any, builder: HeldBuilder, service: KernelService) -> None:
    with pytest.raises(OperandError, match=re.escape(f"jobs = {jobs!r}")):
        service.prepare(SPECS, [0], jobs=jobs)
    assert builder.built == []


@pytest.mark.none
def test_a_kernel_of_no_set_is_refused_before_anything_is_built(builder: HeldBuilder, service: KernelService) -> None:
    stranger = KernelSpec(FP8_GEMM, "sm_90a", SPECS[0].dtypes, (64, 24, 128), 2)
    with pytest.raises(UnsupportedError, match="kernel_set"):
        service.prepare([SPECS[0], stranger], [0])
    assert builder.built == []


# --- other threads


@pytest.mark.none
def test_launches_go_on_while_a_preparation_waits_for_a_compile(
    driver: DriverDouble, builder: HeldBuilder, service: KernelService
) -> None:
    ready, slow = SPECS[:2]
    launch(service, ready)
    builder.held[slow] = threading.Event()
    thread = threading.Thread(target=service.prepare, args=([slow], [0]))
    thread.start()
    try:
        assert builder.reached.wait(HELD_S)
        for _ in range(100):
            launch(service, ready)
        assert service.states([ready, slow]) == {ready: "ready", slow: "building"}
        assert thread.is_alive()
    finally:
        builder.held[slow].set()
        thread.join()
    assert len(driver.launches) == 101
    assert service.states([slow]) == {slow: "ready"}


@pytest.mark.nvrtc
def test_another_thread_runs_python_while_nvrtc_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    beats, progress, ended = [0], [], threading.Event()

    def beat() -> None:
        while not ended.is_set():
            beats[0] += 1
            time.sleep(0.001)

    compile_program = nvrtc.nvrtcCompileProgram

    def watched(*arguments: Any) -> Any:
        before = beats[0]
        result = compile_program(*arguments)
        progress.append(beats[0] - before)
        return result

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", watched)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        KernelService(driver=DriverDouble()).prepare(SPECS[:3], [0], jobs=2)
    finally:
        ended.set()
        thread.join()
    assert len(progress) == 3
    # A call that kept the interpreter's lock would let one beat through at most, before it begins.
    assert min(progress) > 10


@pytest.mark.none
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda service: service.prepare(SPECS[:1], 0), "device_ordinals = 0"),
        (lambda service: service.prepare(SPECS[:1], ["0"]), "device_ordinals has '0'"),
        (lambda service: service.prepare(SPECS[:1], [True]), "device_ordinals has True"),
        (lambda service: service.prepare(SPECS[:1], [-1]), "device_ordinals has -1"),
        (lambda service: service.prepare(SPECS[0], [0]), "an iterable of KernelSpec"),
        (lambda service: service.prepare([["x"]], [0]), "needed: a KernelSpec"),
        (lambda service: service.states(["x"]), "specs has 'x'"),
        (lambda service: service.states(SPECS[0]), "an iterable of KernelSpec"),
        (lambda service: service.states(SPECS, "0"), "device_ordinal = '0'"),
        (lambda service: service.on_event(None), "listener = None"),
    ],
)
def test_what_means_nothing_is_refused_with_what_is_needed(
    wrong: Callable[[KernelService], Any], says: str, builder: HeldBuilder, service: KernelService
) -> None:
    with pytest.raises(OperandError, match=re.escape(says)):
        wrong(service)
    assert builder.built == []


# --- states


@pytest.mark.none
def test_states_are_told_by_gpu_and_by_default_for_all_that_were_used(driver: DriverDouble, service: KernelService) -> None:
    spec, other = SPECS[:2]
    assert service.states([spec, other]) == {spec: "cold", other: "cold"}
    assert not driver.calls
    service.prepare([spec], [0])
    assert service.states([spec, other]) == {spec: "ready", other: "cold"}
    service.prepare([other], [1])
    assert service.states([spec, other], 0) == {spec: "ready", other: "cold"}
    assert service.states([spec, other], 1) == {spec: "cold", other: "ready"}
    assert service.states([spec, other]) == {spec: "cold", other: "cold"}, "each GPU lacks one"
    driver.push_context(driver.retain_primary(0))
    service.unload(spec)
    assert service.states([spec], 0) == {spec: "cold"}


@pytest.mark.none
@pytest.mark.parametrize("step", ["load_library", "set_dynamic_shared_memory"])
def test_a_kernel_whose_load_failed_is_failed_until_a_call_brings_it(
    step: str, driver: DriverDouble, service: KernelService
) -> None:
    driver.fail_next(step, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError):
        service.prepare(SPECS[:1], [0])
    assert service.states(SPECS[:1]) == {SPECS[0]: "failed"}
    launch(service, SPECS[0])
    assert service.states(SPECS[:1]) == {SPECS[0]: "ready"}


@pytest.mark.none
def test_a_fork_does_not_take_a_kernel_for_building_that_its_parent_builds(builder: HeldBuilder, service: KernelService) -> None:
    builder.held[SPECS[0]] = threading.Event()
    thread = threading.Thread(target=service.prepare, args=(SPECS[:1], []))
    thread.start()
    try:
        assert builder.reached.wait(HELD_S)
        assert holds_in_fork(lambda: service.states(SPECS[:1]) == {SPECS[0]: "cold"})
    finally:
        builder.held[SPECS[0]].set()
        thread.join()


@pytest.mark.none
def test_what_a_parent_loaded_is_not_ready_in_a_fork(driver: DriverDouble, service: KernelService) -> None:
    service.prepare(SPECS[:1], [0])
    assert service.states(SPECS[:1]) == {SPECS[0]: "ready"}
    assert holds_in_fork(lambda: service.states(SPECS[:1]) == service.states(SPECS[:1], 0) == {SPECS[0]: "cold"})


# --- events and counts


@pytest.mark.nvrtc
def test_events_and_counts_tell_compiles_hits_loads_and_refusals() -> None:
    events: list[KernelEvent] = []
    service = KernelService(driver=DriverDouble(gpus=2))
    service.on_event(events.append)
    service.prepare(SMALL[:2], [0], jobs=1)
    assert [(event.kernel, event.phase) for event in events] == [
        (spec.name, phase) for spec in SMALL[:2] for phase in ("compile", "load")
    ]
    assert all(event.seconds > 0 and event.error == "" for event in events)
    service.prepare(SMALL[:2], [0, 1])
    assert service.counts == Counts(hits=0, compiles=2, loads=4, refusals=0, failures=0)

    later = KernelService(settings=read_settings(compile="never"), driver=DriverDouble())
    later.on_event(events.append)
    with pytest.raises(KernelNotBuiltError):
        later.prepare(SMALL[:3], [0])
    assert later.counts == Counts(hits=2, compiles=0, loads=2, refusals=1, failures=0)
    (refusal,) = [event for event in events if event.phase == "refusal"]
    assert refusal.kernel == SMALL[2].name
    assert "not built" in refusal.error


@pytest.mark.none
def test_a_failure_is_told_and_counted(driver: DriverDouble, service: KernelService) -> None:
    events: list[KernelEvent] = []
    service.on_event(events.append)
    driver.fail_next("load_library", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError):
        launch(service, SPECS[0])
    assert [event.phase for event in events] == ["hit", "failure"]
    assert "OUT_OF_MEMORY" in events[-1].error
    assert service.counts.failures == 1


@pytest.mark.none
def test_a_listener_that_fails_fails_no_call(service: KernelService, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: KernelEvent) -> None:
        raise RuntimeError("no metrics today")

    seen: list[KernelEvent] = []
    service.on_event(broken)
    service.on_event(seen.append)
    launch(service, SPECS[0])
    assert [event.phase for event in seen] == ["hit", "load"]
    assert "no metrics today" in caplog.text


@pytest.mark.none
@pytest.mark.parametrize("asks", ["kernel", "unload", "prepare"])
@pytest.mark.parametrize("spec", SPECS[:2], ids=["the kernel it is told of", "another"])
def test_a_listener_that_asks_for_a_kernel_is_told_its_mistake_and_waits_for_nothing(
    asks: str, spec: KernelSpec, service: KernelService, caplog: pytest.LogCaptureFixture
) -> None:
    def greedy(event: KernelEvent) -> None:
        with service.call(0, 0):
            getattr(service, asks)([spec] if asks == "prepare" else spec)

    service.on_event(greedy)
    thread = threading.Thread(target=launch, args=(service, SPECS[0]), daemon=True)
    thread.start()
    thread.join(HELD_S)
    assert not thread.is_alive(), "it waits for itself"
    assert service.states(SPECS[:1]) == {SPECS[0]: "ready"}
    assert "greedy asks the service for" in caplog.text
    assert service.prepare(SPECS[:1], [0]).kernels == 1, "outside of a listener all is as before"


@pytest.mark.none
def test_counts_of_many_threads_add_up(service: KernelService) -> None:
    threads = [threading.Thread(target=service.prepare, args=(WHOLE_SET, [number % 2])) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.counts == Counts(hits=len(WHOLE_SET), compiles=0, loads=2 * len(WHOLE_SET), refusals=0, failures=0)


@pytest.mark.none
def test_a_launch_of_a_loaded_kernel_neither_counts_nor_tells_nor_looks_for_its_caller(service: KernelService) -> None:
    service.prepare(SPECS[:1], [0])
    told: list[KernelEvent] = []
    service.on_event(told.append)
    counts, called = service.counts, set()

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            called.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        launch(service, SPECS[0])
    finally:
        sys.setprofile(None)
    assert ("service.py", "_kernel") in called
    assert {name for name, _ in called} & {"monitor.py", "audit.py", "ahead.py", "builder.py"} == set()
    assert (service.counts, told) == (counts, [])


@pytest.mark.none
def test_the_page_for_servers_names_every_phase_count_and_state() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?: `(\w+)` \|)?", page, re.MULTILINE)
    assert {(name, count) for name, count in rows if count} == set(
        zip(get_args(Phase), [field.name for field in fields(Counts)], strict=True)
    )
    assert {name for name, count in rows if not count} == set(get_args(KernelState))


# --- the policy


@pytest.mark.nvrtc
def test_under_never_a_start_up_fails_and_names_every_kernel_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    """B35."""
    monkeypatch.setattr("deepgemm_jit.builder.compile_source", lambda **_: pytest.fail("it compiled"))
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "never")
    with pytest.raises(KernelNotBuiltError, match="deepgemm-jit warmup --arch sm_90a") as refused:
        KernelService(driver=DriverDouble()).prepare(SMALL, [0])
    assert refused.value.kernel == SMALL[0].name
    (note,) = refused.value.__notes__
    assert all(spec.name in note for spec in SMALL[1:])
    assert "set by DEEPGEMM_JIT_COMPILE" in str(refused.value)


@pytest.mark.nvrtc
def test_after_a_warm_up_a_sealed_start_up_loads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    for spec in SMALL:
        builder.build(spec)
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "never")
    service = KernelService(driver=DriverDouble())
    done = service.prepare(SMALL, [0])
    assert (done.kernels, done.compiled) == (len(SMALL), 0)
    assert service.counts == Counts(hits=len(SMALL), compiles=0, loads=len(SMALL), refusals=0, failures=0)


@pytest.mark.nvrtc
def test_after_a_seal_a_compile_is_an_error_that_names_its_caller() -> None:
    service = KernelService(driver=DriverDouble())
    service.prepare(SMALL[:1], [0])
    service.seal()
    launch(service, SMALL[0])
    line = sys._getframe().f_lineno + 2
    with pytest.raises(KernelNotBuiltError) as refused, service.call(0, 0) as call:
        call.kernel(SMALL[1])
    own = test_after_a_seal_a_compile_is_an_error_that_names_its_caller.__name__
    assert refused.value.caller == f"{__file__}:{line} in {own}"
    assert refused.value.caller in str(refused.value) and "set by seal()" in str(refused.value)
    line = sys._getframe().f_lineno + 2
    with pytest.raises(KernelNotBuiltError) as refused:
        service.prepare(SMALL[1:], [0])
    assert refused.value.caller == f"{__file__}:{line} in {own}", "of the preparation, not of its threads"


@pytest.mark.nvrtc
def test_after_a_seal_that_warns_a_compile_is_logged_with_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    service = KernelService(driver=DriverDouble())
    service.seal("warn")
    line = sys._getframe().f_lineno + 2
    with service.call(0, 0) as call:
        call.kernel(SMALL[0])
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert SMALL[0].name in record.getMessage()
    assert f"asked for by {__file__}:{line} in " in record.getMessage()
    assert "\n" not in record.getMessage() and not record.stack_info


@pytest.mark.none
@pytest.mark.parametrize("policy", ["auto", "", "NEVER", None])
def test_a_seal_of_another_policy_is_refused(policy: Any, service: KernelService) -> None:
    with pytest.raises(OperandError, match="needed: 'never' or 'warn'"):
        service.seal(policy)


_SERVER = """
import sys
from doubles.driver import DriverDouble
from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import kernel_set

service = KernelService(driver=DriverDouble())
small = [spec for spec in kernel_set("sm_90a") if spec.family in ("combine", "route")]
service.prepare(small, [0])
service.seal()
print(service.counts, flush=True)

def answer(kernel):
    with service.call(0, 0) as call:
        call.kernel(kernel)

answer(small[0])
answer(next(spec for spec in kernel_set("sm_90a") if spec.family == "transpose"))
"""


@pytest.mark.nvrtc
def test_a_server_without_logging_set_up_prints_nothing_but_its_own_error(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(_SERVER)
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), *sys.path]
    ran = subprocess.run(
        shlex.split(f"{sys.executable} {server}"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout == "Counts(hits=0, compiles=2, loads=2, refusals=0, failures=0)\n"
    before, _, told = ran.stderr.partition("deepgemm_jit.errors.KernelNotBuiltError: ")
    assert before.startswith("Traceback") and "WARNING" not in before
    line = 1 + _SERVER.splitlines().index("        call.kernel(kernel)")
    assert f"{server}:{line} in answer" in told

"""The same facts of the driver and of contexts, held against the double in CI and against the real driver on a GPU machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.fork import holds_in_fork
from runtime.machines import (
    ARCH,
    LARGE,
    SMALL,
    SOURCE,
    DoubledMachine,
    Machine,
    driver_says,
    launch,
    load,
)

import deepgemm_jit
from deepgemm_jit.errors import ContextMismatchError, ForkedProcessError, StaleContextError, UnloadedKernelError
from deepgemm_jit.runtime import Contexts
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

CHILD_LIMIT_S = 100
MUCH = dynamic_shared_memory_bytes(LARGE)


def begun(machine: Machine, gpu: int = 0) -> tuple[Contexts, int]:
    """Return contexts, and the address of the primary one of a GPU, which is current."""
    primary = machine.driver.retain_primary(gpu)
    machine.driver.push_context(primary)
    return Contexts(machine.driver), primary


def a_context_has_one_id_and_no_other_has_it(machine: Machine) -> None:
    _, primary = begun(machine)
    own = machine.create_context(0)
    green = machine.create_green_context(0, 16)
    ids = [machine.driver.try_context_id(handle) for handle in (primary, own, green)]
    assert len(set(ids)) == 3 and None not in ids
    assert machine.driver.try_current_context_id() == ids[0]
    machine.driver.push_context(green)
    assert machine.driver.try_current_context_id() == ids[2]
    machine.driver.pop_context()


def a_reset_keeps_the_address_and_changes_the_id(machine: Machine) -> None:
    contexts, primary = begun(machine)
    kernel = load(machine, contexts)
    launch(kernel)
    before = contexts.current()
    machine.reset_primary(0)
    with pytest.raises(StaleContextError):
        launch(kernel)
    assert contexts.is_gone(before)
    after, pushed = contexts.enter(0, 0)
    assert (after.handle, before.handle) == (primary, primary)
    assert after.identity.context_id != before.identity.context_id
    with pytest.raises(StaleContextError):
        launch(kernel)
    launch(load(machine, contexts))
    contexts.leave(pushed)


def a_destroyed_context_has_no_id_and_its_kernels_are_stale(machine: Machine) -> None:
    contexts, primary = begun(machine)
    own = machine.create_context(0)
    machine.driver.push_context(own)
    kernel = load(machine, contexts)
    machine.driver.pop_context()
    machine.destroy_context(own)
    assert machine.driver.try_context_id(own) is None
    with pytest.raises(StaleContextError):
        launch(kernel)
    assert machine.driver.current_context() == primary


def a_function_of_another_context_is_an_invalid_handle(machine: Machine) -> None:
    contexts, _ = begun(machine)
    kernel = load(machine, contexts, SMALL)
    machine.driver.push_context(machine.create_context(0))
    assert driver_says(machine, kernel._function) == "CUDA_ERROR_INVALID_HANDLE"
    with pytest.raises(ContextMismatchError):
        launch(kernel)


def much_shared_memory_without_the_attribute_is_an_invalid_value(machine: Machine) -> None:
    contexts, _ = begun(machine)
    library = machine.driver.load_library(machine.image)
    function = machine.driver.kernel_function(machine.driver.library_kernel(library, "nothing"))
    assert driver_says(machine, function, shared_memory_bytes=MUCH) == "CUDA_ERROR_INVALID_VALUE"
    machine.driver.set_dynamic_shared_memory(function, MUCH)
    assert driver_says(machine, function, shared_memory_bytes=MUCH) == "CUDA_SUCCESS"
    launch(load(machine, contexts))


def a_green_context_has_its_own_sms_and_the_functions_of_the_primary(machine: Machine) -> None:
    contexts, primary = begun(machine)
    whole = contexts.current().sms
    green = machine.create_green_context(0, 16)
    stream = machine.create_stream(green)
    assert machine.driver.stream_context(stream) == green
    context, pushed = contexts.enter(0, stream)
    assert (context.kind, context.handle) == ("green", green)
    assert 16 <= context.sms < whole
    kernel = load(machine, contexts)
    machine.driver.push_context(primary)
    library_kernel = machine.driver.library_kernel(kernel._library, "nothing")
    assert machine.driver.kernel_function(library_kernel) == kernel._function
    with pytest.raises(ContextMismatchError, match="green"):
        launch(kernel)
    machine.driver.pop_context()
    launch(kernel, stream)
    contexts.leave(pushed)
    assert contexts.current().sms == whole


def special_streams_belong_to_whichever_context_is_current(machine: Machine) -> None:
    contexts, primary = begun(machine)
    kernel = load(machine, contexts)
    own = machine.create_context(0)
    for handle in (primary, own):
        machine.driver.push_context(handle)
        for special in (0, 1, 2):
            assert machine.driver.stream_context(special) == handle
        machine.driver.pop_context()
    for special in (0, 1, 2):
        launch(kernel, special)


def a_foreign_stream_is_refused_and_the_callers_context_stays(machine: Machine) -> None:
    contexts, primary = begun(machine)
    kernel = load(machine, contexts)
    stream = machine.create_stream(machine.create_context(0))
    for refused in (lambda: contexts.enter(0, stream), lambda: launch(kernel, stream)):
        with pytest.raises(ContextMismatchError, match=f"stream {stream:#x} belongs to .*own"):
            refused()
        assert machine.driver.current_context() == primary
    launch(kernel, machine.create_stream(primary))


def an_application_context_makes_way_for_the_primary(machine: Machine) -> None:
    contexts, _ = begun(machine)
    own = machine.create_context(0)
    machine.driver.push_context(own)
    assert contexts.current().kind == "own"
    context, pushed = contexts.enter(0, 0)
    assert (context.kind, pushed) == ("primary", 1)
    launch(load(machine, contexts))
    contexts.leave(pushed)
    assert machine.driver.current_context() == own


def a_cold_kernel_loads_and_launches_under_a_capture(machine: Machine) -> None:
    contexts, primary = begun(machine)
    stream = machine.create_stream(primary)
    with machine.capturing(stream):
        launch(load(machine, contexts), stream)
    with machine.capturing(stream):
        launch(load(machine, contexts), stream)


def an_unloaded_kernel_is_refused_and_can_be_loaded_again(machine: Machine) -> None:
    contexts, _ = begun(machine)
    kernel = load(machine, contexts)
    launch(kernel)
    kernel.unload()
    with pytest.raises(UnloadedKernelError):
        launch(kernel)
    launch(load(machine, contexts))


def a_bare_thread_has_no_context_before_and_after_a_call(machine: Machine) -> None:
    contexts, _ = begun(machine)
    kernel = load(machine, contexts)
    seen: list[object] = []

    def work() -> None:
        try:
            seen.append(contexts.try_current())
            context, pushed = contexts.enter(0, 0)
            launch(kernel)
            seen.append(context is kernel.context)
            contexts.leave(pushed)
            seen.append(machine.driver.current_context())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, True, 0]


def a_fork_is_refused_before_the_driver_is_asked(machine: Machine) -> None:
    contexts, _ = begun(machine)
    kernel, parent = load(machine, contexts), os.getpid()

    def in_child() -> bool:
        for use in (lambda: launch(kernel), lambda: contexts.enter(0, 0), contexts.current, kernel.unload):
            try:
                use()
            except ForkedProcessError as error:
                if (error.loaded_pid, error.pid) != (parent, os.getpid()):
                    return False
            else:
                return False
        return True

    assert holds_in_fork(in_child)
    launch(kernel)


def the_second_gpu_has_its_own_functions_and_attributes(machine: Machine) -> None:
    contexts, primary = begun(machine)
    kernels = []
    for gpu in (0, 1, 0, 1):
        context, pushed = contexts.enter(gpu, 0)
        assert context.device_ordinal == gpu
        kernel = load(machine, contexts)
        launch(kernel)
        kernels.append(kernel)
        contexts.leave(pushed)
        assert machine.driver.current_context() == primary
    first, second = kernels[:2]
    assert first.identity.device_uuid != second.identity.device_uuid
    with pytest.raises(ContextMismatchError) as refused:
        launch(second)
    assert (refused.value.belongs_to, refused.value.used_in) == (second.context.describe(), first.context.describe())
    context, pushed = contexts.enter(1, 0)
    library_kernel = machine.driver.library_kernel(first._library, "nothing")
    function = machine.driver.kernel_function(library_kernel)
    assert function != first._function
    assert driver_says(machine, function, shared_memory_bytes=MUCH) == "CUDA_ERROR_INVALID_VALUE"
    contexts.leave(pushed)


ONE_GPU = [
    a_context_has_one_id_and_no_other_has_it,
    a_reset_keeps_the_address_and_changes_the_id,
    a_destroyed_context_has_no_id_and_its_kernels_are_stale,
    a_function_of_another_context_is_an_invalid_handle,
    much_shared_memory_without_the_attribute_is_an_invalid_value,
    a_green_context_has_its_own_sms_and_the_functions_of_the_primary,
    special_streams_belong_to_whichever_context_is_current,
    a_foreign_stream_is_refused_and_the_callers_context_stays,
    an_application_context_makes_way_for_the_primary,
    a_cold_kernel_loads_and_launches_under_a_capture,
    an_unloaded_kernel_is_refused_and_can_be_loaded_again,
    a_bare_thread_has_no_context_before_and_after_a_call,
    a_fork_is_refused_before_the_driver_is_asked,
]
TWO_GPUS = [the_second_gpu_has_its_own_functions_and_attributes]
Fact = Callable[[Machine], None]


@pytest.mark.none
@pytest.mark.parametrize("fact", [*ONE_GPU, *TWO_GPUS], ids=lambda fact: fact.__name__)
def test_fact_of_the_double(fact: Fact) -> None:
    fact(DoubledMachine())


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deepgemm_jit.compiler import compile_options, compile_source

    compiled = compile_source(source=SOURCE, headers={}, entry="nothing", arch=ARCH, options=compile_options(ARCH))
    file = tmp_path_factory.mktemp("image") / "nothing.cubin"
    file.write_bytes(compiled.cubin.image)
    return file


@pytest.mark.parametrize(
    "fact",
    [
        *(pytest.param(fact, marks=pytest.mark.gpu) for fact in ONE_GPU),
        *(pytest.param(fact, marks=pytest.mark.multigpu) for fact in TWO_GPUS),
    ],
    ids=lambda fact: fact.__name__,
)
def test_fact_of_the_real_driver(fact: Fact, image: Path) -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    program = "import sys; from runtime import test_both_drivers as facts, machines; "
    program += "machines.on_real_machine(getattr(facts, sys.argv[1]), sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", program, fact.__name__, str(image)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

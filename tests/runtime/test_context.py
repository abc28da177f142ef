"""Which context a call means, and that the caller's own is current again afterwards."""

from __future__ import annotations

import threading

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.errors import ContextMismatchError, DriverError
from deepgemm_jit.runtime import Context, Contexts

pytestmark = pytest.mark.none


@pytest.fixture
def driver() -> DriverDouble:
    return DriverDouble(gpus=2)


@pytest.fixture
def contexts(driver: DriverDouble) -> Contexts:
    return Contexts(driver)


def entered(contexts: Contexts, device: int, stream: int = 0) -> Context:
    """Enter and leave, checking that nothing changed for the caller."""
    before = contexts.driver.current_context()
    context, pushed = contexts.enter(device, stream)
    assert contexts.driver.try_current_context_id() == context.identity.context_id
    contexts.leave(pushed)
    assert contexts.driver.current_context() == before
    return context


def test_a_thread_without_a_context_is_told_how_to_get_one(contexts: Contexts) -> None:
    assert contexts.try_current() is None
    with pytest.raises(DriverError, match=r"no CUDA context is current .*KernelService\.call"):
        contexts.current()


@pytest.mark.parametrize("device", [0, 1])
def test_the_device_of_the_call_decides_not_the_current_one(driver: DriverDouble, contexts: Contexts, device: int) -> None:
    driver.push_context(driver.retain_primary(0))
    context = entered(contexts, device)
    assert (context.kind, context.device_ordinal, context.sms) == ("primary", device, 132)
    assert context.identity.device_uuid == driver.device_uuid(device)


def test_a_thread_without_a_context_has_none_afterwards(driver: DriverDouble, contexts: Contexts) -> None:
    assert entered(contexts, 1).device_ordinal == 1
    assert driver.current_context() == 0


def test_each_context_is_looked_at_once(driver: DriverDouble, contexts: Contexts) -> None:
    first = entered(contexts, 0)
    asked = driver.calls["device_uuid"], driver.calls["context_sms"], driver.calls["retain_primary"]
    assert entered(contexts, 0) is first
    assert asked == (driver.calls["device_uuid"], driver.calls["context_sms"], driver.calls["retain_primary"])


@pytest.mark.parametrize("special", [0, 1, 2])
def test_a_call_in_the_right_context_asks_for_one_id(driver: DriverDouble, contexts: Contexts, special: int) -> None:
    driver.push_context(driver.retain_primary(0))
    contexts.current()
    driver.calls.clear()
    contexts.leave(contexts.enter(0, special)[1])
    assert {name: count for name, count in driver.calls.items() if name != "start"} == {"try_current_context_id": 1}


def test_a_stream_of_its_own_adds_one_question(driver: DriverDouble, contexts: Contexts) -> None:
    primary = driver.retain_primary(0)
    driver.push_context(primary)
    stream = driver.create_stream(primary)
    contexts.current()
    driver.calls.clear()
    contexts.leave(contexts.enter(0, stream)[1])
    asked = {name: count for name, count in driver.calls.items() if name != "start"}
    assert asked == {"try_current_context_id": 1, "stream_context": 1}


def test_a_stream_of_a_green_context_is_that_context_and_its_sms(driver: DriverDouble, contexts: Contexts) -> None:
    driver.retain_primary(0)
    context = entered(contexts, 0, driver.create_stream(driver.create_green_context(0, sms=16)))
    assert (context.kind, context.sms) == ("green", 16)


def test_a_green_context_that_is_current_stays_so(driver: DriverDouble, contexts: Contexts) -> None:
    driver.retain_primary(0)
    green = driver.create_green_context(0, sms=24)
    driver.push_context(green)
    context = entered(contexts, 0)
    assert (context.handle, context.sms) == (green, 24)


def test_a_primary_stream_means_the_primary_also_under_a_green_context(driver: DriverDouble, contexts: Contexts) -> None:
    stream = driver.create_stream(driver.retain_primary(0))
    driver.push_context(driver.create_green_context(0, sms=24))
    assert entered(contexts, 0, stream).kind == "primary"


def test_an_application_context_makes_way_for_the_primary_of_the_tensors(driver: DriverDouble, contexts: Contexts) -> None:
    driver.push_context(driver.create_context(0))
    assert contexts.current().kind == "own"
    assert entered(contexts, 0).kind == "primary"


def test_looking_at_an_application_context_does_not_create_the_primary(driver: DriverDouble, contexts: Contexts) -> None:
    driver.push_context(driver.create_context(0))
    contexts.current()
    assert not driver.primary_is_active(0)


@pytest.mark.parametrize("where", ["another context of the GPU", "another GPU", "a green context of another GPU"])
@pytest.mark.parametrize("current_device", [0, 1])
def test_a_foreign_stream_is_refused_and_both_contexts_are_named(
    driver: DriverDouble, contexts: Contexts, where: str, current_device: int
) -> None:
    primaries = [driver.retain_primary(device) for device in (0, 1)]
    home = primaries[current_device]
    driver.push_context(home)
    foreign = {
        "another context of the GPU": lambda: driver.create_context(0),
        "another GPU": lambda: driver.retain_primary(1),
        "a green context of another GPU": lambda: driver.create_green_context(1, sms=16),
    }[where]()
    stream = driver.create_stream(foreign)
    with pytest.raises(ContextMismatchError) as refused:
        contexts.enter(0, stream)
    owner = contexts.with_handle(foreign)
    assert owner is not None
    assert refused.value.what == f"stream {stream:#x}"
    assert refused.value.belongs_to == owner.describe()
    called_in = contexts.with_handle(primaries[0])
    assert called_in is not None
    assert called_in.describe() in refused.value.used_in
    assert driver.current_context() == home


@pytest.mark.parametrize("method", ["device_uuid", "context_sms", "context_device"])
def test_the_callers_context_is_restored_when_looking_fails(driver: DriverDouble, contexts: Contexts, method: str) -> None:
    home = driver.retain_primary(0)
    driver.push_context(home)
    driver.fail_next(method, "CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        contexts.enter(1, 0)
    assert driver.current_context() == home
    assert entered(contexts, 1).device_ordinal == 1


def test_a_reset_keeps_the_address_and_makes_another_context(driver: DriverDouble, contexts: Contexts) -> None:
    before = entered(contexts, 0)
    driver.reset_primary(0)
    after = entered(contexts, 0)
    assert after.handle == before.handle
    assert after.identity != before.identity
    assert contexts.is_gone(before) and not contexts.is_gone(after)


def test_the_description_names_context_gpu_and_uuid(driver: DriverDouble, contexts: Contexts) -> None:
    context = entered(contexts, 1)
    assert context.describe() == (
        f"context {context.identity.context_id} of GPU 1 (NVIDIA H200, uuid 00000000-0000-0000-0000-000000000001)"
    )
    green = entered(contexts, 1, driver.create_stream(driver.create_green_context(1, sms=16)))
    assert green.describe().endswith(", green)")


def test_threads_that_meet_a_context_at_once_agree_on_it(driver: DriverDouble, contexts: Contexts) -> None:
    barrier, found = threading.Barrier(8), []

    def meet() -> None:
        barrier.wait()
        context, pushed = contexts.enter(0, 0)
        contexts.leave(pushed)
        found.append(context)

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(context) for context in found}) == 1

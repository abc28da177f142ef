"""Operations over the life of a process with one GPU: threads, graphs, memory that moves, green contexts, unloading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.gpu_calls import N, Product
from ops.reference import Output, assert_close, m_major, product, random_a, random_b

from deepgemm_jit import ops
from deepgemm_jit.errors import CaptureError, ContextMismatchError
from deepgemm_jit.service import KernelService

pytestmark = pytest.mark.gpu


def counted_loads(service: KernelService, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    loads: list[int] = []
    load = service.contexts.driver.load_library

    def counting(image: bytes) -> int:
        loads.append(len(image))
        return load(image)

    monkeypatch.setattr(service.contexts.driver, "load_library", counting)
    return loads


def test_calls_again_give_the_same_bits_and_follow_their_operands() -> None:
    for m in (77, 128, 77, 1, 300, 128):
        call = Product(m)
        bits = []
        for _ in range(3):
            call.run()
            bits.append(call.out.bits())
            call.check(f"M = {m}")
        assert all(torch.equal(bits[0], other) for other in bits)


def test_memory_that_is_freed_and_used_again_under_another_shape_is_another_call() -> None:
    pool = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    sizes = [(64, 256, 512), (128, 256, 256), (64, 512, 256), (64, 256, 512)]
    for m, n, k in sizes * 2:
        a, b = random_a(m, k), random_b(n, k)
        values = pool[: m * k].view(torch.float8_e4m3fn).view(m, k).copy_(a.values)
        weights = pool[1 << 19 : (1 << 19) + n * k].view(torch.float8_e4m3fn).view(n, k).copy_(b.values)
        out = Output(m, n)
        ops.fp8_gemm_nt((values, m_major(a.scales)), (weights, b.scales), out.tensor)
        out.assert_written()
        assert_close(out.tensor, product(a, b), f"{m} x {n} x {k}")


def test_eight_bare_threads_at_first_touch_load_once(cold: KernelService, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = counted_loads(cold, monkeypatch)
    calls = [Product() for _ in range(8)]
    barrier, raised = threading.Barrier(8), []

    def work(call: Product) -> None:
        barrier.wait()
        try:
            call.run()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    for call in calls:
        call.check()
    assert len(loads) == 1


class CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call()
        return grads[0], None


def test_an_autograd_thread_launches_too() -> None:
    call, seen = Product(), []

    def run() -> None:
        seen.append(threading.current_thread().name)
        call.run()

    x = torch.ones(4, device="cuda", requires_grad=True)
    CallsInBackward.apply(x, run).sum().backward()
    call.check()
    assert len(seen) == 1


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_cold_call_under_capture_replays_right_or_is_refused_and_a_later_capture_works(cold: KernelService, mode: str) -> None:
    call = Product(64, 4096, 7168)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    refusal = None
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            call.run()
    except CaptureError as error:
        refusal = str(error)
    if refusal is not None:
        assert "KernelService.kernel" in refusal
    else:
        torch.cuda.synchronize()
        call.out.assert_untouched()
        graph.replay()
        call.check("replay of a cold capture")
    call.run()
    call.check("eager, after the capture")
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again, stream=stream, capture_error_mode=mode):
        call.run()
    again.replay()
    call.check("replay of a warm capture")


def test_a_graph_replays_like_eager_after_later_loads_and_unloads_of_others(cold: KernelService) -> None:
    call = Product()
    call.run()
    bits = call.out.bits()
    call.check()
    (captured,) = (spec for home in cold._homes.values() for spec in home.kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    x = torch.randn((8, 128), device="cuda", dtype=torch.bfloat16)
    ops.per_token_cast_to_fp8(x)
    Product(4096, 4096, 512).run()
    for spec in [spec for home in cold._homes.values() for spec in home.kernels if spec != captured]:
        assert cold.unload(spec) == 1
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(call.out.bits(), bits)
        call.check()


def test_kernels_that_were_unloaded_come_back(cold: KernelService, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = counted_loads(cold, monkeypatch)
    call = Product()
    for _ in range(3):
        call.run()
        call.run()
        assert cold.unload() == 1
        call.check()
    assert len(loads) == 3


def test_a_limit_of_sms_holds_and_computes_right() -> None:
    call = Product(300, 1024, 512)
    call.run()
    call.check()
    whole = ops.get_num_sms()
    try:
        for limit in (1, 7, whole, 10_000):
            ops.set_num_sms(limit)
            assert ops.get_num_sms() == min(limit, whole)
            for _ in range(2):
                call.run()
                call.check(f"{limit} SMs")
    finally:
        ops.set_num_sms(None)
    assert ops.get_num_sms() == whole


@pytest.fixture
def green_stream() -> Iterator[int]:
    """A stream of a green context of 16 SMs on GPU 0."""
    from cuda.bindings import driver as cuda

    def checked(result: Any) -> Any:
        code, *values = result
        assert int(code) == 0, code
        return values[0] if len(values) == 1 else tuple(values)

    torch.zeros(1, device="cuda:0")
    whole = checked(cuda.cuDeviceGetDevResource(0, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, _, _ = checked(cuda.cuDevSmResourceSplitByCount(1, whole, 0, 16))
    description = checked(cuda.cuDevResourceGenerateDesc(parts, 1))
    green = checked(cuda.cuGreenCtxCreate(description, 0, cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = checked(cuda.cuGreenCtxStreamCreate(green, flags, 0))
    yield int(stream)
    torch.cuda.synchronize(0)
    checked(cuda.cuStreamDestroy(stream))
    checked(cuda.cuGreenCtxDestroy(green))


def test_an_operation_on_a_green_stream_takes_its_sms_and_computes_right(green_stream: int) -> None:
    call = Product(300, 1024, 512)
    whole = ops.get_num_sms()
    with torch.cuda.stream(torch.cuda.ExternalStream(green_stream)):
        assert 16 <= ops.get_num_sms() < whole
        for _ in range(2):
            call.run()
    call.check("green")
    call.run()
    call.check("primary")
    assert ops.get_num_sms() == whole


def test_a_stream_of_a_second_context_is_refused_by_operations() -> None:
    from cuda.bindings import driver as cuda

    call = Product()
    call.run()
    call.check()
    call.out = Output(77, N)
    torch.cuda.synchronize()
    code, context = cuda.cuCtxCreate(0, 0) if cuda.CUDA_VERSION < 13000 else cuda.cuCtxCreate(None, 0, 0)
    assert int(code) == 0
    code, stream = cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert int(code) == 0 and int(cuda.cuCtxPopCurrent()[0]) == 0
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))), pytest.raises(ContextMismatchError, match="own"):
            call.run()
        torch.cuda.synchronize()
        call.out.assert_untouched()
    finally:
        assert int(cuda.cuCtxDestroy(context)[0]) == 0
    call.run()
    call.check()

"""Operations over the life of a process with real GPUs: threads, graphs, memory that moves, green contexts, forks, exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import Output, assert_close, m_major, product, random_a, random_b

import deepgemm_jit
from deepgemm_jit import ops
from deepgemm_jit.errors import CaptureError, ContextMismatchError
from deepgemm_jit.service import KernelService, default_service

CHILD_LIMIT_S = 100
N, K = 264, 400


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> KernelService:
    """A service that has loaded nothing yet, in place of the one that operations share; its store is empty."""
    service = KernelService()
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    return service


def counted_loads(service: KernelService, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    loads: list[int] = []
    load = service.contexts.driver.load_library

    def counting(image: bytes) -> int:
        loads.append(len(image))
        return load(image)

    monkeypatch.setattr(service.contexts.driver, "load_library", counting)
    return loads


class Product:
    """One dense call and its float64 reference; scales lie as the kernel reads them, so that the call is one launch."""

    def __init__(self, m: int = 77, n: int = N, k: int = K, device: str = "cuda:0") -> None:
        self.a, self.b = random_a(m, k, device=device), random_b(n, k, device=device)
        self.scales = m_major(self.a.scales)
        self.out = Output(m, n, device=device)
        self.reference = product(self.a, self.b)
        torch.cuda.synchronize(device)

    def run(self) -> None:
        ops.fp8_gemm_nt((self.a.values, self.scales), self.b.pair, self.out.tensor)

    def check(self, what: str = "") -> None:
        torch.cuda.synchronize(self.out.tensor.device)
        self.out.assert_written()
        assert_close(self.out.tensor, self.reference, what)
        self.out.tensor.fill_(torch.nan)


@pytest.mark.gpu
def test_calls_again_give_the_same_bits_and_follow_their_operands() -> None:
    for m in (77, 128, 77, 1, 300, 128):
        call = Product(m)
        bits = []
        for _ in range(3):
            call.run()
            bits.append(call.out.bits())
            call.check(f"M = {m}")
        assert all(torch.equal(bits[0], other) for other in bits)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_an_autograd_thread_launches_too() -> None:
    call, seen = Product(), []

    def run() -> None:
        seen.append(threading.current_thread().name)
        call.run()

    x = torch.ones(4, device="cuda", requires_grad=True)
    CallsInBackward.apply(x, run).sum().backward()
    call.check()
    assert len(seen) == 1


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_kernels_that_were_unloaded_come_back(cold: KernelService, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = counted_loads(cold, monkeypatch)
    call = Product()
    for _ in range(3):
        call.run()
        call.run()
        assert cold.unload() == 1
        call.check()
    assert len(loads) == 3


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


# --- processes

_BEGIN = """
import atexit, json, os, signal, sys, threading, time
import torch
import deepgemm_jit as dj
from ops.reference import Output, assert_close, m_major, product, random_a, random_b

def multiply(device="cuda:0"):
    from deepgemm_jit import ops
    a, b, out = random_a(77, 400, device=device), random_b(264, 400, device=device), Output(77, 264, device=device)
    scales = m_major(a.scales)
    for _ in range(2):
        ops.fp8_gemm_nt((a.values, scales), b.pair, out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(a, b))
    return a.values, scales, *b.pair, out.tensor
"""


def child(script: str, *arguments: str, file: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", _BEGIN + script]
    if file is not None:
        file.write_text(_BEGIN + script)
        command = [sys.executable, str(file)]
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
    )


ENDINGS = {
    "end": ("", 0, ""),
    "exit": ("sys.exit(0)", 0, ""),
    "an exception": ("raise SystemError('of the application')", 1, "SystemError: of the application"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    "SIGTERM with a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        0,
        "",
    ),
    "a kept kernel": (
        (
            "from deepgemm_jit.service import default_service\n"
            "kept = [kernel for home in default_service()._homes.values() for kernel in home.kernels.values()]"
        ),
        0,
        "",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_happens_at_exit(ending: str) -> None:
    last_lines, status, told = ENDINGS[ending]
    done = child("multiply()\n" + last_lines)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1:] == ([told] if told else [])
    assert "deepgemm_jit" not in done.stderr


@pytest.mark.gpu
def test_import_plan_and_build_start_no_cuda_and_a_fork_can_use_it() -> None:
    done = child(
        """
from deepgemm_jit.warmup.plan import plan_for

from deepgemm_jit.spec import GemmProblem, limits_of

spec = dj.select(GemmProblem(77, 264, 400), limits_of("sm_90a"))
dj.build(spec)
plan_for("sm_90a", sys.argv[1])
service = dj.KernelService()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    try:
        multiply()
        service.kernel(spec)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not torch.cuda.is_initialized()
multiply()
""",
        str(Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_a_fork_of_a_process_that_used_cuda_is_told_so_and_its_parent_goes_on() -> None:
    done = child("""
from deepgemm_jit import ops
from deepgemm_jit.errors import ForkedProcessError
from deepgemm_jit.service import default_service

a, a_scale, b, b_scale, out = multiply()
kernel = next(kernel for home in default_service()._homes.values() for kernel in home.kernels.values())
pid = os.fork()
if pid == 0:
    told = []
    for use in (
        lambda: ops.fp8_gemm_nt((a, a_scale), (b, b_scale), out),
        lambda: kernel.launch((1, 1, 1), (32, 1, 1), 0, 0),
        lambda: default_service().kernel(kernel.spec),
    ):
        try:
            use()
        except ForkedProcessError as error:
            told.append(error.loaded_pid == os.getppid())
        except BaseException as error:
            told.append(repr(error))
    print(json.dumps(told), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
multiply()
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_of_a_process_that_used_cuda_compute(method: str, tmp_path: Path) -> None:
    done = child(
        """
import multiprocessing

if __name__ == "__main__":
    multiply()
    children = [multiprocessing.get_context(sys.argv[1]).Process(target=multiply) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0, 0]
""",
        method,
        file=tmp_path / "program.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- two GPUs


@pytest.mark.multigpu
def test_operands_on_the_other_gpu_leave_current_device_and_context_as_they_were() -> None:
    calls = [Product(device=f"cuda:{gpu}") for gpu in (0, 1)]
    contexts = default_service().contexts
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.zeros(1, device="cuda")
            before = contexts.current()
            for _ in range(50):
                for call in calls:
                    call.run()
                    assert torch.cuda.current_device() == current
                    assert contexts.current() is before
            for call in calls:
                call.check(f"current device {current}")


@pytest.mark.multigpu
def test_graphs_of_both_gpus_replay_like_eager_also_after_later_loads(cold: KernelService) -> None:
    calls = [Product(device=f"cuda:{gpu}") for gpu in (0, 1)]
    graphs, bits = [], []
    for gpu, call in enumerate(calls):
        call.run()
        bits.append(call.out.bits())
        call.check("eager")
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU: torch's own capture stream is one of the GPU that captured first.
        with torch.cuda.device(gpu), torch.cuda.graph(graph, stream=torch.cuda.Stream(gpu)):
            call.run()
        graphs.append(graph)
    for gpu in (0, 1):
        Product(4096, 4096, 512, device=f"cuda:{gpu}").run()
    for _ in range(3):
        for gpu, (graph, call) in enumerate(zip(graphs, calls, strict=True)):
            with torch.cuda.device(gpu):
                graph.replay()
            torch.cuda.synchronize(gpu)
            assert torch.equal(call.out.bits(), bits[gpu])
            call.check(f"replay on GPU {gpu}")


class GroupedCall:
    """A grouped product whose bits are known: each run poisons D, multiplies, and counts what differs, all on the device."""

    def __init__(self, device: str, stream: torch.cuda.Stream, groups: int = 4, rows: int = 128) -> None:
        self.stream = stream
        m = groups * rows
        self.a, self.b = random_a(m, 512, device=device), random_b(groups, 256, 512, device=device)
        self.scales = m_major(self.a.scales)
        self.index = torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(rows)
        self.out = torch.empty((m, 256), dtype=torch.bfloat16, device=device)
        self.different = torch.zeros((), dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            self._multiply()
        torch.cuda.synchronize(device)
        for group in range(groups):
            part = slice(group * rows, (group + 1) * rows)
            assert_close(self.out[part], product(self.a[part], self.b[group]), f"{device}, group {group}")
        self.bits = self.out.view(torch.int16).clone()
        torch.cuda.synchronize(device)

    def _multiply(self) -> None:
        ops.m_grouped_fp8_gemm_nt_contiguous((self.a.values, self.scales), self.b.pair, self.out, self.index)

    def run(self, current: int) -> None:
        """Run with ``current`` as the current device, on a stream of the operands' device."""
        with torch.cuda.stream(self.stream):
            self.out.fill_(torch.nan)
            torch.cuda.set_device(current)
            self._multiply()
            assert torch.cuda.current_device() == current
            self.different += (self.out.view(torch.int16) != self.bits).sum()


@pytest.mark.multigpu
def test_ten_thousand_interleaved_calls_of_four_threads_on_both_gpus_are_all_right(cold: KernelService) -> None:
    """The current device is always the other one."""
    threads_count, calls_each = 4, 2500
    work = [[GroupedCall(f"cuda:{gpu}", torch.cuda.Stream(gpu)) for gpu in (0, 1)] for _ in range(threads_count)]
    barrier, raised = threading.Barrier(threads_count), []

    def run(calls: list[GroupedCall]) -> None:
        barrier.wait()
        try:
            for turn in range(calls_each):
                gpu = turn % 2
                calls[gpu].run(current=1 - gpu)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(calls,)) for calls in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    for gpu in (0, 1):
        torch.cuda.synchronize(gpu)
    assert [[int(call.different) for call in calls] for calls in work] == [[0, 0]] * threads_count


@pytest.mark.multigpu
def test_a_process_that_uses_the_second_gpu_takes_no_memory_of_the_first() -> None:
    done = child("""
import subprocess
from deepgemm_jit.runtime import Driver

def used(gpu):
    uuid = str(torch.cuda.get_device_properties(gpu).uuid)
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        found, mebibytes = line.split(", ")
        if uuid in found:
            return int(mebibytes)

torch.cuda.set_device(1)
driver = Driver()
multiply("cuda:1")
before = used(0)
for _ in range(100):
    multiply("cuda:1")
held = torch.ones(1 << 28, device="cuda:1")
torch.cuda.synchronize(1)
print(json.dumps({"before": before, "after": used(0), "second": used(1), "primary of the first": driver.primary_is_active(0)}))
""")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["primary of the first"] is False
    assert found["after"] == found["before"]
    assert found["second"] >= 1024, "the measure sees what is used"

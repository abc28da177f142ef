"""Contexts, streams and loads against the real driver: what the double claims, shown on GPUs."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from deepgemm_jit.compiler import compile_options, compile_source
from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import ContextMismatchError, StaleContextError
from deepgemm_jit.runtime import Context, Contexts, Driver, LoadedKernel, driver_report, load_kernel
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

ARCH = "sm_90a"
# The kernels under test are loaded under specs of the set; which ones decides nothing but their dynamic shared memory.
SMALL = next(spec for spec in kernel_set(ARCH) if dynamic_shared_memory_bytes(spec) == 0)
LARGE = max((spec for spec in kernel_set(ARCH) if spec.family == FP8_GEMM), key=dynamic_shared_memory_bytes)

SOURCE = """
extern "C" __global__ void add(float* out, float value, int count) {
    extern __shared__ float strip[];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) out[i] += value;
    if (count < 0) { strip[threadIdx.x] = value; out[0] = strip[0]; }
}
"""
COUNT = 4096


@cache
def cubin() -> Cubin:
    return compile_source(source=SOURCE, headers={}, entry="add", arch=ARCH, options=compile_options(ARCH)).cubin


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="GPU tests hold their operands in torch tensors")


@pytest.fixture
def driver(torch: Any) -> Driver:
    for device in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{device}")
    torch.cuda.set_device(0)
    return Driver()


@pytest.fixture
def contexts(driver: Driver) -> Contexts:
    return Contexts(driver)


def load(contexts: Contexts, spec: KernelSpec = SMALL) -> LoadedKernel:
    return load_kernel(contexts, contexts.current(), spec, cubin())


def launch(kernel: LoadedKernel, out: Any, stream: int = 0, value: float = 1.0) -> None:
    arguments = ctypes.c_void_p(out.data_ptr()), ctypes.c_float(value), ctypes.c_int(out.numel())
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
    kernel.launch((8, 1, 1), (128, 1, 1), stream, ctypes.addressof(pointers))


@contextmanager
def entered(contexts: Contexts, device: int, stream: int = 0) -> Iterator[Context]:
    context, pushed = contexts.enter(device, stream)
    try:
        yield context
    finally:
        contexts.leave(pushed)


@contextmanager
def current(driver: Driver, handle: int) -> Iterator[None]:
    driver.push_context(handle)
    try:
        yield
    finally:
        driver.pop_context()


def checked(result: Any) -> Any:
    code, *values = result
    assert int(code) == 0, code
    return values[0] if len(values) == 1 else tuple(values)


@pytest.fixture
def second_context(driver: Driver) -> Iterator[int]:
    """A context of the application's own on GPU 0, not current."""
    from cuda.bindings import driver as cuda

    create = cuda.cuCtxCreate
    context = checked(create(0, 0) if cuda.CUDA_VERSION < 13000 else create(None, 0, 0))
    checked(cuda.cuCtxPopCurrent())
    yield int(context)
    checked(cuda.cuCtxDestroy(context))


@pytest.fixture
def green_context(driver: Driver) -> Iterator[int]:
    """A green context of 16 SMs on GPU 0, not current."""
    from cuda.bindings import driver as cuda

    if not hasattr(cuda, "cuGreenCtxCreate"):
        pytest.skip("these bindings know no green contexts")
    whole = checked(cuda.cuDeviceGetDevResource(0, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, _, _ = checked(cuda.cuDevSmResourceSplitByCount(1, whole, 0, 16))
    description = checked(cuda.cuDevResourceGenerateDesc(parts, 1))
    green = checked(cuda.cuGreenCtxCreate(description, 0, cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    yield int(checked(cuda.cuCtxFromGreenCtx(green)))
    checked(cuda.cuGreenCtxDestroy(green))


@contextmanager
def stream_of(driver: Driver, context: int) -> Iterator[int]:
    from cuda.bindings import driver as cuda

    with current(driver, context):
        stream = checked(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    yield int(stream)
    with current(driver, context):
        checked(cuda.cuStreamSynchronize(stream))
        checked(cuda.cuStreamDestroy(stream))


@pytest.mark.gpu
def test_the_driver_and_torch_agree_on_the_gpu(torch: Any, driver: Driver, contexts: Contexts) -> None:
    properties = torch.cuda.get_device_properties(0)
    context = contexts.current()
    assert (context.kind, context.device_ordinal, context.device_name) == ("primary", 0, properties.name)
    assert context.identity.device_uuid == str(properties.uuid)
    assert context.compute_capability == (properties.major, properties.minor) == (9, 0)
    assert context.sms == properties.multi_processor_count
    assert context.shared_memory_bytes == 227 * 1024
    assert driver.driver_version()[0] >= 12
    report = driver_report()
    assert report.error is None
    assert len(report.gpus) == torch.cuda.device_count()
    assert context.identity.device_uuid == report.gpus[0].uuid


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["no shared memory", "most shared memory"])
def test_a_kernel_computes_in_its_context_on_each_kind_of_stream(torch: Any, contexts: Contexts, spec: KernelSpec) -> None:
    kernel = load(contexts, spec)
    out = torch.rand(COUNT, device="cuda:0")
    expected = out + 1.0 + 1.0 + 1.0
    torch.cuda.synchronize(0)
    stream = torch.cuda.Stream(0)
    for handle in (0, 2, stream.cuda_stream):
        launch(kernel, out, handle)
        torch.cuda.synchronize(0)
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("loaded_in", ["primary", "second"])
def test_two_contexts_of_one_gpu_refuse_each_others_kernels(
    torch: Any, driver: Driver, contexts: Contexts, second_context: int, loaded_in: str
) -> None:
    primary = driver.current_context()
    home, away = (primary, second_context) if loaded_in == "primary" else (second_context, primary)
    with current(driver, home):
        kernel = load(contexts)
    out = torch.rand(COUNT, device="cuda:0")
    before = out.clone()
    torch.cuda.synchronize(0)
    with current(driver, away):
        elsewhere = contexts.current()
        with pytest.raises(ContextMismatchError) as refused:
            launch(kernel, out)
    torch.cuda.synchronize(0)
    assert torch.equal(out, before)
    assert (refused.value.belongs_to, refused.value.used_in) == (kernel.context.describe(), elsewhere.describe())
    assert kernel.identity.context_id != elsewhere.identity.context_id
    assert {kernel.context.kind, elsewhere.kind} == {"primary", "own"}
    if loaded_in == "primary":
        launch(kernel, out)
        torch.cuda.synchronize(0)
        assert torch.equal(out, before + 1.0)


@pytest.mark.gpu
def test_a_stream_of_a_second_context_is_refused(torch: Any, driver: Driver, contexts: Contexts, second_context: int) -> None:
    kernel = load(contexts)
    out = torch.zeros(COUNT, device="cuda:0")
    with stream_of(driver, second_context) as stream:
        with pytest.raises(ContextMismatchError, match="own"):
            launch(kernel, out, stream)
        with pytest.raises(ContextMismatchError, match="own"):
            contexts.enter(0, stream)
    assert contexts.current() is kernel.context
    torch.cuda.synchronize(0)
    assert not out.any()


@pytest.mark.gpu
def test_tensors_of_the_primary_are_served_there_while_a_second_context_is_current(
    torch: Any, driver: Driver, contexts: Contexts, second_context: int
) -> None:
    out = torch.rand(COUNT, device="cuda:0")
    expected = out + 1.0
    torch.cuda.synchronize(0)
    with current(driver, second_context):
        with entered(contexts, 0) as context:
            assert context.kind == "primary"
            launch(load(contexts), out)
        assert driver.current_context() == second_context
    torch.cuda.synchronize(0)
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_green_stream_brings_its_own_context_and_sm_count(
    torch: Any, driver: Driver, contexts: Contexts, green_context: int
) -> None:
    primary = contexts.current()
    out = torch.rand(COUNT, device="cuda:0")
    expected = out + 1.0
    torch.cuda.synchronize(0)
    with stream_of(driver, green_context) as stream:
        with entered(contexts, 0, stream) as context:
            assert context.kind == "green"
            assert 16 <= context.sms < primary.sms
            assert context.identity != primary.identity
            launch(load(contexts, LARGE), out, stream)
        torch.cuda.synchronize(0)
    assert torch.equal(out, expected)
    assert contexts.current() is primary


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_kernel_loads_and_launches_under_capture_and_replays_like_eager(torch: Any, contexts: Contexts, mode: str) -> None:
    out = torch.zeros(COUNT, device="cuda:0")
    stream, graph = torch.cuda.Stream(0), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(0)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        assert torch.cuda.is_current_stream_capturing()
        launch(load(contexts, LARGE), out, stream.cuda_stream)
    torch.cuda.synchronize(0)
    assert not out.any()
    load(contexts)  # a later load changes nothing for the graph
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(0)
    assert torch.equal(out, torch.full_like(out, 3.0))


@pytest.mark.gpu
def test_every_tensor_map_encodes_and_says_what_it_was_given(torch: Any, driver: Driver) -> None:
    tensor = torch.zeros(64, 128, device="cuda:0", dtype=torch.uint8)

    def encoded(rows: int, box_rows: int = 64, swizzled: bool = True) -> bytes:
        # Bindings hand the driver memory of any alignment; many maps meet all of them.
        return driver.encode_tiled_map(tensor.data_ptr(), "u8", (128, rows, 1), (128, 128 * 64), (128, box_rows, 1), swizzled)

    maps = [encoded(rows) for rows in range(1, 1025)]
    assert {len(bytes_) for bytes_ in maps} == {128}
    assert len(set(maps)) == len(maps)
    assert encoded(7) == maps[6]
    assert len({encoded(7), encoded(7, box_rows=32), encoded(7, swizzled=False)}) == 3


IN_A_PROCESS_OF_ITS_OWN = """
import json
from cuda.bindings import driver as cuda
from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import DeepGemmJitError
from deepgemm_jit.runtime import Contexts, Driver, load_kernel
from deepgemm_jit.spec import KernelSpec

driver = Driver()
driver.start()
contexts = Contexts(driver)
image = open({image!r}, "rb").read()
cubin = Cubin(image, {arch!r}, "add", "13.0", (), CubinFacts(0, 0, 0, 0, 0))
spec = KernelSpec.from_text({spec!r})

def create():
    code, context = cuda.cuCtxCreate(0, 0) if cuda.CUDA_VERSION < 13000 else cuda.cuCtxCreate(None, 0, 0)
    assert int(code) == 0, code
    return context

def refusal(kernel):
    try:
        kernel.launch((1, 1, 1), (32, 1, 1), 0, 0)
    except DeepGemmJitError as error:
        return type(error).__name__
    return "launched"

answer = {{}}
{work}
print(json.dumps(answer))
"""


def in_a_process_of_its_own(tmp_path: Any, work: str) -> Any:
    """Run what would spoil this process's torch: resets and destroyed contexts."""
    image = tmp_path / "add.cubin"
    image.write_bytes(cubin().image)
    code = IN_A_PROCESS_OF_ITS_OWN.format(image=str(image), arch=ARCH, spec=SMALL.text, work=work)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.gpu
def test_a_reset_makes_kernels_stale_although_the_address_stays(driver: Driver, tmp_path: Any) -> None:
    answer = in_a_process_of_its_own(
        tmp_path,
        """
before, pushed = contexts.enter(0, 0)
kernel = load_kernel(contexts, before, spec, cubin)
assert int(cuda.cuDevicePrimaryCtxReset(0)[0]) == 0
answer["after reset"] = refusal(kernel)
contexts.leave(pushed)
after, pushed = contexts.enter(0, 0)
answer["in the next context"] = refusal(kernel)
answer["same address"] = after.handle == before.handle
answer["same identity"] = after.identity == before.identity
load_kernel(contexts, after, spec, cubin)
contexts.leave(pushed)
""",
    )
    stale = StaleContextError.__name__
    assert answer == {"after reset": stale, "in the next context": stale, "same address": True, "same identity": False}


@pytest.mark.gpu
def test_a_destroyed_context_makes_kernels_stale(driver: Driver, tmp_path: Any) -> None:
    answer = in_a_process_of_its_own(
        tmp_path,
        """
own = create()
kernel = load_kernel(contexts, contexts.current(), spec, cubin)
assert int(cuda.cuCtxDestroy(own)[0]) == 0
answer["nothing current"] = refusal(kernel)
context, pushed = contexts.enter(0, 0)
answer["the primary is current"] = refusal(kernel)
contexts.leave(pushed)
""",
    )
    assert answer == {"nothing current": StaleContextError.__name__, "the primary is current": StaleContextError.__name__}


@pytest.mark.multigpu
@pytest.mark.parametrize("home", [0, 1])
def test_two_gpus_refuse_each_others_kernels(torch: Any, driver: Driver, contexts: Contexts, home: int) -> None:
    away = 1 - home
    with entered(contexts, home):
        kernel = load(contexts)
    out = torch.rand(COUNT, device=f"cuda:{away}")
    before = out.clone()
    torch.cuda.synchronize(away)
    with entered(contexts, away) as elsewhere, pytest.raises(ContextMismatchError) as refused:
        launch(kernel, out)
    torch.cuda.synchronize(away)
    assert torch.equal(out, before)
    assert f"of GPU {home}" in refused.value.belongs_to
    assert refused.value.used_in == elsewhere.describe()
    stream = torch.cuda.Stream(away)
    with entered(contexts, home), pytest.raises(ContextMismatchError, match=f"of GPU {away}"):
        launch(kernel, out, stream.cuda_stream)


@pytest.mark.multigpu
@pytest.mark.parametrize("current_device", [0, 1])
def test_both_gpus_compute_whichever_is_current(torch: Any, driver: Driver, contexts: Contexts, current_device: int) -> None:
    outs = [torch.rand(COUNT, device=f"cuda:{device}") for device in (0, 1)]
    before = [out.clone() for out in outs]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    torch.cuda.set_device(current_device)
    home = driver.current_context()
    kernels = {}
    for turn in range(100):
        device = turn % 2
        with entered(contexts, device):
            if device not in kernels:
                kernels[device] = load(contexts, LARGE)
            launch(kernels[device], outs[device])
        assert driver.current_context() == home
    for device in (0, 1):
        torch.cuda.synchronize(device)
        expected = before[device]
        for _ in range(50):
            expected = expected + 1.0
        assert torch.equal(outs[device], expected)

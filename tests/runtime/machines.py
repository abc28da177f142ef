"""Two machines that the same facts are asked of: the driver's double, and this machine's real driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from doubles.driver import DriverDouble

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import DriverError
from deepgemm_jit.runtime import Contexts, Driver, LoadedKernel, load_kernel
from deepgemm_jit.spec import FP8_GEMM, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

ARCH = "sm_90a"
LARGE = max((spec for spec in kernel_set(ARCH) if spec.family == FP8_GEMM), key=dynamic_shared_memory_bytes)
SMALL = next(spec for spec in kernel_set(ARCH) if dynamic_shared_memory_bytes(spec) == 0)
SOURCE = 'extern "C" __global__ void nothing() {}\n'


class DoubledMachine:
    """Pretended H200s."""

    def __init__(self, image: bytes = b"cubin") -> None:
        self.image = image
        self.driver: Any = DriverDouble(gpus=2)
        self.create_context = self.driver.create_context
        self.destroy_context = self.driver.destroy_context
        self.create_green_context = self.driver.create_green_context
        self.create_stream = self.driver.create_stream
        self.reset_primary = self.driver.reset_primary

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        self.driver.begin_capture(stream)
        try:
            yield
        finally:
            self.driver.end_capture(stream)

    def finish(self) -> None:
        pass


class RealMachine:
    """The GPUs of this machine; in a process of its own, which resets and destroys may spoil."""

    def __init__(self, image: bytes) -> None:
        from cuda.bindings import driver as cuda

        self.image = image
        self.cuda = cuda
        self.driver: Any = Driver()
        self.driver.start()

    def _checked(self, result: Any) -> Any:
        code, *values = result
        assert int(code) == 0, code
        return values[0] if len(values) == 1 else tuple(values)

    def create_context(self, device: int) -> int:
        create = self.cuda.cuCtxCreate
        context = self._checked(create(0, device) if self.cuda.CUDA_VERSION < 13000 else create(None, 0, device))
        self._checked(self.cuda.cuCtxPopCurrent())
        return int(context)

    def destroy_context(self, handle: int) -> None:
        self._checked(self.cuda.cuCtxDestroy(handle))

    def create_green_context(self, device: int, sms: int) -> int:
        cuda = self.cuda
        whole = self._checked(cuda.cuDeviceGetDevResource(device, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        parts, _, _ = self._checked(cuda.cuDevSmResourceSplitByCount(1, whole, 0, sms))
        description = self._checked(cuda.cuDevResourceGenerateDesc(parts, 1))
        flags = cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return int(self._checked(cuda.cuCtxFromGreenCtx(self._checked(cuda.cuGreenCtxCreate(description, device, flags)))))

    def create_stream(self, context: int) -> int:
        self.driver.push_context(context)
        stream = self._checked(self.cuda.cuStreamCreate(self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.driver.pop_context()
        return int(stream)

    def reset_primary(self, device: int) -> None:
        self._checked(self.cuda.cuDevicePrimaryCtxReset(device))

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        mode = self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._checked(self.cuda.cuStreamBeginCapture(stream, mode))
        yield
        graph = self._checked(self.cuda.cuStreamEndCapture(stream))
        self._checked(self.cuda.cuGraphDestroy(graph))

    def finish(self) -> None:
        self.driver.synchronize()


Machine = DoubledMachine | RealMachine


def cubin(image: bytes) -> Cubin:
    return Cubin(image, ARCH, "nothing", "13.0", (), CubinFacts(0, 0, 0, 0, 0))


def load(machine: Machine, contexts: Contexts, spec: KernelSpec = LARGE) -> LoadedKernel:
    return load_kernel(contexts, contexts.current(), spec, cubin(machine.image))


def launch(kernel: LoadedKernel, stream: int = 0) -> None:
    kernel.launch((1, 1, 1), (32, 1, 1), stream, 0)


def driver_says(machine: Machine, function: int, stream: int = 0, shared_memory_bytes: int = 0) -> str:
    """Return the result of a launch that nothing of ours has looked at."""
    try:
        machine.driver.launch(function, (1, 1, 1), (32, 1, 1), shared_memory_bytes, stream, 0)
    except DriverError as error:
        return error.result
    return "CUDA_SUCCESS"


def on_real_machine(fact: Any, image: str) -> None:
    """Hold a fact against the real driver: the whole of a process of its own."""
    machine = RealMachine(Path(image).read_bytes())
    fact(machine)
    machine.finish()

"""The CUDA driver behind one class: plain Python values in and out, every failure a typed error.

Nothing here knows of kernels or services, and nothing happens before the first call: it imports the bindings and starts CUDA.
Handles are ints at this boundary. The calls exist in cuda-bindings 12.9 and 13; those that an older driver may lack say what
stands in for them.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from deepgemm_jit.errors import DriverError, ForkedProcessError, ToolchainError

LAST_SPECIAL_STREAM = 2
"""Handles 0, 1 and 2 are the default, legacy and per-thread streams: they belong to whichever context is current."""

# cuCtxGetId answers so for a thread without a context and for a context that was destroyed or reset.
_NO_LIVING_CONTEXT = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_CONTEXT_IS_DESTROYED")

# cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void** kernelParams, void** extra); in every driver since CUDA 11.8.
_LAUNCH_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH_VERSION = 11080
_CONFIGS = 1024
"""Launch configurations kept: a few per kernel and stream."""

_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_DTYPES = {"u8": "UINT8", "bf16": "BFLOAT16", "f32": "FLOAT32"}


class _Unstarted:
    """Stands in for the bindings until their first use, so that started calls need not ask whether CUDA was started."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        self._driver.start()
        return getattr(self._driver._cuda, name)


class Driver:
    """The driver calls this package needs.

    Every method may raise DriverError, naming the call and the driver's result, or ToolchainError where the bindings are not
    installed. A context or a stream must be alive: the driver itself does not check all of them.
    """

    def __init__(self) -> None:
        self._cuda: Any = _Unstarted(self)
        self._started_pid: int | None = None
        self._failure: DriverError | ToolchainError | None = None
        self._launch_kernel: Callable[[int, int, int, None], int] = self._first_launch
        self._kept_config = lru_cache(maxsize=_CONFIGS)(self._new_config)

    def start(self) -> None:
        """Start CUDA in this process, once; creates no context.

        A failure is remembered: without a driver, calls after the first failing one have been seen to hang.
        """
        if self._started_pid is not None:
            return
        if self._failure is None:
            try:
                self._cuda = _started_bindings()
                self._started_pid = os.getpid()
                return
            except (DriverError, ToolchainError) as failure:
                self._failure = failure
        raise self._failure.afresh()

    def refuse_fork(self) -> None:
        """Refuse to go on in a fork of the process that started CUDA: no driver serves one, and not every call says so.

        Raises:
            ForkedProcessError: this is one.
        """
        if self._started_pid is not None and self._started_pid != os.getpid():
            raise ForkedProcessError(what="the CUDA driver", loaded_pid=self._started_pid, pid=os.getpid())

    # Devices. A CUdevice is its ordinal: both count from 0 in the order of CUDA_VISIBLE_DEVICES.

    def driver_version(self) -> tuple[int, int]:
        """Return the newest CUDA version that the driver serves, as (major, minor)."""
        version = int(self._call("cuDriverGetVersion"))
        return version // 1000, version % 1000 // 10

    def device_count(self) -> int:
        """Return the number of visible GPUs."""
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, ordinal: int) -> str:
        """Return the product name of a GPU, for example "NVIDIA H200"."""
        name: bytes = self._call("cuDeviceGetName", 256, ordinal)
        return name.split(b"\0", 1)[0].decode()

    def device_uuid(self, ordinal: int) -> str:
        """Return the UUID of a GPU, or of the MIG instance that stands for one."""
        # CUDA 12 has the MIG-aware call under a second name; CUDA 13 gave it the first.
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self._call(name, ordinal).bytes)))

    def device_attribute(self, ordinal: int, name: str) -> int:
        """Return a device attribute by its name without prefix, for example "MULTIPROCESSOR_COUNT"."""
        attribute = getattr(self._cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(self._call("cuDeviceGetAttribute", attribute, ordinal))

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        """Return the compute capability of a GPU as (major, minor)."""
        return (
            self.device_attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR"),
            self.device_attribute(ordinal, "COMPUTE_CAPABILITY_MINOR"),
        )

    # Contexts.

    def primary_is_active(self, ordinal: int) -> bool:
        """Return whether a GPU has a primary context; does not create one."""
        _flags, active = self._call("cuDevicePrimaryCtxGetState", ordinal)
        return bool(active)

    def retain_primary(self, ordinal: int) -> int:
        """Return the primary context of a GPU, created if need be, and count one more user of it."""
        return int(self._call("cuDevicePrimaryCtxRetain", ordinal))

    def current_context(self) -> int:
        """Return the context that is current in this thread, 0 for none."""
        return int(self._call("cuCtxGetCurrent"))

    def push_context(self, context: int) -> None:
        """Make a context current in this thread until :meth:`pop_context`."""
        self._call("cuCtxPushCurrent", context)

    def pop_context(self) -> None:
        """Restore the context that was current before :meth:`push_context`."""
        self._call("cuCtxPopCurrent")

    def context_device(self) -> int:
        """Return the ordinal of the GPU of the current context."""
        return int(self._call("cuCtxGetDevice"))

    def try_context_id(self, context: int) -> int | None:
        """Return the id of a context, unique for the life of the process; None when it was reset or destroyed."""
        return self._id_unless_dead(*self._cuda.cuCtxGetId(context))

    def try_current_context_id(self) -> int | None:
        """Return the id of the current context; None when no living context is current."""
        result, context_id = self._cuda.cuCtxGetId(None)
        # Each launch asks: the usual answer goes the short way.
        return self._id_unless_dead(result, context_id) if result else int(context_id)

    def synchronize(self) -> None:
        """Wait until the GPU has done all work of the current context."""
        self._call("cuCtxSynchronize")

    def context_sms(self, context: int, ordinal: int) -> int:
        """Return the SMs that a context on a GPU may use: fewer than the GPU has for a green or limited context.

        Drivers older than CUDA 12.4 know no such limits; the whole GPU is the answer there.
        """
        resource = self._try_call("cuCtxGetDevResource", context, self._cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        return self.device_attribute(ordinal, "MULTIPROCESSOR_COUNT") if resource is None else int(resource.sm.smCount)

    # Streams.

    def stream_context(self, stream: int) -> int:
        """Return the context of a stream; a green context's stream gives the green context."""
        result, context = self._cuda.cuStreamGetCtx(stream)
        if result:
            raise self._error("cuStreamGetCtx", result)
        return int(context)

    def stream_is_green(self, stream: int) -> bool:
        """Return whether a stream belongs to a green context; stream 0 asks about the current context."""
        green = self._try_call("cuStreamGetGreenCtx", stream)
        return green is not None and int(green) != 0

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread make calls that a capture elsewhere in the process would forbid, such as loading a library."""
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    # Kernels.

    def load_library(self, image: bytes) -> int:
        """Load a cubin; the driver keeps its own copy of the bytes."""
        return int(self._call("cuLibraryLoadData", image, [], [], 0, [], [], 0))

    def unload_library(self, library: int) -> None:
        """Unload a library and all its functions in all contexts."""
        self._call("cuLibraryUnload", library)

    def library_kernel(self, library: int, entry: str) -> int:
        """Return the kernel of a library by the name of its entry."""
        return int(self._call("cuLibraryGetKernel", library, entry.encode()))

    def kernel_function(self, kernel: int) -> int:
        """Return the function of a kernel in the current context."""
        return int(self._call("cuKernelGetFunction", kernel))

    def finish_loading(self, function: int) -> None:
        """Bring the code of a function onto its device now instead of at its first launch."""
        self._try_call("cuFuncLoad", function)

    def set_dynamic_shared_memory(self, function: int, size_bytes: int) -> None:
        """Allow a function to be launched with up to this much dynamic shared memory on its device."""
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, size_bytes)

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory_bytes: int,
        stream: int,
        params_pointer: int,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Launch a function; ``params_pointer`` is the address of an array of pointers to its arguments."""
        config = self.config_for(grid, block, shared_memory_bytes, stream, cluster, dependent)
        self.launch_as(config.getPtr(), function, params_pointer)

    def launch_as(self, config_pointer: int, function: int, params_pointer: int) -> None:
        """Launch a function as the configuration at an address says, one that :meth:`config_for` returned."""
        result = self._launch_kernel(config_pointer, function, params_pointer, None)
        if result:
            raise self._error("cuLaunchKernelEx", self._cuda.CUresult(result))

    def encode_tiled_map(
        self,
        address: int,
        dtype: str,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle_128b: bool,
    ) -> bytes:
        """Return the 128 bytes of a TMA tensor map; the caller keeps them 64-byte aligned.

        Args:
            address: of the first element, on the device.
            dtype: "u8" (also for FP8, whose padding is zero bytes), "bf16" or "f32".
            dims: elements per dimension, innermost first.
            strides_bytes: of all dimensions but the innermost.
            box: elements per dimension that one copy moves.
            swizzle_128b: whether copies swizzle 128-byte rows.
        """
        cuda = self._cuda
        tensor_map = self._call(
            "cuTensorMapEncodeTiled",
            getattr(cuda.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_" + _TENSOR_MAP_DTYPES[dtype]),
            len(dims),
            address,
            [cuda.cuuint64_t(size) for size in dims],
            [cuda.cuuint64_t(stride) for stride in strides_bytes],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1)] * len(dims),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cuda.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_" + ("128B" if swizzle_128b else "NONE")),
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(tensor_map.getPtr(), _TENSOR_MAP_BYTES)

    def config_for(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory_bytes: int,
        stream: int,
        cluster: int = 1,
        dependent: bool = False,
    ) -> Any:
        """Return what a launch is told beside its function and arguments; it is never changed, so that threads may share it."""
        return self._kept_config(grid, block, shared_memory_bytes, stream, cluster, dependent)

    def _new_config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory_bytes: int,
        stream: int,
        cluster: int,
        dependent: bool,
    ) -> Any:
        config = self._cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_memory_bytes
        config.hStream = self._cuda.CUstream(stream)
        attributes = []
        if cluster > 1:
            attributes.append(self._attribute("CLUSTER_DIMENSION"))
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
        if dependent:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _attribute(self, name: str) -> Any:
        attribute = self._cuda.CUlaunchAttribute()
        attribute.id = getattr(self._cuda.CUlaunchAttributeID, "CU_LAUNCH_ATTRIBUTE_" + name)
        return attribute

    def _first_launch(self, config: int, function: int, params_pointer: int, extra: None) -> int:
        # The bindings' own call checks and converts each argument anew, which takes longer than the driver's part of a launch.
        legacy = self._cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM  # stream 0 is torch's default stream
        address, _status = self._call("cuGetProcAddress", b"cuLaunchKernelEx", _LAUNCH_VERSION, legacy)
        launch = self._launch_kernel = _LAUNCH_PROTOTYPE(int(address))
        return int(launch(config, function, params_pointer, extra))

    # Results.

    def _call(self, name: str, *arguments: Any) -> Any:
        """Make one driver call and return its value, its values as a tuple, or None."""
        try:
            result, *values = getattr(self._cuda, name)(*arguments)
        except RuntimeError as failure:
            if isinstance(failure, DriverError):
                raise
            # The bindings raise one when the installed driver lacks the entry point.
            raise DriverError(call=name, result="no such entry point", detail=str(failure)) from failure
        if result:
            raise self._error(name, result)
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def _try_call(self, name: str, *arguments: Any) -> Any:
        """Make one driver call and return its value; None where the driver does not have or support it."""
        try:
            return self._call(name, *arguments)
        except DriverError as error:
            if error.result in ("no such entry point", "CUDA_ERROR_NOT_SUPPORTED"):
                return None
            raise

    def _id_unless_dead(self, result: Any, context_id: int) -> int | None:
        if not result:
            return context_id
        if result.name in _NO_LIVING_CONTEXT:
            return None
        raise self._error("cuCtxGetId", result)

    def _error(self, call: str, result: Any) -> DriverError:
        _, text = self._cuda.cuGetErrorString(result)
        detail = text.decode() if text else ""
        if result.name == "CUDA_ERROR_NOT_INITIALIZED" and self._started_pid != os.getpid():
            detail = (
                f"CUDA was started in process {self._started_pid} before it forked this one; start workers with the spawn or "
                "forkserver method, or use CUDA only after the fork"
            )
        return DriverError(call=call, result=result.name, detail=detail)


def _started_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as failure:
        raise ToolchainError(
            missing="the Python bindings of the CUDA driver",
            looked_for="cuda.bindings.driver of the package cuda-python",
            fix="Install cuda-python (its major version is that of your CUDA driver)",
        ) from failure
    # cuInit comes first: bindings asked for anything else without a driver have been seen to fail in worse ways.
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as failure:
        raise DriverError(call="cuInit", result="no driver", detail=str(failure)) from failure
    if result:
        raise DriverError(call="cuInit", result=result.name, detail=_init_advice(result.name))
    return driver


def _init_advice(result: str) -> str:
    return {
        "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU; check CUDA_VISIBLE_DEVICES",
        "CUDA_ERROR_NOT_INITIALIZED": "usually a fork of a process that had started CUDA; start workers with spawn or forkserver",
    }.get(result, "")

"""An in-memory CUDA driver that fails in the ways the real one was seen to fail.

Seen on two H200s with driver 580: a primary context keeps its address over a reset and changes its id; functions differ per
device, and a green context shares those of its device's primary; a launch of a function on a stream of another context is
"invalid handle"; the dynamic shared memory attribute belongs to a function, and more than 48 KB without it is "invalid value".
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepgemm_jit.errors import DriverError
from deepgemm_jit.runtime.driver import LAST_SPECIAL_STREAM, Driver

SHARED_MEMORY_WITHOUT_ATTRIBUTE = 48 * 1024


@dataclass
class _FakeContext:
    handle: int
    device: int
    sms: int
    kind: str
    context_id: int | None = None
    """None: not created yet, reset, or destroyed."""


@dataclass
class Launch:
    """One launch that reached the driver."""

    function: int
    context_id: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int
    stream: int
    cluster: int = 1
    dependent: bool = False


@dataclass
class _Function:
    kernel: int
    context_id: int
    shared_memory_bytes: int = SHARED_MEMORY_WITHOUT_ATTRIBUTE


@dataclass
class _Thread(threading.local):
    stack: list[int] = field(default_factory=list)
    relaxed: bool = False


@dataclass(frozen=True)
class _Config:
    """What the bindings return for a launch configuration, as far as it is used."""

    pointer: int

    def getPtr(self) -> int:  # noqa: N802 - the bindings' name
        return self.pointer


class DriverDouble(Driver):
    """Driver of ``gpus`` pretended H200s.

    Attributes:
        calls: how often each method was called.
        launches: the launches that reached the driver and were accepted.
        version: newest CUDA version that the driver serves.
        refuses_load_in_capture: as drivers older than those seen do while any stream is capturing.
        in_launch: called in the middle of each launch, while its function is in use.
    """

    def __init__(self, gpus: int = 1, sms: int = 132, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        self.gpus, self.sms, self.capability = gpus, sms, capability
        self.version = (13, 0)
        self.calls: Counter[str] = Counter()
        self.launches: list[Launch] = []
        self.refuses_load_in_capture = False
        self.in_launch: Callable[[], None] = lambda: None
        self._failures: dict[str, list[str]] = {}
        self._thread = _Thread()
        self._mutex = threading.RLock()
        self._next = 0x1000
        self._ids = 0
        self._primaries = [_FakeContext(self._handle(), device, sms, "primary") for device in range(gpus)]
        self._contexts = {context.handle: context for context in self._primaries}
        self._streams: dict[int, int] = {}
        self._capturing: set[int] = set()
        self._libraries: set[int] = set()
        self._kernels: dict[int, int] = {}
        self._library_kernels: dict[tuple[int, str], int] = {}
        self._launching: Counter[int] = Counter()
        self._configs: dict[int, tuple[Any, ...]] = {}
        self._functions: dict[int, _Function] = {}

    # What a test does to the machine.

    def fail_next(self, method: str, result: str, times: int = 1) -> None:
        """Make the next calls of a method fail."""
        self._failures.setdefault(method, []).extend([result] * times)

    def reset_primary(self, device: int) -> None:
        """Reset a primary context: same address, no living context until it is retained again."""
        self._primaries[device].context_id = None

    def create_context(self, device: int) -> int:
        """Create a context of the application's own; not made current."""
        return self._add(_FakeContext(self._handle(), device, self.sms, "own"))

    def create_green_context(self, device: int, sms: int) -> int:
        """Create a green context with some of the SMs."""
        return self._add(_FakeContext(self._handle(), device, sms, "green"))

    def destroy_context(self, handle: int) -> None:
        """Destroy a context."""
        self._contexts[handle].context_id = None

    def create_stream(self, context: int) -> int:
        """Create a stream in a context."""
        stream = self._handle()
        self._streams[stream] = context
        return stream

    def begin_capture(self, stream: int) -> None:
        """Start capturing a stream."""
        self._capturing.add(stream)

    def end_capture(self, stream: int) -> None:
        """End capturing a stream."""
        self._capturing.remove(stream)

    @property
    def libraries_loaded(self) -> int:
        """Libraries that were loaded and not unloaded."""
        return len(self._libraries)

    # The driver's side.

    def start(self) -> None:
        self._count("start")
        if self._started_pid is None:
            self._started_pid = os.getpid()

    def refuse_fork(self) -> None:
        super().refuse_fork()  # asks no driver

    def driver_version(self) -> tuple[int, int]:
        self._count("driver_version")
        return self.version

    def device_count(self) -> int:
        self._count("device_count")
        return self.gpus

    def device_name(self, ordinal: int) -> str:
        self._count("device_name")
        return "NVIDIA H200"

    def device_uuid(self, ordinal: int) -> str:
        self._count("device_uuid")
        return f"00000000-0000-0000-0000-{ordinal:012d}"

    def device_attribute(self, ordinal: int, name: str) -> int:
        self._count("device_attribute")
        return {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024, "MULTIPROCESSOR_COUNT": self.sms}[name]

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        self._count("compute_capability")
        return self.capability

    def primary_is_active(self, ordinal: int) -> bool:
        self._count("primary_is_active")
        return self._primaries[ordinal].context_id is not None

    def retain_primary(self, ordinal: int) -> int:
        self._count("retain_primary")
        primary = self._primaries[ordinal]
        with self._mutex:
            if primary.context_id is None:
                primary.context_id = self._new_id()
        return primary.handle

    def current_context(self) -> int:
        self._count("current_context")
        return self._thread.stack[-1] if self._thread.stack else 0

    def push_context(self, context: int) -> None:
        self._count("push_context")
        if context not in self._contexts:
            raise self._refused("push_context", "CUDA_ERROR_INVALID_CONTEXT")
        self._thread.stack.append(context)

    def pop_context(self) -> None:
        self._count("pop_context")
        if not self._thread.stack:
            raise self._refused("pop_context", "CUDA_ERROR_INVALID_CONTEXT")
        self._thread.stack.pop()

    def context_device(self) -> int:
        self._count("context_device")
        return self._current().device

    def try_context_id(self, context: int) -> int | None:
        self._count("try_context_id")
        return self._contexts[context].context_id

    def try_current_context_id(self) -> int | None:
        self._count("try_current_context_id")
        return self._contexts[self._thread.stack[-1]].context_id if self._thread.stack else None

    def synchronize(self) -> None:
        self._count("synchronize")
        self._current()
        if self._capturing:
            raise self._refused("synchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    def context_sms(self, context: int, ordinal: int) -> int:
        self._count("context_sms")
        return self._contexts[context].sms

    def stream_context(self, stream: int) -> int:
        self._count("stream_context")
        return self._current().handle if stream <= LAST_SPECIAL_STREAM else self._streams[stream]

    def stream_is_green(self, stream: int) -> bool:
        self._count("stream_is_green")
        context = self._current() if stream <= LAST_SPECIAL_STREAM else self._contexts[self._streams[stream]]
        return context.kind == "green"

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self._count("relaxed_capture")
        before, self._thread.relaxed = self._thread.relaxed, True
        try:
            yield
        finally:
            self._thread.relaxed = before

    def load_library(self, image: bytes) -> int:
        self._count("load_library")
        if self._capturing and (self.refuses_load_in_capture or not self._thread.relaxed):
            raise self._refused("load_library", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        library = self._handle()
        self._libraries.add(library)
        return library

    def unload_library(self, library: int) -> None:
        self._count("unload_library")
        with self._mutex:
            assert library not in self._launching, "unloaded under a launch"
            self._libraries.remove(library)

    def library_kernel(self, library: int, entry: str) -> int:
        self._count("library_kernel")
        with self._mutex:
            kernel = self._library_kernels.setdefault((library, entry), self._handle())
            self._kernels[kernel] = library
        return kernel

    def kernel_function(self, kernel: int) -> int:
        self._count("kernel_function")
        context_id = self._functions_owner(self._current())
        for handle, function in self._functions.items():
            if (function.kernel, function.context_id) == (kernel, context_id):
                return handle
        handle = self._handle()
        self._functions[handle] = _Function(kernel, context_id)
        return handle

    def finish_loading(self, function: int) -> None:
        self._count("finish_loading")

    def set_dynamic_shared_memory(self, function: int, size_bytes: int) -> None:
        self._count("set_dynamic_shared_memory")
        self._functions[function].shared_memory_bytes = size_bytes

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
        config = self.config_for(grid, block, shared_memory_bytes, stream, cluster, dependent)
        self.launch_as(config.getPtr(), function, params_pointer)

    def config_for(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory_bytes: int,
        stream: int,
        cluster: int = 1,
        dependent: bool = False,
    ) -> _Config:
        config = _Config(self._handle())
        self._configs[config.pointer] = grid, block, shared_memory_bytes, stream, cluster, dependent
        return config

    def launch_as(self, config_pointer: int, function: int, params_pointer: int) -> None:
        grid, block, shared_memory_bytes, stream, cluster, dependent = self._configs[config_pointer]
        self._count("launch")
        target = self._current() if stream <= LAST_SPECIAL_STREAM else self._contexts[self._streams[stream]]
        launched = self._functions[function]
        if self._kernels[launched.kernel] not in self._libraries:
            raise self._refused("launch", "CUDA_ERROR_INVALID_HANDLE")  # the real one does not look: the code is gone
        if launched.context_id != self._functions_owner(target):
            raise self._refused("launch", "CUDA_ERROR_INVALID_HANDLE")
        if shared_memory_bytes > launched.shared_memory_bytes:
            raise self._refused("launch", "CUDA_ERROR_INVALID_VALUE")
        assert target.context_id is not None
        library = self._kernels[launched.kernel]
        with self._mutex:
            self._launching[library] += 1
        self.in_launch()
        with self._mutex:
            self._launching[library] -= 1
            self._launching += Counter()  # drops what is not positive
        self.launches.append(Launch(function, target.context_id, grid, block, shared_memory_bytes, stream, cluster, dependent))

    def encode_tiled_map(
        self,
        address: int,
        dtype: str,
        dims: object,
        strides_bytes: object,
        box: object,
        swizzle_128b: bool,
    ) -> bytes:
        self._count("encode_tiled_map")
        return repr((address, dtype, dims, strides_bytes, box, swizzle_128b)).encode()[:128].ljust(128, b"\0")

    # Inside.

    def _count(self, method: str) -> None:
        with self._mutex:
            self.calls[method] += 1
            pending = self._failures.get(method)
            result = pending.pop(0) if pending else None
        if method != "start":
            self.start()
            if self._started_pid != os.getpid():
                raise self._refused(method, "CUDA_ERROR_NOT_INITIALIZED")
        if result is not None:
            raise self._refused(method, result)

    def _refused(self, call: str, result: str) -> DriverError:
        return DriverError(call=call, result=result)

    def _handle(self) -> int:
        with self._mutex:
            self._next += 0x10
            return self._next

    def _new_id(self) -> int:
        with self._mutex:
            self._ids += 1
            return self._ids

    def _add(self, context: _FakeContext) -> int:
        context.context_id = self._new_id()
        self._contexts[context.handle] = context
        return context.handle

    def _current(self) -> _FakeContext:
        if not self._thread.stack or self._contexts[self._thread.stack[-1]].context_id is None:
            raise self._refused("current context", "CUDA_ERROR_INVALID_CONTEXT")
        return self._contexts[self._thread.stack[-1]]

    def _functions_owner(self, context: _FakeContext) -> int:
        owner = self._primaries[context.device] if context.kind == "green" else context
        context_id = owner.context_id
        return context.context_id if context_id is None else context_id  # type: ignore[return-value]

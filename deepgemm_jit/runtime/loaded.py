"""A kernel in one CUDA context: loading it there, and launching it there and nowhere else."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import (
    CaptureError,
    ContextError,
    ContextMismatchError,
    DriverError,
    ForkedProcessError,
    StaleContextError,
    UnloadedKernelError,
)
from deepgemm_jit.runtime.context import NO_CONTEXT, Context, ContextIdentity, Contexts
from deepgemm_jit.runtime.driver import LAST_SPECIAL_STREAM
from deepgemm_jit.runtime.params import Launch
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

# What drivers were seen to answer, or say they answer, when a load meets a capture.
_CAPTURE_REFUSALS = (
    "CUDA_ERROR_NOT_PERMITTED",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
)


_PAUSE_S = 0.0005
"""Between two looks at launches on their way: one lasts microseconds, unless the queue of the GPU is full."""


class _Use:
    """Who is launching a kernel at this moment, and whether anyone still may."""

    __slots__ = ("closed", "launching")

    def __init__(self) -> None:
        self.closed = False
        # One item per launch on its way. Appending and popping are atomic, so the launch path needs no lock.
        self.launching: list[None] = []


@dataclass(frozen=True, slots=True, eq=False)
class LoadedKernel:
    """A kernel that is ready to launch in one context.

    Attributes:
        spec: what it is.
        context: where it was loaded.
        shared_memory_bytes: dynamic shared memory of a block.
    """

    spec: KernelSpec
    context: Context
    shared_memory_bytes: int
    _contexts: Contexts = field(repr=False)
    _library: int = field(repr=False)
    _function: int = field(repr=False)
    _use: _Use = field(repr=False, default_factory=_Use)

    @property
    def identity(self) -> ContextIdentity:
        """What tells the kernel's context from every other."""
        return self.context.identity

    @property
    def sms(self) -> int:
        """SMs that the kernel's context may use."""
        return self.context.sms

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: int,
        params_pointer: int,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Launch in the current context, which must be the kernel's own; a refusal comes before anything is launched.

        Args:
            grid: blocks per dimension.
            block: threads per dimension.
            stream: raw handle of a stream of the current context.
            params_pointer: address of an array of pointers to the arguments.
            cluster: blocks of a cluster, neighbours in the first dimension of the grid.
            dependent: start while the kernels before it in the stream end; it waits for them itself.

        Raises:
            ForkedProcessError: the kernel was loaded before a fork.
            ContextMismatchError: another context is current, or the stream belongs to another.
            StaleContextError: the kernel's context was reset or destroyed.
            UnloadedKernelError: the kernel was unloaded.
            DriverError: the driver refused the launch.
        """
        self._require_current()
        if stream > LAST_SPECIAL_STREAM:
            handle = self._contexts.driver.stream_context(stream)
            if handle != self.context.handle:
                owner = self._contexts.with_handle(handle)
                raise ContextMismatchError(
                    what=f"stream {stream:#x}",
                    belongs_to="a context that is gone" if owner is None else owner.describe(),
                    used_in=f"a launch of {self._what} in {self.context.describe()}",
                )
        config = self.config_for(Launch(grid, block, params_pointer, cluster, dependent), stream)
        self.launch_entered(self.context, config.getPtr(), params_pointer)

    def config_for(self, launch: Launch, stream: int) -> Any:
        """Return what :meth:`launch_entered` needs of a launch beside its parameters."""
        grid, block, _params_pointer, cluster, dependent = launch
        return self._contexts.driver.config_for(grid, block, self.shared_memory_bytes, stream, cluster, dependent)

    def launch_entered(self, context: Context, config_pointer: int, params_pointer: int) -> None:
        """Launch in ``context``, which :meth:`Contexts.enter` has just made current for a call on the configuration's stream.

        That has looked at all that :meth:`launch` looks at; what is left is whether this is the kernel's context.

        Raises:
            ContextMismatchError, UnloadedKernelError, DriverError: as :meth:`launch`.
        """
        if context is not self.context:
            raise self._refusal(context)
        use = self._use
        use.launching.append(None)  # before the look at `closed`: unload sets that first and looks here afterwards
        try:
            if use.closed:
                raise UnloadedKernelError(what=self._what)
            self._contexts.driver.launch_as(config_pointer, self._function, params_pointer)
        finally:
            use.launching.pop()

    def unload(self) -> None:
        """Unload the kernel for good; its context must be current.

        No launch of this process is cut off: those on their way are waited for, then all work of the context, and later ones
        are refused. A CUDA graph that captured the kernel must not be replayed afterwards.

        Raises:
            ForkedProcessError, ContextMismatchError, StaleContextError, UnloadedKernelError: as :meth:`launch`.
            CaptureError: a stream of the context is capturing; the kernel stays loaded.
            DriverError: the driver failed, which it also says of work that went wrong before.
        """
        self._require_current()
        if self._use.closed:
            raise UnloadedKernelError(what=self._what)
        driver = self._contexts.driver
        self._use.closed = True
        try:
            while self._use.launching:
                time.sleep(_PAUSE_S)
            with driver.relaxed_capture():
                driver.synchronize()
                driver.unload_library(self._library)
        except BaseException as error:
            self._use.closed = False
            if isinstance(error, DriverError) and error.result in _CAPTURE_REFUSALS:
                raise CaptureError(kernel=self.spec.name, result=error.result) from error
            raise

    def _require_current(self) -> None:
        identity = self.context.identity
        if os.getpid() != identity.pid:
            raise ForkedProcessError(what=self._what, loaded_pid=identity.pid, pid=os.getpid())
        if self._contexts.driver.try_current_context_id() != identity.context_id:
            raise self._refusal(self._contexts.try_current())

    @property
    def _what(self) -> str:
        return f"kernel {self.spec.name}"

    def _refusal(self, used_in: Context | None) -> ContextError:
        where = NO_CONTEXT if used_in is None else used_in.describe()
        gone = self._contexts.is_gone(self.context)
        error = StaleContextError if gone else ContextMismatchError
        return error(what=self._what, belongs_to=self.context.describe(), used_in=where)


def load_kernel(contexts: Contexts, context: Context, spec: KernelSpec, cubin: Cubin) -> LoadedKernel:
    """Load a cubin into ``context``, which must be current, and leave nothing for the first launch to do.

    A load that fails in any step is undone and leaves nothing behind, so that the next one does every step again.

    Raises:
        CaptureError: the driver does not load while a stream is capturing.
        DriverError: the driver refused the cubin or an attribute.
    """
    driver = contexts.driver
    shared_memory_bytes = dynamic_shared_memory_bytes(spec)
    try:
        with driver.relaxed_capture():
            library = driver.load_library(cubin.image)
            try:
                function = driver.kernel_function(driver.library_kernel(library, cubin.entry))
                if shared_memory_bytes:
                    # The driver keeps this per device, so every context sets it for itself.
                    driver.set_dynamic_shared_memory(function, shared_memory_bytes)
                driver.finish_loading(function)
            except DriverError:
                with suppress(DriverError):
                    driver.unload_library(library)
                raise
    except DriverError as error:
        if error.result in _CAPTURE_REFUSALS:
            raise CaptureError(kernel=spec.name, result=error.result) from error
        raise
    return LoadedKernel(spec, context, shared_memory_bytes, contexts, library, function)

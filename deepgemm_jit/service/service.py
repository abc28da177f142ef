"""The service: a spec becomes a kernel loaded in the context of a call, at most once per context."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Any, Literal, Self

from deepgemm_jit.builder import Builder, Built
from deepgemm_jit.errors import (
    CompileError,
    KernelNotBuiltError,
    OperandError,
    ToolchainError,
    UnloadedKernelError,
    UnsupportedError,
)
from deepgemm_jit.runtime import Context, Contexts, Driver, Launch, LoadedKernel, TensorMaps, load_kernel
from deepgemm_jit.service.ahead import Preparation, side_by_side
from deepgemm_jit.service.arguments import require_ordinal, require_ordinals, require_specs
from deepgemm_jit.service.audit import Audit, caller_of_ours
from deepgemm_jit.service.monitor import Counts, KernelEvent, KernelState, Monitor
from deepgemm_jit.settings import Settings
from deepgemm_jit.spec import KernelSpec, Limits, Overlap, arch_of, require_member
from deepgemm_jit.spec.shown import shown


@dataclass(slots=True)
class _Home:
    """What the service keeps for one context."""

    context: Context
    limits: Limits
    kernels: dict[KernelSpec, LoadedKernel] = field(default_factory=dict)
    prepared: dict[object, Any] = field(default_factory=dict)


class KernelService:
    """Builds, loads and keeps kernels for every context of this process.

    Making one reads no setting and starts no CUDA. It may be used from several threads, which load a kernel once between them,
    and in a fork: cubins stay, kernels are loaded afresh (where the parent had started CUDA the driver refuses that).

    Args:
        settings: of the builder; default: those of the moment it is first needed.
        builder: default: one made of ``settings``.
        driver: default: the driver of this machine.
    """

    def __init__(self, settings: Settings | None = None, builder: Builder | None = None, driver: Driver | None = None) -> None:
        self.contexts = Contexts(driver or Driver())
        self.maps = TensorMaps(self.contexts.driver)
        self._settings = settings
        self._builders = {} if builder is None else {"builder": builder}
        self._audits: dict[str, Audit] = {}
        self._homes: dict[Context, _Home] = {}
        self._sms_limit: int | None = None
        self._overlap = Overlap.NONE
        self._monitor = Monitor()
        self._built: dict[KernelSpec, Built] = {}
        self._failures: dict[KernelSpec, CompileError] = {}
        # By process as well: a fork may inherit a lock whose holder did not come along.
        self._locks: dict[tuple[int, KernelSpec], Lock] = {}

    @property
    def builder(self) -> Builder:
        """The builder, made on first use."""
        builder = self._builders.get("builder")
        # setdefault: of two threads that come first at once, both get the one builder, and seal() is not lost with the other.
        return self._builders.setdefault("builder", Builder(self._settings)) if builder is None else builder

    def kernel(self, spec: KernelSpec) -> LoadedKernel:
        """Return the kernel of ``spec`` in the current context: kept from before, or built and loaded now.

        Raises:
            DriverError: no context is current, or the driver refused the load.
            UnsupportedError: the current GPU has no kernels, or is not the arch of ``spec``.
            CompileError: NVRTC refused the source, now or earlier in this process.
            ToolchainError: NVRTC cannot be used, or is newer than the driver.
            KernelNotBuiltError: the compile policy is "never" and there is no cubin.
            CaptureError: the driver does not load while a stream is capturing.
        """
        return self._kernel(self._home(self.contexts.current()), spec)

    def prepare(
        self, specs: Iterable[KernelSpec], device_ordinals: Sequence[int] | None = None, *, jobs: int | None = None
    ) -> Preparation:
        """Build and load kernels before anything needs them: afterwards the first call of each is a hit.

        It returns when all is done, and holds no other thread up meanwhile: NVRTC and the driver work without the interpreter's
        lock, and kernels that are ready go on being launched. The compile policy holds here as for any call: under "never" all
        that is not built is an error. No memory of a GPU is taken but that of the kernels themselves.

        Args:
            specs: members of a kernel set; one that is there already costs nothing.
            device_ordinals: GPUs to load into, each into the context that a call on it means; default: the current context. An
                empty sequence builds only, and starts no CUDA.
            jobs: compiles at a time; default: the setting, or the CPUs of this process.

        Raises:
            KernelNotBuiltError, CompileError, ToolchainError, DriverError: as of :meth:`kernel`, of the first kernel that cannot
                be had; the others are tried all the same, and its notes name those that failed too.
            OperandError: ``jobs`` is no count, or something is no spec or no ordinal.
            UnsupportedError: as of :meth:`kernel`.
        """
        self._monitor.refuse_listeners("a preparation")
        specs = tuple(dict.fromkeys(require_specs("prepare", specs)))
        if device_ordinals is not None:
            device_ordinals = require_ordinals("prepare", device_ordinals)
        for spec in specs:
            require_member(spec)
        caller, homes = caller_of_ours(), self._homes_of(device_ordinals)
        work = self._builds_ahead(caller) if device_ordinals is not None and not homes else self._loads_ahead(homes, caller)
        return side_by_side(specs, work, self.builder.settings.jobs if jobs is None else jobs)

    def states(self, specs: Iterable[KernelSpec], device_ordinal: int | None = None) -> Mapping[KernelSpec, KernelState]:
        """Return the state of each kernel; asks no driver and takes no lock, so that any thread may poll it.

        A kernel is ready when it is loaded on ``device_ordinal``; default: on every GPU that was used so far. In a fork none is:
        the parent's stay the parent's. That a GPU was reset is noticed by the next call on it, not here.

        Raises:
            OperandError: something is no spec or no ordinal.
        """
        specs = require_specs("states", specs)
        if device_ordinal is not None:
            require_ordinal("states", device_ordinal)
        loaded: dict[int, set[KernelSpec]] = {}
        pid = os.getpid()
        for home in [each for each in list(self._homes.values()) if each.context.identity.pid == pid]:
            loaded.setdefault(home.context.device_ordinal, set()).update(list(home.kernels))
        wanted = list(loaded) if device_ordinal is None else [device_ordinal]
        return {
            spec: "ready" if wanted and all(spec in loaded.get(each, ()) for each in wanted) else self._monitor.state(spec)
            for spec in specs
        }

    @property
    def counts(self) -> Counts:
        """What was done for kernels so far; a launch of a kernel that is loaded counts nothing."""
        return self._monitor.counts

    def on_event(self, listener: Callable[[KernelEvent], None]) -> None:
        """Call ``listener`` with each thing that is done for a kernel from now on, in the thread that did it.

        Others may wait for that kernel meanwhile: a listener must be quick, and ask the service for no kernel, which raises
        OperandError there. What it raises is logged.

        Raises:
            OperandError: ``listener`` cannot be called.
        """
        if not callable(listener):
            raise OperandError(
                operation="on_event", faults=[f"listener = {shown(listener)}, needed: a function of one KernelEvent"]
            )
        self._monitor.listen(listener)

    def limits(self) -> Limits:
        """Return what the current context offers, or the part of it that :meth:`limit_sms` leaves; selection needs it.

        Raises:
            DriverError: no context is current.
            UnsupportedError: its GPU has no kernels.
        """
        return self._home(self.contexts.current()).limits

    def call(self, device_ordinal: int, stream: int) -> Call:
        """Return the context that a call on ``device_ordinal`` and the raw handle ``stream`` means, to be entered with ``with``.

        What a hit costs: the process id, the driver's id of the current context and, for a stream that is not one of the special
        ones, the stream's context (about 0.8 us together); then one look-up for the context and one per kernel. Nothing
        is hashed but the identity and the spec, and no setting, file or lock is touched. The launch itself checks again.
        """
        return Call(self, device_ordinal, stream)

    def prepared(self, context: Context) -> dict[object, Any]:
        """Return what operations keep of their calls in a context: theirs to fill and to bound.

        It is emptied when anything that it may rest on changes here: the SM limit, dependent launch, or a kernel
        that is unloaded.
        """
        home = self._homes.get(context)
        return (self._home(context) if home is None else home).prepared

    def limit_sms(self, sms: int | None) -> None:
        """Let persistent kernels take at most this many SMs, in every context that has more; None lifts the limit.

        Leaves SMs to kernels that run beside ours, for example to communication.

        Raises:
            OperandError: no positive whole number.
        """
        if sms is not None and (isinstance(sms, bool) or not isinstance(sms, int) or sms < 1):
            raise OperandError(operation="limit_sms", faults=[f"sms must be a whole number of at least 1, or None, not {sms!r}"])
        self._sms_limit = sms
        self._select_anew()

    @property
    def overlaps(self) -> bool:
        """Whether launches may start while the kernels before them in the stream end, see :meth:`overlap_launches`."""
        return self._overlap is not Overlap.NONE

    def overlap_launches(self, overlap: bool, constant_weights: bool = False) -> None:
        """Let kernels that wait for those before them by themselves start while those end (programmatic dependent launch).

        Args:
            overlap: whether they may.
            constant_weights: no kernel of a stream writes B of a GEMM launched behind it: dense GEMMs may read it at once.
        """
        # At once: no call sees a promise that nobody has given.
        self._overlap = Overlap.NONE if not overlap else Overlap.WEIGHTS if constant_weights else Overlap.START
        self._select_anew()

    def _select_anew(self) -> None:
        for home in list(self._homes.values()):
            self._renew_limits(home)
        self.forget_calls()

    def _renew_limits(self, home: _Home) -> None:
        # Until they are those of the settings now: another thread may set them meanwhile.
        while home.limits != (limits := self._limits_of(home.context)):
            home.limits = limits

    def forget_calls(self) -> None:
        """Forget what operations keep of their calls: the next one of each kind is checked and selected anew."""
        for home in list(self._homes.values()):
            home.prepared = {}  # a new one: a call that is on its way may still fill the old one

    def unload(self, spec: KernelSpec | None = None) -> int:
        """Unload the kernel of ``spec``, or all, from the current context; return how many there were.

        Nothing else ever unloads a kernel. It waits for what runs in the context. A later call loads the kernel again from the
        cubin that the service kept.

        Raises:
            DriverError: no context is current, or the driver failed.
            CaptureError: a stream of the context is capturing.
        """
        home = self._home(self.contexts.current())
        unloaded = 0
        for loaded in list(home.kernels) if spec is None else [spec]:
            with self._lock(loaded):
                # Out of sight first: who asks for the kernel meanwhile waits here and loads it anew.
                kernel = home.kernels.pop(loaded, None)
                if kernel is None:
                    continue
                home.prepared = {}
                try:
                    kernel.unload()
                except BaseException:
                    home.kernels[loaded] = kernel
                    raise
                unloaded += 1
        return unloaded

    def seal(self, policy: Literal["never", "warn"] = "never") -> None:
        """Hold every compile from now on for a fault, and name the call that asked for it.

        Args:
            policy: "never": it raises KernelNotBuiltError. "warn": it is logged, and goes on. What the store has is loaded
                under either.

        Raises:
            OperandError: another policy.
        """
        if policy not in ("never", "warn"):
            raise OperandError(operation="seal", faults=[f"policy is {policy!r}, needed: 'never' or 'warn'"])
        self.builder.set_policy(policy, origin="seal()")

    def _home(self, context: Context) -> _Home:
        home = self._homes.get(context)
        if home is None:
            # What a context at the same address held went with it.
            for other in list(self._homes):
                if other.handle == context.handle and other is not context:
                    self._homes.pop(other, None)
            home = self._homes.setdefault(context, _Home(context, self._limits_of(context)))
            self._renew_limits(home)  # a setting that came between did not see it
        return home

    def _limits_of(self, context: Context) -> Limits:
        arch = arch_of(context.compute_capability).name
        limits = Limits(arch, context.sms, context.shared_memory_bytes, overlap=self._overlap)
        if self._sms_limit is None or self._sms_limit >= limits.sms:
            return limits
        return replace(limits, sms=self._sms_limit, whole=False)

    def _lock(self, spec: KernelSpec) -> Lock:
        self._monitor.refuse_listeners(spec.name)
        # One lock per spec, not per context: two GPUs that need the same kernel at once build it once.
        return self._locks.setdefault((os.getpid(), spec), Lock())

    def _kernel(self, home: _Home, spec: KernelSpec, caller: str = "") -> LoadedKernel:
        kernel = home.kernels.get(spec)
        if kernel is not None:
            return kernel
        with self._lock(spec):
            kernel = home.kernels.get(spec)
            if kernel is None:
                if spec.arch != home.limits.arch:
                    raise UnsupportedError(
                        given=f"kernel {spec.name} in {home.context.describe()}",
                        supported=f"kernels of {home.limits.arch} there",
                    )
                with self._monitor.building(spec):
                    cubin = self._loadable(spec, caller).cubin
                    started = time.perf_counter()
                    kernel = home.kernels[spec] = load_kernel(self.contexts, home.context, spec, cubin)
                    self._monitor.tell(spec, "load", started)
        return kernel

    def _loadable(self, spec: KernelSpec, caller: str) -> Built:
        """Return a cubin that the driver at hand loads, and keep it."""
        built = self._built.get(spec)
        if built is not None:
            return built
        failure = self._failures.get(spec)
        if failure is not None:
            raise failure.afresh()
        cuda_major, _minor = self.contexts.driver.driver_version()
        built = self._built[spec] = self._build(spec, caller, max_cuda_major=cuda_major)
        return built

    def _build(self, spec: KernelSpec, caller: str, max_cuda_major: int | None) -> Built:
        caller = caller or caller_of_ours()
        started, audit, key = time.perf_counter(), self._audit, self.builder.request(spec).key
        try:
            built = self.builder.build(spec, max_cuda_major, caller)
        except (CompileError, KernelNotBuiltError, ToolchainError) as error:
            audit.note(spec.name, key, caller)
            if isinstance(error, CompileError):
                self._failures[spec] = error.afresh()
            raise
        if built.outcome == "compiled":
            audit.note(spec.name, key, caller)
        self._monitor.tell(spec, "compile" if built.outcome == "compiled" else "hit", started)
        return built

    def _homes_of(self, device_ordinals: Sequence[int] | None) -> list[_Home]:
        if device_ordinals is None:
            return [self._home(self.contexts.current())]
        homes = []
        for ordinal in device_ordinals:
            with self.call(ordinal, 0) as call:
                homes.append(call._home)
        return homes

    def _loads_ahead(self, homes: Sequence[_Home], caller: str) -> Callable[[KernelSpec], bool]:
        """Return what loads a kernel into contexts, in any thread, and says whether it was compiled for that."""

        def load(spec: KernelSpec) -> bool:
            known = self._built.get(spec)
            for home in homes:
                self.contexts.driver.push_context(home.context.handle)
                try:
                    self._kernel(home, spec, caller)
                finally:
                    self.contexts.driver.pop_context()
            built = self._built[spec]
            return built is not known and built.outcome == "compiled"

        return load

    def _builds_ahead(self, caller: str) -> Callable[[KernelSpec], bool]:
        """Return what brings a kernel into the store, and says whether it was compiled for that."""

        def build(spec: KernelSpec) -> bool:
            with self._lock(spec), self._monitor.building(spec):
                # Not kept here: which cubins the driver loads has not been asked.
                return self._build(spec, caller, max_cuda_major=None).outcome == "compiled"

        return build

    @property
    def _audit(self) -> Audit:
        audit = self._audits.get("audit")
        if audit is None:
            audit = self._audits.setdefault("audit", Audit(self.builder.settings.audit))
            audit.begin()
        return audit


class Call:
    """The context of one call, current between enter and exit; the caller's is restored also when the call raises.

    Attributes:
        context: which context it is.
        limits: what that context offers.
        prepared: what operations keep of their calls there, see :meth:`KernelService.prepared`.
        stream: raw handle of the call's stream.
    """

    __slots__ = ("_device_ordinal", "_home", "_pushed", "_service", "context", "limits", "prepared", "stream")

    context: Context
    limits: Limits
    prepared: dict[object, Any]

    def __init__(self, service: KernelService, device_ordinal: int, stream: int) -> None:
        self._service = service
        self._device_ordinal = device_ordinal
        self.stream = stream

    def __enter__(self) -> Self:
        """Make the call's context current.

        Raises:
            ContextMismatchError: the stream belongs to another device, or to a context of the application's own.
            UnsupportedError: the GPU has no kernels.
        """
        contexts = self._service.contexts
        self.context, self._pushed = contexts.enter(self._device_ordinal, self.stream)
        try:
            self._home = self._service._home(self.context)
        except BaseException:
            contexts.leave(self._pushed)
            raise
        # In this order: what a call keeps must not outlive a change of the limits it saw.
        self.prepared = self._home.prepared
        self.limits = self._home.limits
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._service.contexts.leave(self._pushed)

    def kernel(self, spec: KernelSpec) -> LoadedKernel:
        """Return the kernel of ``spec`` in this context; raises what :meth:`KernelService.kernel` raises."""
        return self._service._kernel(self._home, spec)

    def launch(self, spec: KernelSpec, launch: Launch) -> None:
        """Launch the kernel of ``spec`` on the stream of this call; raises what :meth:`kernel` and a launch raise."""
        while True:
            try:
                grid, block, params_pointer, cluster, dependent = launch
                self.kernel(spec).launch(grid, block, self.stream, params_pointer, cluster, dependent)
                return
            except UnloadedKernelError:
                continue  # between look-up and launch another thread unloaded it: the next look-up loads it again


_DEFAULT: dict[str, KernelService] = {}


def default_service() -> KernelService:
    """Return the service that the operations of this process share, made on first use with the settings of the environment."""
    service = _DEFAULT.get("service")
    # setdefault: of two threads that come first at once, both get the one service.
    return _DEFAULT.setdefault("service", KernelService()) if service is None else service

"""The one path from a spec to a cubin: store, lock, store again, render, compile, publish."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deepgemm_jit.compiler import compile_options, compile_source, nvrtc_info
from deepgemm_jit.cubin import Cubin
from deepgemm_jit.errors import KernelNotBuiltError, ToolchainError
from deepgemm_jit.frontend import render
from deepgemm_jit.settings import CompilePolicy, Settings, read_settings
from deepgemm_jit.spec import KernelSpec, require_member
from deepgemm_jit.store import Store, request_key

logger = logging.getLogger("deepgemm_jit.builder")


@dataclass(frozen=True, slots=True)
class Request:
    """All that decides a cubin besides the compiler's version: what the request key covers."""

    spec: KernelSpec
    source: str
    headers: Mapping[str, str]
    options: tuple[str, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Built:
    """A cubin and how it came."""

    cubin: Cubin
    outcome: Literal["compiled", "cached"]
    stored: bool
    """False when the store could not be written: the cubin lives in this process only."""
    seconds: float


class Builder:
    """Builds specs through one store under one compile policy.

    Args:
        settings: default: those of this moment.
        store: default: the one that the settings name.
    """

    def __init__(self, settings: Settings | None = None, store: Store | None = None) -> None:
        self.settings = read_settings() if settings is None else settings
        self.store = Store.open(self.settings) if store is None else store
        self._requests: dict[KernelSpec, Request] = {}

    def set_policy(self, policy: CompilePolicy, origin: str = "argument") -> None:
        """Change the compile policy for all builds that follow; ``origin`` is who says so, for the text of a refusal."""
        self.settings = replace(self.settings, compile=policy, origins={**self.settings.origins, "compile": origin})

    def request(self, spec: KernelSpec) -> Request:
        """Render ``spec`` and return what its key covers; compiles nothing, needs no NVRTC.

        Raises:
            UnsupportedError: the spec is in no kernel set: nothing is known of what it would compile to.
            ToolchainError: a source that it needs is missing.
        """
        request = self._requests.get(spec)
        if request is None:
            require_member(spec)
            source = render(spec)
            options = compile_options(spec.arch)
            key = request_key(arch=spec.arch, source=source.text, headers=source.headers, entry=source.entry, options=options)
            request = self._requests[spec] = Request(spec, source.text, source.headers, options, key)
        return request

    def warmup_command(self, arch: str) -> str:
        """Return the command that builds the kernel set of ``arch`` into the store of this builder."""
        words = ["deepgemm-jit", "warmup", "--arch", arch]
        # Also where a variable says so: the shell in which the command is run may lack it.
        if self.settings.cache_dir is not None:
            words += ["--cache-dir", str(self.settings.cache_dir)]
        return shlex.join(words)

    def try_cached(self, spec: KernelSpec, max_cuda_major: int | None = None) -> Cubin | None:
        """Return the stored cubin of ``spec``, or None; compiles nothing, needs no NVRTC."""
        return self._stored(self.request(spec), max_cuda_major)

    def keep(self, spec: KernelSpec, cubin: Cubin) -> None:
        """Keep a cubin of ``spec`` that another process built from the sources at hand; in memory, if the store is not writable.

        Raises:
            OperandError: it is not well formed, or not of ``spec``.
        """
        self.store.put(self.request(spec).key, cubin, spec_text=spec.text)

    def build(self, spec: KernelSpec, max_cuda_major: int | None = None, caller: str = "") -> Built:
        """Return the cubin of ``spec``.

        Args:
            spec: a member of a kernel set.
            max_cuda_major: newest CUDA major that the driver at hand can load; None when no driver is asked.
            caller: who asks, in words, for a policy that reports or refuses.

        Raises:
            KernelNotBuiltError: the policy is "never" and the store has no cubin.
            CompileError, ToolchainError: NVRTC refused the source, or cannot be used, or is newer than the driver.
        """
        start = time.perf_counter()
        request = self.request(spec)
        built = self._try_built(request, max_cuda_major, start)
        if built is not None:
            return built
        if self.settings.compile == "never":
            raise KernelNotBuiltError(
                kernel=spec.name,
                store=self.store.describe(),
                command=self.warmup_command(spec.arch),
                policy_origin=self.settings.origin("compile"),
                caller=caller,
            )
        if max_cuda_major is not None:
            check_loadable(max_cuda_major)
        if self.settings.compile == "warn":
            asked = f"; asked for by {caller}" if caller else ""
            logger.warning("compiling %s now: no warm-up had built it%s", spec.name, asked)
        with self.store.lock(request.key, spec.name):
            # Another process or thread may have published while this one waited.
            built = self._try_built(request, max_cuda_major, start)
            if built is not None:
                return built
            compiled = compile_source(
                source=request.source, headers=request.headers, entry=spec.name, arch=spec.arch, options=request.options
            )
            for advisory in compiled.advisories:
                logger.warning("ptxas reports %s for %s: it will run slower than it should", advisory, spec.name)
            stored = self.store.put(request.key, compiled.cubin, spec_text=spec.text)
        seconds = time.perf_counter() - start
        logger.info("compiled %s in %.2f s", spec.name, seconds)
        return Built(compiled.cubin, "compiled", stored, seconds)

    def _try_built(self, request: Request, max_cuda_major: int | None, start: float) -> Built | None:
        cubin = self._stored(request, max_cuda_major)
        if cubin is None:
            return None
        stored = not self.store.is_in_memory(request.key, cubin.nvrtc_version)
        return Built(cubin, "cached", stored, time.perf_counter() - start)

    def _stored(self, request: Request, max_cuda_major: int | None) -> Cubin | None:
        return self.store.get(
            request.key, spec_text=request.spec.text, nvrtc_version=_nvrtc_version(), max_cuda_major=max_cuda_major
        )


def build(spec: KernelSpec, settings: Settings | None = None) -> Cubin:
    """Return the cubin of ``spec``: from the store, or compiled and stored. No GPU is needed.

    Raises:
        KernelNotBuiltError, CompileError, ToolchainError: see :meth:`Builder.build`.
    """
    return Builder(settings).build(spec).cubin


def check_loadable(max_cuda_major: int) -> None:
    """Refuse an NVRTC whose cubins the driver could not load: every process would compile them again, in vain.

    Raises:
        ToolchainError: the CUDA major of NVRTC is above ``max_cuda_major``.
    """
    version = _nvrtc_version()
    if version is not None and int(version.partition(".")[0]) > max_cuda_major:
        raise ToolchainError(
            missing=f"NVRTC {version}",
            looked_for=f"one of CUDA {max_cuda_major}, as the driver of this machine loads no cubin of a newer one",
            fix="Install nvidia-cuda-nvrtc-cu12 with cuda-python of CUDA 12, or update the driver",
        )


def _nvrtc_version() -> str | None:
    try:
        return nvrtc_info().version
    except ToolchainError:
        return None  # a store filled elsewhere serves a machine without NVRTC

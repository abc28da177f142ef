"""NVRTC: source and headers in memory to a cubin. No GPU, no driver, no nvcc, and no file is opened."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from deepgemm_jit.compiler.elf import read_cubin_elf
from deepgemm_jit.compiler.log import read_ptxas_log
from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import CompileError, ToolchainError

PACKAGE = "nvidia-cuda-nvrtc"
_FIX = (
    f"Install it with: pip install '{PACKAGE}>=13,<14' 'cuda-bindings>=13,<14' "
    f"(where the driver is one of CUDA 12: '{PACKAGE}-cu12>=12.9,<13' 'cuda-bindings>=12.9,<13')"
)
_FIX_BROKEN = f"Reinstall it with: pip install --force-reinstall {PACKAGE} (of CUDA 12: {PACKAGE}-cu12)"
_FIX_BROKEN_BINDINGS = "Reinstall it with: pip install --force-reinstall cuda-bindings cuda-pathfinder"

# "site-packages" and "conda" are installed packages. A library that pathfinder finds elsewhere (CUDA_HOME, the loader's path)
# has a version nobody pinned and is refused: a compile must not depend on what a machine happens to have.
_PACKAGED = ("site-packages", "conda")


@dataclass(frozen=True, slots=True)
class NvrtcInfo:
    """The NVRTC of this process."""

    version: str
    """``major.minor``."""
    path: str


def compile_options(arch: str) -> tuple[str, ...]:
    """Return the options of every compile for ``arch``, in order.

    ``--no-source-include`` keeps NVRTC from reading headers out of the working directory, and ``-default-device`` spares the
    sources a ``__device__`` on every constant; ptxas' report goes to the log.
    """
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "-default-device",
        "--no-source-include",
        "--no-cache",
        "--ptxas-options=-v",
    )


@cache
def nvrtc_info() -> NvrtcInfo:
    """Load NVRTC and return its version and path.

    Raises:
        ToolchainError: it, its builtins library or the bindings are missing or broken; the loader's error is chained.
    """
    try:
        from cuda import pathfinder
    except ImportError as cause:
        raise _package_error("cuda-pathfinder", "cuda.pathfinder", cause) from cause
    looked_for = f"libnvrtc of an installed {PACKAGE} package"
    try:
        loaded = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError as cause:
        raise ToolchainError(missing="NVRTC", looked_for=looked_for, fix=_FIX) from cause
    except Exception as cause:  # found, but refused by the loader, which raises several kinds
        raise ToolchainError(missing=f"NVRTC is broken ({cause}) and", looked_for=looked_for, fix=_FIX_BROKEN) from cause
    if loaded.found_via not in _PACKAGED and not loaded.was_already_loaded_from_elsewhere:
        raise ToolchainError(
            missing=f"NVRTC at {loaded.abs_path} (found via {loaded.found_via})",
            looked_for=looked_for,
            fix=_FIX,
        )
    nvrtc = _bindings()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion(), "nvrtcVersion")
    return NvrtcInfo(f"{major}.{minor}", str(loaded.abs_path))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin with the log of its compile."""

    cubin: Cubin
    log: str
    advisories: tuple[str, ...]


def compile_source(*, source: str, headers: Mapping[str, str], entry: str, arch: str, options: tuple[str, ...]) -> Compiled:
    """Compile one translation unit.

    Args:
        source: CUDA C++ with one ``extern "C"`` entry.
        headers: every header that may be included, by the name the source uses.
        entry: name of the entry.
        arch: target that the cubin must be of, for example ``sm_90a``.
        options: NVRTC options, see :func:`compile_options`.

    Raises:
        CompileError: NVRTC refused the source, or what it made is not the kernel asked for.
        ToolchainError: NVRTC cannot be used.
    """
    info = nvrtc_info()
    image, log = _run(source, headers, entry, options)

    def refused(reason: str) -> CompileError:
        return CompileError(kernel=entry, options=options, log=f"{reason}\n{log}", source=source)

    # A compiler's success is not believed: an empty or foreign image must never reach the store (flashinfer #4062).
    try:
        elf = read_cubin_elf(image)
    except ValueError as cause:
        raise refused(f"NVRTC returned {len(image)} bytes that are no cubin: {cause}") from cause
    report = read_ptxas_log(log)
    if elf.arch != arch.rstrip("af"):
        raise refused(f"the cubin is for {elf.arch}, not {arch}")
    if elf.entries != (entry,):
        raise refused(f"the cubin's entries are {', '.join(elf.entries)}, not {entry}")
    if report is None or report.registers != elf.registers:
        raise refused(f"the log does not report on the cubin, which uses {elf.registers} registers")
    facts = CubinFacts(
        registers=elf.registers,
        shared_memory_bytes=report.shared_memory_bytes,
        local_memory_bytes=elf.frame_bytes,
        spill_store_bytes=report.spill_store_bytes,
        spill_load_bytes=report.spill_load_bytes,
    )
    return Compiled(Cubin(image, arch, entry, info.version, options, facts), log, report.advisories)


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as cause:
        raise _package_error("cuda-bindings", "cuda.bindings", cause) from cause
    return nvrtc


def _package_error(package: str, module: str, cause: ImportError) -> ToolchainError:
    # `from cuda import x` says the same of a module that is missing and of one that fails, as `cuda` is a namespace.
    try:
        missing = isinstance(cause, ModuleNotFoundError) or find_spec(module) is None
    except ImportError:  # of the parent package
        missing = False
    if missing:
        return ToolchainError(missing=f"package {package}", looked_for=module, fix=_FIX)
    return ToolchainError(missing=f"package {package} is broken ({cause}) and", looked_for=module, fix=_FIX_BROKEN_BINDINGS)


def _run(source: str, headers: Mapping[str, str], entry: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _bindings()
    names = list(headers)
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.encode(), f"{entry}.cu".encode(), len(names), [headers[n].encode() for n in names], [n.encode() for n in names]
        ),
        "nvrtcCreateProgram",
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = log.replace(b"\0", b"").decode(errors="replace")  # one ends the log, another the part of it before ptxas failed
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE:
            _raise_broken_builtins(text)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(kernel=entry, options=options, log=f"{result.name}\n{text}", source=source)
        image = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return bytes(image), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _raise_broken_builtins(log: str) -> NoReturn:
    # NVRTC loads this library on the first compile and keeps the loader's reason to itself, so the loader is asked again.
    info = nvrtc_info()
    path = Path(info.path).with_name(f"libnvrtc-builtins.so.{info.version}")
    what = f"{path.name} of package {PACKAGE}"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        cause = error
    else:
        cause = OSError(log.strip())
    state = "is broken" if path.exists() else "is missing"
    raise ToolchainError(missing=f"{what} {state} ({cause}) and", looked_for=str(path), fix=_FIX_BROKEN) from cause


def _checked(nvrtc: Any, returned: tuple[Any, ...], call: str) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(missing=f"NVRTC ({call} returned {result.name})", looked_for="a working libnvrtc", fix=_FIX_BROKEN)
    return values[0] if len(values) == 1 else values

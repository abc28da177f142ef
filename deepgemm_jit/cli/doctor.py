"""``doctor``: is everything here that compiling and running need, and what mends what is not."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from deepgemm_jit.__about__ import __version__
from deepgemm_jit.builder import Builder, check_loadable
from deepgemm_jit.cli.output import Reply, Session, command
from deepgemm_jit.errors import DeepGemmJitError, UnsupportedError
from deepgemm_jit.settings import Settings, read_settings, setting_names
from deepgemm_jit.spec import ARCHES, arch_of, kernel_set

if TYPE_CHECKING:
    from deepgemm_jit.runtime import DriverReport

_PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cutlass", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; ``fix`` says what to do when it is not ok."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@click.command()
@command
def doctor(session: Session) -> Reply:
    """Check what compiling and running need: NVRTC, headers, driver, GPUs, store, settings."""
    checks = list(_checks(session))
    ok = all(check.ok for check in checks)
    return Reply({"ok": ok, "checks": [asdict(check) for check in checks]}, [_text(check) for check in checks], ok)


def _text(check: Check) -> str:
    lines = [f"{check.name}:", *check.detail.splitlines()] if "\n" in check.detail else [f"{check.name}: {check.detail}"]
    if not check.ok:
        lines.append(f"to do: {check.fix}")
    return "\n       ".join([f"{'ok' if check.ok else 'FAULT':6} {lines[0]}", *lines[1:]])


def _checks(session: Session) -> Iterator[Check]:
    yield Check("versions", True, _versions())
    try:
        settings = session.settings()
    except DeepGemmJitError as error:
        # The other checks go on without the environment, so that one bad variable does not hide a second fault.
        settings = read_settings({}, cache_dir=session.cache_dir)
        yield Check("settings", False, str(error), "Correct the variable or unset it")
    else:
        yield Check("settings", True, _settings(settings))
    builder = Builder(settings)
    yield _check("nvrtc", _nvrtc)
    yield _check("headers", lambda: _headers(builder))
    yield from machine_checks(_driver_report())
    yield _store(builder)
    yield from (_kernels(builder, arch) for arch in ARCHES)


def _check(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except DeepGemmJitError as error:
        cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        return Check(name, False, f"{error}{cause}", getattr(error, "fix", ""))


def _versions() -> str:
    found = [f"deepgemm-jit {__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _settings(settings: Settings) -> str:
    return "\n".join(f"{name} = {getattr(settings, name)} (from {settings.origin(name)})" for name in setting_names())


def _nvrtc() -> str:
    from deepgemm_jit.compiler import nvrtc_info

    info = nvrtc_info()
    return f"NVRTC {info.version} at {info.path}"


def _headers(builder: Builder) -> str:
    from deepgemm_jit.frontend import header_path

    path = header_path()
    specs = [spec for arch in ARCHES for spec in kernel_set(arch)]
    for spec in specs:
        builder.request(spec)
    return f"{path}; all {len(specs)} kernels render"


def _driver_report() -> DriverReport:
    from deepgemm_jit.runtime import driver_report

    return driver_report()


def machine_checks(report: DriverReport) -> Iterator[Check]:
    """Yield the findings about the driver and each GPU: does it load what is compiled here, is there a kernel for it."""
    if report.version is None or report.error is not None:
        # Compiling ahead on a machine without a GPU is a use this package is made for, so not a fault.
        yield Check("driver", True, f"no GPU here, compile only ({report.error})")
        return
    major, minor = report.version

    def driver() -> str:
        check_loadable(major)
        return f"driver for CUDA {major}.{minor}"

    yield _check("driver", driver)
    for gpu in report.gpus:
        name, words = f"GPU {gpu.ordinal}", f"{gpu.name}, uuid {gpu.uuid}"
        try:
            yield Check(name, True, f"{words}, served by the kernels of {arch_of(gpu.compute_capability).name}")
        except UnsupportedError as refusal:
            yield Check(name, False, f"{words}: {refusal}", "Leave it out of CUDA_VISIBLE_DEVICES; nothing runs on it")


def _store(builder: Builder) -> Check:
    failure = builder.store.write_failure()
    fix = "Name a directory that can be written with --cache-dir or DEEPGEMM_JIT_CACHE_DIR"
    return Check("store", failure is None, builder.store.describe(), "" if failure is None else fix)


def _kernels(builder: Builder, arch: str) -> Check:
    name = f"kernels of {arch}"
    try:
        keys = {builder.request(spec).key for spec in kernel_set(arch)}
    except DeepGemmJitError:
        return Check(name, False, "not known, as they do not render", "See headers")
    built = len(keys & {entry.key for entry in builder.store.entries()})
    # What is missing is compiled on first use, unless the policy forbids it.
    ok = built == len(keys) or builder.settings.compile != "never"
    return Check(name, ok, f"{built} of {len(keys)} are in the store", "" if ok else builder.warmup_command(arch))

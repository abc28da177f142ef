"""``doctor``: is everything here that compiling and running need, and what mends what is not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepgemm_jit.__about__ import __version__
from deepgemm_jit.builder import Builder, check_loadable
from deepgemm_jit.cli.output import Opened, Reply, Session, command, count, kernels_by_key, open_store
from deepgemm_jit.cli.packs import CheckedPack, checked_pack
from deepgemm_jit.errors import DeepGemmJitError, StoreError, ToolchainError, UnsupportedError
from deepgemm_jit.settings import PREFIX, CompilePolicy, Settings, read_settings, setting_names, setting_text
from deepgemm_jit.spec import ARCHES, KernelSpec, arch_of, kernel_set
from deepgemm_jit.store import Entry
from deepgemm_jit.store.key import parsed_version
from deepgemm_jit.store.location import NAME_ANOTHER, Location, locate, lock_dir_path
from deepgemm_jit.store.locks import lock_failure

if TYPE_CHECKING:
    from deepgemm_jit.compiler import InstalledNvrtc
    from deepgemm_jit.runtime import DriverReport

_REPORT = "Report it with all that deepgemm-jit doctor --json prints"
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
        yield Check("settings", True, _settings(settings, locate(settings, create=False)))
    opened: Opened | StoreError
    try:
        opened = open_store(settings)
    except StoreError as error:
        opened = error
    builder = Builder(settings)
    yield nvrtc_check(settings.compile)
    yield from nvrtc_packages(_installed())
    yield _check("headers", lambda: _headers(builder))
    report = _driver_report()
    yield from machine_checks(report)
    yield _store(opened)
    packs = [checked_pack(found) for found in builder.store.packs()]
    known = kernels_by_key(builder)
    yield from (_pack(pack, known) for pack in packs)
    yield _locks(settings)
    entries = [*(opened.entries() if isinstance(opened, Opened) else []), *(e for pack in packs for e in pack.entries)]
    yield from (kernels_check(builder, entries, arch, report) for arch in ARCHES)


def _check(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except DeepGemmJitError as error:
        return _fault(name, error)


def _fault(name: str, error: DeepGemmJitError) -> Check:
    """Return the finding of an error, with its cause where it does not tell that itself, and with its fix in one place only."""
    fix = getattr(error, "fix", "")
    told = str(error).removesuffix(fix).strip() if fix else str(error)
    cause = str(error.__cause__).strip() if error.__cause__ is not None else ""
    if cause and cause not in told:
        told = f"{told} ({type(error.__cause__).__name__}: {cause})"
    return Check(name, False, told, fix or _REPORT)


def _versions() -> str:
    found = [f"deepgemm-jit {__version__}", f"Python {platform.python_version()}", platform.platform()]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _settings(settings: Settings, place: Location) -> str:
    effective = {
        "cache_dir": place.root or "none: memory only",
        "lock_dir": lock_dir_path(settings),
        "jobs": settings.jobs or len(os.sched_getaffinity(0)),
        "audit": settings.audit or "none",
        "trust_root": settings.trust_root or "none",
        "packs": setting_text(settings.packs) or "none",
        "cache_max_bytes": settings.cache_max_bytes or "no limit",
    }
    lines = []
    for name in setting_names():
        origin = settings.origin(name)
        origin = place.origin if (name, origin) == ("cache_dir", "default") else origin
        source = f"from {origin}" if origin != "default" else origin
        lines.append(f"{PREFIX}{name.upper()} = {effective.get(name, getattr(settings, name))} ({source})")
    return "\n".join(lines)


def nvrtc_check(policy: CompilePolicy) -> Check:
    """Return whether kernels can be compiled; where the policy never does, a machine without NVRTC is as it should be."""
    try:
        return Check("nvrtc", True, _nvrtc())
    except ToolchainError as error:
        if policy == "never" and error.missing == "NVRTC":  # not there at all: one that is there and broken is told
            return Check("nvrtc", True, "no NVRTC here; the policy never compiles")
        return _fault("nvrtc", error)
    except DeepGemmJitError as error:
        return _fault("nvrtc", error)


def _nvrtc() -> str:
    from deepgemm_jit.compiler import compile_options, compile_source, nvrtc_info

    info = nvrtc_info()
    # NVRTC loads a part of itself on its first compile, so that one alone shows whether all of it is there.
    arch, source = next(iter(ARCHES)), 'extern "C" __global__ void probe(float* out) { *out = 1; }'
    compile_source(source=source, headers={}, entry="probe", arch=arch, options=compile_options(arch))
    return f"NVRTC {info.version} at {info.path}; compiles for {arch}"


def _installed() -> tuple[InstalledNvrtc, ...]:
    from deepgemm_jit.compiler import installed_nvrtcs

    return installed_nvrtcs()


def nvrtc_packages(installed: tuple[InstalledNvrtc, ...]) -> Iterator[Check]:
    """Yield a finding where there are several NVRTCs: of one CUDA major, the import path alone decides which one compiles."""
    if len(installed) < 2:
        return
    from deepgemm_jit.compiler import nvrtc_info

    try:
        used = Path(nvrtc_info().path).resolve()
    except DeepGemmJitError:
        used = None
    lines = [f"{each.package} {each.version} at {each.path}{' (in use)' if each.path == used else ''}" for each in installed]
    majors = [each.cuda_major for each in installed]
    twice = sorted({major for major in majors if majors.count(major) > 1})
    fix = f"Keep one of CUDA {', '.join(map(str, twice))}: uninstall the others, or take their folder off the import path"
    yield Check("NVRTC packages", not twice, "\n".join(lines), fix if twice else "")


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
        none = report.version is None and "cuInit returned no driver" in (report.error or "")
        yield Check(
            "driver", True, "no NVIDIA driver here: compile only" if none else f"no GPU here: compile only ({report.error})"
        )
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


def _store(opened: Opened | StoreError) -> Check:
    if isinstance(opened, StoreError):
        return Check("store", False, f"{opened.path} {opened.reason}", opened.fix)
    place, root = opened.place, opened.place.root
    if not opened.is_there:  # it was found that it can be created
        return Check("store", True, f"{place.text}; not created yet")
    failure = opened.builder.store.write_failure()
    if failure is None:
        # What is wrong with an entry mends itself on its next use; a folder is in the way of many.
        spoilt = [found for found in opened.examined().damage if not found.index_name]
        told = "; ".join([place.text, *(f"{found.path} {found.reason}" for found in spoilt)])
        return Check("store", not spoilt, told, "Run deepgemm-jit prune, which moves that out of the way" if spoilt else "")
    if opened.entries() and not _may_write(root):
        return Check("store", True, f"{place.text}; read only: hits are served, misses stay in memory")
    return Check("store", False, f"{place.text}; {failure.removeprefix(f'store {root} ')}", NAME_ANOTHER)


def _pack(pack: CheckedPack, known: Mapping[str, KernelSpec]) -> Check:
    detail = f"{pack.path} (from {pack.origin})"
    if pack.reason:
        fix = "Make or fetch it again, make it readable for this user and writable for its owner only, or name it no longer"
        return Check("pack", False, f"{detail} is ignored: {pack.reason}", fix)
    stale = _stale(pack.entries, known)
    if not stale:
        return Check("pack", True, f"{detail}: {count(len(pack.entries), 'kernel')}")
    made_by = f"deepgemm-jit {pack.library_version}"
    told = f"{detail} is stale: {len(stale)} of {count(len(pack.entries), 'kernel')} have other sources than this version has"
    fix = "Make it again with this version: deepgemm-jit warmup, then deepgemm-jit pack create, or name it no longer"
    return Check("pack", False, f"{told}; it was made by {made_by}", fix)


def _stale(entries: Sequence[Entry], known: Mapping[str, KernelSpec]) -> list[Entry]:
    """Return the entries of kernels that this version asks for under keys that are not there; all, where none serves."""
    served = {known[entry.key].text for entry in entries if entry.key in known}
    if known and entries and not served:
        return list(entries)
    wanted = {spec.text for spec in known.values()}
    return [entry for entry in entries if entry.key not in known and entry.spec in wanted - served]


def _may_write(root: Path | None) -> bool:
    # By right, not by trying: a full disk can be written by right, and is a fault.
    folders = [] if root is None else [root, *root.glob("*"), *root.glob("*/*")]
    return all(os.access(folder, os.W_OK, effective_ids=True) for folder in folders if folder.is_dir())


def _locks(settings: Settings) -> Check:
    failure = lock_failure(settings)
    if failure is None:
        return Check("locks", True, str(lock_dir_path(settings)))
    fix = "Name a folder of your own on a disk of this machine with DEEPGEMM_JIT_LOCK_DIR"
    return Check("locks", False, f"do not work, processes may compile the same kernels: {failure}", fix)


def kernels_check(builder: Builder, entries: list[Entry], arch: str, report: DriverReport) -> Check:
    """Return whether the kernels of an arch are built, and whether the driver of this machine, if there is one, loads them."""
    name = f"kernels of {arch}"
    specs = kernel_set(arch)
    try:
        keys = {(builder.request(spec).key, spec.text) for spec in specs}
    except DeepGemmJitError:
        return Check(name, False, "not known, as they do not render", "See headers")
    found = [entry for entry in entries if (entry.key, entry.spec) in keys]
    built = {entry.key for entry in found}
    detail = f"{len(built)} of {len(specs)} are in the store or a pack"
    if report.version is not None:
        major, minor = report.version
        unloadable = built - {entry.key for entry in found if parsed_version(entry.nvrtc_version)[0] <= major}
        if unloadable:
            newest = max((entry.nvrtc_version for entry in found if entry.key in unloadable), key=parsed_version)
            told = (
                f"{detail}; built by NVRTC {newest}, {len(unloadable)} cannot be loaded: the driver serves CUDA {major}.{minor}"
            )
            fix = f"Update the driver to one of CUDA {parsed_version(newest)[0]}, or build them with an NVRTC of CUDA {major}"
            return Check(name, False, told, f"{fix}: {builder.warmup_command(arch)}")
    # What is missing is compiled on first use, unless the policy forbids it.
    ok = len(built) == len(specs) or builder.settings.compile != "never"
    return Check(name, ok, detail, "" if ok else builder.warmup_command(arch))

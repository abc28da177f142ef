"""``doctor``, as a process of its own: it asks the driver, and the tests' process must stay without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.driver import DriverDouble

from deepgemm_jit.builder import Builder, build
from deepgemm_jit.cli.doctor import _store, kernels_check, machine_checks, nvrtc_packages
from deepgemm_jit.cli.output import open_store
from deepgemm_jit.compiler import InstalledNvrtc, installed_nvrtcs, nvrtc_info
from deepgemm_jit.runtime import DriverReport, driver_report
from deepgemm_jit.settings import Settings, read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.store import Entry
from deepgemm_jit.store.pack import pack_bytes, write_pack

pytestmark = pytest.mark.nvrtc

Program = Callable[..., subprocess.CompletedProcess[str]]
Environment = dict[str, str]
Checks = dict[str, dict[str, Any]]
Doctor = Callable[..., Checks]


@pytest.fixture
def doctor(program: Program) -> Doctor:
    """Return a function that gives doctor's checks by name, having seen that status, text and JSON agree on them."""

    def ask(*arguments: str, environment: Environment | None = None) -> Checks:
        command = ("-m", "deepgemm_jit", "doctor", *arguments)
        finished, text = (program(*command, *extra, environment=environment) for extra in (("--json",), ()))
        payload = json.loads(finished.stdout)
        faults = [check for check in payload["checks"] if not check["ok"]]
        assert payload["ok"] is not bool(faults)
        assert (finished.returncode, text.returncode) == (int(bool(faults)),) * 2
        assert all(check["fix"] and check["fix"] in text.stdout for check in faults)
        assert text.stdout.count("FAULT") == len(faults)
        assert all(set(check) == {"name", "ok", "detail", "fix"} for check in payload["checks"])
        return {check["name"]: check for check in payload["checks"]}

    return ask


def faults(checks: Checks) -> list[str]:
    return [name for name, check in checks.items() if not check["ok"]]


def test_every_part_is_checked_and_a_sound_installation_has_no_fault(doctor: Doctor) -> None:
    checks = doctor()
    assert list(checks) == ["versions", "settings", "nvrtc", "headers", "driver", "store", "locks", "kernels of sm_90a"]
    assert faults(checks) == []
    if "no NVIDIA driver" in checks["driver"]["detail"]:
        assert checks["driver"]["detail"] == "no NVIDIA driver here: compile only"
    assert f"0 of {len(kernel_set('sm_90a'))}" in checks["kernels of sm_90a"]["detail"]


def test_each_setting_is_printed_with_its_origin(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_JOBS", "3")
    lines = doctor("--cache-dir", str(tmp_path / "given"))["settings"]["detail"].splitlines()
    assert f"DEEPGEMM_JIT_CACHE_DIR = {tmp_path / 'given'} (from argument)" in lines
    assert "DEEPGEMM_JIT_JOBS = 3 (from DEEPGEMM_JIT_JOBS)" in lines
    assert "DEEPGEMM_JIT_COMPILE = auto (default)" in lines


def test_what_is_not_set_is_printed_with_its_effective_value(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DEEPGEMM_JIT_CACHE_DIR", "DEEPGEMM_JIT_LOCK_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    lines = doctor()["settings"]["detail"].splitlines()
    assert f"DEEPGEMM_JIT_CACHE_DIR = {tmp_path / '.cache/deepgemm_jit'} (from the home directory)" in lines
    assert f"DEEPGEMM_JIT_LOCK_DIR = {tmp_path / f'deepgemm_jit-locks-{os.geteuid()}'} (default)" in lines
    assert f"DEEPGEMM_JIT_JOBS = {len(os.sched_getaffinity(0))} (default)" in lines


@pytest.mark.parametrize(
    ("variable", "value", "check", "says"),
    [
        ("JOBS", "0", "settings", "DEEPGEMM_JIT_JOBS"),
        ("NO_SUCH_SETTING", "1", "settings", "DEEPGEMM_JIT_NO_SUCH_SETTING"),
        ("CACHE_DIR", "/proc/no-store-here", "store", "/proc/no-store-here"),
        ("COMPILE", "never", "kernels of sm_90a", "0 of"),
        ("LOCK_DIR", "/proc", "locks", "/proc"),
        ("LOCK_DIR", "/dev/null", "locks", "is not a directory"),
    ],
)
def test_a_fault_is_found_and_the_other_checks_go_on(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, check: str, says: str
) -> None:
    monkeypatch.setenv(f"DEEPGEMM_JIT_{variable}", value)
    checks = doctor()
    assert faults(checks) == [check]
    assert says in checks[check]["detail"]


def test_a_store_that_others_may_write_is_a_fault(doctor: Doctor, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    checks = doctor("--cache-dir", str(shared))
    assert faults(checks) == ["store"]
    assert str(shared) in checks["store"]["detail"]


def test_a_folder_of_objects_that_others_may_write_is_a_fault_until_prune_has_moved_it(
    doctor: Doctor, program: Program, cache_dir: Path
) -> None:
    build(kernel_set("sm_90a")[0])
    spoilt = next(cache_dir.glob("v1/objects/??"))
    spoilt.chmod(0o777)
    found = doctor()["store"]
    assert not found["ok"]
    assert str(spoilt) in found["detail"]
    assert "deepgemm-jit prune" in found["fix"]
    assert program("-m", "deepgemm_jit", "prune").returncode == 0
    assert doctor()["store"]["ok"]


def test_a_read_only_store_of_root_serves_another_user_and_is_no_fault() -> None:
    if os.geteuid() != 0:
        pytest.skip(f"only root can become another user; this is uid {os.geteuid()}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        build(kernel_set("sm_90a")[0], read_settings(cache_dir=root / "full"))
        for folder in ("full", "empty"):
            (root / folder).mkdir(exist_ok=True)
            (root / folder).chmod(0o755)
        found = []
        for folder in ("full", "empty"):
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    os.setuid(12345)
                    check = _store(open_store(read_settings(cache_dir=root / folder)))
                    os.write(writer, json.dumps([check.ok, check.detail]).encode())
                finally:
                    os._exit(0)  # whatever happens, the tests go on in the parent only
            os.close(writer)
            os.waitpid(child, 0)
            found.append(json.loads(os.read(reader, 10000)))
    (full_ok, detail), (empty_ok, _) = found
    assert (full_ok, empty_ok) == (True, False)
    assert detail.endswith("read only: hits are served, misses stay in memory")


def test_missing_builtins_of_nvrtc_are_a_fault(doctor: Doctor, tmp_path: Path) -> None:
    # NVRTC gives this result when the library is missing; the tests of the compiler take it away for real.
    (tmp_path / "sitecustomize.py").write_text(
        "import deepgemm_jit.compiler.nvrtc as nvrtc\n"
        "def run(*args): nvrtc._raise_broken_builtins('builtins failed')\n"
        "nvrtc._run = run\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    checks = doctor(environment={**os.environ, "PYTHONPATH": path})
    assert faults(checks) == ["nvrtc"]
    assert "libnvrtc-builtins" in checks["nvrtc"]["detail"]


def test_without_the_packages_of_cuda_nvrtc_is_a_fault_with_its_cause_and_the_driver_is_none(
    doctor: Doctor, hiding: Callable[[str], Environment]
) -> None:
    checks = doctor(environment=hiding("cuda"))
    assert faults(checks) == ["nvrtc"]
    assert "No module named cuda" in checks["nvrtc"]["detail"]
    assert "pip install" in checks["nvrtc"]["fix"]


@pytest.fixture
def without_nvrtc(tmp_path: Path) -> Environment:
    """An environment in which the finder of libraries finds no NVRTC."""
    (tmp_path / "sitecustomize.py").write_text(
        "from cuda import pathfinder\n"
        "def load(name): raise pathfinder.DynamicLibNotFoundError(f'No such file: lib{name}.so*\\n')\n"
        "pathfinder.load_nvidia_dynamic_lib = load\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


def test_an_nvrtc_that_is_missing_is_told_in_whole_lines_and_its_fix_once(doctor: Doctor, without_nvrtc: Environment) -> None:
    checks = doctor(environment=without_nvrtc)
    assert faults(checks) == ["nvrtc"]
    detail, fix = checks["nvrtc"]["detail"], checks["nvrtc"]["fix"]
    assert "No such file: libnvrtc.so*)" in detail
    assert "pip install" in fix and "pip install" not in detail


def test_where_the_policy_never_compiles_the_kernels_are_missed_and_no_nvrtc(doctor: Doctor, without_nvrtc: Environment) -> None:
    checks = doctor(environment={**without_nvrtc, "DEEPGEMM_JIT_COMPILE": "never"})
    assert faults(checks) == ["kernels of sm_90a"]
    assert checks["nvrtc"]["detail"] == "no NVRTC here; the policy never compiles"


def test_a_broken_nvrtc_is_a_fault_under_any_policy(doctor: Doctor, hiding: Callable[[str], Environment]) -> None:
    checks = doctor(environment={**hiding("cuda"), "DEEPGEMM_JIT_COMPILE": "never"})
    assert "nvrtc" in faults(checks), "without the bindings there is no driver either"


def test_no_environment_but_a_path_is_needed(doctor: Doctor) -> None:
    checks = doctor(environment={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": "/nonexistent"})
    assert faults(checks) == []


def test_a_gpu_that_kernels_serve_names_their_arch() -> None:
    driver, first, second = machine_checks(driver_report(DriverDouble(gpus=2)))
    assert (driver.name, driver.ok, driver.detail) == ("driver", True, "driver for CUDA 13.0")
    assert [(gpu.name, gpu.ok) for gpu in (first, second)] == [("GPU 0", True), ("GPU 1", True)]
    assert all("NVIDIA H200" in gpu.detail and "sm_90a" in gpu.detail for gpu in (first, second))


def test_a_gpu_that_no_kernel_serves_is_a_fault_and_names_what_would_be_served() -> None:
    _, gpu = machine_checks(driver_report(DriverDouble(capability=(8, 9))))
    assert not gpu.ok
    assert "compute capability 8.9; supported: sm_90a (compute capability 9.0)" in gpu.detail
    assert "CUDA_VISIBLE_DEVICES" in gpu.fix


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((8, 0), "Ampere"),
        ((8, 9), "Ada"),
        ((10, 3), "tcgen05"),
        ((12, 1), "99 KB of shared memory"),
        ((13, 0), "does not know it"),
    ],
)
def test_a_gpu_that_no_kernel_serves_is_told_why_not(capability: tuple[int, int], reason: str) -> None:
    _, gpu = machine_checks(driver_report(DriverDouble(capability=capability)))
    assert reason in gpu.detail


def test_a_slice_of_a_gpu_is_served_as_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    double = DriverDouble(sms=16)
    monkeypatch.setattr(double, "device_name", lambda ordinal: "NVIDIA H200 MIG 1g.18gb")
    _, gpu = machine_checks(driver_report(double))
    assert gpu.ok and "MIG 1g.18gb" in gpu.detail and "sm_90a" in gpu.detail


def test_a_driver_older_than_nvrtc_is_a_fault_with_the_extra_that_fits_it() -> None:
    double = DriverDouble()
    double.version = (int(nvrtc_info().version.partition(".")[0]) - 1, 9)
    driver, gpu = machine_checks(driver_report(double))
    assert (driver.ok, gpu.ok) == (False, True)
    assert nvrtc_info().version in driver.detail
    assert "nvidia-cuda-nvrtc-cu12" in driver.fix


# --- several NVRTCs


def nvrtc_distribution(folder: Path, package: str, version: str, library: str) -> Path:
    """Make a folder in which a package of NVRTC seems to be installed; return its library."""
    path = folder / library
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{library},,\n")
    return path


def own_nvrtc() -> InstalledNvrtc:
    (installed,) = installed_nvrtcs()
    return installed


def test_one_nvrtc_is_no_finding() -> None:
    assert list(nvrtc_packages((own_nvrtc(),))) == []


def test_a_second_nvrtc_of_the_same_cuda_is_a_fault_that_names_both_and_the_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_nvrtc()
    second = nvrtc_distribution(tmp_path, "nvidia-cuda-nvrtc", "13.0.88", f"nvidia/cu13/lib/libnvrtc.so.{own.cuda_major}")
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = nvrtc_packages(installed_nvrtcs())
    assert not check.ok
    assert f"nvidia-cuda-nvrtc 13.0.88 at {second}\n" in check.detail
    assert check.detail.endswith(f"{own.package} {own.version} at {own.path} (in use)")
    assert f"Keep one of CUDA {own.cuda_major}" in check.fix


def test_an_nvrtc_of_another_cuda_beside_is_told_and_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_nvrtc()
    other = own.cuda_major - 1
    nvrtc_distribution(tmp_path, f"nvidia-cuda-nvrtc-cu{other}", f"{other}.9.86", f"nvidia/cuda_nvrtc/lib/libnvrtc.so.{other}")
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = nvrtc_packages(installed_nvrtcs())
    assert check.ok
    assert [line.split(" at ")[0] for line in check.detail.splitlines()] == [
        f"nvidia-cuda-nvrtc-cu{other} {other}.9.86",
        f"{own.package} {own.version}",
    ]


def test_broken_metadata_of_a_package_hides_no_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_nvrtc()
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_nvrtcs() == (own,)


# --- kernels that this driver or this version does not take


def stored_entries(settings: Settings) -> list[Entry]:
    return open_store(settings).entries()


@pytest.mark.parametrize(("behind", "ok"), [(0, True), (1, False)])
def test_kernels_that_the_driver_is_too_old_for_are_a_fault_with_both_versions(behind: int, ok: bool) -> None:
    spec = kernel_set("sm_90a")[0]
    build(spec)
    settings = read_settings()
    nvrtc = nvrtc_info().version
    double = DriverDouble()
    double.version = (int(nvrtc.partition(".")[0]) - behind, 0)
    check = kernels_check(Builder(settings), stored_entries(settings), "sm_90a", driver_report(double))
    assert check.ok is ok
    assert check.detail.startswith("1 of ")
    if not ok:
        assert f"built by NVRTC {nvrtc}, 1 cannot be loaded: the driver serves CUDA {double.version[0]}.0" in check.detail
        assert "Update the driver" in check.fix and "deepgemm-jit warmup --arch sm_90a" in check.fix


def test_kernels_that_an_older_nvrtc_built_too_are_no_fault() -> None:
    build(kernel_set("sm_90a")[0])
    settings = read_settings()
    (entry,) = stored_entries(settings)
    double = DriverDouble()
    double.version = (12, 9)
    entries = [entry, replace(entry, nvrtc_version="12.9")]
    assert kernels_check(Builder(settings), entries, "sm_90a", driver_report(double)).ok


def test_a_machine_without_driver_asks_for_none() -> None:
    build(kernel_set("sm_90a")[0])
    settings = read_settings()
    report = DriverReport(None, (), "cuInit returned no driver")
    assert kernels_check(Builder(settings), stored_entries(settings), "sm_90a", report).ok


def packed(path: Path, stale: int) -> Path:
    """Write a pack of two kernels as version 0.6.10 might have made it; so many of them are of other sources than ours."""
    for spec in kernel_set("sm_90a")[:2]:
        build(spec)
    store = Builder(read_settings()).store
    entries = stored_entries(read_settings())
    images = {entry.digest: store.load(entry).image for entry in entries}
    changed = [replace(entry, key=f"{number:064x}") if number < stale else entry for number, entry in enumerate(entries)]
    write_pack(path, pack_bytes("0.6.10", changed, lambda entry: images[entry.digest]))
    return path


@pytest.mark.parametrize("stale", [1, 2])
def test_a_pack_that_an_older_version_made_is_stale_and_says_how_much_of_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stale: int
) -> None:
    pack = packed(tmp_path / "old.pack", stale)
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", str(pack))
    checks = doctor()
    assert faults(checks) == ["pack"]
    detail = checks["pack"]["detail"]
    assert f"{pack} (from DEEPGEMM_JIT_PACKS) is stale: {stale} of 2 kernels" in detail
    assert detail.endswith("made by deepgemm-jit 0.6.10")
    assert "deepgemm-jit pack create" in checks["pack"]["fix"]


def test_a_pack_of_a_part_of_the_kernels_is_not_stale(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", str(packed(tmp_path / "part.pack", stale=0)))
    checks = doctor()
    assert faults(checks) == []
    assert checks["pack"]["detail"].endswith(": 2 kernels")


def test_what_is_told_without_a_fix_of_its_own_is_to_be_reported(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import deepgemm_jit.compiler as compiler, deepgemm_jit.errors as errors\n"
        "def refused(**_): raise errors.CompileError(kernel='probe', options=(), log='no', source='x')\n"
        "compiler.compile_source = refused\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    checks = doctor(environment={**os.environ, "PYTHONPATH": path})
    assert faults(checks) == ["nvrtc"]
    assert "doctor --json" in checks["nvrtc"]["fix"]

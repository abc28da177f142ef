from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepgemm_jit.compiler import Compiled, compile_options, nvrtc_info
from deepgemm_jit.compiler.elf import read_cubin_elf
from deepgemm_jit.spec import ARCHES, FP8_GEMM, SCALE_LAYOUT, KernelSpec, kernel_set

pytestmark = pytest.mark.nvrtc

SPECS = [spec for arch in ARCHES for spec in kernel_set(arch)]
GEMM = next(spec for spec in SPECS if spec.family == FP8_GEMM)
SMALL = next(spec for spec in SPECS if spec.family == SCALE_LAYOUT)
Digests = Callable[[subprocess.Popen[str]], dict[str, list[str]]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_kernel_of_every_arch_compiles_to_one_entry(spec: KernelSpec, compile_spec: Callable[..., Compiled]) -> None:
    compiled = compile_spec(spec)
    cubin = compiled.cubin
    elf = read_cubin_elf(cubin.image)
    assert elf.entries == (spec.name,) == (cubin.entry,)
    assert (cubin.arch, elf.arch) == (spec.arch, spec.arch.rstrip("af"))
    assert cubin.options == compile_options(spec.arch)
    assert cubin.nvrtc_version == nvrtc_info().version
    assert elf.registers == cubin.facts.registers > 0
    assert f"Used {cubin.facts.registers} registers" in compiled.log


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_second_build_gives_the_same_bytes(
    spec: KernelSpec, compile_spec: Callable[..., Compiled], digest_of: Callable[[KernelSpec], str]
) -> None:
    assert compile_spec(spec).cubin.digest == digest_of(spec)


@pytest.mark.parametrize(
    "env",
    [{"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"}],
    ids=["hash seed", "locale"],
)
def test_another_process_gives_the_same_bytes(
    start_compiles: Callable[..., subprocess.Popen[str]],
    digests_from: Digests,
    digest_of: Callable[[KernelSpec], str],
    tmp_path: Path,
    env: dict[str, str],
) -> None:
    digests = digests_from(start_compiles(1, GEMM, SMALL, env=env, cwd=tmp_path))
    assert digests == {spec.text: [digest_of(spec)] for spec in (GEMM, SMALL)}


def test_threads_that_compile_at_once_get_the_same_bytes(
    compile_spec: Callable[..., Compiled], digest_of: Callable[[KernelSpec], str]
) -> None:
    specs = [GEMM, SMALL] * 4
    together = threading.Barrier(len(specs))

    def compile_together(spec: KernelSpec) -> str:
        together.wait()
        return compile_spec(spec).cubin.digest

    with ThreadPoolExecutor(len(specs)) as threads:
        assert list(threads.map(compile_together, specs)) == [digest_of(spec) for spec in specs]


def test_processes_that_compile_at_once_get_the_same_bytes(
    start_compiles: Callable[..., subprocess.Popen[str]],
    digests_from: Digests,
    digest_of: Callable[[KernelSpec], str],
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o555)
    env = {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    children = [start_compiles(20, SMALL, env=env, cwd=tmp_path) for _ in range(8)]
    assert [digests_from(child) for child in children] == [{SMALL.text: [digest_of(SMALL)] * 20}] * 8
    assert list(tmp_path.iterdir()) == []


def test_facts_tell_shared_memory_and_local_memory(compile_spec: Callable[..., Compiled]) -> None:
    # 32 columns of 64 rows and a padding of one float each.
    assert compile_spec(SMALL).cubin.facts.shared_memory_bytes == 32 * (64 + 1) * 4
    source = f"""extern "C" __global__ void {SMALL.name}(int* x) {{
        int indexed_at_run_time[64];
        for (int i = 0; i < 64; ++i) indexed_at_run_time[x[i]] = i;
        x[0] = indexed_at_run_time[x[64]];
    }}"""
    facts = compile_spec(SMALL, source=source).cubin.facts
    assert (facts.shared_memory_bytes, facts.local_memory_bytes, facts.spill_store_bytes) == (0, 64 * 4, 0)


def test_a_kernel_may_call_printf(compile_spec: Callable[..., Compiled]) -> None:
    source = f'extern "C" __global__ void {SMALL.name}(int* x) {{ printf("%d", *x); }}'
    assert compile_spec(SMALL, source=source).cubin.entry == SMALL.name


@pytest.mark.parametrize("arch", ARCHES)
def test_the_options_ask_for_the_arch_and_for_nothing_of_the_machine(arch: str) -> None:
    options = compile_options(arch)
    assert options[0] == f"--gpu-architecture={arch}"
    assert {"--no-source-include", "--no-cache", "-default-device"} <= set(options)
    assert not any(
        option.startswith(("-I", "--include-path", "-D", "--pch", "-pch", "--use-pch", "--create-pch")) for option in options
    )

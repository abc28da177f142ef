"""Operations and the store: sealed processes, a process without NVRTC, several GPUs in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.reference import Output, assert_close, cast_rows, group_rows, product, random_a, random_b

import deepgemm_jit
from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError
from deepgemm_jit.runtime.steps import CastCall, prepare_cast
from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.settings import Settings
from deepgemm_jit.spec import CAST_TO_FP8, GemmProblem, StepProblem, limits_of, select

ARCH = "sm_90a"
CHILD_LIMIT_S = 90

# Hides NVRTC from every way to it: the bindings, the loader of the library, and a library that happens to be loaded already.
_WITHOUT_NVRTC = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "cuda.bindings.nvrtc":
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by a test)", name=name)

sys.meta_path.insert(0, Blocker())
from cuda import pathfinder
load = pathfinder.load_nvidia_dynamic_lib

def load_others(name):
    if name == "nvrtc":
        raise RuntimeError("libnvrtc is hidden by a test")
    return load(name)

pathfinder.load_nvidia_dynamic_lib = load_others
"""

# Runs one dense and one grouped product and says how it went.
_RUN = """
import json, sys
import torch
from deepgemm_jit import ops
from deepgemm_jit.compiler import nvrtc_info
from deepgemm_jit.errors import KernelNotBuiltError, ToolchainError
from ops.reference import Output, assert_close, group_rows, product, random_a, random_b

try:
    nvrtc = nvrtc_info().version
except ToolchainError:
    nvrtc = None
answer = {"nvrtc": nvrtc}
try:
    a, b, out = random_a(77, 400), random_b(264, 400), Output(77, 264)
    ops.fp8_gemm_nt(a.pair, b.pair, out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(a, b))
    rows, b = group_rows((100, 0, 33)), random_b(3, 264, 400)
    x, out = torch.randn((rows.total, 400), device="cuda", dtype=torch.bfloat16), Output(rows.total, 264)
    values, scales = ops.per_token_cast_to_fp8(x)
    ops.m_grouped_fp8_gemm_nt_contiguous((values, scales), b.pair, out.tensor, rows.m_indices())
    for group, part in enumerate(rows.slices):
        a = type(b)(values[part], scales[part])
        assert_close(out.tensor[part], product(a, b[group]))
    answer["right"] = True
except KernelNotBuiltError as error:
    out.assert_untouched()
    answer |= {"kernel": error.kernel, "command": error.command, "text": str(error)}
print(json.dumps(answer))
"""


def run_child(script: str, store: Path, policy: str) -> dict[str, object]:
    """Run ``script`` in a process of its own, with a store and a compile policy, and return what it printed last."""
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "DEEPGEMM_JIT_CACHE_DIR": str(store),
        "DEEPGEMM_JIT_COMPILE": policy,
    }
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return dict(json.loads(child.stdout.splitlines()[-1]))


def files_of(store: Path) -> dict[str, int]:
    """Return every file of a store with the time of its last change."""
    return {str(path.relative_to(store)): path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}


@pytest.mark.gpu
def test_a_sealed_process_with_an_empty_store_names_the_kernel_and_the_command(cache_dir: Path) -> None:
    answer = run_child(_RUN, cache_dir, "never")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = select(GemmProblem(77, 264, 400), limits_of(ARCH, sms)).name
    assert answer["kernel"] == wanted
    assert answer["command"].startswith(f"deepgemm-jit warmup --arch {ARCH}")
    assert wanted in str(answer["text"]) and str(answer["command"]) in str(answer["text"])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the whole set."""
    root = tmp_path_factory.mktemp("filled") / "store"
    report = deepgemm_jit.warm_up(ARCH, settings=Settings(cache_dir=root))
    assert report.compiled == report.kernels
    return root


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["never", "auto"])
@pytest.mark.parametrize("nvrtc", ["with_nvrtc", "without_nvrtc"])
def test_a_filled_store_serves(nvrtc: str, policy: str, cache_dir: Path, filled: Path) -> None:
    shutil.copytree(filled, cache_dir, dirs_exist_ok=True)
    before = files_of(cache_dir)
    script = _WITHOUT_NVRTC + _RUN if nvrtc == "without_nvrtc" else _RUN
    assert before, "nothing was stored"
    answer = run_child(script, cache_dir, policy)
    assert answer["right"] is True
    assert (answer["nvrtc"] is None) == (nvrtc == "without_nvrtc")
    assert files_of(cache_dir) == before, "a hit writes nothing"


@pytest.mark.gpu
def test_a_missing_kernel_without_nvrtc_says_what_to_install(cache_dir: Path) -> None:
    child = _WITHOUT_NVRTC + _RUN.replace("KernelNotBuiltError as error", "ToolchainError as error").replace(
        '{"kernel": error.kernel, "command": error.command, "text": str(error)}', '{"fix": error.fix}'
    )
    answer = run_child(child, cache_dir, "auto")
    assert "nvrtc" in str(answer["fix"]).lower()


# --- two GPUs


def check_product(device: str, m: int) -> None:
    a, b = random_a(m, 400, device=device), random_b(264, 400, device=device)
    out = Output(m, 264, device=device)
    ops.fp8_gemm_nt(a.pair, b.pair, out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(a, b), device)


@pytest.mark.multigpu
def test_both_gpus_give_right_results_in_one_process() -> None:
    for m in (77, 3, 300):
        for current in (0, 1):
            with torch.cuda.device(current):
                for device in ("cuda:0", "cuda:1"):
                    check_product(device, m)
                assert torch.cuda.current_device() == current


@pytest.mark.multigpu
def test_casts_and_groups_follow_their_tensors_to_the_second_gpu() -> None:
    device = "cuda:1"
    rows = group_rows((100, 0, 33))
    x = torch.randn((rows.total, 400), device=device, dtype=torch.bfloat16)
    values, scales = ops.per_token_cast_to_fp8(x)
    right, right_scales = cast_rows(x)
    assert (values.device, scales.device) == (x.device, x.device)
    assert torch.equal(values.view(torch.uint8), right.view(torch.uint8)) and torch.equal(scales, right_scales)
    b, out = random_b(3, 264, 400, device=device), Output(rows.total, 264, device=device)
    ops.m_grouped_fp8_gemm_nt_contiguous((values, scales), b.pair, out.tensor, rows.m_indices(device))
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(type(b)(values[part], scales[part]), b[group]), f"group {group}")


@pytest.mark.multigpu
def test_operands_on_two_gpus_are_refused() -> None:
    a, b = random_a(77, 400, device="cuda:0"), random_b(264, 400, device="cuda:1")
    out = Output(77, 264, device="cuda:0")
    with pytest.raises(ContextMismatchError, match=r"cuda:1.*cuda:0") as caught:
        ops.fp8_gemm_nt(a.pair, b.pair, out.tensor)
    assert caught.value.belongs_to == "cuda:1"
    out.assert_untouched()


@pytest.mark.multigpu
@pytest.mark.parametrize("service", [default_service, KernelService], ids=["default_service", "service_of_its_own"])
def test_a_kernel_of_the_first_gpu_is_refused_on_the_second(service: type[KernelService]) -> None:
    x = torch.randn((8, 128), device="cuda:0", dtype=torch.bfloat16)
    values = torch.full((8, 128), 0x55, dtype=torch.uint8, device="cuda:0")
    scales = torch.full((1, 8), -1.0, device="cuda:0")
    torch.cuda.synchronize(0)
    made = service()
    launch = prepare_cast(CastCall(x.data_ptr(), values.data_ptr(), scales.data_ptr(), 128, 8, 8, 128, False, 2))
    with torch.cuda.device(0):
        kernel = made.kernel(select(StepProblem(CAST_TO_FP8, ("bf16", "e4m3")), made.limits()))
    with torch.cuda.device(1):
        torch.ones(1, device="cuda:1")
        other = made.kernel(kernel.spec)
        assert other is not kernel and other.context.device_ordinal == 1
        with pytest.raises(ContextMismatchError) as caught:
            kernel.launch(launch.grid, launch.block, 0, launch.params_pointer)
    for context in (kernel.context, other.context):
        assert context.identity.device_uuid in str(caught.value)
    assert kernel.spec.name in str(caught.value)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert bool((values == 0x55).all()) and bool((scales == -1).all()), "a refused launch wrote"

    with torch.cuda.device(0):
        kernel.launch(launch.grid, launch.block, torch.cuda.current_stream().cuda_stream, launch.params_pointer)
        torch.cuda.synchronize()
    right, right_scales = cast_rows(x)
    assert torch.equal(values, right.view(torch.uint8)) and torch.equal(scales[0], right_scales[:, 0])

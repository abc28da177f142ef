"""compute-sanitizer over every kernel of the set on one Hopper GPU: memcheck, synccheck, and racecheck of those it can judge.

racecheck does not see the copy engine's writes to shared memory, and loses a block's order at a barrier where some warps only
arrive (it reports stores and loads that have a barrier of the whole block between them), so it looks at the kernels without
tensor maps only. Shapes are small and ragged. The output of each tool is kept. Exit status: 0, or 1 for an error of a kernel or
one that nothing here runs, or 2 where compute-sanitizer or a GPU is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import environment, try_driver_version, write_json

import deepgemm_jit as dj
from deepgemm_jit import ops
from deepgemm_jit.ops.fp4 import fragments_shape
from deepgemm_jit.ops.launching import Chosen, blocks_for, call_on, empty_m_major, m_major_matrices, matrices, run_gemm
from deepgemm_jit.runtime import GemmCall, Matrices, prepare_gemm
from deepgemm_jit.service import default_service
from deepgemm_jit.spec import FP4_GEMM_SWAP_AB, FP8_GEMM_SWAP_AB, N_MAJOR, ROW_SCALES, GemmProblem, KernelSpec, Layout
from deepgemm_jit.spec.kernel_set import is_gemm

ARCH = "sm_90a"
TOOLS = {"memcheck": False, "synccheck": False, "racecheck": True}
"""Whether a tool is kept to kernels without tensor maps."""
RESULTS = Path(__file__).parent / "results" / "sanitizer"
PACKAGES = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc")
GEMMS = "_gemm_"
"""In the names of the kernels with tensor maps, and of no other."""
FOUND = 86
"""Exit status by which the tool says that it found something."""
_TORCH = re.compile(r"\bat::|\bat_cuda_detail::|\bcub::")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) .*$", re.MULTILINE)

M, N, K, GROUPS, MAX_M = 300, 264, 528, 3, 150
INDEX = [0] * 128 + [2] * 100 + [-1] * 28 + [1] * 44
ENDS = [100, 128, 300]
COUNTS = [0, 77, 150]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def m_major(*shape: int) -> torch.Tensor:
    return empty_m_major(shape, torch.device("cuda")).fill_(1.0)


def fragments(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def blocks(size: int) -> int:
    return -(-size // 128)


def run_gemms(specs: list[KernelSpec]) -> None:
    """Run each GEMM kernel in every layout it serves, whatever selection would take, and with every split of K."""
    group_data = {Layout.CONTIGUOUS: INDEX, Layout.PREFIX_SUMS: ENDS, Layout.MASKED: COUNTS}
    for spec in specs:
        for layout in Layout:
            aligned = layout in (Layout.CONTIGUOUS, Layout.PREFIX_SUMS)
            if spec.family == FP4_GEMM_SWAP_AB:
                run_fp4_gemm(spec, layout, group_data.get(layout))
            elif not (aligned and 128 % spec.block[0]):
                for split_k in (1, 2, 4) if spec.family == FP8_GEMM_SWAP_AB else (1,):
                    run_one_gemm(spec, split_k, layout, group_data.get(layout))


def run_one_gemm(spec: KernelSpec, split_k: int, layout: Layout, numbers: list[int] | None) -> None:
    """Run one GEMM kernel in one layout."""
    quantized = spec.dtypes[0] == "e4m3"
    made = fp8 if quantized else bf16
    a_lead = (GROUPS, MAX_M) if layout is Layout.MASKED else (M,)
    b_lead = () if layout is Layout.DENSE else (GROUPS,)
    a, out = made(*a_lead, K), bf16(*a_lead, N)
    b = made(*b_lead, K, N) if N_MAJOR in spec.flags else made(*b_lead, N, K)
    pair, dtypes = None, (spec.dtypes[0], spec.dtypes[1], spec.dtypes[2])
    if quantized:
        by_rows = ROW_SCALES in spec.flags
        pair = m_major(*a_lead, blocks(K)), (m_major(*b_lead, N, blocks(K)) if by_rows else scales(*b_lead, blocks(N), blocks(K)))
    problem = GemmProblem(a_lead[-1], N, K, GROUPS if b_lead else 1, layout, 128, dtypes, spec.flags)
    with call_on(a) as call:
        run_gemm(call, Chosen(call.kernel(spec), split_k), problem, a, b, out, None if numbers is None else int32(numbers), pair)


def run_fp4_gemm(spec: KernelSpec, layout: Layout, numbers: list[int] | None) -> None:
    """Run one GEMM kernel of FP4 weights in one layout; no operation but the experts forward has it."""
    lead, groups = (GROUPS, MAX_M) if layout is Layout.MASKED else (M,), 1 if layout is Layout.DENSE else GROUPS
    a, a_scales, out = fp8(*lead, K), m_major(*lead, blocks(K)), bf16(*lead, N)
    b, group_data = fragments(*fragments_shape(groups, N, K)), int32(numbers or [])
    gemm = GemmCall(
        a=matrices(a),
        b=Matrices(b.data_ptr(), b.stride(0), b.stride(1)),
        d=matrices(out),
        group_data=group_data.data_ptr(),
        m=lead[-1],
        n=N,
        k=K,
        groups=groups,
        layout=layout,
        alignment=128,
        a_scales=m_major_matrices(a_scales),
    )
    with call_on(a) as call:
        call.kernel(spec)
        call.launch(spec, prepare_gemm(spec, blocks_for(call, spec), default_service().maps, gemm))


def run_operations() -> None:
    """Run the operations around the GEMMs, and a GEMM twice, so that the second launch is one that was kept."""
    a, b = (fp8(M, K), m_major(M, blocks(K))), (fp8(N, K), scales(blocks(N), blocks(K)))
    out = bf16(M, N)
    for _ in range(2):
        ops.fp8_gemm_nt(a, b, out)
    run_steps()


def run_steps() -> None:
    """Run every kernel without tensor maps; where one is a step of an operation, all of that operation."""
    for x in (bf16(77, K), bf16(77, K).float()):
        ops.per_token_cast_to_fp8(x)
    ops.get_mn_major_tma_aligned_tensor(scales(77, blocks(K)))
    ops.fp8_gemm_nn((fp8(77, K), m_major(77, blocks(K))), (fp8(K, N), scales(blocks(K), blocks(N))), bf16(77, N))
    for tokens in (50, 700):  # routed by one block, and by a cluster
        run_experts(tokens)


def run_experts(tokens: int) -> None:
    """Run the experts forward in every scheme."""
    experts, hidden, intermediate, top_k = 9, K, 144, 3
    index = torch.randint(-1, experts + 1, (tokens, top_k), device="cuda")
    weights, x = torch.rand(tokens, top_k, device="cuda"), bf16(tokens, hidden)
    up, down = fp8(experts, 2 * intermediate, hidden), fp8(experts, hidden, intermediate)
    for block in ((128, 128), (1, 128)):
        parts = [scales(experts, -(-w.shape[1] // block[0]), blocks(w.shape[2])) for w in (up, down)]
        ops.fp8_experts(x, index, weights, ops.prepare_experts(up, down, *parts, block_size=block))
    ops.bf16_experts(x, index, weights, bf16(experts, 2 * intermediate, hidden), bf16(experts, hidden, intermediate))


def uncovered(without_maps: bool) -> list[str]:
    """Return the kernels of the set that this process has not loaded, of those that it should have."""
    loaded = {spec for home in default_service()._homes.values() for spec in home.kernels}
    return [spec.name for spec in dj.kernel_set(ARCH) if spec not in loaded and not (without_maps and is_gemm(spec))]


def run_here(without_maps: bool) -> int:
    """Run the kernels in this process, which a tool watches, and print which were left out."""
    torch.manual_seed(0)
    with torch.no_grad():
        if without_maps:
            run_steps()
        else:
            run_gemms([spec for spec in dj.kernel_set(ARCH) if is_gemm(spec)])
            run_operations()
    torch.cuda.synchronize()
    print(json.dumps({"uncovered": uncovered(without_maps)}), flush=True)
    return 0


def races_elsewhere(printed: str) -> list[str]:
    """Return the races that racecheck reported, if each names a kernel of torch; none if any does not."""
    races = [line.strip("= ") for line in printed.splitlines() if "Race reported" in line]
    return races if all(_TORCH.search(line) for line in races) else []


def watch(sanitizer: str, tool: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run this file under one tool, keep what it prints, and return what came of it."""
    here = [sys.executable, __file__, "--run-here", *(["--without-maps"] if TOOLS[tool] else [])]
    # The bindings look for entry points that a driver may lack, which is no fault of a kernel.
    kept = ["--kernel-name-exclude", f"kernel_substring={GEMMS}"] if TOOLS[tool] else []
    # Each tensor in an allocation of its own: a read behind its end is none of a neighbour's.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, *kept, "--report-api-errors", "no", "--error-exitcode", str(FOUND), *here]
    status: int | None = None
    # A session of its own: what the tool started must end with it.
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{tool}.txt").write_text(printed, encoding="utf-8")
    summary = _SUMMARY.search(printed)
    left = re.search(r'^\{"uncovered": .*\}$', printed, re.MULTILINE)
    faults = []
    foreign = races_elsewhere(printed) if tool == "racecheck" else []
    if status is None:
        faults.append(f"not done after {timeout_s:.0f} s")
    elif status != 0 and not (foreign and status == FOUND):
        faults.append(f"exit status {status}")
    if summary is None or (int(summary[1]) and not foreign):
        faults.append(summary[0].strip("= ") if summary else "no summary of the tool")
    names = json.loads(left[0])["uncovered"] if left else []
    if status in (0, FOUND) and left is None:
        faults.append("the kernels did not run to their end")
    faults += [f"{name} is run by nothing here" for name in names]
    return {"tool": tool, "summary": summary[0].strip("= ") if summary else None, "uncovered": names, "races_elsewhere": foreign,
            "faults": faults}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--tools", default=",".join(TOOLS), help=f"default: {','.join(TOOLS)}")
    line.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer")
    line.add_argument("--timeout", type=float, default=300, help="seconds for each tool; default: 300")
    line.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results/sanitizer")
    line.add_argument("--run-here", action="store_true", help=argparse.SUPPRESS)
    line.add_argument("--without-maps", action="store_true", help=argparse.SUPPRESS)
    return line


def main() -> int:
    options = parser().parse_args()
    if options.run_here:
        return run_here(options.without_maps)
    tools = options.tools.split(",")
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        parser().error(f"argument --tools: {', '.join(unknown)} is none of {', '.join(TOOLS)}")
    if not os.access(options.sanitizer, os.X_OK) or not torch.cuda.is_available():
        print(f"bench/sanitize.py needs {options.sanitizer} (--sanitizer names another) and a CUDA device.", file=sys.stderr)
        return 2
    record = environment(PACKAGES)
    record["machine"] |= {"gpu": torch.cuda.get_device_name(), "driver": try_driver_version(), "cuda": torch.version.cuda}
    for spec in dj.kernel_set(ARCH):
        dj.build(spec)  # a compile under a tool takes many times longer
    found = []
    for tool in tools:
        found.append(watch(options.sanitizer, tool, options.results, options.timeout))
        print(f"{tool}: {found[-1]['summary']}; {len(found[-1]['faults'])} faults", flush=True)
        for fault in found[-1]["faults"]:
            print(f"FAILED {tool}: {fault}", file=sys.stderr)
    write_json(options.results / "summary.json", {**record, "kernels": len(dj.kernel_set(ARCH)), "tools": found})
    return 1 if any(result["faults"] for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())

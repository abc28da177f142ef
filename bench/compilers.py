"""Code of NVRTC beside code of nvcc: the same sources, for three dense FP8 products, in turn on one Hopper GPU.

Does NVRTC make slower code? Nothing of the package needs nvcc; this program does. ``--compile-only`` compares registers and needs
no GPU. Exit status: 0, or 1 where NVRTC's kernel takes over 3 % longer or gives other bits, or 2 without nvcc or GPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Table, environment, number, try_driver_version, write_json

from deepgemm_jit import build
from deepgemm_jit.compiler.elf import read_cubin_elf
from deepgemm_jit.frontend import render
from deepgemm_jit.spec import GemmProblem, KernelSpec, limits_of, select

ARCH = "sm_90a"
PROBLEMS = ((64, 2112, 7168), (128, 7168, 16384), (4096, 2112, 7168))
"""M, N and K."""
LARGEST_LOSS = 1.03
RUNS = 5
"""The median of their medians counts."""


def nvcc_image(spec: KernelSpec, nvcc: str) -> bytes:
    """Return what nvcc makes of a kernel's source and headers."""
    source = render(spec)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in {**source.headers, "kernel.cu": source.text}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            # nvcc brings the names of the widths itself.
            (root / name).write_text(re.sub(r"^using u?int\d+_t = .*;$", "", text, flags=re.MULTILINE), encoding="utf-8")
        options = (
            "-cubin",
            f"-arch={ARCH}",
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "-include",
            "cstdint",
            "-I.",
            "-o",
            "kernel.cubin",
        )
        subprocess.run([nvcc, *options, "kernel.cu"], cwd=root, check=True)
        return (root / "kernel.cubin").read_bytes()


def measure(problem: tuple[int, int, int], image: bytes, seconds: float) -> dict[str, Any]:
    """Time one product with NVRTC's kernel and with nvcc's, which services of their own have loaded."""
    import torch
    from gemm import FLUSH_BYTES, gemm_call, time_in_turn
    from problems import Shape, empty_output, random_operands

    from deepgemm_jit import ops
    from deepgemm_jit.service import KernelService
    from deepgemm_jit.service import service as module

    m, n, k = problem
    shape = Shape("dense", 1, m, m, n, k)
    operands, services = random_operands(shape, torch.device("cuda")), {}
    outs, calls = {}, []
    for compiler in ("nvrtc", "nvcc"):
        services[compiler] = service = KernelService()
        if compiler == "nvcc":
            spec = select(GemmProblem(m, n, k), limits_of(ARCH))
            built = service.builder.build(spec)
            service._built[spec] = replace(built, cubin=replace(built.cubin, image=image))
        outs[compiler] = empty_output(shape, operands)
        inner = gemm_call(ops, shape, operands, outs[compiler])

        def call(service: KernelService = service, inner: Any = inner) -> None:
            module._DEFAULT["service"] = service
            inner()

        call()
        calls.append(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    medians: dict[str, list[float]] = {"nvrtc": [], "nvcc": []}
    for _ in range(RUNS):
        for times, timing in zip(medians.values(), time_in_turn(calls, flush, seconds), strict=True):
            times.append(timing.device_us.median)
    found = {compiler: statistics.median(times) for compiler, times in medians.items()}
    return {**found, "ratio": found["nvrtc"] / found["nvcc"], "same_bits": torch.equal(outs["nvrtc"], outs["nvcc"])}


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--compile-only", action="store_true", help="compare registers; no GPU")
    line.add_argument("--seconds", type=float, default=0.3, help="of each of the runs; default: 0.3")
    line.add_argument("--json", type=Path, metavar="PATH", help="write the result here")
    options = line.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("bench/compilers.py compares with nvcc, and there is none in PATH.", file=sys.stderr)
        return 2
    table = Table(("problem", 22), ("kernel", 52), ("registers", 9), ("nvcc", 6), ("NVRTC us", 9), ("nvcc us", 9), ("ratio", 6))
    table.start("NVRTC's time over nvcc's")
    rows = []
    for problem in PROBLEMS:
        spec = select(GemmProblem(*problem), limits_of(ARCH))
        image, ours = nvcc_image(spec, nvcc), build(spec)
        row: dict[str, Any] = {"problem": problem, "kernel": spec.name, "registers": ours.facts.registers}
        row["nvcc_registers"] = read_cubin_elf(image).registers
        if not options.compile_only:
            row |= measure(problem, image, options.seconds)
        rows.append(row)
        label = "{} x {} x {}".format(*problem)
        times = (number(row.get(key), digits) for key, digits in (("nvrtc", 1), ("nvcc", 1), ("ratio", 3)))
        table.row(label, spec.name, row["registers"], row["nvcc_registers"], *times)
    if options.json:
        record = environment(("torch", "cuda-bindings", "nvidia-cuda-nvrtc"))
        record["machine"] |= {"driver": try_driver_version()}
        write_json(options.json, record | {"rows": rows})
    return int(any(row.get("ratio", 1.0) > LARGEST_LOSS or not row.get("same_bits", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())

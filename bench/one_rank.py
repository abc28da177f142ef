"""One rank of a job: gets ready, says so, waits for a line, makes its first call, and prints what came of it as JSON.

Run by bench/cold_ranks.py: ``one_rank.py RANK WORK``, WORK as in :data:`WORKS`. Ready means all but the kernels: imports, the
context, operands on the GPU of the rank's number.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.spec import kernel_set

TESTS = Path(__file__).resolve().parents[1] / "tests"
TOKENS = 1024
ARCH = "sm_90a"
STEP_WITHOUT_GPU = 5
"""Every fifth kernel of the set: of each family some, about as many as a forward asks for."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does once it is ready."""

    first: Callable[[], None]
    """Returns when the GPU is done."""
    is_right: Callable[[], bool]
    """Compares what the first call gave with float64."""
    service: KernelService | None
    """Whose kernels it uses; None for those of DeepGEMM."""


def forward(rank: int) -> Work:
    """Make an experts forward of the layer of Qwen3-30B-A3B."""
    import torch
    from experts import LARGEST_ERROR, LAYERS, ours, random_tokens, random_weights, relative_error

    torch.cuda.set_device(rank)
    weights, tokens = random_weights(LAYERS[0]), random_tokens(LAYERS[0], TOKENS)
    call = ours(weights)
    torch.cuda.synchronize()
    outs = []

    def first() -> None:
        outs.append(call(tokens))
        torch.cuda.synchronize()

    return Work(first, lambda: relative_error(outs[0], tokens, weights) <= LARGEST_ERROR, default_service())


def gemms(rank: int, *, peer: bool = False) -> Work:
    """Make the two grouped GEMMs of that layer, with 128 rows for each expert, with this package or with DeepGEMM."""
    import torch
    from gemm import LARGEST_ERROR, try_peer
    from problems import Shape, empty_output, random_operands, relative_errors

    from deepgemm_jit import ops

    torch.cuda.set_device(rank)  # before the peer is loaded, which may look at the current device
    library = try_peer() if peer else ops
    if library is None:
        raise SystemExit("DeepGEMM is not here")
    device = torch.device("cuda", rank)
    shapes = [Shape("contiguous", 128, 128, 128, n, k) for n, k in ((1536, 2048), (2048, 768))]
    operands = [random_operands(shape, device) for shape in shapes]
    outs = [empty_output(shape, x) for shape, x in zip(shapes, operands, strict=True)]
    scales = [x.a_scale.T.contiguous().T for x in operands]  # as the kernels of both sides read them
    torch.cuda.synchronize()

    def first() -> None:
        for x, scale, out in zip(operands, scales, outs, strict=True):
            library.m_grouped_fp8_gemm_nt_contiguous((x.a, scale), (x.b, x.b_scale), out, x.group_data)
        torch.cuda.synchronize()

    def is_right() -> bool:
        return all(
            relative_errors(*each)[0] <= LARGEST_ERROR for each in zip(shapes, operands, [[out] for out in outs], strict=True)
        )

    return Work(first, is_right, None if peer else default_service())


def load(_rank: int) -> Work:
    """Load some kernels into a pretended GPU: what a first forward does before it launches. There is nothing to compute."""
    sys.path.insert(0, str(TESTS))
    from doubles.driver import DriverDouble

    service = KernelService(driver=DriverDouble())

    def first() -> None:
        with service.call(0, 0) as call:
            for spec in kernel_set(ARCH)[::STEP_WITHOUT_GPU]:
                call.kernel(spec)

    return Work(first, lambda: True, service)


WORKS: dict[str, Callable[[int], Work]] = {
    "forward": forward,
    "gemms": gemms,
    "gemms of DeepGEMM": lambda rank: gemms(rank, peer=True),
    "load": load,
}


def loaded_kernels(service: KernelService | None) -> list[str]:
    """Return the names of the kernels that a service has loaded."""
    return sorted({spec.name for home in service._homes.values() for spec in home.kernels}) if service else []


def main() -> int:
    work = WORKS[sys.argv[2]](int(sys.argv[1]))
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("not told to begin: another rank did not get ready")
    started = time.perf_counter()
    work.first()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": round(seconds, 4), "right": work.is_right(), "kernels": loaded_kernels(work.service)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

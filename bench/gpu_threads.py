"""One process, all its GPUs and several threads for each: is every call right, does each GPU stay as fast as alone?

A round of a thread is one grouped GEMM and one experts forward on its GPU, on a stream of its own, while another GPU is the
current device. Both are so large that the GPU is the limit: what the host needs for them is measured too, as the threads
share one interpreter lock. Run by bench/many_gpus.py: ``gpu_threads.py speed|memory GPUS SECONDS`` prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from experts import CHECKED_TOKENS, LAYERS, Forward, Layer, Tokens, Weights, ours, random_tokens, random_weights, relative_error
from experts import LARGEST_ERROR as LARGEST_FORWARD_ERROR
from gemm import LARGEST_ERROR as LARGEST_GEMM_ERROR
from gemm import gemm_call
from problems import Shape, empty_output, random_operands, relative_errors

from deepgemm_jit import ops

THREADS = 4
"""Of each GPU."""
AHEAD = 2
"""Rounds of a thread that may be on their way: the GPU has work while the host prepares more."""
CHECK_EVERY = 8
"""Rounds between checks while the speed is measured: a check costs host and GPU something too."""
PASSES = 3
LEAD_S = 0.5
"""Of the pass before each that is measured: clocks rise."""
START_LIMIT_S = 60.0
MEMORY_SECONDS = 1.0
HELD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Job:
    """What a round is."""

    shape: Shape
    layer: Layer
    tokens: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the GEMMs of a round."""
        layer = self.layer
        return self.shape.flops + 6 * self.tokens * layer.top_k * layer.hidden * layer.intermediate

    @property
    def label(self) -> str:
        """Name the round."""
        return f"grouped GEMM of {self.shape.label}; experts of {self.layer.name}, {self.tokens} tokens"


LARGE = Job(Shape("contiguous", 4, 8192, 8192, 4096, 7168), LAYERS[1], 8192)
SMALL = Job(Shape("contiguous", 4, 128, 128, 256, 512), Layer("a small layer", 8, 512, 256, top_k=2), 256)


class Calls:
    """The calls of one thread on one GPU, with the bits that they must give: those of a first call, compared with float64.

    Make it with its GPU current.
    """

    def __init__(self, job: Job, gpu: int, weights: Weights, forward: Any) -> None:
        device = torch.device("cuda", gpu)
        self.gpu, self.stream = gpu, torch.cuda.Stream(device)
        operands, tokens = random_operands(job.shape, device), random_tokens(job.layer, job.tokens)
        self._out = empty_output(job.shape, operands)
        self._gemm = gemm_call(ops, job.shape, operands, self._out)
        self._forward: Forward = partial(forward, tokens)
        self._different = torch.zeros((), dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self.stream):
            self._gemm()
            result = self._forward()
        torch.cuda.synchronize(device)
        self.gemm_error = relative_errors(job.shape, operands, [self._out])[0]
        some = torch.linspace(0, job.tokens - 1, CHECKED_TOKENS, device=device).long()
        chosen = Tokens(tokens.hidden[some], tokens.index[some], tokens.weights[some])
        self.forward_error = relative_error(result[some], chosen, weights)
        self._gemm_bits, self._forward_bits = self._out.view(torch.int16).clone(), result.view(torch.int16).clone()
        torch.cuda.synchronize(device)

    def run(self, current: int, *, check: bool) -> None:
        """Make one round with ``current`` as the current device; the stream of this object is torch's current one of its GPU.

        Raises:
            RuntimeError: a call left another device current.
        """
        torch.cuda.set_device(current)
        if check:
            self._out.fill_(torch.nan)
        self._gemm()
        result = self._forward()
        if torch.cuda.current_device() != current:
            raise RuntimeError(
                f"GPU {current} was current, and after calls on GPU {self.gpu} GPU {torch.cuda.current_device()} is"
            )
        if check:
            self._different += (self._out.view(torch.int16) != self._gemm_bits).sum()
            self._different += (result.view(torch.int16) != self._forward_bits).sum()

    def different(self) -> int:
        """Return how many elements of all checked rounds had other bits; waits for the GPU."""
        torch.cuda.synchronize(self.gpu)
        return int(self._different)


@dataclass(frozen=True, slots=True)
class Pace:
    """What one thread did in one pass."""

    rounds: int
    started: float
    ended: float
    """When the GPU was done with all of its rounds."""
    host_s: float
    """CPU time of the thread."""


def work(calls: Calls, currents: Sequence[int], seconds: float, check_every: int, barrier: threading.Barrier) -> Pace:
    """Make rounds for some seconds, the current device another one each time, and wait for the last."""
    with torch.no_grad():
        torch.cuda.set_stream(calls.stream)
        events = [torch.cuda.Event(blocking=True) for _ in range(AHEAD)]  # type: ignore[no-untyped-call]
        barrier.wait(START_LIMIT_S)
        started, host_s, rounds = time.perf_counter(), time.thread_time(), 0
        while rounds == 0 or time.perf_counter() < started + seconds:
            event = events[rounds % AHEAD]
            event.synchronize()
            calls.run(currents[rounds % len(currents)], check=rounds % check_every == 0)
            event.record(calls.stream)
            rounds += 1
        calls.stream.synchronize()
        return Pace(rounds, started, time.perf_counter(), time.thread_time() - host_s)


def run_pass(
    threads: Mapping[int, Sequence[Calls]], gpus: Sequence[int], seconds: float, check_every: int
) -> dict[int, list[Pace]]:
    """Let all threads of ``gpus`` work at once; return what they did, by GPU. Every GPU of ``threads`` may be made current."""
    everyone = [calls for gpu in gpus for calls in threads[gpu]]
    barrier = threading.Barrier(len(everyone))
    with ThreadPoolExecutor(len(everyone)) as pool:
        futures = [
            pool.submit(work, calls, [gpu for gpu in threads if gpu != calls.gpu] or [calls.gpu], seconds, check_every, barrier)
            for calls in everyone
        ]
    paces: dict[int, list[Pace]] = {gpu: [] for gpu in gpus}
    for calls, future in zip(everyone, futures, strict=True):
        paces[calls.gpu].append(future.result())
    return paces


def measured_pass(threads: Mapping[int, Sequence[Calls]], gpus: Sequence[int], seconds: float) -> dict[int, list[Pace]]:
    """Return a pass behind a short one that does not count."""
    run_pass(threads, gpus, LEAD_S, CHECK_EVERY)
    return run_pass(threads, gpus, seconds, CHECK_EVERY)


def rounds_per_s(paces: Sequence[Pace]) -> float:
    """Return the rounds of a GPU in a second, from the first start until all its work was done."""
    return sum(pace.rounds for pace in paces) / (max(pace.ended for pace in paces) - min(pace.started for pace in paces))


def host_share(paces: Mapping[int, Sequence[Pace]]) -> float:
    """Return the CPU time of all threads over the time that passed: near 1 the interpreter lock is the limit, not the GPUs."""
    every = list(itertools.chain.from_iterable(paces.values()))
    return sum(pace.host_s for pace in every) / (max(pace.ended for pace in every) - min(pace.started for pace in every))


def start_threads(job: Job, gpus: Sequence[int]) -> dict[int, list[Calls]]:
    """Make the calls of all threads; those of a GPU share their weights."""
    threads = {}
    for gpu in gpus:
        with torch.cuda.device(gpu), torch.no_grad():
            weights = random_weights(job.layer)
            forward = ours(weights)
            threads[gpu] = [Calls(job, gpu, weights, forward) for _ in range(THREADS)]
    return threads


def measure_speed(gpus: int, seconds: float, job: Job = LARGE) -> dict[str, Any]:
    """Check every round of a pass of all GPUs together, then measure all together and each alone, in turn."""
    threads = start_threads(job, range(gpus))
    checked = run_pass(threads, range(gpus), seconds, check_every=1)
    together: list[dict[int, list[Pace]]] = []
    alone: list[dict[int, list[Pace]]] = []
    for _ in range(PASSES):
        together.append(measured_pass(threads, range(gpus), seconds))
        alone += [measured_pass(threads, [gpu], seconds) for gpu in range(gpus)]
    rows = []
    for gpu, mine in threads.items():
        rates = {
            "alone": [rounds_per_s(paces[gpu]) for paces in alone if gpu in paces],
            "together": [rounds_per_s(paces[gpu]) for paces in together],
        }
        rows.append(
            {
                "gpu": gpu,
                **{f"{name}_rounds_per_s": [round(rate, 3) for rate in some] for name, some in rates.items()},
                **{f"{name}_tflops": round(median(some) * job.flops / 1e12, 1) for name, some in rates.items()},
                "ratio": round(median(rates["together"]) / median(rates["alone"]), 4),
                "checked_rounds": sum(pace.rounds for pace in checked[gpu]),
                "different_elements": sum(calls.different() for calls in mine),
                "gemm_error": max_error(calls.gemm_error for calls in mine),
                "forward_error": max_error(calls.forward_error for calls in mine),
            }
        )
    return {
        "round": job.label,
        "threads_per_gpu": THREADS,
        "largest_errors": {"gemm_error": LARGEST_GEMM_ERROR, "forward_error": LARGEST_FORWARD_ERROR},
        "host_share_alone": round(median(host_share(paces) for paces in alone), 4),
        "host_share_together": round(median(host_share(paces) for paces in together), 4),
        "gpus": rows,
    }


def max_error(errors: Iterable[float]) -> float | None:
    """Return the largest error, or None where one is NaN: JSON has no NaN, and a comparison must not lose it."""
    found = list(errors)
    return None if any(math.isnan(error) for error in found) else max(found)


def used_mib(uuids: Sequence[str]) -> list[int]:
    """Return the memory in use on each GPU, asked in another process: this one must not open a context to know."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    used = dict(line.removeprefix("GPU-").split(", ") for line in lines)
    return [int(used[uuid]) for uuid in uuids]


def measure_memory(gpus: int, seconds: float, job: Job = SMALL) -> dict[str, Any]:
    """Use every second GPU only, and see what becomes of the memory of the others."""
    from deepgemm_jit.runtime import Driver

    driver = Driver()
    uuids = [driver.device_uuid(gpu) for gpu in range(gpus)]
    used, unused = list(range(1, gpus, 2)), list(range(0, gpus, 2))
    at_start = used_mib(uuids)
    torch.cuda.set_device(used[0])
    threads = start_threads(job, used)
    before = used_mib(uuids)
    run_pass(threads, used, seconds, check_every=1)
    held = [torch.ones(HELD_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in used]
    different = sum(calls.different() for some in threads.values() for calls in some)  # waits for the GPUs
    after = used_mib(uuids)
    del held
    return {
        "used": used,
        "unused": unused,
        "used_mib": {"at_start": at_start, "before_calls": before, "after_calls": after},
        "held_mib": HELD_BYTES // 2**20,
        "contexts_on_unused": [gpu for gpu in unused if driver.primary_is_active(gpu)],
        "different_elements": different,
    }


def main() -> int:
    what, gpus, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    print(json.dumps(measure_memory(gpus, MEMORY_SECONDS) if what == "memory" else measure_speed(gpus, seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

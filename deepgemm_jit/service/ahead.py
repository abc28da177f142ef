"""Work that is done for many kernels before anything needs them, side by side in threads: NVRTC releases the GIL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deepgemm_jit.errors import DeepGemmJitError, OperandError
from deepgemm_jit.spec import KernelSpec

logger = logging.getLogger("deepgemm_jit.service")


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a preparation did."""

    kernels: int
    """Kernels that are ready now."""
    compiled: int
    """Those that had to be compiled; the store or this process had the others."""
    seconds: float
    """Wall time of the whole."""


def side_by_side(specs: Sequence[KernelSpec], work: Callable[[KernelSpec], bool], jobs: int | None) -> Preparation:
    """Do ``work`` for every kernel, ``jobs`` at a time; it says whether it compiled the kernel.

    Raises:
        OperandError: ``jobs`` is no count.
        DeepGemmJitError: of the first kernel that failed, once all were tried; its notes name the others that did.
    """
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if type(jobs) is not int or jobs < 1:
        raise OperandError(operation="prepare", faults=[f"jobs = {jobs!r}, needed: a whole number of at least 1"])
    started, compiled, failures = time.monotonic(), 0, dict[KernelSpec, DeepGemmJitError]()
    logger.info("preparing %d kernels, %d at a time", len(specs), jobs)
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="deepgemm_jit-prepare")
    try:
        futures = {spec: pool.submit(work, spec) for spec in specs}
        for spec, future in futures.items():
            try:
                compiled += future.result()
            except DeepGemmJitError as failure:
                failures[spec] = failure
    finally:
        # Ctrl-C: what has not begun is left, what has cannot be stopped.
        pool.shutdown(cancel_futures=True)
    seconds = time.monotonic() - started
    done = len(specs) - len(failures)
    logger.info("prepared %d of %d kernels in %.1f s, %d of them compiled", done, len(specs), seconds, compiled)
    if failures:
        first, *others = failures
        error = failures[first]
        if others:
            error.add_note(f"{len(others)} other kernels failed too: {', '.join(spec.name for spec in others)}")
        try:
            raise error
        finally:
            # An error holds this frame and those above it: held by the frame in turn, all would live until a garbage collection.
            del error, failures, futures, future
    return Preparation(done, compiled, seconds)

"""A warm-up worker: builds one kernel per line of its input until the input ends.

The parent starts it as ``python -m deepgemm_jit.warmup.worker`` with the settings in its environment. A line in is
``{"spec": text}``; a line out answers it: ``{"outcome", "stored", "seconds", "peak_bytes"}`` or ``{"error", "peak_bytes"}``.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import signal
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from deepgemm_jit.builder import Builder
from deepgemm_jit.errors import DeepGemmJitError
from deepgemm_jit.spec import KernelSpec

GRACE_S = 1.0
"""Time a compile under way has to come to an end once the parent is gone."""


def main() -> None:
    """Serve the parent until it closes this process's input."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An exit by exception lets the store remove its temporary files.
    signal.signal(signal.SIGTERM, _leave)
    # The pipe of the answers is this function's alone: whatever else prints goes to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # to stderr, which the parent reads
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while (line := lines.get()) is not None:
        answer = {**_answer(json.loads(line)["spec"]), "peak_bytes": peak_memory_bytes()}
        print(json.dumps(answer), file=answers, flush=True)


def peak_memory_bytes() -> int:
    """Return the most memory this process has had resident.

    Not ``ru_maxrss``: the kernel lets it start at the peak of the process that called exec, so that a parent with a model in
    memory would show in every worker.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Sandboxed kernels leave the line out.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@cache
def _builder() -> Builder:
    return Builder()  # one for all lines: what is wrong with the store is said once


def _answer(text: str) -> dict[str, Any]:
    try:
        built = _builder().build(KernelSpec.from_text(text))
    except DeepGemmJitError as error:
        return {"error": str(error)}
    except Exception:  # noqa: BLE001 - whatever one kernel meets, the others are still to be built
        return {"error": traceback.format_exc().strip()}
    return {"outcome": built.outcome, "stored": built.stored, "seconds": built.seconds}


def _read(lines: queue.SimpleQueue[bytes | None]) -> NoReturn:
    # Unbuffered, as a buffer's lock held by this thread would abort the interpreter on its way out.
    with open(0, "rb", buffering=0) as source:
        for line in source:
            lines.put(line)
    # The parent closes the pipe when it has no more work, and the system does when the parent dies, however it dies.
    lines.put(None)
    time.sleep(GRACE_S)
    os._exit(1)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()

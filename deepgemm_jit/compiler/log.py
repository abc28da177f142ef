"""What ptxas reports in NVRTC's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\((C\d{4})\)")


@dataclass(frozen=True, slots=True)
class PtxasReport:
    """Resources of one kernel: counts and bytes per thread, shared memory per block."""

    registers: int
    shared_memory_bytes: int
    stack_frame_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    advisories: tuple[str, ...]
    """Codes of performance warnings, for example C7510 (WGMMA serialised)."""


def read_ptxas_log(log: str) -> PtxasReport | None:
    """Return the report on the log's only kernel, or None when there is not exactly one."""
    frames, used = _FRAME.findall(log), _USED.findall(log)
    if len(frames) != 1 or len(used) != 1:
        return None
    shared = _SHARED.search(log)
    stack, stores, loads = (int(number) for number in frames[0])
    advisories = tuple(sorted(set(_ADVISORY.findall(log))))
    return PtxasReport(int(used[0]), int(shared[1]) if shared else 0, stack, stores, loads, advisories)

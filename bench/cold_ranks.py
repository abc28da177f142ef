"""Ranks that start at once: how many kernels are compiled by all of them, and when has the slowest made its first forward?

Each rank is a process (bench/one_rank.py). All get ready, then all begin upon one signal: with an empty store that they share,
with the store that this left, and with a pack of it beside an empty store. Ranks of DeepGEMM have an empty cache each.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from common import answer_in, end, last_line, without_settings

from deepgemm_jit.service.audit import Asked, read_audit
from deepgemm_jit.settings import PREFIX

RANK = Path(__file__).with_name("one_rank.py")
PEER_WORK = "gemms of DeepGEMM"
LIMIT_S = 240.0
PACK_LIMIT_S = 60.0
EMPTY, WARM, PACK = "empty store", "warm store", "pack, empty store"


def run_ranks(work: str, environs: Sequence[Mapping[str, str]], folder: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run one rank for each environment; return their answers, and as faults how those ended that gave none.

    Args:
        work: one of ``one_rank.WORKS``.
        environs: whole environments.
        folder: a new one, for what the ranks write to their error streams.
        limit_s: for all of them from their start; what runs then is killed.
    """
    folder.mkdir(parents=True)
    started = time.perf_counter()
    logs = [folder / f"rank_{rank}.txt" for rank in range(len(environs))]
    with ExitStack() as stack:
        ranks = []
        for rank, each in enumerate(zip(environs, logs, strict=True)):
            ranks.append(stack.enter_context(_start(rank, work, *each)))
            stack.callback(end, ranks[-1])
        killer = threading.Timer(limit_s, lambda: [end(rank) for rank in ranks])
        stack.callback(killer.cancel)
        killer.start()
        ready = [_becomes_ready(rank) for rank in ranks]
        ready_s = time.perf_counter() - started
        for rank in ranks:
            _tell(rank, "go\n" if all(ready) else "")
        answers = [answer_in(rank.stdout.read()) for rank in ranks if rank.stdout]
        statuses = [rank.wait() for rank in ranks]
    faults = []
    for rank, (status, answer, log) in enumerate(zip(statuses, answers, logs, strict=True)):
        if answer is None or status:
            told = log.read_text(encoding="utf-8", errors="replace")
            print(told, file=sys.stderr)
            faults.append(f"rank {rank} ended with status {status}: {last_line(told) or 'no error told'}")
    return {"ready_s": round(ready_s, 3), "answers": [answer for answer in answers if answer], "faults": faults}


def _start(rank: int, work: str, environ: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(RANK), str(rank), work]
    with log.open("wb") as errors:
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )


def _becomes_ready(rank: subprocess.Popen[str]) -> bool:
    """Wait until a rank says so or ends; what libraries print before is passed over."""
    return rank.stdout is not None and any(line == "ready\n" for line in iter(rank.stdout.readline, ""))


def _tell(rank: subprocess.Popen[str], line: str) -> None:
    """Write to a rank and close its input."""
    if rank.stdin is not None:
        with suppress(BrokenPipeError):
            rank.stdin.write(line)
            rank.stdin.close()


# --- ours


def measure(works: Sequence[str], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run ranks of ours: each work with an empty store, the first one also with what it left and with a pack of that."""
    rows = []
    for index, work in enumerate(works):
        store = folder / f"store_{index}"
        rows.append(start_cold(EMPTY, work, ranks, folder / f"empty_{index}", store))
        if index == 0:
            rows.append(start_cold(WARM, work, ranks, folder / "warm", store))
            pack = folder / "kernels.pack"
            command = [sys.executable, "-m", "deepgemm_jit", "pack", "create", str(pack), "--cache-dir", str(store)]
            made = subprocess.run(
                command, env=without_settings(), capture_output=True, text=True, timeout=PACK_LIMIT_S, check=False
            )
            rows.append(start_cold(PACK, work, ranks, folder / "pack", folder / "unused_store", pack))
            rows[-1]["faults"] += [f"no pack: {last_line(made.stderr)}"] if made.returncode else []
    return rows


def start_cold(kind: str, work: str, ranks: int, folder: Path, store: Path, pack: Path | None = None) -> dict[str, Any]:
    """Run ranks once and return their row, with what is wrong in it."""
    settings = {"CACHE_DIR": store, "LOCK_DIR": folder / "locks", "AUDIT": folder / "audit.jsonl"}
    settings |= {} if pack is None else {"PACKS": pack}
    environ = without_settings() | {PREFIX + name: str(path) for name, path in settings.items()}
    row = {"store": kind, "work": work} | run_ranks(work, [environ] * ranks, folder / "ranks")
    audit = folder / "audit.jsonl"
    asked = list(read_audit(audit)) if audit.is_file() else []
    # The audit has a line for each compile of a process, and none for a kernel that was found.
    row["compiles"] = dict(sorted(Counter(line.kernel for line in asked if isinstance(line, Asked)).items()))
    row["faults"] += [line for line in asked if isinstance(line, str)] + faults_of(row, ranks)
    if kind == PACK and (written := sum(path.is_file() for path in store.rglob("*"))):
        row["faults"].append(f"{written} files were written to the store beside the pack")
    row["kernels"] = len({kernel for answer in row["answers"] for kernel in answer["kernels"]})
    return _with_times(row)


def faults_of(row: Mapping[str, Any], ranks: int) -> list[str]:
    """Return what is wrong with the answers and the compiles of a row of ours."""
    answers, compiles = row["answers"], row["compiles"]
    faults = [] if len(answers) == ranks else [f"{len(answers)} of {ranks} ranks answered"]
    faults += [f"the result of {wrong} ranks is wrong"] if (wrong := sum(not answer["right"] for answer in answers)) else []
    loaded = {kernel for answer in answers for kernel in answer["kernels"]}
    faults += ["no kernel was loaded"] if not loaded else []
    wanted = 1 if row["store"] == EMPTY else 0
    for kernel in sorted(loaded | compiles.keys()):
        if (count := compiles.get(kernel, 0)) != wanted:
            faults.append(f"{kernel} was compiled {count} times, not {wanted}")
    return faults


# --- the peer


def measure_peer(ranks: int, folder: Path) -> dict[str, Any]:
    """Run ranks of DeepGEMM, with an empty cache each, and count the kernels that they leave there."""
    caches = [folder / f"cache_{rank}" for rank in range(ranks)]
    environs = [without_settings() | {"DG_JIT_CACHE_DIR": str(cache)} for cache in caches]
    row = {"store": "an empty cache each", "work": PEER_WORK} | run_ranks(PEER_WORK, environs, folder / "ranks")
    row["faults"] += [f"the result of {wrong} ranks is wrong"] if (wrong := sum(not a["right"] for a in row["answers"])) else []
    row["kernels_per_rank"] = [sum(1 for _ in cache.rglob("*.cubin")) for cache in caches]
    return _with_times(row)


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the times of its ranks' first calls in the place of their answers."""
    seconds = [answer["seconds"] for answer in row.pop("answers")]
    return row | {"seconds": seconds, "slowest_s": max(seconds, default=None)}

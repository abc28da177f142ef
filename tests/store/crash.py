"""Kills writers of a store at random while others read it, and counts what that does: ``crash.py ROOT KILLS SEED``.

Two kinds of kills, half and half: at a random line of the store's own code, wherever a put and its lock go, and from outside
after a random time. Four readers loop over the same keys all the while. Each key has several contents, whose bytes follow from
key and number, so that a reader can tell a whole cubin from a torn one. Once a reader has had a key, it must have it ever after.

Prints one JSON object; exit status 1 when something is wrong.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from worker import SPEC, cubin_for

import deepgemm_jit.store
from deepgemm_jit.cubin import Cubin
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Store

READERS = 4
CONTENTS = 3
HANG_S = 60.0
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(6)]
_PACKAGE = str(Path(deepgemm_jit.store.__file__).parent)


def content(key: str, number: int) -> Cubin:
    """Return one of the cubins of a key, up to 200 kB long."""
    word = f"{key}/{number} ".encode()
    return cubin_for(payload=word * (1 + int(key[:4], 16) % 50 * (1 + 20 * number)))


VALID = {key: {content(key, number).image for number in range(CONTENTS)} for key in KEYS}


def put_one(rng: random.Random) -> None:
    store, key = Store.open(read_settings()), rng.choice(KEYS)
    with store.lock(key):
        store.get(key, spec_text=SPEC.text, nvrtc_version="13.5")
        store.put(key, content(key, rng.randrange(CONTENTS)), spec_text=SPEC.text)


def counting_lines(run: Callable[[], None], die_at: int = 0) -> int:
    """Run with every line of the store's code counted, killing this process at line ``die_at``; return the count."""
    lines = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        lines += event == "line"
        if die_at and lines >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    run()
    sys.settrace(None)
    return lines


def forked(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return child


def write_until_killed(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        put_one(rng)


def die_at_line(seed: int, place: int) -> None:
    counting_lines(lambda: put_one(random.Random(seed)), place)


def read_until_told(answer: int) -> None:
    """Read until SIGTERM, then write what was seen to the descriptor ``answer``."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    warned = _Counter()
    logging.getLogger("deepgemm_jit").addHandler(warned)
    seen: set[str] = set()
    counts = {"reads": 0, "hits": 0, "torn_reads": 0, "lost_entries": 0, "hangs": 0}
    rng = random.Random(os.getpid())
    while not told:
        store, key = Store.open(read_settings()), rng.choice(KEYS)
        started = time.monotonic()
        cubin = store.get(key, spec_text=SPEC.text, nvrtc_version=rng.choice([None, "13.5", "13.0"]))
        counts["hangs"] += time.monotonic() - started > HANG_S
        counts["reads"] += 1
        counts["hits"] += cubin is not None
        counts["torn_reads"] += cubin is not None and cubin.image not in VALID[key]
        counts["lost_entries"] += cubin is None and key in seen
        if cubin is not None:
            seen.add(key)
    os.write(answer, json.dumps({**counts, "warnings": warned.count}).encode())


class _Counter(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.count += 1


def ended(child: int) -> int | None:
    """Wait for a child and return its status; None, having killed it, when it hangs."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> int:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    started = time.monotonic()
    lines = counting_lines(lambda: put_one(random.Random(seed)))
    readers, answers = [], []
    for _ in range(READERS):
        mine, theirs = os.pipe()
        readers.append(forked(partial(read_until_told, theirs)))
        os.close(theirs)
        answers.append(mine)

    counts = {"kills_at_a_line": 0, "kills_by_time": 0, "writer_hangs": 0}
    while sum(counts.values()) < kills:
        place, child_seed = rng.randint(1, lines), rng.getrandbits(32)
        by_time = forked(partial(write_until_killed, child_seed))
        at_line = forked(partial(die_at_line, child_seed, place))
        time.sleep(rng.uniform(0, 0.02))
        os.kill(by_time, signal.SIGKILL)
        for kind, child in (("kills_at_a_line", at_line), ("kills_by_time", by_time)):
            status = ended(child)
            counts[kind] += status == -signal.SIGKILL
            counts["writer_hangs"] += status is None

    left = len(list((root / "v1/tmp").iterdir()))
    for reader in readers:
        os.kill(reader, signal.SIGTERM)
    seen = [json.loads(os.read(answer, 10_000)) for answer in answers]
    for reader in readers:
        os.waitpid(reader, 0)
    store = Store.open(read_settings())
    stored = all(store.put(key, content(key, 0), spec_text=SPEC.text) for key in KEYS)
    report = {
        "seed": seed,
        "lines_of_a_put": lines,
        **counts,
        "readers": READERS,
        **{name: sum(each[name] for each in seen) for name in seen[0]},
        "leftovers_of_the_killed": left,
        "leftovers_after_the_next_writer": len(list((root / "v1/tmp").iterdir())),
        "set_aside": len(list((root / "v1/quarantine").glob("*"))),
        "damaged": len(store.verify()),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(report))
    wrong = ("writer_hangs", "torn_reads", "lost_entries", "hangs", "warnings", "set_aside", "damaged")
    return int(not stored or any(report[name] for name in wrong) or report["leftovers_after_the_next_writer"] > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Sample cubins for the store's tests, and the other processes of those tests (run by path: ``worker.py VERB ...``)."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store import Store, request_key
from deepgemm_jit.store.prune import clear

SPEC = KernelSpec(family="sample", arch="sm_90a", dtypes=("bf16",), block=(64, 32))
OTHER_SPEC = KernelSpec(family="sample", arch="sm_90a", dtypes=("bf16",), block=(64, 64))
REQUEST = {
    "arch": SPEC.arch,
    "source": '#include "a.cuh"\nextern "C" __global__ void f() {}\n',
    "headers": {"a.cuh": '#include "b/c.cuh"\n', "b/c.cuh": "// ünïcode\n"},
    "entry": SPEC.name,
    "options": ["-arch=sm_90a", "-DX=1", "--maxrregcount=168"],
}
KEY = request_key(**REQUEST)


def elf_for(arch: str, entry: str) -> bytes:
    """Return an ELF header of a cubin of CUDA 13 and the name of a kernel's section."""
    flags = int(arch.removeprefix("sm_").rstrip("af")) << 8
    ident = b"\x7fELF\x02\x01\x01\x41\x08".ljust(16, b"\0")
    header = ident + (2).to_bytes(2, "little") + (190).to_bytes(2, "little") + bytes(28) + flags.to_bytes(4, "little")
    return header.ljust(64, b"\0") + b"\0.text." + entry.encode() + b"\0"


def cubin_for(nvrtc_version: str = "13.5", spec: KernelSpec = SPEC, payload: bytes = b"payload " * 64) -> Cubin:
    """Return bytes that pass for a cubin at a glance, different for each version and payload."""
    return Cubin(
        image=elf_for(spec.arch, spec.name) + nvrtc_version.encode() + payload,
        arch=spec.arch,
        entry=spec.name,
        nvrtc_version=nvrtc_version,
        options=tuple(REQUEST["options"]),
        facts=CubinFacts(168, 1024, 0, 0, 0),
    )


def put(die_before_rename: str = "0") -> None:
    """Put the sample; with N > 0, be killed just before the N-th rename."""
    countdown = int(die_before_rename)
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    print(Store.open(read_settings()).put(KEY, cubin_for(), spec_text=SPEC.text))


def stop_before_rename() -> None:
    """Put the sample, stopping before the first rename until a line comes."""
    rename, stopped = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if not stopped:
            stopped.append(self)
            print("stopping", flush=True)
            sys.stdin.readline()
        return rename(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    put()


def put_at_once() -> None:
    """Say so when ready, wait for a line, then put the sample."""
    store = Store.open(read_settings())
    print("ready", flush=True)
    sys.stdin.readline()
    stored = store.put(KEY, cubin_for(), spec_text=SPEC.text)
    print(stored, store.get(KEY, spec_text=SPEC.text) == cubin_for())


def hold() -> None:
    """Take the sample's lock, say whether it is held, and keep it until a line or the end of the input comes."""
    with Store.open(read_settings()).lock(KEY) as held:
        print(held, flush=True)
        sys.stdin.readline()


def count(path: str, times: str) -> None:
    """Add one to the number in a file, again and again, in a way that loses counts without a lock."""
    store = Store.open(read_settings())
    for _ in range(int(times)):
        with store.lock(KEY) as held:
            if held:
                number = int(Path(path).read_text())
                os.sched_yield()
                Path(path).write_text(str(number + 1))


def _busy(seconds: str, names: tuple[str, ...], turn: Callable[[Store, random.Random, dict[str, int]], None]) -> None:
    """Take turns for some seconds, each with a store of its own, and print what was counted and warned of."""
    counts, warnings = dict.fromkeys(names, 0), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepgemm_jit").addHandler(handler)
    rng, until = random.Random(os.environ["SEED"]), time.monotonic() + float(seconds)
    while time.monotonic() < until:
        turn(Store.open(read_settings()), rng, counts)
    print(json.dumps({**counts, "warnings": warnings}))


def _one_of(rng: random.Random) -> tuple[str, Cubin]:
    digit = rng.choice("abcdef")
    return digit * 64, cubin_for(payload=digit.encode() * 50_000)


def write_on(seconds: str) -> None:
    """Put one of six cubins again and again."""

    def turn(store: Store, rng: random.Random, counts: dict[str, int]) -> None:
        key, cubin = _one_of(rng)
        counts["puts"] += store.put(key, cubin, spec_text=SPEC.text)

    _busy(seconds, ("puts",), turn)


def read_on(seconds: str) -> None:
    """Get one of six cubins again and again."""

    def turn(store: Store, rng: random.Random, counts: dict[str, int]) -> None:
        key, cubin = _one_of(rng)
        found = store.get(key, spec_text=SPEC.text)
        counts["hits"] += found is not None
        counts["torn"] += found not in (None, cubin)

    _busy(seconds, ("hits", "torn"), turn)


def prune_on(seconds: str) -> None:
    """Prune and clear again and again."""

    def turn(store: Store, rng: random.Random, counts: dict[str, int]) -> None:
        root = store.root
        assert root is not None
        if rng.random() < 0.03:
            clear(root)
            counts["clears"] += 1
        else:
            store.prune(max_bytes=rng.choice((None, 100_000, 0)), unused_s=rng.choice((None, 0.0)))
            counts["prunes"] += 1

    _busy(seconds, ("prunes", "clears"), turn)


def key() -> None:
    """Print the sample's request key."""
    print(request_key(**REQUEST))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

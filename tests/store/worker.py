"""Sample cubins for the store's tests, and the other processes of those tests (run by path: ``worker.py VERB ...``)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store import Store, request_key

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


def cubin_for(nvrtc_version: str = "13.5", spec: KernelSpec = SPEC, payload: bytes = b"payload " * 64) -> Cubin:
    """Return bytes that begin as an ELF file does, different for each version."""
    return Cubin(
        image=b"\x7fELF" + nvrtc_version.encode() + payload,
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


def key() -> None:
    """Print the sample's request key."""
    print(request_key(**REQUEST))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""What must hold for any bytes that lie where an index entry or a pack is expected. Used by hypothesis and by the fuzzer."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepgemm_jit.errors import OperandError
from deepgemm_jit.store import Entry
from deepgemm_jit.store.pack import read_pack, verify_pack
from deepgemm_jit.store.trust import DamagedError

HANG_S = 30.0


@contextmanager
def no_hang() -> Iterator[None]:
    """End the process's current work with an error when it takes far too long."""

    def late(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"no answer after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_entry(data: bytes) -> bool:
    """Read bytes as an index entry; return whether they are accepted, and fail when they should not be."""
    try:
        entry = Entry.from_json(data)
    except OperandError:
        return False
    body = json.loads(data)
    digest = body.pop("sha256")
    # In our own words what the digest covers: the text without its last field.
    assert hashlib.sha256(json.dumps(body, indent=1).encode() + b"\n").hexdigest() == digest
    assert (entry.key, entry.digest, entry.size_bytes) == (body["key"], body["object"]["sha256"], body["object"]["size_bytes"])
    assert "/" not in entry.key + entry.digest + entry.nvrtc_version + entry.entry
    return True


def read_pack_bytes(data: bytes, path: Path) -> bool:
    """Read bytes as a pack; return whether the manifest is accepted, and fail when a digest does not hold."""
    path.write_bytes(data)
    try:
        pack = read_pack(path)
    except DamagedError:
        return False
    size = int.from_bytes(data[22:26], "little")
    text = data[43 : 43 + size]
    body = json.loads(text)
    digest = body.pop("sha256")
    assert hashlib.sha256(json.dumps(body, separators=(",", ":")).encode() + b"\n").hexdigest() == digest
    sound = True
    for entry in pack.entries:
        try:
            cubin = pack.load_cubin(entry)
        except DamagedError:
            sound = False
        else:
            assert hashlib.sha256(cubin.image).hexdigest() == entry.digest
            assert len(cubin.image) == entry.size_bytes
            assert cubin.faults() == []
    try:
        verify_pack(pack)
    except DamagedError:
        pass
    else:
        assert sound
    return True

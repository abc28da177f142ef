"""Coverage-guided fuzzing of the parsers with atheris: ``fuzz.py entry|pack RUNS CORPUS``.

Fails on a crash or a hang, and when bytes are believed that should not be. The corpus folder gets what reached new code. Digests
would keep the fuzzer from ever getting past them, so each input is tried as it is and signed afresh, and for a pack also as the
manifest of a sound one.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["deepgemm_jit.store.entry", "deepgemm_jit.store.pack", "deepgemm_jit.store.key", "json"]
):
    import deepgemm_jit.store.entry
    import deepgemm_jit.store.pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from store.parsers import HANG_S, read_entry, read_pack_bytes
from store.test_packs import manifest_of, with_manifest
from store.worker import KEY, SPEC, cubin_for

ENTRY = deepgemm_jit.store.entry.Entry.for_cubin(KEY, cubin_for(), SPEC.text)
PACK = deepgemm_jit.store.pack.pack_bytes("0.6.10", [ENTRY], lambda _entry: cubin_for().image)
_SIGNATURE = b'"sha256":'


def signed_again(text: bytes) -> bytes:
    """Put the right digest where a text of ours has its own, as far as it still looks like one."""
    head, mark, rest = text.rpartition(_SIGNATURE)
    if not mark:
        return text
    body = head.rstrip().rstrip(b",")
    closed = body + (b"\n}" if rest.startswith(b" ") else b"}") + b"\n"
    return head + mark + rest[: rest.find(b'"') + 1] + hashlib.sha256(closed).hexdigest().encode() + rest[-3:]


def try_entry(data: bytes) -> None:
    read_entry(data)
    read_entry(signed_again(data))


def try_pack(data: bytes, path: Path) -> None:
    read_pack_bytes(data, path)
    # A header that is right, around a manifest that may be anything.
    read_pack_bytes(with_manifest(PACK, data), path)
    read_pack_bytes(with_manifest(PACK, signed_again(data)), path)


def main() -> None:
    what, runs, corpus = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = {"entry": [ENTRY.to_json()], "pack": [PACK, manifest_of(PACK)]}[what]
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    path = corpus.with_name("fuzzed.pack")
    options = [
        f"-runs={runs}",
        f"-timeout={int(HANG_S)}",
        "-max_len=8192",
        "-use_value_profile=1",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={corpus}/",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], try_entry if what == "entry" else lambda data: try_pack(data, path))
    atheris.Fuzz()


if __name__ == "__main__":
    main()

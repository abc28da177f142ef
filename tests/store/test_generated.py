"""Generated index entries and packs: nothing crashes or hangs, and nothing is believed that fails a digest."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store.parsers import no_hang, read_entry, read_pack_bytes

from deepgemm_jit.cubin import CubinFacts
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store import Entry, Store
from deepgemm_jit.store.pack import pack_bytes

pytestmark = pytest.mark.none

# Values that parsers stumble over, beside random ones.
numbers = st.one_of(
    st.integers(), st.integers(-2, 2), st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**400]), st.floats(), st.booleans()
)
words = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "../../x", "/etc/passwd", "a" * 64, "A" * 64, "sm_90a", "13.5", "1\x00", "\ud800", "0" * 64 + "\n", "\uff11\uff13.5"]
    ),
    st.text(alphabet="0123456789abcdef", min_size=64, max_size=64),
)
values = st.recursive(
    st.one_of(st.none(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=10,
)
FIELDS = [
    "schema",
    "key",
    "object",
    "spec",
    "entry",
    "arch",
    "nvrtc_version",
    "options",
    "facts",
    "sha256",
    "kernels",
    "library_version",
]
edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 10**6), st.integers(0, 200)),
        st.tuples(st.just("insert"), st.integers(0, 10**6), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("repeat"), st.integers(0, 10**6), st.integers(1, 300)),
        st.tuples(st.just("number"), st.integers(0, 10**6), st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])),
    ),
    min_size=1,
    max_size=4,
)
field_changes = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3)


def edited(data: bytes, changes: list[tuple[str, int, Any]]) -> bytes:
    for kind, place, detail in changes:
        at = place % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ detail]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + detail :]
        elif kind == "insert":
            data = data[:at] + detail + data[at:]
        elif kind == "repeat":
            data = data[: at + detail] + data[at:]
        elif kind == "number":
            data = data[:at] + detail.to_bytes(4, "little") + data[at + 4 :]
    return data


def signed(body: dict[str, Any], **form: Any) -> bytes:
    text = (
        json.dumps({name: value for name, value in body.items() if name != "sha256"}, **form).encode("utf-8", "replace") + b"\n"
    )
    digest = body.get("sha256", hashlib.sha256(text).hexdigest())
    return json.dumps({**{n: v for n, v in body.items() if n != "sha256"}, "sha256": digest}, **form).encode() + b"\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


Generate = Callable[[st.SearchStrategy[bytes], Callable[[bytes], bool]], None]


@pytest.fixture
def generate(profile: Any, record: Callable[..., None], request: pytest.FixtureRequest) -> Generate:
    """Return a function that hands a property so many examples as the profile says, and counts them."""

    def generate(strategy: st.SearchStrategy[bytes], holds: Callable[[bytes], bool]) -> None:
        seen: Counter[bool] = Counter()

        @settings(max_examples=profile.examples // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def run(data: bytes) -> None:
            with no_hang():
                seen[holds(data)] += 1

        run()
        record(request.node.name, examples=seen.total(), accepted=seen[True])
        assert seen.total() >= profile.examples // 2

    return generate


@pytest.fixture
def entry(sample: ModuleType) -> Entry:
    return Entry.for_cubin(sample.KEY, sample.cubin_for(), sample.SPEC.text)


def test_generated_index_entries_of_damaged_bytes(generate: Generate, entry: Entry) -> None:
    data = entry.to_json()

    def holds(damaged: bytes) -> bool:
        accepted = read_entry(damaged)
        assert not accepted or damaged == data, "bytes that nobody wrote are believed"
        return accepted

    generate(st.one_of(edits.map(lambda changes: edited(data, changes)), st.binary(max_size=300)), holds)


def test_generated_index_entries_with_signed_fields_in_a_store(
    generate: Generate, entry: Entry, folder: Path, sample: ModuleType
) -> None:
    """Signed right, so that the fields alone decide; read through a store that has the object."""
    root, cubin, body = folder / "store", sample.cubin_for(), json.loads(entry.to_json())
    del body["sha256"]
    assert Store.open(read_settings(cache_dir=root)).put(sample.KEY, cubin, spec_text=sample.SPEC.text)
    index = next((root / "v1/kernels").iterdir())

    def holds(data: bytes) -> bool:
        accepted = read_entry(data)
        index.write_bytes(data)
        found = Store.open(read_settings(cache_dir=root)).get(sample.KEY, spec_text=sample.SPEC.text, nvrtc_version="13.5")
        for path in (root / "v1/quarantine").glob("*"):
            path.unlink()
        # Signed facts and options are the writer's word; bytes, arch and kernel are not to be changed by any of it.
        assert found is None or (found.image, found.arch, found.entry) == (cubin.image, cubin.arch, cubin.entry)
        return accepted

    facts = st.builds(CubinFacts, *[st.integers(0, 2**31 - 1)] * 5).map(lambda facts: replace(entry, facts=facts).to_json())
    generate(st.one_of(field_changes.map(lambda changes: signed({**body, **changes}, indent=1)), facts), holds)


@pytest.fixture
def pack(entry: Entry, sample: ModuleType) -> bytes:
    other = sample.cubin_for("12.9")
    cubins = {"13.5": sample.cubin_for(), "12.9": other}
    entries = [entry, Entry.for_cubin(sample.KEY, other, sample.SPEC.text)]
    return pack_bytes("0.6.10", entries, lambda each: cubins[each.nvrtc_version].image)


def test_generated_packs_of_damaged_bytes(generate: Generate, pack: bytes, folder: Path) -> None:
    strategy = st.one_of(edits.map(lambda changes: edited(pack, changes)), st.binary(max_size=300))
    generate(strategy, lambda data: read_pack_bytes(data, folder / "damaged.pack"))


def test_generated_packs_with_signed_manifests(generate: Generate, pack: bytes, folder: Path) -> None:
    """A header that is right for the manifest, and a digest too: what is in it decides."""
    from store.test_packs import manifest_of, with_manifest

    body = json.loads(manifest_of(pack))
    del body["sha256"]

    def with_fields(change: tuple[dict[str, Any], dict[str, Any], int]) -> bytes:
        top, kernel, which = change
        kernels = [dict(each) for each in body["kernels"]]
        kernels[which % len(kernels)] |= kernel
        return with_manifest(pack, signed({**body, "kernels": kernels, **top}, separators=(",", ":")))

    changes = st.tuples(st.one_of(st.just({}), field_changes), st.one_of(st.just({}), field_changes), st.integers(0, 1))
    generate(changes.map(with_fields), lambda data: read_pack_bytes(data, folder / "signed.pack"))

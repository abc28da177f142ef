from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from deepgemm_jit.cubin import CubinFacts
from deepgemm_jit.errors import OperandError
from deepgemm_jit.store import Entry

pytestmark = pytest.mark.none


@pytest.fixture
def entry(sample: ModuleType) -> Entry:
    return Entry.for_cubin(sample.KEY, sample.cubin_for(), sample.SPEC.text)


def signed(body: dict[str, Any]) -> bytes:
    """Write a body with a right digest of itself: its fields alone decide whether it is refused."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode() + b"\n").hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n"


def test_an_entry_reads_back_as_it_was_written(entry: Entry, sample: ModuleType) -> None:
    assert Entry.from_json(entry.to_json()) == entry
    assert entry.cubin(sample.cubin_for().image) == sample.cubin_for()


def test_the_signing_helper_writes_what_the_writer_writes(entry: Entry) -> None:
    assert signed(json.loads(entry.to_json())) == entry.to_json()


def test_no_flipped_bit_is_believed(entry: Entry) -> None:
    data = entry.to_json()
    for place in range(len(data)):
        for bit in (0, 2, 5):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(OperandError):
                Entry.from_json(bytes(damaged))


FACTS = {"registers": 1, "shared_memory_bytes": 0, "local_memory_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
FIELDS: dict[str, dict[str, Any]] = {
    "schema of the future": {"schema": 2},
    "schema as text": {"schema": "1"},
    "schema as a float": {"schema": 1.0},
    "schema as a truth": {"schema": True},
    "no schema": {"schema": None},
    "unknown field": {"extra": 0},
    "key of 63 digits": {"key": "a" * 63},
    "key in capitals": {"key": "A" * 64},
    "key with a path": {"key": "../" + "a" * 61},
    "key with a newline": {"key": "a" * 64 + "\n"},
    "key is a number": {"key": 0},
    "object is a text": {"object": "a" * 64},
    "object without size": {"object": {"sha256": "a" * 64}},
    "object with more": {"object": {"sha256": "a" * 64, "size_bytes": 1, "more": 1}},
    "empty object": {"object": {"sha256": "a" * 64, "size_bytes": 0}},
    "negative size": {"object": {"sha256": "a" * 64, "size_bytes": -1}},
    "size as a float": {"object": {"sha256": "a" * 64, "size_bytes": 1.0}},
    "size as a truth": {"object": {"sha256": "a" * 64, "size_bytes": True}},
    "size beyond any cubin": {"object": {"sha256": "a" * 64, "size_bytes": 2**40}},
    "empty spec": {"spec": ""},
    "spec with a control character": {"spec": "a\x00"},
    "spec with half a character": {"spec": "\ud800"},
    "entry with a path": {"entry": "../../x"},
    "entry is not a C name": {"entry": "1x"},
    "arch of no GPU": {"arch": "../sm_90a"},
    "version with a path": {"nvrtc_version": "13.5/../x"},
    "version without minor": {"nvrtc_version": "13"},
    "version with leading zeros": {"nvrtc_version": "13.05"},
    "version in other digits": {"nvrtc_version": "1٣.5"},
    "version is a number": {"nvrtc_version": 13.5},
    "options as text": {"options": "ab"},
    "options as an object": {"options": {"a": 1}},
    "option is a number": {"options": [0]},
    "facts as a list": {"facts": []},
    "facts without registers": {"facts": {name: 0 for name in FACTS if name != "registers"}},
    "facts with more": {"facts": {**FACTS, "more": 0}},
    "negative registers": {"facts": {**FACTS, "registers": -1}},
    "registers as a float": {"facts": {**FACTS, "registers": 1.5}},
    "registers as a truth": {"facts": {**FACTS, "registers": True}},
    "registers beyond 31 bits": {"facts": {**FACTS, "registers": 2**31}},
}


@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
def test_a_field_that_is_not_well_formed_is_refused(entry: Entry, change: dict[str, Any]) -> None:
    with pytest.raises(OperandError):
        Entry.from_json(signed({**json.loads(entry.to_json()), **change}))


@pytest.mark.parametrize(
    "field", ["schema", "key", "object", "spec", "entry", "arch", "nvrtc_version", "options", "facts", "sha256"]
)
def test_a_missing_field_is_refused(entry: Entry, field: str) -> None:
    body = json.loads(entry.to_json())
    del body[field]
    with pytest.raises(OperandError):
        Entry.from_json(signed(body) if field != "sha256" else json.dumps(body, indent=1).encode() + b"\n")


TEXTS = {
    "nothing": b"",
    "not JSON": b"not JSON",
    "null": b"null\n",
    "a list": b"[]\n",
    "a number": b"1\n",
    "not UTF-8": b"\xff\xfe{}",
    "a pickle": pickle.dumps({"schema": 1}),
    "deep nesting": b"[" * 60_000,
    "deep objects": b'{"a":' * 10_000,
    "a number of many digits": b'{"schema": ' + b"1" * 60_000 + b"}",
    "larger than the limit": b" " * (64 * 1024 + 1),
}


@pytest.mark.parametrize("data", TEXTS.values(), ids=TEXTS)
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(OperandError):
        Entry.from_json(data)


def test_another_form_of_the_same_content_is_refused(entry: Entry) -> None:
    data = entry.to_json()
    body = json.loads(data)
    others = {
        "compact": json.dumps(body).encode(),
        "sorted": json.dumps(body, indent=1, sort_keys=True).encode() + b"\n",
        "more space": data + b"\n",
        "byte order mark": b"\xef\xbb\xbf" + data,
        "a repeated field": data.replace(b'{\n "schema": 1,', b'{\n "schema": 1,\n "schema": 1,'),
    }
    for form, other in others.items():
        assert other != data, form
        with pytest.raises(OperandError):
            Entry.from_json(other)


@pytest.mark.parametrize(
    "change",
    [{"key": "../../x"}, {"size_bytes": 0}, {"entry": "a/b"}, {"nvrtc_version": "13.5.1"}, {"facts": CubinFacts(-1, 0, 0, 0, 0)}],
)
def test_there_is_no_malformed_entry(entry: Entry, change: dict[str, Any]) -> None:
    with pytest.raises(OperandError, match="not well formed"):
        replace(entry, **change)

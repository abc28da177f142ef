"""The index entry: a small JSON text that commits one object to one request key and one NVRTC version."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store.key import SCHEMA, is_digest, is_nvrtc_version

MAX_ENTRY_BYTES = 64 * 1024
MAX_OBJECT_BYTES = 256 * 1024 * 1024
"""Far above any cubin; keeps a damaged size from making a reader allocate what it says."""

_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")
_C_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_MAX_FACT = 2**31 - 1
_MAX_TEXT = 4096
_MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store knows about one cubin; holds nothing of the time, the host or the path.

    Raises:
        OperandError: a field is not well formed. There is no malformed Entry.
    """

    key: str
    digest: str
    size_bytes: int
    spec: str
    """Canonical text of the spec."""
    entry: str
    arch: str
    nvrtc_version: str
    options: tuple[str, ...]
    facts: CubinFacts

    def __post_init__(self) -> None:
        checks = {
            "key": is_digest(self.key),
            "object digest": is_digest(self.digest),
            "object size": _is_count(self.size_bytes, MAX_OBJECT_BYTES) and self.size_bytes > 0,
            "spec": _is_printable(self.spec),
            "entry": _matches(_C_NAME, self.entry),
            "arch": _matches(_ARCH, self.arch),
            "nvrtc_version": is_nvrtc_version(self.nvrtc_version),
            "options": all(_is_printable(option) for option in self.options),
            "facts": all(_is_count(n, _MAX_FACT) for n in asdict(self.facts).values()),
        }
        faults = [f"{name} is not well formed" for name, ok in checks.items() if not ok]
        if faults:
            raise OperandError(operation="store entry", faults=faults)

    @classmethod
    def for_cubin(cls, key: str, cubin: Cubin, spec_text: str) -> Entry:
        """Return the entry that commits ``cubin`` to ``key``."""
        return cls(
            key=key,
            digest=cubin.digest,
            size_bytes=len(cubin.image),
            spec=spec_text,
            entry=cubin.entry,
            arch=cubin.arch,
            nvrtc_version=cubin.nvrtc_version,
            options=tuple(cubin.options),
            facts=cubin.facts,
        )

    def cubin(self, image: bytes) -> Cubin:
        """Return the cubin of this entry around its bytes."""
        return Cubin(
            image=image,
            arch=self.arch,
            entry=self.entry,
            nvrtc_version=self.nvrtc_version,
            options=self.options,
            facts=self.facts,
        )

    def mismatches(self, spec: KernelSpec) -> list[str]:
        """Return in what this entry is not the one of ``spec``; empty when it is."""
        pairs = (("spec", self.spec, spec.text), ("arch", self.arch, spec.arch), ("entry", self.entry, spec.name))
        return [f"{what} is {given!r}; the spec asks for {needed!r}" for what, given, needed in pairs if given != needed]

    def body(self) -> dict[str, Any]:
        """Return the fields as JSON has them, in the one order."""
        return {
            "schema": SCHEMA,
            "key": self.key,
            "object": {"sha256": self.digest, "size_bytes": self.size_bytes},
            "spec": self.spec,
            "entry": self.entry,
            "arch": self.arch,
            "nvrtc_version": self.nvrtc_version,
            "options": list(self.options),
            "facts": asdict(self.facts),
        }

    @classmethod
    def from_body(cls, body: object) -> Entry:
        """Read the fields as JSON has them; unknown ones are for the caller to refuse.

        Raises:
            OperandError: one is missing or not well formed.
        """
        if not isinstance(body, dict):
            raise malformed("is not a JSON object")
        check_schema(body)
        try:
            stored, facts = body["object"], body["facts"]
            return cls(
                key=body["key"],
                digest=stored["sha256"],
                size_bytes=stored["size_bytes"],
                spec=body["spec"],
                entry=body["entry"],
                arch=body["arch"],
                nvrtc_version=body["nvrtc_version"],
                options=tuple(body["options"]),
                facts=CubinFacts(**{field.name: facts[field.name] for field in fields(CubinFacts)}),
            )
        except (KeyError, TypeError) as error:
            raise malformed(f"lacks a field or has one of another type ({error})") from None

    def to_json(self) -> bytes:
        """Return the one canonical text of this entry, with a digest of itself."""
        body = self.body()
        # The object's digest says nothing about the facts beside it: a flipped bit in "registers" would be believed.
        return _dumped({**body, "sha256": hashlib.sha256(_dumped(body)).hexdigest()})

    @classmethod
    def from_json(cls, data: bytes) -> Entry:
        """Read an entry; accepts exactly what :meth:`to_json` writes.

        Raises:
            OperandError: ``data`` is anything else.
        """
        entry = cls.from_body(json_of(data, MAX_ENTRY_BYTES))
        # One comparison covers unknown and repeated fields, another order or spacing, and the entry's own digest.
        if entry.to_json() != data:
            raise malformed("is not in canonical form or does not match its own digest")
        return entry


def json_of(data: bytes, limit_bytes: int) -> Any:
    """Parse bytes that may be anything.

    Raises:
        OperandError: they are too many, or not JSON.
    """
    if len(data) > limit_bytes:
        raise malformed(f"is {len(data)} bytes long; the limit is {limit_bytes}")
    try:
        # RecursionError: deep nesting; ValueError: not JSON, not UTF-8, or a number of thousands of digits.
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(f"is not JSON ({type(error).__name__})") from None


def check_schema(body: dict[str, Any]) -> None:
    """Refuse what has another schema: equal means equal, no prefix, no text, no float.

    Raises:
        OperandError: it has.
    """
    if type(body.get("schema")) is not int or body["schema"] != SCHEMA:
        given = body.get("schema")
        shown = repr(given)[:_MAX_SHOWN] if isinstance(given, int | float | str | None) else f"a {type(given).__name__}"
        raise malformed(f"has schema {shown}; this library reads schema {SCHEMA}")


def malformed(reason: str) -> OperandError:
    """Return the refusal of a text that is no entry or manifest of ours."""
    return OperandError(operation="store entry", faults=[reason])


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode("ascii") + b"\n"


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()

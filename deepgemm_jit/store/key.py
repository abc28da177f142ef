"""The request key: what a cubin is made of, as one digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from deepgemm_jit.errors import OperandError

SCHEMA = 1
"""Version of the key, of the index entry and of the folder layout; one number, as none of them is read without the others."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[1-9][0-9]{0,3}\.(0|[1-9][0-9]{0,3})")


def is_digest(value: object) -> bool:
    """Say whether ``value`` is a SHA-256 in lower-case hex; such a text cannot leave a folder when used as a file name."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_nvrtc_version(value: object) -> bool:
    """Say whether ``value`` is ``major.minor`` in ASCII digits without leading zeros."""
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


def parsed_version(version: str) -> tuple[int, int]:
    """Return major and minor of a well-formed NVRTC version, by which versions sort."""
    major, minor = version.split(".")
    return int(major), int(minor)


def request_key(*, arch: str, source: str, headers: Mapping[str, str], entry: str, options: Sequence[str]) -> str:
    """Return the request key: SHA-256 in hex over everything the compiler sees, and nothing else.

    Fields are labelled and length-prefixed, so that no two different requests feed the same bytes to the digest.

    Args:
        arch: the target with its suffix, for example ``sm_90a``.
        source: the rendered translation unit.
        headers: content by the name the source includes it under; the order of the mapping does not matter.
        entry: name of the ``extern "C"`` kernel.
        options: compiler options; their order matters, as it does to the compiler.

    Raises:
        OperandError: an input is missing, or is not the text that it should be.
    """
    faults = _request_faults(arch, source, headers, entry, options)
    if faults:
        raise OperandError(operation="request_key", faults=faults)

    fields = [("schema", str(SCHEMA)), ("arch", arch), ("source", source)]
    fields.append(("headers", str(len(headers))))
    for name in sorted(headers):
        fields += [("header name", name), ("header text", headers[name])]
    fields += [("entry", entry), ("options", str(len(options)))]
    fields += [("option", option) for option in options]

    digest = hashlib.sha256()
    for label, value in fields:
        content = _encoded(value)
        digest.update(f"{label}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _request_faults(arch: object, source: object, headers: object, entry: object, options: object) -> list[str]:
    faults = [
        f"{what} must be a non-empty str, got {value!r}"
        for what, value in (("arch", arch), ("entry", entry), ("source", source))
        if not (isinstance(value, str) and value)
    ]
    if isinstance(headers, Mapping):
        for name, text in headers.items():
            if not (isinstance(name, str) and name and isinstance(text, str)):
                faults.append(f"headers must map names to their text, got {name!r}: {text!r}")
    else:
        faults.append(f"headers must map names to their text, got {headers!r}")
    # A str is a sequence of str, and a set has no order.
    if not isinstance(options, Sequence) or isinstance(options, str | bytes):
        faults.append(f"options must be a list or tuple of str, got {options!r}")
    else:
        faults += [
            f"option must be a non-empty str, got {option!r}" for option in options if not (isinstance(option, str) and option)
        ]
    return faults


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise OperandError(operation="request_key", faults=[f"text is not valid Unicode: {error}"]) from None

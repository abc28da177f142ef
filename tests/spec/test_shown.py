"""Values in messages: printable, short, and shown whatever they are."""

from __future__ import annotations

from typing import NoReturn

import pytest

from deepgemm_jit.spec.shown import MOST, shown

pytestmark = pytest.mark.none


class Unshowable:
    def __repr__(self) -> NoReturn:
        raise RuntimeError("no repr")


class Raw:
    def __repr__(self) -> str:
        return "\x1b[2J\n\udcff\u202e"


def _nested(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, 5, -1.5, "name", b"x", ["a", 1], {"a": [1]}, (1, 2), "ü"])
def test_small_values_are_shown_as_they_are(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        [1] * 10**6,
        {str(i): i for i in range(1000)},
        10**4000,
        10**5000,
        _nested(100_000),
        Unshowable(),
        Raw(),
        "\x1b\udcff\n",
    ],
    ids=["text", "list", "dict", "digits", "too many digits", "deep", "unshowable", "raw", "escapes"],
)
def test_any_value_is_shown_printable_and_short(value: object) -> None:
    text = shown(value)
    assert 0 < len(text) <= MOST + len("...")
    assert text.isprintable()
    text.encode()

"""How a value that somebody else gave is shown in a message: on one line, printable and short."""

from __future__ import annotations

import reprlib

MOST = 80
"""Characters that a reader can still take in."""

_SHORTENER = reprlib.Repr()
_SHORTENER.maxlevel = 3
_SHORTENER.maxstring = _SHORTENER.maxlong = _SHORTENER.maxother = 10 * MOST
_SHORTENER.maxlist = _SHORTENER.maxtuple = _SHORTENER.maxdict = 12


def shown(value: object, most: int = MOST) -> str:
    """Return the ``repr`` of any value, cut to ``most`` characters and an ellipsis; it never raises."""
    try:
        text = _SHORTENER.repr(value)
    except Exception:  # noqa: BLE001 - a whole number of too many digits, or a repr of the caller's own
        text = f"<{type(value).__name__}>"
    # Whatever a repr holds, a message must neither drive a terminal nor fail to encode.
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."

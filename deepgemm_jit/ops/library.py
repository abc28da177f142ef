"""The torch operators of this package: opaque to torch.compile, which sees a shape-only implementation of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("deepgemm_jit", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``torch.ops.deepgemm_jit.<name>``.

    Args:
        schema: in torch's notation, without namespace.
        run: the real thing. It takes tensors of every device, so that a wrong one meets our check and not torch's dispatcher.
        fake: checks and allocates, and launches nothing.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"deepgemm_jit::{name}", fake, lib=_LIBRARY)

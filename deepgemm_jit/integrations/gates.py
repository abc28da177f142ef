"""Which gate lies between the GEMMs of a transformers experts module: a SwiGLU we have kernels for, or a callback.

The two gates that transformers itself provides are run once on a few numbers and compared with our formula, so that a version
that computes something else is served by its own gate. What a module's own class computes is never guessed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepgemm_jit.ops.weights import Activation

_LIMIT, _ALPHA = 3.0, 1.7
_WIDTH = 64


class _Gate(NamedTuple):
    """What a gate function was seen to do."""

    reads_limit: bool
    reads_alpha: bool
    others: frozenset[str]
    """Attributes it asked for beyond those we know; the formula holds where they are None."""


class _StandIn:
    """An experts module with nothing but the attributes of its gate; it notes what else is asked of it."""

    def __init__(self, limit: float | None, alpha: float | None) -> None:
        self.act_fn = torch.nn.SiLU()
        self.limit = self.swiglu_limit = limit
        self.swiglu_alpha = alpha
        self.others: set[str] = set()

    def __getattr__(self, name: str) -> None:
        self.others.add(name)


def activation_of(module: Any, known_gates: tuple[Callable[..., Any], ...]) -> Activation | None:
    """Return the activation of an experts module, or None where its own ``_apply_gate`` has to be called.

    Args:
        module: an experts module of transformers, ``has_gate`` set.
        known_gates: the gate functions of transformers that may be replaced by a kernel.
    """
    if not module.has_gate:
        return Activation("silu") if is_silu(module.act_fn) else Activation("callback", callback=module.act_fn)
    function = getattr(module._apply_gate, "__func__", None)
    # A class with a gate of its own may have no act_fn at all.
    gate = gate_seen(function) if function in known_gates and is_silu(getattr(module, "act_fn", None)) else None
    if gate is None or any(getattr(module, name, gate) is not None for name in gate.others):
        return None
    limit = getattr(module, "swiglu_limit", None) if gate.reads_limit else None
    alpha = getattr(module, "swiglu_alpha", None) if gate.reads_alpha else None
    if (gate.reads_limit and getattr(module, "limit", None) != limit) or (alpha is not None and limit is None):
        return None
    return Activation("silu", limit=limit, alpha=alpha)


def is_silu(function: Any) -> bool:
    """Return whether an activation function is the SiLU of torch or of transformers; a class derived may compute anything."""
    from transformers import activations

    theirs = getattr(activations, "SiLUActivation", torch.nn.SiLU)
    return function is torch.nn.functional.silu or type(function) in (torch.nn.SiLU, theirs)


@functools.cache
def gate_seen(function: Callable[..., Any]) -> _Gate | None:
    """Run a gate function on numbers on the CPU; None where it is no SwiGLU that we know."""
    others: set[str] = set()
    plain = _result(function, None, None, others)
    if plain is None or not torch.allclose(plain, _swiglu(None, None)):
        return None
    reads = []
    for limit, alpha in ((_LIMIT, None), (_LIMIT, _ALPHA)):
        result = _result(function, limit, alpha, others)
        if result is None:
            return None
        if torch.allclose(result, _swiglu(limit, alpha)):
            reads.append(True)
        elif torch.allclose(result, plain):
            reads.append(False)
        else:
            return None
    return _Gate(reads[0], reads[1], frozenset(others))


def _sample() -> torch.Tensor:
    """Return (8, 2 * _WIDTH): gate and up each from -12 to 12, large beside small."""
    # Told apart from the defaults: transformers builds models under another dtype and on another device.
    numbers = torch.linspace(-12, 12, 8 * _WIDTH, dtype=torch.float64, device="cpu")
    return torch.cat([numbers.view(8, _WIDTH), numbers.view(_WIDTH, 8).T], dim=-1)


def _result(function: Callable[..., Any], limit: float | None, alpha: float | None, others: set[str]) -> torch.Tensor | None:
    stand_in = _StandIn(limit, alpha)
    try:
        result = function(stand_in, _sample())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # it wants more of a module than numbers
    others |= stand_in.others
    return result.double() if isinstance(result, torch.Tensor) and result.shape == (8, _WIDTH) else None


def _swiglu(limit: float | None, alpha: float | None) -> torch.Tensor:
    """Return what :class:`Activation` says, for the sample."""
    gate, up = _sample().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha is not None:
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return torch.nn.functional.silu(gate) * up

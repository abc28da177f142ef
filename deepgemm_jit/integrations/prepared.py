"""What is made of a module's parameters once, kept on the module until the parameters change.

It is a plain attribute: freed with the module, absent from its state dict, left out of copies and pickles, and readable by
torch.compile, which takes the tensors in it for inputs of the graph.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Protocol

import torch

_ATTRIBUTE = "_deepgemm_jit_prepared"


class HasParameters(Protocol):
    """The part of a torch module that is read here."""

    _parameters: dict[str, torch.Tensor | None]


class Prepared:
    """A value and the parameters it was made of."""

    def __init__(self, value: Any, module: HasParameters) -> None:
        self.value = value
        # Weak references tell one parameter from another that took its id and its memory; versions tell a load in place.
        self._sources = [(weakref.ref(p), _version(p), _address(p)) for p in _parameters(module)]

    def is_of(self, module: HasParameters) -> bool:
        """Return whether ``module`` still has the same parameters, unchanged and in the same place."""
        parameters = _parameters(module)
        return len(parameters) == len(self._sources) and all(
            source() is p and version == _version(p) and address == _address(p)
            for p, (source, version, address) in zip(parameters, self._sources, strict=True)
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a module has other parameters and prepares again


def remember(module: Any, value: Any) -> None:
    """Keep ``value`` on ``module`` as made of its parameters."""
    setattr(module, _ATTRIBUTE, Prepared(value, module))


def forget(module: Any) -> None:
    """Drop what is kept on ``module``, if anything."""
    vars(module).pop(_ATTRIBUTE, None)


def is_prepared(module: Any) -> bool:
    """Return whether ``module`` holds a value made of its parameters as they are."""
    kept = getattr(module, _ATTRIBUTE, None)
    return kept is not None and kept.is_of(module)


def value_of(module: Any) -> Any:
    """Return the value kept on ``module``, which must hold one."""
    return getattr(module, _ATTRIBUTE).value


def module_of(identity: int) -> Any:
    """Return the module of an ``id``, which must be alive.

    Preparation has to run while torch.compile traces, on the real module. What runs then takes constants, and before torch 2.13 a
    module is none, but its id is, and is guarded.
    """
    return ctypes.cast(identity, ctypes.py_object).value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, or the tensor itself, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _parameters(module: HasParameters) -> list[torch.Tensor]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "fake_mode"):  # a fake tensor's address is a fault to ask for
        return 0
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr()

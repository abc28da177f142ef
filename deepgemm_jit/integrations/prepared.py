"""What is made of a module's parameters once, kept on the module until the parameters change.

Only what was made is kept: tensors that serve as they lie are taken from the module in each call, so that they follow it, and
their memory goes when the module lets go of it. What is made again overwrites what was made before where it fits, because a
captured CUDA graph and a compiled graph hold its address.

It hangs on plain attributes: freed with the module, absent from its state dict, left out of copies and pickles, and readable by
torch.compile, which takes the tensors in it for inputs of the graph.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

_ATTRIBUTE = "_deepgemm_jit_prepared"
_BEFORE_TRACING = "_deepgemm_jit_prepared_before_tracing"
"""The same, where a trace found it: absent on a module that the trace itself prepared, which its guards hold on to."""
_SETTINGS = ("limit", "swiglu_limit", "swiglu_alpha", "block_size", "activation_scheme", "has_gate", "is_transposed")
"""Attributes of modules that what is made depends on."""

_lock = threading.RLock()


class HasParameters(Protocol):
    """The part of a torch module that is read here."""

    _parameters: dict[str, torch.Tensor | None]


class Prepared:
    """A value and the parameters and settings it was made of."""

    def __init__(self, value: Any, module: HasParameters) -> None:
        self.value = value
        self._settings = _settings(module)
        self._devices = _devices(module)
        # Weak references tell one parameter from another that took its id and its memory; versions tell a load in place.
        # Their callbacks free what was made when a parameter makes room: accelerate offloads by putting an empty one there.
        freed = _when_freed(self, module)
        self._sources = [(weakref.ref(p, freed), _version(p), _address(p)) for p in _parameters(module)]

    def is_of(self, module: HasParameters) -> bool:
        """Return whether ``module`` still has the same parameters and settings, unchanged and in the same place."""
        parameters = _parameters(module)
        return (
            len(parameters) == len(self._sources)
            and all(
                source() is p and version == _version(p) and address == _address(p)
                for p, (source, version, address) in zip(parameters, self._sources, strict=True)
            )
            and self._settings == _settings(module)
        )

    def is_elsewhere(self, module: HasParameters) -> bool:
        """Return whether the parameters of ``module`` are on other devices than those that this was made of."""
        return self._devices != _devices(module)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a module has other parameters and prepares again


def value_for(module: Any, make: Callable[[Any], Any], *, again: bool = False) -> Any:
    """Return what ``make(module)`` made of the parameters as they are: of late, or now; one thread at a time.

    Args:
        module: a torch module.
        make: gives tensors and other things in named tuples, also nested ones; no tensor may share memory with a parameter.
        again: now in any case.
    """
    kept = getattr(module, _ATTRIBUTE, None)
    if kept is not None and kept.is_of(module) and not again:
        return kept.value
    with _lock:
        return _make(module, make, tracing=False, again=again)


def try_kept(module: Any) -> Any:
    """Return what was made last, of whatever the parameters were then, or None."""
    kept = vars(module).get(_ATTRIBUTE)
    return None if kept is None else kept.value


def value_while_tracing(module: Any, prepare: Callable[[int], Any]) -> Any:
    """Return what was prepared, for a graph that torch.compile builds.

    What was prepared before is read as any attribute, so that modules of a class share a graph. Otherwise the graph holds on to
    this one module, and ``prepare`` is called with its ``id``: a constant function that calls :func:`prepare_traced`.
    """
    kept = getattr(module, _BEFORE_TRACING, None)
    if kept is None:
        prepare(id(module))
        kept = getattr(module, _ATTRIBUTE)
    return kept.value


def prepare_traced(identity: int, make: Callable[[Any], Any]) -> None:
    """Do what :func:`value_for` does, of the module of an ``id``, which must be alive, for the trace that is being made.

    What runs then takes constants, and before torch 2.13 a module is none, but its id is, and is guarded.
    """
    with _lock:
        _make(ctypes.cast(identity, ctypes.py_object).value, make, tracing=True)


def forget(module: Any) -> None:
    """Drop what is kept on ``module``, if anything."""
    for name in (_BEFORE_TRACING, _ATTRIBUTE):
        vars(module).pop(name, None)


def forget_if_elsewhere(module: Any) -> None:
    """Drop what is kept on ``module`` if its parameters are on another device by now."""
    kept = vars(module).get(_ATTRIBUTE)
    if kept is not None and kept.is_elsewhere(module):
        forget(module)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, or the tensor itself, without gradient."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wide(scale: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 scale in float32, which holds it exactly; others as they are."""
    return scale.float() if scale.dtype == torch.bfloat16 else scale


def added_bytes(value: Any) -> int:
    """Return the memory of the tensors in named tuples."""
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(value))


def _make(module: Any, make: Callable[[Any], Any], *, tracing: bool, again: bool = False) -> Any:
    forget_if_elsewhere(module)
    before = getattr(module, _ATTRIBUTE, None)
    if before is not None and before.is_of(module) and not again:
        return before.value
    # Not as tensors of inference mode: those cannot be written again outside of it.
    with torch.inference_mode(False), torch.no_grad():
        value = make(module)
        if before is not None:
            value = _in_place(value, before.value)
    _wait_for(value)
    kept = Prepared(value, module)
    if not tracing and (before is None or getattr(module, _BEFORE_TRACING, None) is not None):
        setattr(module, _BEFORE_TRACING, kept)
    setattr(module, _ATTRIBUTE, kept)
    return value


def _in_place(new: Any, old: Any) -> Any:
    """Return ``new`` with the tensors of ``old`` in it, overwritten, where the two are alike."""
    if type(new) is not type(old):
        return new
    if isinstance(new, torch.Tensor):
        if (new.shape, new.stride(), new.dtype, new.device) != (old.shape, old.stride(), old.dtype, old.device):
            return new
        as_bytes = new.element_size() == 1  # not every torch copies FP8
        (old.view(torch.uint8) if as_bytes else old).copy_(new.view(torch.uint8) if as_bytes else new)
        return old
    if isinstance(new, tuple) and hasattr(new, "_fields"):
        return type(new)(*(_in_place(a, b) for a, b in zip(new, old, strict=True)))
    return new


def _wait_for(value: Any) -> None:
    """Let what was launched end: other streams read the tensors, and are not ordered after the one that wrote them."""
    for device in {tensor.device for tensor in _tensors(value) if tensor.is_cuda}:
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(device).synchronize()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for part in value:
            yield from _tensors(part)


def _when_freed(kept: Prepared, module: Any) -> Callable[[Any], None]:
    weak_kept, weak_module = weakref.ref(kept), weakref.ref(module)

    def freed(_: Any) -> None:
        kept, module = weak_kept(), weak_module()
        # A parameter that another on the same device replaced leaves what was made to be overwritten.
        if kept is not None and module is not None and vars(module).get(_ATTRIBUTE) is kept and kept.is_elsewhere(module):
            forget(module)

    return freed


def _parameters(module: HasParameters) -> list[torch.Tensor]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _devices(module: HasParameters) -> list[torch.device]:
    return [parameter.device for parameter in _parameters(module)]


def _settings(module: Any) -> list[Any]:
    found = [vars(module).get(name) for name in _SETTINGS]
    activation = module._modules.get("act_fn", vars(module).get("act_fn"))
    return [*(tuple(value) if isinstance(value, list) else value for value in found), id(activation)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "fake_mode"):  # a fake tensor's address is a fault to ask for
        return 0
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr()

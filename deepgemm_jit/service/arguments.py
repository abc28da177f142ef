"""What callers of the service pass, checked where a wrong one would be taken for something else, or fail far from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.spec.shown import shown

_ORDINAL = "the ordinal of a GPU, a whole number of at least 0"


def require_ordinals(operation: str, device_ordinals: Any) -> Sequence[int]:
    """Return the ordinals of GPUs that a caller names.

    Raises:
        OperandError: no sequence of whole numbers of at least 0.
    """
    if not isinstance(device_ordinals, Iterable):
        raise OperandError(
            operation=operation, faults=[f"device_ordinals = {shown(device_ordinals)}, needed: a sequence of ordinals"]
        )
    ordinals = tuple(device_ordinals)
    faults = [f"device_ordinals has {shown(each)}, needed: {_ORDINAL}" for each in ordinals if not _is_ordinal(each)]
    if faults:
        raise OperandError(operation=operation, faults=faults)
    return ordinals


def require_ordinal(operation: str, device_ordinal: Any) -> None:
    """Refuse what names no GPU.

    Raises:
        OperandError: no whole number of at least 0.
    """
    if not _is_ordinal(device_ordinal):
        raise OperandError(operation=operation, faults=[f"device_ordinal = {shown(device_ordinal)}, needed: {_ORDINAL}"])


def require_specs(operation: str, specs: Any) -> tuple[KernelSpec, ...]:
    """Return the kernels that a caller names.

    Raises:
        OperandError: no iterable of specs.
    """
    if not isinstance(specs, Iterable):
        raise OperandError(operation=operation, faults=[f"specs = {shown(specs)}, needed: an iterable of KernelSpec"])
    named = tuple(specs)
    faults = [f"specs has {shown(each)}, needed: a KernelSpec" for each in named if not isinstance(each, KernelSpec)]
    if faults:
        raise OperandError(operation=operation, faults=faults)
    return named


def _is_ordinal(value: Any) -> bool:
    return type(value) is int and value >= 0

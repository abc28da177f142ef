"""Whether a GPU has kernels at all, asked before anything is loaded for it."""

from __future__ import annotations

from typing import NamedTuple

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.problem import arch_of
from deepgemm_jit.spec.shown import shown


class Support(NamedTuple):
    """An answer and why."""

    supported: bool
    reason: str


def is_supported(compute_capability: tuple[int, int] | None) -> Support:
    """Return whether there are kernels for a GPU, and why; starts no CUDA, needs no torch and never raises.

    Args:
        compute_capability: as the driver or ``torch.cuda.get_device_capability()`` gives it; None where there is no GPU. Names of
            devices are not looked at: a slice of a GPU (MIG) has the kernels of the whole.
    """
    given: object = compute_capability
    if given is None:
        return Support(False, "there is no GPU")
    if not (isinstance(given, tuple) and len(given) == 2 and all(type(number) is int for number in given)):
        return Support(False, f"{shown(given)} is no compute capability, which is a pair of whole numbers, for example (9, 0)")
    try:
        return Support(True, f"kernels for {arch_of((given[0], given[1])).name}")
    except UnsupportedError as refusal:
        return Support(False, str(refusal))

"""What DeepGEMM's callers set for a whole process."""

from __future__ import annotations

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.ops import get_num_sms, get_pdl, set_num_sms, set_pdl

__all__ = ["get_num_sms", "get_pdl", "get_tc_util", "set_num_sms", "set_pdl", "set_tc_util"]

_FULL = 100


def set_tc_util(new_tc_util: int) -> None:
    """Set the share of the tensor cores that a GEMM keeps busy, in percent: 100, and nothing else.

    Raises:
        UnsupportedError: any other share.
    """
    if new_tc_util != _FULL:
        raise UnsupportedError(
            given=f"set_tc_util({new_tc_util!r})",
            supported="100: a GEMM never idles on purpose",
            advice="Leave SMs to others with set_num_sms",
        )


def get_tc_util() -> int:
    """Return the share of the tensor cores that a GEMM keeps busy, in percent."""
    return _FULL

"""``deep_gemm.utils.math``: casts."""

from typing import Any

from deepgemm_jit.integrations.deep_gemm import absent
from deepgemm_jit.integrations.deep_gemm.casts import *
from deepgemm_jit.integrations.deep_gemm.layouts import align, ceil_div


def __getattr__(name: str) -> Any:
    return absent.named(__name__, name)

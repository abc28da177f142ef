"""``deep_gemm.utils.layout``: layouts of scales, and where groups start."""

from typing import Any

from deepgemm_jit.integrations.deep_gemm import absent
from deepgemm_jit.integrations.deep_gemm.layouts import *


def __getattr__(name: str) -> Any:
    return absent.named(__name__, name)

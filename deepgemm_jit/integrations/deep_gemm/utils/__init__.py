"""``deep_gemm.utils``: casts and layouts, which stand at the top too."""

from typing import Any

from deepgemm_jit.integrations.deep_gemm import absent
from deepgemm_jit.integrations.deep_gemm.utils import dist
from deepgemm_jit.integrations.deep_gemm.utils.layout import *
from deepgemm_jit.integrations.deep_gemm.utils.math import *


def __getattr__(name: str) -> Any:
    return absent.named(__name__, name)

"""``deep_gemm.mega``: nothing of it is served; the same names stand at the top."""

from typing import Any

from deepgemm_jit.integrations.deep_gemm import absent


def __getattr__(name: str) -> Any:
    return absent.named(__name__, name)

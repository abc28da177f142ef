"""``deep_gemm.legacy``: nothing of it is served."""

from typing import Any

from deepgemm_jit.integrations.deep_gemm import absent


def __getattr__(name: str) -> Any:
    return absent.named(__name__, name, "legacy")

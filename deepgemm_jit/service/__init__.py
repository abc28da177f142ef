"""The service: spec to loaded kernel, in the context that a call means."""

from deepgemm_jit.service.ahead import Preparation
from deepgemm_jit.service.monitor import Counts, KernelEvent, KernelState, Phase
from deepgemm_jit.service.service import Call, KernelService, default_service

__all__ = [
    "Call",
    "Counts",
    "KernelEvent",
    "KernelService",
    "KernelState",
    "Phase",
    "Preparation",
    "default_service",
]

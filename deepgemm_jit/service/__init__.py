"""The service: spec to loaded kernel, in the context that a call means."""

from deepgemm_jit.service.service import Call, KernelService, default_service

__all__ = ["Call", "KernelService", "default_service"]

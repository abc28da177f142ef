"""Tensors that say they are on a GPU: metadata and addresses are real, the memory is the host's, and nothing ever reads it."""

from __future__ import annotations

from typing import Any

import torch


class PretendedTensor(torch.Tensor):
    """A CPU tensor that claims a CUDA device; only what an operation asks of its operands is made up."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True
    ordinal = 0

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.ordinal)

    def get_device(self) -> int:
        return self.ordinal


class _OnSecondGpu(PretendedTensor):
    ordinal = 1


_CLASSES = (PretendedTensor, _OnSecondGpu)


def pretend(tensor: torch.Tensor, ordinal: int = 0) -> torch.Tensor:
    """Return a tensor on the same memory that claims to be on GPU ``ordinal``."""
    return torch.Tensor._make_subclass(_CLASSES[ordinal], tensor)  # type: ignore[attr-defined]


def pretend_gpus(monkeypatch: Any) -> dict[int, int]:
    """Make operations take pretended tensors as torch's own; return the raw handle of the current stream by device, to change."""
    streams = dict.fromkeys(range(len(_CLASSES)), 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    monkeypatch.setattr("deepgemm_jit.ops.prepared._PLAIN_TENSORS", frozenset((torch.Tensor, torch.nn.Parameter, *_CLASSES)))
    return streams

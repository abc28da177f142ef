"""What the tests of the integrations share; torch and transformers are imported where a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ops.conftest import gpu_time_limit

__all__ = ["gpu_time_limit"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def registered() -> Iterator[None]:
    """Register the name, and take it back."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from deepgemm_jit.integrations import transformers as integration

    integration.register()
    yield
    for interface in (ALL_FP8_EXPERTS_FUNCTIONS, ALL_EXPERTS_FUNCTIONS):
        type(interface)._global_mapping.pop(integration.NAME, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run `ops.fp8_experts` on dequantized weights; return the experts it was given."""
    from integrations import peers

    from deepgemm_jit import ops

    given: list[Any] = []

    def fp8_experts(hidden: Any, index: Any, weights: Any, experts: Any) -> Any:
        given.append(experts)
        return peers.experts_on_floats(hidden, index, weights, experts)

    monkeypatch.setattr(ops, "fp8_experts", fp8_experts)
    return given

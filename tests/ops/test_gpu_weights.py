"""Expert weights are prepared on a GPU as on a CPU, and must all be on one device."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.experts_reference import SCHEMES, random_experts

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError

pytestmark = pytest.mark.gpu


def moved(arguments: dict[str, object], device: str) -> dict[str, object]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_prepares_the_same_bits_as_a_cpu(scheme: str) -> None:
    arguments = random_experts(3, 272, 144, device="cpu", **SCHEMES[scheme]).arguments
    ours, expected = ops.prepare_experts(**moved(arguments, "cuda")), ops.prepare_experts(**arguments)
    assert ours.device.type == "cuda"
    for projection, other in ((ours.gate_up, expected.gate_up), (ours.down, expected.down)):
        assert torch.equal(projection.weight.view(torch.uint8).cpu(), other.weight.view(torch.uint8))
        assert torch.equal(projection.scale.cpu(), other.scale)
        assert projection.scale.stride() == other.scale.stride()
        assert (projection.scale_kind, projection.added_bytes) == (other.scale_kind, other.added_bytes)


@pytest.mark.parametrize("name", ["down", "gate_up_scale", "down_activation_scale"])
def test_tensors_on_different_devices_are_refused_by_name(name: str) -> None:
    arguments = random_experts(3, 272, 144, device="cuda", static="(E,)").arguments
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ContextMismatchError, match=rf"{name} of prepare_experts belongs to cpu .* gate_up is on cuda:0"):
        ops.prepare_experts(**arguments)


def test_requantized_weights_are_the_same_bits_as_on_a_cpu() -> None:
    weight, scale = (torch.randn((3, 200, 400)) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand((3, 2, 4))
    ours, expected = ops.requantize_ue8m0(weight.cuda(), scale.cuda()), ops.requantize_ue8m0(weight, scale)
    assert torch.equal(ours[0].view(torch.uint8).cpu(), expected[0].view(torch.uint8))
    assert torch.equal(ours[1].cpu(), expected[1])

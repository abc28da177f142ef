"""Experts forwards in one piece: what is launched, and when it is launched again as it was; on the driver's double."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.tensors import pretend, pretend_gpus

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, OperandError
from deepgemm_jit.ops import checks
from deepgemm_jit.ops.weights import Activation, Experts, Projection
from deepgemm_jit.service import KernelService, default_service

pytestmark = pytest.mark.none

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
TOKENS, TOP_K, COUNT, HIDDEN, INTERMEDIATE = 6, 2, 4, 256, 128


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    """The driver of the service that operations use; the primary context of GPU 0 is current."""
    double = DriverDouble(gpus=2)
    double.push_context(double.retain_primary(0))
    service = KernelService(builder=InstantBuilder(), driver=double)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    return double


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[Any, torch.Tensor]:
    """What the forward's allocator gives, by shape: the same memory each time, as torch's does in a loop."""
    given: dict[Any, torch.Tensor] = {}
    empty = torch.empty

    def allocate(shape: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
        if device is None or device.type != "cuda":
            return empty(shape, dtype=dtype, device=device)
        return given.setdefault((shape, dtype, device), pretend(empty(shape, dtype=dtype), device.index or 0))

    monkeypatch.setattr(torch, "empty", allocate)
    return given


@pytest.fixture
def streams(memory: dict[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The raw handle of the current stream by GPU."""
    return pretend_gpus(monkeypatch)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each forward whose operands were checked."""
    made: list[None] = []
    check = checks.check_experts

    def counting(*operands: Any, **options: Any) -> None:
        made.append(None)
        check(*operands, **options)

    monkeypatch.setattr("deepgemm_jit.ops.checks.check_experts", counting)
    return made


def on_gpu(*shape: int, dtype: torch.dtype, gpu: int = 0) -> torch.Tensor:
    return pretend(torch.zeros(shape, dtype=torch.uint8).to(dtype), gpu)


def projection(n: int, k: int, gpu: int) -> Projection:
    scale = on_gpu(COUNT, -(-n // 128), -(-k // 128), dtype=F32, gpu=gpu)
    return Projection(on_gpu(COUNT, n, k, dtype=E4M3, gpu=gpu), scale, "block", None, 0)


def layer(gpu: int = 0, limit: float | None = None) -> Experts:
    up, down = projection(2 * INTERMEDIATE, HIDDEN, gpu), projection(HIDDEN, INTERMEDIATE, gpu)
    return Experts(up, down, True, Activation("silu", limit=limit))


def tokens(count: int = TOKENS, gpu: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = on_gpu(count, TOP_K, dtype=torch.int64, gpu=gpu)
    return on_gpu(count, HIDDEN, dtype=BF16, gpu=gpu), index, on_gpu(count, TOP_K, dtype=F32, gpu=gpu)


def asked(driver: DriverDouble) -> dict[str, int]:
    return {name: count for name, count in driver.calls.items() if name != "start"}


def test_a_forward_is_six_launches_of_which_all_but_the_first_overlap(driver: DriverDouble, streams: dict[int, int]) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    assert [launch.dependent for launch in driver.launches] == [False, *[True] * 5]
    ops.set_pdl(True)
    try:
        ops.fp8_experts(*given, experts)
    finally:
        ops.set_pdl(False)
    assert all(launch.dependent for launch in driver.launches[6:])


def test_the_same_again_is_a_question_for_the_context_and_six_launches(
    driver: DriverDouble, streams: dict[int, int], checked: list[None]
) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    driver.calls.clear()
    for _ in range(3):
        ops.fp8_experts(*given, experts)
    assert asked(driver) == {"try_current_context_id": 3, "launch": 18}
    assert len(checked) == 1
    assert driver.launches[:6] == driver.launches[6:12] == driver.launches[18:]


def test_tokens_elsewhere_are_not_checked_again_and_weights_not_encoded_again(
    driver: DriverDouble, streams: dict[int, int], checked: list[None]
) -> None:
    experts = layer()
    ops.fp8_experts(*tokens(), experts)
    encoded = driver.calls["encode_tiled_map"]
    others = tokens()
    ops.fp8_experts(*others, experts)
    assert (len(checked), driver.calls["encode_tiled_map"]) == (1, encoded)
    assert len(driver.launches) == 12


@pytest.mark.parametrize("change", ["layer", "limit", "tokens", "dtype", "weights"])
def test_another_forward_is_checked(
    change: str, driver: DriverDouble, streams: dict[int, int], checked: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, (hidden, index, weights) = layer(), tokens()
    ops.fp8_experts(hidden, index, weights, experts)
    if change == "layer":
        experts = layer()
    elif change == "limit":
        up, down = experts.gate_up, experts.down
        experts = Experts(up, down, True, Activation("silu", limit=7.0))
    elif change == "tokens":
        hidden, index, weights = tokens(TOKENS + 1)
    elif change == "dtype":
        index = on_gpu(TOKENS, TOP_K, dtype=torch.int32)
    else:
        experts.down.weight.data = on_gpu(COUNT, HIDDEN, INTERMEDIATE, dtype=E4M3)
    ops.fp8_experts(hidden, index, weights, experts)
    assert len(checked) == 2
    assert len(driver.launches) == 12


def test_a_limit_of_sms_is_seen_by_the_next_forward(driver: DriverDouble, streams: dict[int, int]) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    ops.set_num_sms(2)
    ops.fp8_experts(*given, experts)
    ops.set_num_sms(None)
    before, after = ([launch.grid[0] for launch in driver.launches[first : first + 6]] for first in (0, 6))
    assert max(after[2], after[4]) <= 2 < max(before[2], before[4])


def test_unloaded_kernels_are_loaded_again(driver: DriverDouble, streams: dict[int, int]) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    loaded = driver.libraries_loaded
    default_service().unload()
    assert driver.libraries_loaded == 0
    ops.fp8_experts(*given, experts)
    assert driver.libraries_loaded == loaded
    assert len(driver.launches) == 12


def test_each_stream_and_gpu_has_launches_of_its_own(driver: DriverDouble, streams: dict[int, int]) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    streams[0] = driver.create_stream(driver.retain_primary(0))
    ops.fp8_experts(*given, experts)
    ops.fp8_experts(*tokens(gpu=1), layer(gpu=1))
    assert [launch.stream for launch in driver.launches[::6]] == [0, streams[0], 0]
    assert len({launch.context_id for launch in driver.launches}) == 2
    assert driver.current_context() == driver.retain_primary(0)
    with pytest.raises(ContextMismatchError, match="cuda:1"):
        ops.fp8_experts(*tokens(), layer(gpu=1))
    assert len(driver.launches) == 18


def test_inputs_that_require_grad_are_refused_also_when_the_forward_is_known(
    driver: DriverDouble, streams: dict[int, int]
) -> None:
    experts, (hidden, index, weights) = layer(), tokens()
    ops.fp8_experts(hidden, index, weights, experts)
    hidden.requires_grad_()
    with pytest.raises(OperandError, match="grad"):
        ops.fp8_experts(hidden, index, weights, experts)
    with torch.no_grad():
        ops.fp8_experts(hidden, index, weights, experts)
    assert len(driver.launches) == 12


def test_no_tokens_are_no_launch(driver: DriverDouble, streams: dict[int, int], memory: dict[Any, torch.Tensor]) -> None:
    hidden, index, weights = tokens(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda like: like)
        out = ops.fp8_experts(hidden, index, weights, layer())
    assert out.shape == (0, HIDDEN)
    assert driver.launches == [] and memory == {}


def test_weights_changed_in_place_at_the_same_address_are_looked_at_again(
    driver: DriverDouble, streams: dict[int, int], checked: list[None]
) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    whole = experts.gate_up.weight.data
    experts.gate_up.weight.data = whole[:, :INTERMEDIATE]
    with pytest.raises(OperandError, match="gate_up weights must have shape"):
        ops.fp8_experts(*given, experts)
    experts.gate_up.weight.data = whole
    ops.fp8_experts(*given, experts)
    assert len(driver.launches) == 12 and len(checked) == 2


@pytest.mark.parametrize(
    ("scale", "fault"),
    [
        (torch.zeros((COUNT, 2, 2), dtype=torch.float64), "must be torch.float32"),
        (torch.zeros((COUNT, 3, 2)), "must have shape"),
        (torch.zeros((COUNT, 2, 4))[..., ::2], "must be contiguous"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_scales_that_are_not_those_of_the_weights_are_refused(
    scale: torch.Tensor, fault: str, driver: DriverDouble, streams: dict[int, int]
) -> None:
    up = Projection(on_gpu(COUNT, 2 * INTERMEDIATE, HIDDEN, dtype=E4M3), pretend(scale), "block", None, 0)
    with pytest.raises(OperandError, match=f"gate_up scales {fault}"):
        ops.fp8_experts(*tokens(), Experts(up, projection(HIDDEN, INTERMEDIATE, 0), True, Activation("silu")))
    assert driver.launches == []


def test_scales_on_another_gpu_are_refused(driver: DriverDouble, streams: dict[int, int]) -> None:
    up = projection(2 * INTERMEDIATE, HIDDEN, 0)
    elsewhere = Projection(up.weight, up.scale, "block", on_gpu(COUNT, dtype=F32, gpu=1), 0)
    with pytest.raises(ContextMismatchError, match="gate_up activation scales"):
        ops.fp8_experts(*tokens(), Experts(elsewhere, projection(HIDDEN, INTERMEDIATE, 0), True, Activation("silu")))
    assert driver.launches == []


def test_memory_that_is_gone_is_refused(driver: DriverDouble, streams: dict[int, int]) -> None:
    experts, given = layer(), tokens()
    ops.fp8_experts(*given, experts)
    experts.down.weight.untyped_storage().resize_(0)
    with pytest.raises(OperandError, match="down weights has no memory"):
        ops.fp8_experts(*given, experts)
    assert len(driver.launches) == 6


def test_what_torch_has_yet_to_negate_goes_through_its_dispatcher(
    driver: DriverDouble, streams: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, index, weights = tokens()
    monkeypatch.setattr(type(weights), "is_neg", lambda tensor: tensor is weights)
    monkeypatch.setattr("deepgemm_jit.ops.experts.experts_up", lambda *_: (None, None, None))
    monkeypatch.setattr("deepgemm_jit.ops.experts.experts_down", lambda *_: "by the operators")
    assert ops.fp8_experts(hidden, index, weights, layer()) == "by the operators"
    assert driver.launches == []

"""Expert weights of every scheme stand for the same numbers after ``prepare_experts``, and what no kernel reads is refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from deepgemm_jit import ops
from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.ops import Activation, Projection

pytestmark = pytest.mark.none

E4M3, F32 = torch.float8_e4m3fn, torch.float32
E, H, I = 3, 272, 144  # noqa: E741  # neither is a multiple of 128, and a block of gate_up holds rows of gate and of up

Arguments = dict[str, Any]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 50).to(E4M3)


def arguments(count: int = E, hidden: int = H, inner: int = I, *, gated: bool = True, **changes: Any) -> Arguments:
    """Return right arguments in blocks of 128 x 128, with changes."""
    rows = 2 * inner if gated else inner
    made: Arguments = {
        "gate_up": fp8(count, rows, hidden),
        "down": fp8(count, hidden, inner),
        "gate_up_scale": 0.5 + torch.rand((count, ceil_div(rows, 128), ceil_div(hidden, 128))),
        "down_scale": 0.5 + torch.rand((count, ceil_div(hidden, 128), ceil_div(inner, 128))),
        "gated": gated,
    }
    return made | changes


def prepare(given: Arguments) -> ops.Experts:
    return ops.prepare_experts(**given)


def dequantized(weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return (E, N, K) values times one scale per rows x columns, in float64."""
    _, n, k = weight.shape
    wide = scale.double().repeat_interleave(rows, 1)[:, :n].repeat_interleave(columns, 2)[..., :k]
    return weight.double() * wide


def read(projection: Projection) -> torch.Tensor:
    """Return what a projection stands for, in float64."""
    return dequantized(projection.weight, projection.scale, 128 if projection.scale_kind == "block" else 1, 128)


def tensors(given: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


# --- scales


def test_float32_blocks_are_used_as_they_are() -> None:
    given = arguments()
    experts = prepare(given)
    for name in ("gate_up", "down"):
        projection = getattr(experts, name)
        assert (projection.scale_kind, projection.activation_scale) == ("block", None)
        assert projection.weight.data_ptr() == given[name].data_ptr()
        assert projection.scale.data_ptr() == given[f"{name}_scale"].data_ptr()
    assert (experts.count, experts.hidden_size, experts.intermediate_size) == (E, H, I)
    assert (experts.added_bytes, experts.device, experts.gated) == (0, torch.device("cpu"), True)
    assert experts.activation == Activation("silu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block_size", [(128, 128), (1, 128), None])
def test_every_ue8m0_byte_is_read_exactly(block_size: tuple[int, int] | None, dtype: torch.dtype) -> None:
    count = 255
    rows, columns = {(128, 128): (1, 1), (1, 128): (32, 1), None: (2, 1)}[block_size]
    down_rows = {(128, 128): 1, (1, 128): 16, None: 1}[block_size]
    codes = torch.arange(255, dtype=torch.uint8)[:, None, None]
    given = arguments(count, 16, 16, block_size=block_size)
    given |= {
        "gate_up_scale": codes.expand(-1, rows, columns).contiguous().view(dtype),
        "down_scale": codes.expand(-1, down_rows, 1).contiguous().view(dtype),
    }
    experts = prepare(given)
    for projection in (experts.gate_up, experts.down):
        assert projection.scale.dtype == F32
        assert [set(scales.flatten().tolist()) for scales in projection.scale] == [{2.0 ** (code - 127)} for code in range(255)]
        assert projection.added_bytes == projection.scale.numel() * 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_the_nan_of_ue8m0_is_refused_by_expert_and_block(dtype: torch.dtype) -> None:
    given = arguments()
    codes = torch.full(given["down_scale"].shape, 127, dtype=torch.uint8)
    codes[2, 1, 0] = 255
    given["down_scale"] = codes.view(dtype)
    with pytest.raises(OperandError, match=r"down_scale is NaN \(UE8M0 byte 255\) at expert 2, block \(1, 0\)"):
        prepare(given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_not_finite_are_refused_by_expert_and_block(bad: float) -> None:
    given = arguments()
    given["gate_up_scale"][1, 2, 0] = bad
    given["down_scale"][0, 0, 1] = bad
    with pytest.raises(OperandError) as caught:
        prepare(given)
    first, second = caught.value.faults
    assert first.startswith(f"gate_up_scale is {bad} at expert 1, block (2, 0)")
    assert second.startswith(f"down_scale is {bad} at expert 0, block (0, 1)")


def test_zero_and_negative_scales_are_read_as_they_are() -> None:
    given = arguments()
    given["gate_up_scale"][1, 2, 0] = 0.0
    given["gate_up_scale"][2, 0, 1] = -1.5
    assert torch.equal(read(prepare(given).gate_up), dequantized(given["gate_up"], given["gate_up_scale"], 128, 128))


def test_a_scale_per_row_lies_with_its_rows_one_after_another() -> None:
    given = arguments(block_size=(1, 128))
    given |= {"gate_up_scale": torch.rand((E, 2 * I, 3)), "down_scale": torch.rand((E, H, 2))}
    experts = prepare(given)
    for name, columns in (("gate_up", 3), ("down", 2)):
        projection = getattr(experts, name)
        n = projection.weight.shape[1]
        assert (projection.scale_kind, projection.scale.stride()) == ("row", (columns * n, 1, n))
        assert torch.equal(projection.scale, given[f"{name}_scale"])
        assert projection.added_bytes == E * n * columns * 4


def test_a_single_column_of_row_scales_has_the_same_strides() -> None:
    given = arguments(1, 16, 16, block_size=(1, 128), gate_up_scale=torch.rand((1, 32, 1)), down_scale=torch.rand((1, 16, 1)))
    assert prepare(given).gate_up.scale.stride() == (32, 1, 32)


@pytest.mark.parametrize(
    ("shape", "down_shape"), [((E, 1, 1), (E, 1, 1)), ((E, 1), (E,)), ((E,), (E, 1)), ((), ()), ((E, 2, 1), (E, 1, 1))]
)
@pytest.mark.parametrize(("inner", "halves_kind"), [(144, "row"), (128, "block"), (48, "row")])
def test_scales_per_tensor(shape: tuple[int, ...], down_shape: tuple[int, ...], inner: int, halves_kind: str) -> None:
    given = arguments(E, H, inner, block_size=None)
    given |= {"gate_up_scale": 0.5 + torch.rand(shape), "down_scale": 0.5 + torch.rand(down_shape)}
    experts = prepare(given)
    parts = given["gate_up_scale"].reshape(shape if len(shape) == 3 else (-1, 1, 1)).expand(E, -1, -1)
    rows = inner if shape == (E, 2, 1) else 2 * inner
    assert torch.equal(read(experts.gate_up), dequantized(given["gate_up"], parts, rows, H))
    down_scale = given["down_scale"].reshape(-1, 1, 1).expand(E, -1, -1)
    assert torch.equal(read(experts.down), dequantized(given["down"], down_scale, H, inner))
    assert experts.gate_up.scale_kind == (halves_kind if shape == (E, 2, 1) else "block")
    assert experts.down.scale_kind == "block"


@pytest.mark.parametrize(("inner", "rows"), [(48, 2), (16, 2), (144, 4), (320, 6), (1440, 24)])
def test_blocks_of_gate_and_up_may_be_counted_apart(inner: int, rows: int) -> None:
    given = arguments(2, 144, inner, gate_up_scale=0.5 + torch.rand((2, rows, 2)))
    assert rows != ceil_div(2 * inner, 128)
    experts = prepare(given)
    halves = zip(given["gate_up"].split(inner, 1), given["gate_up_scale"].chunk(2, 1), strict=True)
    expected = torch.cat([dequantized(weight, scale, 128, 128) for weight, scale in halves], 1)
    assert experts.gate_up.scale_kind == "row"
    assert torch.equal(read(experts.gate_up), expected)


def test_without_a_gate_blocks_are_counted_over_all_rows() -> None:
    given = arguments(gated=False)
    experts = prepare(given)
    assert (experts.gated, experts.intermediate_size) == (False, I)
    assert torch.equal(read(experts.gate_up), dequantized(given["gate_up"], given["gate_up_scale"], 128, 128))
    for shape in ((E, 4, 3), (E, 2, 1)):
        with pytest.raises(OperandError, match="gate_up_scale must have shape"):
            prepare(given | {"gate_up_scale": torch.ones(shape), "block_size": None if shape[2] == 1 else (128, 128)})


# --- weights


def test_transposed_weights_get_one_k_major_copy() -> None:
    given = arguments()
    turned = given | {name: given[name].transpose(1, 2).contiguous() for name in ("gate_up", "down")} | {"transposed": True}
    experts = prepare(turned)
    for name in ("gate_up", "down"):
        projection = getattr(experts, name)
        assert projection.weight.is_contiguous()
        assert bits(projection.weight) == bits(given[name])
        assert projection.added_bytes == given[name].numel()
        assert projection.scale.data_ptr() == given[f"{name}_scale"].data_ptr()


def test_a_transposed_view_of_k_major_weights_needs_no_copy() -> None:
    given = arguments()
    turned = given | {name: given[name].transpose(1, 2) for name in ("gate_up", "down")} | {"transposed": True}
    experts = prepare(turned)
    assert experts.added_bytes == 0
    assert experts.gate_up.weight.data_ptr() == given["gate_up"].data_ptr()


def views() -> dict[str, torch.Tensor]:
    """Return right and wrong places of one (E, 2I, H) weight."""
    bytes_of = torch.randint(0, 120, (E, 2 * I, H), dtype=torch.uint8)
    wide = torch.zeros((E, 2 * I, H + 16), dtype=torch.uint8)
    wide[..., :H] = bytes_of
    odd = torch.zeros((E, 2 * I, H + 8), dtype=torch.uint8)
    odd[..., :H] = bytes_of
    shifted = torch.zeros(bytes_of.numel() + 16, dtype=torch.uint8)
    shifted[1 : bytes_of.numel() + 1] = bytes_of.flatten()
    return {
        "rows 16 bytes apart": wide[..., :H],
        "rows 8 bytes apart": odd[..., :H],
        "odd address": shifted[1 : bytes_of.numel() + 1].view(E, 2 * I, H),
        "every expert alike": bytes_of[:1].expand(E, -1, -1),
    }


@pytest.mark.parametrize(
    ("view", "copied"), [("rows 16 bytes apart", 0), ("rows 8 bytes apart", 1), ("odd address", 1), ("every expert alike", 1)]
)
def test_weights_are_copied_only_where_tensor_maps_cannot_read_them(view: str, copied: int) -> None:
    weight = views()[view].view(E4M3)
    experts = prepare(arguments(gate_up=weight))
    assert experts.gate_up.added_bytes == copied * E * 2 * I * H
    assert bits(experts.gate_up.weight) == bits(weight)
    assert experts.gate_up.weight.data_ptr() % 16 == 0


def in_scheme(name: str) -> Arguments:
    if name == "rows":
        return arguments(block_size=(1, 128), gate_up_scale=torch.rand((E, 2 * I, 3)), down_scale=torch.rand((E, H, 2)))
    if name == "tensor":
        return arguments(block_size=None, gate_up_scale=torch.rand((E, 2, 1)), down_scale=torch.rand(()))
    if name == "transposed":
        return arguments(transposed=True, gate_up=fp8(E, H, 2 * I), down=fp8(E, I, H))
    if name == "static":
        return arguments(gate_up_activation_scale=torch.rand(E) + 1, down_activation_scale=torch.rand(1) + 1)
    if name == "fp4":
        packed = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((E, 2 * I, H // 2), (E, H, I // 2))]
        codes = [torch.randint(120, 130, shape, dtype=torch.uint8) for shape in ((E, 2 * I, 9), (E, H, 5))]
        codes[1] = codes[1].view(torch.float8_e8m0fnu)
        return arguments(gate_up=packed[0], down=packed[1], gate_up_scale=codes[0], down_scale=codes[1])
    return arguments()


SCHEMES = ("blocks", "rows", "tensor", "transposed", "static", "fp4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_given_is_changed_and_twice_is_the_same(scheme: str) -> None:
    given = in_scheme(scheme)
    before = {name: bits(tensor) for name, tensor in tensors(given).items()}
    first, second = prepare(given), prepare(given)
    assert {name: bits(tensor) for name, tensor in tensors(given).items()} == before
    for one, other in ((first.gate_up, second.gate_up), (first.down, second.down)):
        assert bits(one.weight) == bits(other.weight)
        assert bits(one.scale) == bits(other.scale)
        assert (one.scale.stride(), one.scale_kind, one.added_bytes) == (
            other.scale.stride(),
            other.scale_kind,
            other.added_bytes,
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_are_taken_without_their_gradients(scheme: str) -> None:
    given = in_scheme(scheme)
    parameters = {
        name: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for name, tensor in tensors(given).items()
    }
    experts, plain = prepare(given | parameters), prepare(given)
    assert parameters["gate_up"].requires_grad == given["gate_up"].is_floating_point()
    for projection, expected in ((experts.gate_up, plain.gate_up), (experts.down, plain.down)):
        assert not projection.weight.requires_grad
        assert not projection.scale.requires_grad
        assert type(projection.weight) is torch.Tensor
        assert bits(projection.weight) == bits(expected.weight)


def test_distributed_tensors_are_taken_local() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    given = arguments()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        spread = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors(given).items()}
        experts = prepare(given | spread)
    finally:
        dist.destroy_process_group()
    assert type(experts.gate_up.weight) is torch.Tensor
    assert experts.gate_up.weight.data_ptr() == given["gate_up"].data_ptr()
    assert torch.equal(experts.down.scale, given["down_scale"])


# --- activations


@pytest.mark.parametrize("shape", [(E,), (1,), ()])
def test_static_scales_become_one_per_expert(shape: tuple[int, ...]) -> None:
    scale, down_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    experts = prepare(arguments(gate_up_activation_scale=scale, down_activation_scale=down_scale))
    for projection, given in ((experts.gate_up, scale), (experts.down, down_scale)):
        assert projection.activation_scale is not None
        assert projection.activation_scale.is_contiguous()
        assert projection.activation_scale.tolist() == given.expand(E).tolist()
        assert projection.added_bytes == (0 if shape == (E,) else E * 4)


def test_one_projection_may_be_static_and_the_other_dynamic() -> None:
    experts = prepare(arguments(down_activation_scale=torch.tensor(2.0)))
    assert experts.gate_up.activation_scale is None
    assert experts.down.activation_scale is not None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_static_scales_must_be_finite_and_positive(bad: float) -> None:
    scale = torch.ones(E)
    scale[1] = bad
    with pytest.raises(OperandError, match=rf"gate_up_activation_scale of expert 1 is {bad}"):
        prepare(arguments(gate_up_activation_scale=scale))
    with pytest.raises(OperandError, match=rf"down_activation_scale is {bad}"):
        prepare(arguments(down_activation_scale=torch.tensor(bad)))


def test_the_gate_keeps_its_numbers() -> None:
    assert prepare(arguments(swiglu_limit=7, swiglu_alpha=1.702)).activation == Activation("silu", 7.0, 1.702)
    assert prepare(arguments(gated=False, activation="silu")).activation == Activation("silu")
    assert prepare(arguments(activation=torch.relu)).activation == Activation("callback", callback=torch.relu)


@pytest.mark.parametrize(
    "given",
    [
        {"swiglu_limit": 0.0},
        {"swiglu_limit": -1.0},
        {"swiglu_limit": float("inf")},
        {"swiglu_alpha": float("nan")},
        {"swiglu_limit": 1.0, "activation": torch.relu},
        {"swiglu_alpha": 1.0, "gated": False},
    ],
)
def test_numbers_that_no_gate_has_are_refused(given: Arguments) -> None:
    with pytest.raises(OperandError, match="swiglu_"):
        prepare(arguments(**given))


# --- refusals


@pytest.mark.parametrize(
    ("changes", "given", "supported"),
    [
        ({"block_size": (64, 128)}, "block_size = (64, 128)", "(128, 128), (1, 128), or None"),
        ({"block_size": [128, 64]}, "block_size = (128, 64)", "(128, 128), (1, 128), or None"),
        ({"block_size": 128}, "block_size = 128", "(128, 128), (1, 128), or None"),
        ({"block_size": (1, 32)}, "block_size = (1, 32)", "(128, 128), (1, 128), or None"),
        ({"gate_up": fp8(E, 2 * I, H).to(torch.float8_e5m2)}, "gate_up of dtype torch.float8_e5m2", "torch.float8_e4m3fn"),
        ({"down": torch.zeros((E, H, I), dtype=torch.bfloat16)}, "down of dtype torch.bfloat16", "torch.float8_e4m3fn"),
        ({"down": torch.zeros((E, H, I // 2), dtype=torch.uint8)}, "down of dtype torch.uint8", "torch.int8"),
        ({"gate_up_activation_scale": torch.ones((E, 1))}, "gate_up_activation_scale of shape (3, 1)", "(E,) = (3,)"),
        ({"down_activation_scale": torch.ones(2)}, "down_activation_scale of shape (2,)", "(1,) or ()"),
        ({"activation": "gelu"}, "activation = 'gelu'", "'silu', or a function"),
    ],
)
def test_schemes_without_a_kernel_are_refused_by_name(changes: Arguments, given: str, supported: str) -> None:
    wrong = arguments(**changes)
    wrong["gate_up_scale"][0, 0, 0] = float("nan")  # values are not looked at before
    before = {name: bits(tensor) for name, tensor in tensors(wrong).items()}
    with pytest.raises(NotImplementedError) as caught:
        prepare(wrong)
    assert isinstance(caught.value, UnsupportedError)
    assert caught.value.given == given
    assert supported in caught.value.supported
    assert {name: bits(tensor) for name, tensor in tensors(wrong).items()} == before


def test_all_faults_of_a_call_are_listed_at_once() -> None:
    given = arguments(
        gate_up=fp8(E, 200, 100),
        down=fp8(E - 1, 90, 8),
        gate_up_scale=torch.ones((E, 2, 2), dtype=torch.bfloat16),
        down_scale=torch.ones((E, 1, 1)),
        down_activation_scale=torch.ones((), dtype=torch.float16),
    )
    with pytest.raises(OperandError) as caught:
        prepare(given)
    assert list(caught.value.faults) == [
        "gate_up holds 3 experts and down 2",
        "gate_up has K = 100 columns and down N = 90 rows; both are the hidden size H",
        "gate_up has N = 200 rows, which must be 2I, gate and up, where down has K = I = 8 columns",
        "gate_up has K = H = 100, which must be a multiple of 16; nearest: 96 or 112",
        "gate_up_scale must be torch.float32 or UE8M0 (torch.float8_e8m0fnu, or torch.uint8 with its bits), not torch.bfloat16",
        "gate_up_scale must have shape (E, ceil(N / 128), ceil(K / 128)) = (3, 2, 1), not (3, 2, 2)",
        "down has K = I = 8, which must be a multiple of 16; nearest: 16",
        "down_scale must have shape (E, ceil(N / 128), ceil(K / 128)) = (2, 1, 1), not (3, 1, 1)",
        "down_activation_scale must be torch.float32, not torch.float16",
    ]


@pytest.mark.parametrize(("hidden", "inner"), [(96, 16), (112, 16), (16, 96), (16, 112)])
def test_the_sizes_that_a_refusal_suggests_pass(hidden: int, inner: int) -> None:
    assert prepare(arguments(1, hidden, inner)).hidden_size == hidden


@pytest.mark.parametrize("count", [0, 513])
def test_up_to_512_experts_are_served(count: int) -> None:
    assert prepare(arguments(512, 16, 16)).count == 512
    with pytest.raises(OperandError, match=f"E = {count} experts; 1 to 512"):
        prepare(arguments(count, 16, 16))


def test_what_is_no_stack_of_matrices_is_refused() -> None:
    given = arguments(gate_up=[1, 2], down=fp8(H, I), down_scale=None, gate_up_activation_scale=1.0)
    with pytest.raises(OperandError) as caught:
        prepare(given)
    assert list(caught.value.faults) == [
        "gate_up must be a tensor, not list",
        f"down must have 3 dimensions, not shape ({H}, {I})",
        "down_scale must be a tensor, not NoneType",
        "gate_up_activation_scale must be a tensor, not float",
    ]


def test_weights_that_are_not_loaded_yet_are_refused() -> None:
    given = arguments()
    with pytest.raises(OperandError, match="down is on the meta device"):
        prepare(given | {"down": given["down"].to("meta")})

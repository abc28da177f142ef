"""Where the shapes leave nothing to do, nothing is compiled, loaded or launched: in every operation, with the driver's double."""

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
from deepgemm_jit.integrations import deep_gemm
from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import KernelSpec

pytestmark = pytest.mark.none

E4M3, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
N, K, GROUPS, TOP_K = 256, 512, 3, 2
SENTINEL = 0x7FA5
EMPTY = torch.empty


class CountingBuilder(InstantBuilder):
    def __init__(self) -> None:
        self.built: list[str] = []

    def build(self, spec: KernelSpec, max_cuda_major: int | None = None, caller: str | None = None) -> Any:
        self.built.append(spec.family)
        return super().build(spec, max_cuda_major, caller)


@pytest.fixture
def builder() -> CountingBuilder:
    return CountingBuilder()


@pytest.fixture
def driver(builder: CountingBuilder, monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    double = DriverDouble()
    double.push_context(double.retain_primary(0))
    service = KernelService(builder=builder, driver=double)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **how: pretend(EMPTY(*shape, **how)))
    monkeypatch.setattr("deepgemm_jit.ops.quant.empty_m_major", lambda shape, device: tensor(*shape[::-1], dtype=F32).T)
    return double


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return pretend(EMPTY(shape, dtype=dtype))


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(*shape, dtype=E4M3), tensor(*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128, dtype=F32)


def untouched(*shape: int) -> torch.Tensor:
    return pretend(torch.full(shape, SENTINEL, dtype=torch.int16).view(BF16))


def none(out: torch.Tensor) -> torch.Tensor:
    """Return no rows of an output."""
    return pretend(out.as_subclass(torch.Tensor)[:0])


def fp8(m: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = EMPTY((*lead, K // 128, -(-m // 4) * 4)).mT[..., :m, :]  # M-major: laid out anew they would be a launch
    return tensor(*lead, m, K, dtype=E4M3), pretend(scales)


def weights(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pair(count, N, K)


CALLS: dict[str, Any] = {
    "dense fp8 without rows": lambda out: ops.fp8_gemm_nt(fp8(0), pair(N, K), none(out)),
    "dense bf16 without rows": lambda out: ops.bf16_gemm_nn(tensor(0, K, dtype=BF16), tensor(K, N, dtype=BF16), none(out)),
    "row index without rows": lambda out: ops.m_grouped_fp8_gemm_nt_contiguous(
        fp8(0), weights(GROUPS), none(out), tensor(0, dtype=I32)
    ),
    "prefix sums without rows": lambda out: ops.m_grouped_fp8_gemm_nt_contiguous(
        fp8(0), weights(GROUPS), none(out), tensor(GROUPS, dtype=I32), use_psum_layout=True
    ),
    "row index without groups": lambda out: ops.m_grouped_fp8_gemm_nt_contiguous(fp8(5), weights(0), out, tensor(5, dtype=I32)),
    "prefix sums without groups": lambda out: ops.m_grouped_bf16_gemm_nt_contiguous(
        tensor(5, K, dtype=BF16), tensor(0, N, K, dtype=BF16), out, tensor(0, dtype=I32), use_psum_layout=True
    ),
    "masked without rows": lambda out: ops.m_grouped_fp8_gemm_nt_masked(
        fp8(0, GROUPS), weights(GROUPS), tensor(GROUPS, 0, N, dtype=BF16), tensor(GROUPS, dtype=I32), 64
    ),
    "masked without groups": lambda out: ops.m_grouped_bf16_gemm_nt_masked(
        tensor(0, 5, K, dtype=BF16), tensor(0, N, K, dtype=BF16), tensor(0, 5, N, dtype=BF16), tensor(0, dtype=I32), 0
    ),
    "by DeepGEMM's name": lambda out: deep_gemm.fp8_gemm_nt(fp8(0), pair(N, K), none(out)),
}


@pytest.mark.parametrize("what", CALLS)
def test_nothing_is_compiled_or_launched_and_nothing_written(driver: DriverDouble, builder: CountingBuilder, what: str) -> None:
    out = untouched(5, N)
    CALLS[what](out)
    assert (driver.launches, builder.built, driver.libraries_loaded) == ([], [], 0)
    assert (out.view(torch.int16) == SENTINEL).all()


def test_a_cast_of_no_rows_has_the_shapes_of_one(driver: DriverDouble, builder: CountingBuilder) -> None:
    values, scales = ops.per_token_cast_to_fp8(tensor(0, K, dtype=BF16))
    assert (values.shape, values.dtype, scales.shape, scales.dtype) == ((0, K), E4M3, (0, K // 128), F32)
    assert (driver.launches, builder.built) == ([], [])


def experts_call(tokens: int) -> torch.Tensor:
    return ops.bf16_experts(
        tensor(tokens, K, dtype=BF16),
        tensor(tokens, TOP_K, dtype=torch.int64),
        tensor(tokens, TOP_K, dtype=F32),
        tensor(GROUPS, 2 * N, K, dtype=BF16),
        tensor(GROUPS, K, N, dtype=BF16),
    )


def test_experts_of_no_tokens_give_no_rows(driver: DriverDouble, builder: CountingBuilder) -> None:
    out = experts_call(0)
    assert (out.shape, out.dtype) == ((0, K), BF16)
    assert (driver.launches, builder.built) == ([], [])


def test_the_same_with_one_token_launches(driver: DriverDouble, builder: CountingBuilder) -> None:
    """What shows that the tests above would see a launch."""
    assert experts_call(1).shape == (1, K)
    assert len(driver.launches) == len(builder.built) + 1 == 6  # the kernel of both GEMMs is one


@pytest.mark.parametrize("groups", [1, 256, 384])
def test_any_number_of_groups_is_one_launch(driver: DriverDouble, groups: int) -> None:
    ops.m_grouped_fp8_gemm_nt_contiguous(fp8(128), weights(groups), untouched(128, N), tensor(128, dtype=I32))
    assert len(driver.launches) == 1


@pytest.mark.parametrize("expected_m", [-1, 0, 1, 2**40])
def test_a_hint_never_skips_work_as_counts_lie_on_the_device(driver: DriverDouble, expected_m: int) -> None:
    counts = tensor(GROUPS, dtype=I32)
    ops.m_grouped_fp8_gemm_nt_masked(fp8(64, GROUPS), weights(GROUPS), untouched(GROUPS, 64, N), counts, expected_m)
    assert len(driver.launches) == 1

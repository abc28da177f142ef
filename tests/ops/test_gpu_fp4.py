"""FP4 weights on a GPU: their GEMM against float64 in every layout, and forwards with fragments beside those without."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.experts_reference import (
    FROBENIUS_RATIO,
    ONE_SMALL_TOKEN_RATIO,
    SCHEMES,
    assert_as_good_as_torch,
    e2m1_values,
    exact_forward,
    random_experts,
    random_hidden,
    random_routing,
    rounded_forward,
    scale_values,
)
from ops.gpu_memory import poison_free_memory
from ops.reference import (
    Output,
    Scaled,
    assert_close,
    dequantize,
    group_rows,
    m_major,
    poison_rows,
    random_a,
    relative_error,
    used_rows,
)

from deepgemm_jit import ops
from deepgemm_jit.ops import fp4
from deepgemm_jit.ops.launching import blocks_for, call_on, m_major_matrices, matrices
from deepgemm_jit.runtime import GemmCall, Matrices, prepare_gemm
from deepgemm_jit.service import default_service
from deepgemm_jit.spec import FP4_GEMM_SWAP_AB, KernelSpec, Layout, kernel_set

pytestmark = pytest.mark.gpu

KERNELS = [spec for spec in kernel_set("sm_90a") if spec.family == FP4_GEMM_SWAP_AB]
GROUP = 32
BIAS = 127
SIZES = (1, 0, 16, 17, 40, 33, 0, 5, 32, 8)
N_K = ((4096, 7168), (7168, 2048), (8, 16), (16, 32), (264, 1296), (200, 96), (72, 160))
"""One k-block and many, ends of N and K inside of a fragment, and of K inside of a group."""
REPEATS = 200

Fp4 = tuple[torch.Tensor, torch.Tensor]


def random_fp4(groups: int, n: int, k: int, span: int = 4) -> Fp4:
    """Draw e2m1 pairs, zeros of both signs and whole groups of them among them, and UE8M0 scales over ``span`` binades."""
    packed = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    columns = -(-k // GROUP)
    zero = (torch.rand((groups, n, columns), device="cuda") < 0.05).repeat_interleave(GROUP // 2, -1)[..., : k // 2]
    scale = torch.randint(BIAS - 6 - span, BIAS - 5, (groups, n, columns), dtype=torch.uint8, device="cuda")
    return torch.where(zero, packed & 0x88, packed).view(torch.int8), scale


def multiply(
    spec: KernelSpec,
    a: Scaled,
    b: Fp4,
    out: torch.Tensor,
    layout: Layout,
    group_data: torch.Tensor | None = None,
    alignment: int = 16,
    fragments: torch.Tensor | None = None,
) -> None:
    """Run one kernel, whatever selection would take."""
    packed, scale = b
    groups, n, k_bytes = packed.shape
    fragments = fp4.pack_fragments(packed, scale) if fragments is None else fragments
    scales = m_major(a.scales)
    gemm = GemmCall(
        a=matrices(a.values),
        b=Matrices(fragments.data_ptr(), fragments.stride(0), fragments.stride(1)),
        d=matrices(out),
        group_data=0 if group_data is None else group_data.data_ptr(),
        m=a.values.shape[-2],
        n=n,
        k=2 * k_bytes,
        groups=groups,
        layout=layout,
        alignment=alignment,
        a_scales=m_major_matrices(scales),
    )
    with call_on(a.values) as call:
        call.kernel(spec)
        call.launch(spec, prepare_gemm(spec, blocks_for(call, spec), default_service().maps, gemm))


def product(a: Scaled, b: Fp4, group: int) -> torch.Tensor:
    """Return A @ B.T of one group in float64."""
    packed, scale = b[0][group], b[1][group]
    k = 2 * packed.shape[-1]
    weights = e2m1_values(packed) * scale_values(scale).repeat_interleave(GROUP, -1)[:, :k]
    return dequantize(a.values, a.scales, 1) @ weights.T


def check_groups(spec: KernelSpec, sizes: Sequence[int], n: int, k: int, layout: Layout, alignment: int, span: int = 4) -> None:
    rows = group_rows(sizes, alignment, extra_rows=alignment)
    a, b = random_a(rows.total, k), random_fp4(len(sizes), n, k, span)
    valid = rows.valid()
    group_data = rows.ends() if layout is Layout.PREFIX_SUMS else rows.m_indices()
    out, again = Output(rows.total, n), Output(rows.total, n)
    fragments = fp4.pack_fragments(*b)
    multiply(spec, poison_rows(a, valid), b, out.tensor, layout, group_data, alignment, fragments)
    multiply(spec, poison_rows(a, valid), b, again.tensor, layout, group_data, alignment, fragments)
    out.assert_written(must=valid, may=rows.tails(spec.block[0]))
    assert torch.equal(out.bits()[valid], again.bits()[valid]), "two runs differ"
    for group, part in enumerate(rows.slices):
        assert_close(out.tensor[part], product(a[part], b, group), f"group {group} of {rows.sizes[group]} rows")


# --- the GEMM


@pytest.mark.parametrize(("n", "k"), N_K)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_groups_at_multiples_of_16_rows_are_right(spec: KernelSpec, n: int, k: int) -> None:
    check_groups(spec, SIZES, n, k, Layout.PREFIX_SUMS, 16)


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.PREFIX_SUMS])
@pytest.mark.parametrize("alignment", [32, 64, 128])
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_groups_start_at_any_alignment(spec: KernelSpec, alignment: int, layout: Layout) -> None:
    check_groups(spec, (130, 0, 1, 257, 64), 264, 1296, layout, alignment)


@pytest.mark.parametrize("rows", range(1, 41))
def test_any_number_of_rows_is_right(rows: int) -> None:
    for spec in KERNELS:
        check_groups(spec, (rows, 0, 41 - rows), 136, 224, Layout.PREFIX_SUMS, 16)


@pytest.mark.parametrize(("n", "k"), [(264, 1296), (136, 64)])
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_masked_groups_are_right(spec: KernelSpec, n: int, k: int) -> None:
    max_m = 48
    a, b = random_a(len(SIZES), max_m, k), random_fp4(len(SIZES), n, k)
    used, masked_m = used_rows(SIZES, max_m), torch.tensor(SIZES, dtype=torch.int32, device="cuda")
    out = Output(len(SIZES), max_m, n)
    multiply(spec, poison_rows(a, used), b, out.tensor, Layout.MASKED, masked_m)
    out.assert_written(must=used)
    for group, count in enumerate(SIZES):
        assert_close(out.tensor[group, :count], product(a[group][:count], b, group), f"group {group}")


@pytest.mark.parametrize("m", [1, 15, 16, 33, 300])
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_a_single_matrix_is_right(spec: KernelSpec, m: int) -> None:
    for n, k in ((2112, 7168), (264, 1296), (8, 16)):
        a, b, out = random_a(m, k), random_fp4(1, n, k), Output(m, n)
        multiply(spec, a, b, out.tensor, Layout.DENSE)
        out.assert_written()
        assert_close(out.tensor, product(a, b, 0), f"M, N, K = {m}, {n}, {k}")


@pytest.mark.parametrize("span", [0, 14, 40])
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_scales_may_lie_any_number_of_binades_apart(spec: KernelSpec, span: int) -> None:
    check_groups(spec, SIZES, 264, 1296, Layout.PREFIX_SUMS, 16, span)


@pytest.mark.parametrize("exponent", [-110, 110])
def test_scales_of_any_size_are_exact(exponent: int) -> None:
    # Products of small whole numbers are exact, and so must be their powers of two.
    values = torch.randint(-8, 9, (16, 256), device="cuda").to(torch.float8_e4m3fn)
    a = Scaled(values, torch.full((16, 2), 2.0**-exponent, device="cuda"))
    packed, scale = random_fp4(1, 64, 256, 0)
    for spec in KERNELS:
        out = Output(16, 64)
        multiply(spec, a, (packed, torch.full_like(scale, BIAS + exponent)), out.tensor, Layout.DENSE)
        expected = values.double() @ e2m1_values(packed[0]).T
        assert torch.equal(out.tensor, expected.bfloat16())


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_run_gives_the_same_bits(spec: KernelSpec) -> None:
    rows, (n, k) = group_rows(SIZES, 16), (2112, 2048)
    a, b = random_a(rows.total, k), random_fp4(len(SIZES), n, k)
    fragments, ends, valid = fp4.pack_fragments(*b), rows.ends(), rows.valid()
    first, again = (torch.zeros((rows.total, n), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiply(spec, a, b, first, Layout.PREFIX_SUMS, ends, fragments=fragments)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again.fill_(torch.nan)
        multiply(spec, a, b, again, Layout.PREFIX_SUMS, ends, fragments=fragments)
        differing += (again.view(torch.int16) != first.view(torch.int16))[valid].sum()
    assert differing.item() == 0


def test_packing_on_a_gpu_gives_the_bytes_that_it_gives_on_a_cpu() -> None:
    packed, scale = random_fp4(3, 272, 208, 9)
    assert torch.equal(fp4.pack_fragments(packed, scale).cpu(), fp4.pack_fragments(packed.cpu(), scale.cpu()))


# --- the forward


@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 600])
@pytest.mark.parametrize("shape", [(8, 2, 512, 256), (32, 8, 2048, 768), (33, 3, 2880, 1440)], ids=str)
@pytest.mark.parametrize("scheme", ["fp4_span_0", "fp4_span_3", "fp4_span_14", "fp4_float_scales"])
def test_a_forward_that_reads_fragments_is_as_good_as_one_of_the_folded_copy(
    scheme: str, shape: tuple[int, int, int, int], tokens: int
) -> None:
    count, k, hidden, intermediate = shape
    reference = random_experts(count, hidden, intermediate, **SCHEMES[scheme])
    given = random_hidden(tokens, hidden), *random_routing(tokens, k, count)
    experts = {decode: ops.prepare_experts(**reference.arguments, decode=decode) for decode in ("fp4", "fp8")}
    assert (experts["fp4"].decodes_fp4, experts["fp8"].decodes_fp4) == (True, False)
    outs = {}
    for decode, side in experts.items():
        first = ops.fp8_experts(*given, side)
        poison_free_memory()
        outs[decode] = ops.fp8_experts(*given, side)
        assert torch.equal(first.view(torch.int16), outs[decode].view(torch.int16)), f"{decode}: two runs differ"
        ratio = ONE_SMALL_TOKEN_RATIO if tokens == 1 else FROBENIUS_RATIO
        exact, rounded = exact_forward(*given, reference), rounded_forward(*given, reference)
        assert_as_good_as_torch(outs[decode], exact, rounded, decode, ratio)
    # Quantization between the GEMMs makes steps of small differences, but each is nearer to the other than to what is exact.
    assert relative_error(outs["fp4"], outs["fp8"].double()) < relative_error(outs["fp8"], exact)


def test_fragments_are_kept_only_while_half_of_the_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_experts(8, 512, 256, **SCHEMES["fp4_span_3"])
    fragments = fp4.fragments_shape(8, 512, 512), fp4.fragments_shape(8, 512, 256)
    total = 1 << 30
    needed = total // 2 + sum(torch.Size(shape).numel() for shape in fragments)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1 << 20)
    for free, cached, kept in ((needed, 0, True), (needed - 1, 0, False), (needed - 512, 512, True), (0, 0, False)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device, cached=cached: (1 << 20) + cached)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, total))
        assert ops.prepare_experts(**reference.arguments).decodes_fp4 == kept
        assert ops.prepare_experts(**reference.arguments, decode="fp4").decodes_fp4

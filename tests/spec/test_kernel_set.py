"""The kernel sets: closed, ordered, small, and made of kernels that fit the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec import ARCHES, FP8_GEMM, KernelSpec, arch_named, arch_of, kernel_set, limits_of
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes, threads

pytestmark = [pytest.mark.none, pytest.mark.parametrize("arch", ARCHES)]

MOST_KERNELS = 96
MOST_FP8_GEMMS = 32
# CUDA C++ Programming Guide, technical specifications per compute capability: dynamic shared memory and threads per block.
MOST_SHARED_MEMORY_BYTES = {"sm_90a": 227 * 1024}
MOST_THREADS = 1024


def _gemms(arch: str) -> list[KernelSpec]:
    return [spec for spec in kernel_set(arch) if spec.family == FP8_GEMM]


def test_the_set_is_ordered_without_repeats_and_the_same_each_time(arch: str) -> None:
    kernels = kernel_set(arch)
    assert list(kernels) == sorted(set(kernels))
    kernel_set.cache_clear()
    assert kernel_set(arch) == kernels


def test_the_set_stays_small(arch: str) -> None:
    assert 0 < len(_gemms(arch)) <= MOST_FP8_GEMMS
    assert len(kernel_set(arch)) <= MOST_KERNELS


def test_every_kernel_is_for_this_arch(arch: str) -> None:
    assert {spec.arch for spec in kernel_set(arch)} == {arch}


def test_every_kernel_fits_a_block_of_the_device(arch: str) -> None:
    for spec in kernel_set(arch):
        assert dynamic_shared_memory_bytes(spec) <= MOST_SHARED_MEMORY_BYTES[arch], spec.name
        assert threads(spec) <= MOST_THREADS, spec.name


def test_no_gemm_could_have_one_more_stage(arch: str) -> None:
    for spec in _gemms(arch):
        deeper = replace(spec, stages=spec.stages + 1)
        assert spec.stages == 8 or dynamic_shared_memory_bytes(deeper) > MOST_SHARED_MEMORY_BYTES[arch], spec.name


def test_every_gemm_overlaps_copies_with_products(arch: str) -> None:
    assert min(spec.stages for spec in _gemms(arch)) >= 2


def test_a_tile_of_b_meets_two_scales_per_k_block_at_most_and_changes_at_a_multiple_of_64_columns(arch: str) -> None:
    for spec in _gemms(arch):
        _block_m, block_n, block_k = spec.block
        assert block_k == 128, spec.name
        assert 128 % block_n == 0 or block_n == 192, spec.name


def test_the_arch_is_found_by_its_compute_capability_and_only_by_that(arch: str) -> None:
    known = arch_named(arch)
    assert arch_of(known.compute_capability) is known
    major, minor = known.compute_capability
    with pytest.raises(UnsupportedError, match=arch):
        arch_of((major, minor + 1))


def test_an_arch_without_its_suffix_or_with_another_is_refused_with_the_one_meant(arch: str) -> None:
    for wrong in {arch.rstrip("af"), arch.rstrip("af") + "f"} - {arch}:
        with pytest.raises(UnsupportedError, match=f"Did you mean {arch}"):
            kernel_set(wrong)


@pytest.mark.parametrize("unknown", ["sm_80", "sm_120a", "", "hopper", "SM_90A"])
def test_an_unknown_arch_is_refused_and_the_known_ones_are_named(arch: str, unknown: str) -> None:
    for look_up in (kernel_set, limits_of, arch_named):
        with pytest.raises(UnsupportedError, match=arch):
            look_up(unknown)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 1), (11, 0), (12, 1), (99, 0)])
def test_an_unlisted_compute_capability_is_no_not_yes(arch: str, capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        arch_of(capability)
    assert ".".join(map(str, capability)) in refusal.value.given
    assert arch in refusal.value.supported

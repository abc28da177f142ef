"""The kernel sets: closed, ordered, small, and made of kernels that fit the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.spec import (
    ARCHES,
    FP8_GEMM,
    KernelSpec,
    arch_named,
    arch_of,
    kernel_set,
    kernels_by_name,
    limits_of,
    require_member,
)
from deepgemm_jit.spec.kernel_set import GEMM_TILES, _kernel_set, dynamic_shared_memory_bytes, threads

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
    _kernel_set.cache_clear()
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
        tiles = GEMM_TILES[spec.family, spec.flags]
        most = next(
            tile.most_stages for tile in tiles if (tile.block_m, tile.block_n, tile.cluster) == (*spec.block[:2], spec.cluster)
        )
        deeper = replace(spec, stages=spec.stages + 1)
        assert spec.stages == most or dynamic_shared_memory_bytes(deeper) > MOST_SHARED_MEMORY_BYTES[arch], spec.name


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


@pytest.mark.parametrize("given", [None, 5, True, 1.5, b"sm_90a", ["sm_90a"], {"sm_90a"}, ("sm_90a",)], ids=repr)
@pytest.mark.parametrize("look_up", [kernel_set, kernels_by_name, limits_of, arch_named])
def test_what_is_no_arch_is_refused_shown_and_the_known_ones_are_named(
    arch: str, look_up: Callable[[Any], Any], given: Any
) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        look_up(given)
    assert repr(given) in refusal.value.given
    assert arch in refusal.value.supported


def test_members_are_the_kernels_of_the_set_however_they_were_made(arch: str) -> None:
    for spec in kernel_set(arch):
        require_member(KernelSpec.from_text(spec.text))


@pytest.mark.parametrize(
    "change", [{"stages": 1}, {"cluster": 2}, {"flags": ("fast",)}, {"block": (64, 72, 128)}, {"dtypes": ("e5m2",)}]
)
def test_a_kernel_outside_of_the_set_is_refused_with_the_name_of_the_set(arch: str, change: dict[str, Any]) -> None:
    spec = replace(_gemms(arch)[0], **change)
    with pytest.raises(UnsupportedError) as refusal:
        require_member(spec)
    assert spec.text in refusal.value.given
    assert f"kernel_set('{arch}')" in refusal.value.supported


def test_a_kernel_of_an_arch_without_a_set_is_refused(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=arch):
        require_member(replace(_gemms(arch)[0], arch="sm_80"))


@pytest.mark.parametrize("given", [None, "sm_90a_route_i32_1024", [], 5], ids=repr)
def test_what_is_no_spec_is_no_member(arch: str, given: Any) -> None:
    with pytest.raises(OperandError, match="needed: a KernelSpec"):
        require_member(given)

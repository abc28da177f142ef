"""The names users import, pinned: a change here is a change of the interface and belongs in the changelog."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import pytest

import deepgemm_jit

pytestmark = pytest.mark.none

NAMES = [
    "Cubin",
    "KernelService",
    "KernelSpec",
    "WarmupReport",
    "__version__",
    "build",
    "is_supported",
    "kernel_set",
    "select",
    "warm_up",
]


def test_the_public_names_are_pinned() -> None:
    assert sorted(deepgemm_jit.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_listed(name: str) -> None:
    assert name in dir(deepgemm_jit)


def test_every_public_name_resolves_and_no_submodule_takes_its_place() -> None:
    """Importing a submodule sets it as an attribute of the package, over a function of that name."""
    for module in pkgutil.iter_modules(deepgemm_jit.__path__, "deepgemm_jit."):
        if module.name not in ("deepgemm_jit.__main__", "deepgemm_jit.ops"):
            importlib.import_module(module.name)
    kinds = {name: type(getattr(deepgemm_jit, name)) for name in NAMES}
    functions = {"build", "is_supported", "kernel_set", "select", "warm_up"}
    assert {name for name in NAMES if callable(getattr(deepgemm_jit, name)) and kinds[name] is not type} == functions
    assert {name for name in NAMES if kinds[name] is type} == set(NAMES) - functions - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nvcc'"):
        _ = deepgemm_jit.nvcc


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="deepgemm_jit.ops needs torch, which is not installed")
def test_the_operations_are_pinned() -> None:
    from deepgemm_jit import ops

    assert sorted(ops.__all__) == [
        "Activation",
        "Experts",
        "Projection",
        "bf16_experts",
        "bf16_gemm_nn",
        "bf16_gemm_nt",
        "fp8_experts",
        "fp8_gemm_nn",
        "fp8_gemm_nt",
        "get_mk_alignment_for_contiguous_layout",
        "get_mn_major_tma_aligned_tensor",
        "get_num_sms",
        "get_pdl",
        "m_grouped_bf16_gemm_nn_contiguous",
        "m_grouped_bf16_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_masked",
        "m_grouped_fp8_gemm_nn_contiguous",
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
        "per_token_cast_to_fp8",
        "prepare_experts",
        "requantize_ue8m0",
        "set_num_sms",
        "set_pdl",
        "to_ue8m0",
    ]
    assert [name for name in ops.__all__ if not callable(getattr(ops, name))] == []

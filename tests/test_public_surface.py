"""The names users import, pinned: a change here is a change of the interface and belongs in the changelog."""

from __future__ import annotations

import pytest

import deepgemm_jit

pytestmark = pytest.mark.none

NAMES = ["Cubin", "KernelService", "KernelSpec", "WarmupReport", "__version__", "build", "kernel_set", "select", "warm_up"]


def test_the_public_names_are_pinned() -> None:
    assert sorted(deepgemm_jit.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(deepgemm_jit, name) is getattr(deepgemm_jit, name)
    assert name in dir(deepgemm_jit)


def test_functions_resolve_to_functions_even_after_a_package_of_that_name_is_imported() -> None:
    import deepgemm_jit.build

    assert callable(deepgemm_jit.build)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nvcc'"):
        _ = deepgemm_jit.nvcc

"""The way to this folder's own modules, and the kernels they judge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deepgemm_jit.compiler import Compiled
from deepgemm_jit.spec import KernelSpec

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def built() -> Callable[[KernelSpec], Compiled]:
    """A spec's kernel as it is compiled now, once per test run; no store is asked."""
    from contract.facts import compiled

    return cache(compiled)

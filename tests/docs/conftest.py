"""What the tests of the documentation share: a store that is warm, as a reader's is."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepgemm_jit.settings import read_settings
from deepgemm_jit.warmup import build_plan, plan_for


@pytest.fixture(scope="session")
def warm_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of a store that holds the kernel set."""
    root = tmp_path_factory.mktemp("readers") / "store"
    settings = read_settings({}, cache_dir=root, lock_dir=root.with_name("locks"))
    assert not build_plan(plan_for("sm_90a"), 2, settings=settings).failed
    return root

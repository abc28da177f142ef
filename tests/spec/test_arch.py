"""Which GPUs the kernels run on: yes or no with a reason, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec import ARCHES, arch_named, arch_of, is_supported

pytestmark = pytest.mark.none

REASONS: dict[tuple[int, int] | None, str] = {
    (7, 5): "before Ampere",
    (8, 0): "Ampere has neither FP8",
    (8, 6): "Ampere has neither FP8",
    (8, 7): "Ampere has neither FP8",
    (8, 9): "Ada has FP8 tensor cores, but neither TMA",
    (10, 0): "tcgen05 in place of the WGMMA",
    (10, 1): "tcgen05 in place of the WGMMA",
    (10, 3): "tcgen05 in place of the WGMMA",
    (11, 0): "tcgen05 in place of the WGMMA",
    (12, 0): "neither WGMMA nor tcgen05",
    (12, 1): "neither WGMMA nor tcgen05",
    (9, 1): "does not know it",
    (13, 0): "does not know it",
    (99, 9): "does not know it",
    None: "there is no GPU",
}


@pytest.mark.parametrize("capability", REASONS, ids=str)
def test_a_gpu_that_no_kernel_runs_on_is_a_no_with_the_reason(capability: tuple[int, int] | None) -> None:
    support = is_supported(capability)
    assert not support
    assert support.arch is None
    assert REASONS[capability] in support.reason
    if capability is not None:
        with pytest.raises(UnsupportedError) as refusal:
            arch_of(capability)
        assert refusal.value.advice.casefold() == support.reason.casefold()


@pytest.mark.parametrize("arch", ARCHES)
def test_a_gpu_of_the_arch_is_a_yes_that_names_it(arch: str) -> None:
    support = is_supported(arch_named(arch).compute_capability)
    assert support and (support.arch, support.reason) == (arch, "")
    assert is_supported(list(arch_named(arch).compute_capability)) == support  # type: ignore[arg-type]


def test_the_question_loads_nothing() -> None:
    code = (
        "import sys; import deepgemm_jit; assert not deepgemm_jit.is_supported((8, 9));"
        "print([name for name in sys.modules if name.partition('.')[0] in ('cuda', 'torch', 'jinja2', 'elftools')])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (child.returncode, child.stdout.strip()) == (0, "[]"), child.stderr

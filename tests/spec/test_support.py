"""Whether a GPU has kernels: an explicit list, asked before weights are loaded, that never guesses and never raises."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deepgemm_jit import is_supported

pytestmark = pytest.mark.none


@pytest.mark.parametrize(
    ("given", "supported", "says"),
    [
        ((8, 0), False, "compute capability 8.0"),
        ((8, 6), False, "compute capability 8.6"),
        ((8, 9), False, "compute capability 8.9"),
        ((9, 0), True, "sm_90a"),
        ((9, 1), False, "compute capability 9.1"),
        ((10, 0), False, "compute capability 10.0"),
        ((10, 1), False, "compute capability 10.1"),
        ((10, 3), False, "compute capability 10.3"),
        ((11, 0), False, "compute capability 11.0"),
        ((12, 0), False, "compute capability 12.0"),
        ((12, 1), False, "compute capability 12.1"),
        ((99, 0), False, "compute capability 99.0"),
        (None, False, "there is no GPU"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False, "MIG 1g.10gb"),
        (9.0, False, "9.0 is no compute capability"),
        ([9, 0], False, "[9, 0] is no compute capability"),
        ((True, 0), False, "is no compute capability"),
        ((9, 0, 0), False, "is no compute capability"),
    ],
    ids=str,
)
def test_the_answer_says_yes_or_no_and_why(given: Any, supported: bool, says: str) -> None:
    answer = is_supported(given)
    assert answer.supported is supported
    assert says in answer.reason
    assert supported or given is None or "9, 0" in answer.reason or "sm_90a" in answer.reason


def test_asking_brings_in_neither_torch_nor_cuda_nor_kernels() -> None:
    source = (
        "import sys, deepgemm_jit\n"
        "deepgemm_jit.is_supported((9, 0))\n"
        "brought = {name.split('.')[0] for name in sys.modules} & {'torch', 'cuda', 'jinja2'}\n"
        "print(brought, any(name.startswith(('deepgemm_jit.runtime', 'deepgemm_jit.compiler')) for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["set()", "False"], done.stderr

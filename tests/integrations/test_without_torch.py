"""Without torch, and with a torch that has no GPU, what needs them says so in our words."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from deepgemm_jit.errors import DriverError

pytestmark = pytest.mark.none

_WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None  # as Python has it for a module that cannot be imported
from deepgemm_jit.errors import ToolchainError
try:
    importlib.import_module(sys.argv[1])
except ToolchainError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module", ["ops", "integrations.deep_gemm", "integrations.deep_gemm.utils.layout", "integrations.transformers"]
)
def test_a_module_that_needs_torch_says_how_to_get_it(module: str) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, f"deepgemm_jit.{module}"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert child.stdout.startswith("package torch cannot be used; looked for: torch. Install it with: pip install torch")


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_sms_cannot_be_asked_for_where_torch_has_no_gpu() -> None:
    import torch

    from deepgemm_jit import ops

    if torch.cuda.is_available():
        pytest.skip("torch has a GPU here")
    with pytest.raises(DriverError, match=r"torch\.cuda\.current_device returned no device \("):
        ops.get_num_sms()

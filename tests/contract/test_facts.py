from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from contract import facts

from deepgemm_jit.compiler import Compiled, nvrtc_info
from deepgemm_jit.spec import ARCHES, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes


@pytest.mark.none
@pytest.mark.parametrize("arch", ARCHES)
def test_the_recorded_facts_are_of_this_kernel_set(arch: str) -> None:
    text = (facts.FOLDER / f"{arch}.json").read_text()
    recorded = json.loads(text)
    assert text == facts.document(arch, recorded["nvrtc_version"], recorded["kernels"])
    assert set(recorded["kernels"]) == {spec.name for spec in kernel_set(arch)}
    for spec in kernel_set(arch):
        kernel = recorded["kernels"][spec.name]
        assert kernel["dynamic_shared_memory_bytes"] == dynamic_shared_memory_bytes(spec)
        assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == kernel["local_memory_bytes"] == 0


@pytest.mark.none
def test_each_file_of_facts_is_of_an_arch() -> None:
    assert {path.stem for path in facts.FOLDER.iterdir()} == set(ARCHES)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHES)
def test_a_build_of_today_has_the_recorded_facts(arch: str, built: Callable[[KernelSpec], Compiled]) -> None:
    text = (facts.FOLDER / f"{arch}.json").read_text()
    version = json.loads(text)["nvrtc_version"]
    if nvrtc_info().version != version:
        pytest.skip(f"facts are of NVRTC {version}, here is {nvrtc_info().version}")
    kernels = {spec.name: facts.kernel_facts(spec, built(spec)) for spec in kernel_set(arch)}
    assert facts.document(arch, version, kernels) == text, "python tests/contract/facts.py writes it anew: review the change"

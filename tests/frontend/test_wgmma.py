from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit.errors import ToolchainError
from deepgemm_jit.frontend import header_path, render
from deepgemm_jit.frontend.wgmma import HEADER, PACKAGE, wrapper_for
from deepgemm_jit.spec import ARCHES, FP4_GEMM_SWAP_AB, SWAPPED, KernelSpec, kernel_set

pytestmark = pytest.mark.none

GEMMS = [spec for arch in ARCHES for spec in kernel_set(arch) if spec.stages]
NAME = "MMA_64x128x32_F32E4M3E4M3_SS_TN"


@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_a_gemm_gets_one_struct_as_it_stands_in_the_header_and_nothing_else_of_cutlass(spec: KernelSpec) -> None:
    header = header_path().read_text()
    (text,) = [text for name, text in render(spec).headers.items() if name.startswith("dj/generated/")]
    assert text in header
    assert text.startswith("template <")
    assert text.endswith("\n};\n")
    assert text.count("struct ") == text.count("template <") == 1
    assert text.count("{") == text.count("}")
    assert "#include" not in text and "#define" not in text
    (name,) = re.findall(r"^struct (\w+)$", text, re.MULTILINE)
    dtype, columns = spec.dtypes[0], spec.block[0 if spec.family in SWAPPED else 1]
    read = "RS" if spec.family == FP4_GEMM_SWAP_AB else "SS"
    assert re.fullmatch(rf"MMA_64x{columns}x\d+_F32({dtype.upper()}){{2}}_{read}\w*", name)
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n{columns}k\d+\.f32\.{dtype}\.{dtype}", text)


@pytest.mark.parametrize(
    "spec", [spec for arch in ARCHES for spec in kernel_set(arch) if not spec.stages], ids=lambda spec: spec.name
)
def test_other_kernels_get_nothing_of_cutlass(spec: KernelSpec) -> None:
    assert not any(name.startswith("dj/generated/") for name in render(spec).headers)


def test_a_missing_package_is_named_with_the_header_it_brings(without_packages: None) -> None:
    with pytest.raises(ToolchainError, match=f"package {PACKAGE} cannot be used.*{HEADER}.*pip install") as error:
        wrapper_for(NAME)
    assert PACKAGE in str(error.value.__cause__)


@pytest.mark.parametrize("recorded", [True, False], ids=["file deleted", "not in the package"])
def test_a_missing_header_is_named_with_its_package(cutlass: Callable[..., Path], recorded: bool) -> None:
    cutlass(None, recorded=recorded)
    with pytest.raises(ToolchainError, match=f"header {HEADER} of package {PACKAGE} cannot be used"):
        wrapper_for(NAME)


def test_a_header_that_is_no_text_is_named_with_the_reason(cutlass: Callable[..., Path]) -> None:
    cutlass(b"\xff\xfe\x00")
    with pytest.raises(ToolchainError, match=f"header {HEADER} of package {PACKAGE}") as error:
        wrapper_for(NAME)
    assert isinstance(error.value.__cause__, UnicodeDecodeError)


CHANGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "struct renamed": lambda text: text.replace(NAME, "MMA_OF_TOMORROW"),
    "struct declared only": lambda text: text.replace(f"struct {NAME}\n{{", f"struct {NAME};"),
    "cut off within the struct": lambda text: text[: text.index(f"struct {NAME}\n") + 200],
    "another template list": lambda text: text.replace(f">\nstruct {NAME}\n", f">\nrequires true\nstruct {NAME}\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_header_is_refused_with_struct_file_and_package(
    cutlass: Callable[..., Path], change: Callable[[str], str]
) -> None:
    text = header_path().read_text()
    changed = change(text)
    assert changed != text
    path = cutlass(changed.encode())
    with pytest.raises(ToolchainError) as error:
        wrapper_for(NAME)
    assert all(part in str(error.value) for part in (f"struct {NAME}", HEADER, PACKAGE, str(path)))

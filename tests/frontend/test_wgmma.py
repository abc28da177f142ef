from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit.errors import ToolchainError
from deepgemm_jit.frontend import header_path, render
from deepgemm_jit.frontend.wgmma import HEADER, PACKAGE, wrapper_for, wrapper_name
from deepgemm_jit.spec import ARCHES, FP8_GEMM, KernelSpec, kernel_set

pytestmark = pytest.mark.none

GEMMS = [spec for arch in ARCHES for spec in kernel_set(arch) if spec.family == FP8_GEMM]
NAME = wrapper_name(128)


@pytest.mark.parametrize("block_n", sorted({spec.block[1] for spec in GEMMS}))
def test_a_wrapper_is_one_struct_as_it_stands_in_the_header(block_n: int) -> None:
    text = wrapper_for(wrapper_name(block_n))
    assert text in header_path().read_text()
    assert text.count("struct ") == text.count("template <") == 1
    assert text.startswith("template <")
    assert text.endswith("\n};\n")
    assert text.count("{") == text.count("}")
    assert f"struct {wrapper_name(block_n)}\n" in text
    assert f"m64n{block_n}k32.f32.e4m3.e4m3" in text
    assert "#" not in text.replace("#if", "").replace("#else", "").replace("#endif", "")  # no include, no macro


@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_a_gemm_gets_its_own_wrapper_and_nothing_else_of_cutlass(spec: KernelSpec) -> None:
    generated = {name: text for name, text in render(spec).headers.items() if name.startswith("dj/generated/")}
    assert list(generated.values()) == [wrapper_for(wrapper_name(spec.block[1]))]


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

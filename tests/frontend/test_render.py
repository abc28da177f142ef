from __future__ import annotations

import shutil
from pathlib import Path

import jinja2
import pytest

from deepgemm_jit.errors import ToolchainError, UnsupportedError
from deepgemm_jit.frontend import render
from deepgemm_jit.resources import data_dir
from deepgemm_jit.spec import ARCHES, KernelSpec, kernel_set

pytestmark = pytest.mark.none

SPECS = [spec for arch in ARCHES for spec in kernel_set(arch)]
SPEC_OF_FAMILY = {spec.family: spec for spec in SPECS}
TEMPLATES = sorted((data_dir("kernels_src") / "templates").iterdir())
INCLUDE = data_dir("kernels_src") / "include"


def _names_included_by(text: str) -> set[str]:
    return {line.split('"')[1] for line in text.splitlines() if line.strip().startswith("#include")}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_thin(template: Path) -> None:
    assert 0 < len(template.read_text().splitlines()) < 60


def test_each_family_has_its_template_and_each_template_its_family() -> None:
    assert {path.name for path in TEMPLATES} == {f"{family}.cu.j2" for family in SPEC_OF_FAMILY}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_source_says_what_it_is_and_has_one_entry(spec: KernelSpec) -> None:
    source = render(spec)
    assert source.entry == spec.name
    assert source.text.startswith(f"// {spec.text}\n")
    assert source.text.count('extern "C"') == source.text.count("__global__") == 1
    assert source.text.count(f"\n{spec.name}(") == 1


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rendering_again_gives_the_same_bytes(spec: KernelSpec, fresh: None) -> None:
    first = render(spec)
    render.cache_clear()
    second = render(spec)
    assert second is not first
    assert second == first


def test_different_specs_give_different_sources() -> None:
    assert len({render(spec).text for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize("family", SPEC_OF_FAMILY)
@pytest.mark.parametrize(
    "use", ["{{ nonsense }}", "{{ spec.nonsense }}", "{% if nonsense %}{% endif %}", "{{ threads.nonsense }}"]
)
def test_an_undefined_name_in_a_template_is_an_error(family: str, use: str, kernels_src: Path) -> None:
    template = kernels_src / f"templates/{family}.cu.j2"
    template.write_text(f"{template.read_text()}// {use}\n")
    with pytest.raises(jinja2.UndefinedError, match="nonsense"):
        render(SPEC_OF_FAMILY[family])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_headers_handed_over_are_exactly_those_reached(spec: KernelSpec) -> None:
    source = render(spec)
    reached: set[str] = set()
    names = _names_included_by(source.text)
    while names:
        reached |= names
        names = {name for header in names for name in _names_included_by(source.headers[header])} - reached
    assert set(source.headers) == reached
    assert list(source.headers) == sorted(reached)


def test_headers_are_handed_over_as_they_are_on_disk_and_none_is_without_use() -> None:
    used = {name: text for spec in SPECS for name, text in render(spec).headers.items() if not name.startswith("dj/generated/")}
    assert used == {path.relative_to(INCLUDE).as_posix(): path.read_text() for path in INCLUDE.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", [*TEMPLATES, *INCLUDE.rglob("*.cuh")], ids=lambda path: path.name)
def test_sources_include_nothing_but_our_own_headers(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("#include")]
    assert all(line.startswith('#include "dj/') for line in lines), lines


@pytest.mark.parametrize("header", ["dj/kernels/fp8_gemm_1d2d.cuh", "dj/ptx/mbarrier.cuh", "dj/types.cuh"])
def test_a_missing_header_is_named(header: str, kernels_src: Path) -> None:
    (kernels_src / "include" / header).unlink()
    with pytest.raises(ToolchainError, match=f"{header}.*Reinstall deepgemm-jit"):
        render(SPEC_OF_FAMILY["fp8_gemm_1d2d"])


@pytest.mark.parametrize("include", ['"{}"', "<{}>", '"foo.h"', "<foo.h>"])
def test_a_header_that_is_not_ours_is_refused_where_ever_it_lies(include: str, kernels_src: Path, tmp_path: Path) -> None:
    (tmp_path / "foo.h").touch()
    template = kernels_src / "templates/scale_layout.cu.j2"
    template.write_text(f"#include {include.format(tmp_path / 'foo.h')}\n{template.read_text()}")
    with pytest.raises(ToolchainError, match=r"foo\.h"):
        render(SPEC_OF_FAMILY["scale_layout"])


@pytest.mark.parametrize("folder", ["include", "templates"])
def test_package_data_that_is_gone_is_a_broken_toolchain(folder: str, kernels_src: Path) -> None:
    shutil.rmtree(kernels_src / folder)
    with pytest.raises(ToolchainError, match="Reinstall deepgemm-jit"):
        render(SPEC_OF_FAMILY["scale_layout"])


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        render(KernelSpec(family="gemm_of_tomorrow", arch="sm_90a", dtypes=("bf16",), block=(1,)))
    assert "gemm_of_tomorrow" in str(refusal.value)
    assert all(family in refusal.value.supported for family in SPEC_OF_FAMILY)

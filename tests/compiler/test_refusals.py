"""What NVRTC refuses, and what it must not be believed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from deepgemm_jit.builder import Builder
from deepgemm_jit.compiler import Compiled, compile_options
from deepgemm_jit.compiler import nvrtc as compiler
from deepgemm_jit.errors import CompileError
from deepgemm_jit.frontend import Source, render
from deepgemm_jit.spec import ARCHES, FP8_GEMM, SCALE_LAYOUT, kernel_set

pytestmark = pytest.mark.nvrtc

SPECS = [spec for arch in ARCHES for spec in kernel_set(arch)]
GEMM = next(spec for spec in SPECS if spec.family == FP8_GEMM)
SMALL = next(spec for spec in SPECS if spec.family == SCALE_LAYOUT)
SOURCE = render(SMALL)
BROKEN = Source(SMALL.name, SOURCE.text.replace("dj::scale_layout<", "dj::scale_lay_out<"), SOURCE.headers)


def _kernels_in(root: Path) -> list[Path]:
    """Return the objects, index entries and unfinished files of a store."""
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_compile_error_holds_all_that_is_needed_to_mend_the_source(compile_spec: Callable[..., Compiled]) -> None:
    line = next(number for number, text in enumerate(BROKEN.text.splitlines(), 1) if "scale_lay_out" in text)
    with pytest.raises(CompileError) as refusal:
        compile_spec(SMALL, source=BROKEN.text)
    error = refusal.value
    assert f'{SMALL.name}.cu({line}): error: namespace "dj" has no member "scale_lay_out"' in error.log
    assert (error.kernel, error.options, error.source) == (SMALL.name, compile_options(SMALL.arch), BROKEN.text)
    assert f"{line:5d}  {BROKEN.text.splitlines()[line - 1]}" in error.listing.splitlines()
    assert len(error.listing.splitlines()) == len(BROKEN.text.splitlines())
    assert all(part in str(error) for part in (SMALL.name, "scale_lay_out", "--no-source-include"))


def test_an_error_in_a_header_names_the_header_and_its_line(compile_spec: Callable[..., Compiled]) -> None:
    name = "dj/types.cuh"
    with pytest.raises(CompileError, match=rf'{name}\(2\): error: identifier "undeclared" is undefined'):
        compile_spec(SMALL, headers={**SOURCE.headers, name: f"#pragma once\nint x = undeclared;\n{SOURCE.headers[name]}"})


def test_the_log_of_a_refusal_by_ptxas_is_text(compile_spec: Callable[..., Compiled]) -> None:
    text = render(GEMM).text
    start = text.index("__launch_bounds__(")
    unbound = text[:start] + text[text.index("\n", start) :]
    with pytest.raises(CompileError, match="Insufficient registers") as refusal:
        compile_spec(GEMM, source=unbound, options=(*compile_options(GEMM.arch), "--maxrregcount=32"))
    assert refusal.value.log.replace("\n", "").isprintable()


def test_a_refused_source_leaves_no_trace_and_the_mended_one_works(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deepgemm_jit.builder.render", lambda spec: BROKEN)
        builder = Builder()
        for _ in range(2):
            with pytest.raises(CompileError, match="scale_lay_out"):
                builder.build(SMALL)
            assert builder.try_cached(SMALL) is None
        assert _kernels_in(cache_dir) == []
    mended = Builder().build(SMALL)
    assert (mended.outcome, mended.stored, mended.cubin.entry) == ("compiled", True, SMALL.name)
    assert len(_kernels_in(cache_dir)) == 2
    assert Builder().build(SMALL).outcome == "cached"


LOG = "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 16 registers\n"
LIES = {
    "no bytes": lambda image: b"",
    "100 random bytes": lambda image: random.Random(7).randbytes(100),
    "half a cubin": lambda image: image[: len(image) // 2],
    "all but the last byte": lambda image: image[:-1],
    "only the magic": lambda image: image[:4] + bytes(len(image) - 4),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_image_that_is_no_cubin_is_refused_and_not_stored(
    lie: Callable[[bytes], bytes], cache_dir: Path, compile_spec: Callable[..., Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = compile_spec(SMALL)
    image = lie(honest.cubin.image)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_run", lambda source, headers, entry, options: (image, honest.log))
        with pytest.raises(CompileError, match=f"{len(image)} bytes that are no cubin"):
            Builder().build(SMALL)
    assert _kernels_in(cache_dir) == []
    assert Builder().build(SMALL).cubin == honest.cubin


def test_a_log_that_does_not_report_on_the_kernel_is_refused(
    cache_dir: Path, compile_spec: Callable[..., Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = compile_spec(SMALL)
    for log in ("", honest.log + honest.log, honest.log.replace("Used ", "Used 1")):
        monkeypatch.setattr(compiler, "_run", lambda source, headers, entry, options, log=log: (honest.cubin.image, log))
        with pytest.raises(CompileError, match="does not report on the cubin"):
            Builder().build(SMALL)
    assert _kernels_in(cache_dir) == []


OTHERS = {
    "another name": ('extern "C" __global__ void other() {}', {}, "entries are other, not"),
    "no kernel": ("int nothing;", {}, "no cubin: no kernel|no cubin: no symbols"),
    "two kernels": (f'extern "C" __global__ void {SMALL.name}() {{}} extern "C" __global__ void b() {{}}', {}, "entries are"),
    "another arch": (
        f'extern "C" __global__ void {SMALL.name}() {{}}',
        {"options": compile_options("sm_80")},
        f"for sm_80, not {SMALL.arch}",
    ),
}


@pytest.mark.parametrize(("source", "changes", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_cubin_of_another_kernel_is_refused(
    source: str, changes: dict[str, tuple[str, ...]], reason: str, compile_spec: Callable[..., Compiled]
) -> None:
    with pytest.raises(CompileError, match=reason):
        compile_spec(SMALL, source=source, **changes)

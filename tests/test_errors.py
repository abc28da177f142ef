"""The error tree: its shape, its texts and its way between processes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from deepgemm_jit import errors

pytestmark = pytest.mark.none

SAMPLES = [
    errors.UnsupportedError(given="arch 'sm_80'", supported="sm_90a", advice="Use another backend"),
    errors.OperandError(operation="fp8_gemm_nt", faults=["a is on cpu", "b has 3 dimensions"]),
    errors.SettingError(name="DEEPGEMM_JIT_JOBS", value="two", origin="the environment", needed="a whole number"),
    errors.CompileError(kernel="sm_90a_x", options=["-arch=sm_90a", "-std=c++17"], log="x.cu(2): error: no", source="int a;\nb"),
    errors.ToolchainError(missing="libnvrtc", looked_for="libnvrtc.so.13", fix="Install nvidia-cuda-nvrtc"),
    errors.StoreError(path="/srv/store", reason="others can write it", fix="chmod 0700"),
    errors.DriverError(call="cuModuleLoadData", result="CUDA_ERROR_OUT_OF_MEMORY", detail="device 1"),
    errors.KernelNotBuiltError(kernel="sm_90a_x", store="/srv/store", command="deepgemm-jit warmup --arch sm_90a"),
    errors.ContextMismatchError(what="kernel sm_90a_x", belongs_to="context 1 on GPU 0", used_in="context 2 on GPU 1"),
    errors.StaleContextError(what="kernel sm_90a_x", belongs_to="context 1", used_in="context 7"),
    errors.UnloadedKernelError(what="kernel sm_90a_x"),
    errors.ForkedProcessError(what="kernel sm_90a_x", loaded_pid=4321, pid=8765),
    errors.CaptureError(kernel="sm_90a_x", result="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
]
each_sample = pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)

TREE = {
    "DeepGemmJitError": ("Exception",),
    "UnsupportedError": ("DeepGemmJitError", "NotImplementedError"),
    "OperandError": ("DeepGemmJitError", "ValueError"),
    "SettingError": ("DeepGemmJitError", "ValueError"),
    "CompileError": ("DeepGemmJitError", "RuntimeError"),
    "ToolchainError": ("DeepGemmJitError", "ImportError"),
    "StoreError": ("DeepGemmJitError", "RuntimeError"),
    "DriverError": ("DeepGemmJitError", "RuntimeError"),
    "KernelNotBuiltError": ("DeepGemmJitError", "RuntimeError"),
    "ContextError": ("DeepGemmJitError", "RuntimeError"),
    "_UsedElsewhereError": ("ContextError",),
    "ContextMismatchError": ("_UsedElsewhereError",),
    "StaleContextError": ("_UsedElsewhereError",),
    "UnloadedKernelError": ("ContextError",),
    "ForkedProcessError": ("ContextError",),
    "CaptureError": ("ContextError",),
}


def _classes() -> list[type[BaseException]]:
    return [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, BaseException)]


def _facts(error: errors.DeepGemmJitError) -> dict[str, object]:
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


def test_the_tree_is_the_documented_one() -> None:
    assert {cls.__name__: tuple(base.__name__ for base in cls.__bases__) for cls in _classes()} == TREE


def test_every_error_is_drawn_in_the_module_docstring() -> None:
    drawn = errors.__doc__ or ""
    assert [name for name in TREE if name not in drawn and not name.startswith("_")] == []


def test_every_error_that_is_raised_has_a_sample() -> None:
    leaves = {cls.__name__ for cls in _classes() if not cls.__subclasses__()}
    assert {type(error).__name__ for error in SAMPLES} == leaves


@each_sample
def test_text_holds_every_fact(error: errors.DeepGemmJitError) -> None:
    left_out = {"source"}  # the listing of a whole translation unit is asked for, never printed unasked
    for name, value in _facts(error).items():
        for part in value if isinstance(value, tuple) else (value,):
            assert name in left_out or str(part) in str(error), f"{name} is missing from the text"


@each_sample
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_facts_and_text(error: errors.DeepGemmJitError, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert _facts(copy) == _facts(error)
    assert str(copy) == str(error)


def test_an_error_raised_in_another_process_reads_the_same_here() -> None:
    code = """
import pickle, sys
from deepgemm_jit.spec import kernel_set
try:
    kernel_set("sm_90")
except Exception as error:
    sys.stdout.buffer.write(pickle.dumps(error))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    error = pickle.loads(child.stdout)
    assert isinstance(error, errors.UnsupportedError)
    assert error.given == "arch 'sm_90'"
    assert "sm_90a" in str(error)


def test_one_fault_makes_one_line_and_several_make_a_list() -> None:
    one = errors.OperandError(operation="cast", faults=["x is on cpu"])
    two = errors.OperandError(operation="cast", faults=["x is on cpu", "x has 3 dimensions"])
    assert str(one) == "cast: x is on cpu"
    assert str(two).splitlines() == ["cast: 2 faults", "  - x is on cpu", "  - x has 3 dimensions"]


def test_compile_error_numbers_its_source_as_the_log_counts() -> None:
    error = errors.CompileError(kernel="k", options=[], log="", source="first\nsecond")
    assert [line.split() for line in error.listing.splitlines()] == [["1", "first"], ["2", "second"]]


@pytest.mark.parametrize("line", [1, 5, 10])
def test_compile_error_shows_the_numbered_source_around_the_first_line_that_was_refused(line: int) -> None:
    source = "\n".join(f"source of line {number};" for number in range(1, 11))
    log = f"dj/head.cuh(2): warning: odd\nk.cu({line}): error: no\nk.cu(7): error: neither\n"
    text = str(errors.CompileError(kernel="k", options=[], log=log, source=source))
    shown = text.partition(f"source around line {line}:\n")[2].splitlines()
    assert shown == [f"{number:5d}  source of line {number};" for number in range(max(1, line - 3), min(10, line + 3) + 1)]


@pytest.mark.parametrize("log", ["dj/head.cuh(2): error: no", "ptxas fatal: no", "k.cu(2): warning: odd"])
def test_compile_error_shows_no_source_where_none_of_its_lines_was_refused(log: str) -> None:
    text = str(errors.CompileError(kernel="k", options=[], log=log, source="first\nsecond"))
    assert "second" not in text
    assert text.endswith(log)


@each_sample
def test_an_error_raised_once_more_has_its_cause_and_no_traceback(error: errors.DeepGemmJitError) -> None:
    cause = OSError("the loader's own words")
    try:
        raise error.afresh() from cause
    except errors.DeepGemmJitError as raised:
        fresh = raised.afresh()
    assert (type(fresh), str(fresh), _facts(fresh)) == (type(error), str(error), _facts(error))
    assert fresh.__cause__ is cause
    assert fresh.__traceback__ is None


@pytest.mark.parametrize("builtin", [NotImplementedError, ValueError, RuntimeError, ImportError])
def test_builtin_handlers_catch_our_errors_too(builtin: type[Exception]) -> None:
    caught = [error for error in SAMPLES if isinstance(error, builtin)]
    assert caught
    for error in caught:
        with pytest.raises(builtin):
            raise error

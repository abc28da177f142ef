"""KernelSpec: its canonical text, its name, and what it refuses to be."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec import ARCHES, CAST_TO_FP8, FP8_GEMM, SCALE_LAYOUT, KernelSpec, kernel_set, kernels_by_name

pytestmark = pytest.mark.none

words = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
specs = st.builds(
    KernelSpec,
    family=words,
    arch=words,
    dtypes=st.lists(words, min_size=1, max_size=4).map(tuple),
    block=st.lists(st.integers(1, 4096), min_size=1, max_size=3).map(tuple),
    stages=st.integers(0, 16),
    cluster=st.integers(1, 16),
    flags=st.sets(words, max_size=3).map(lambda flags: tuple(sorted(flags))),
)
# What a kernel set may hold: a family has its own number of dtypes, and no flag reads like stages or a cluster.
# (family, dtypes, block sizes)
shipped_specs = st.sampled_from([(FP8_GEMM, 3, 3), (CAST_TO_FP8, 2, 1), (SCALE_LAYOUT, 1, 2)]).flatmap(
    lambda family: st.builds(
        KernelSpec,
        family=st.just(family[0]),
        arch=st.sampled_from(["sm_89", "sm_90", "sm_90a", "sm_100a"]),
        dtypes=st.tuples(*[st.sampled_from(["e4m3", "e5m2", "bf16", "f32"])] * family[1]),
        block=st.tuples(*[st.integers(1, 256)] * family[2]),
        stages=st.integers(0, 8),
        cluster=st.integers(1, 4),
        flags=st.sets(st.sampled_from(["ue8m0", "swap_ab", "masked"])).map(lambda flags: tuple(sorted(flags))),
    )
)
VALID: dict[str, Any] = {"family": "fp8_gemm_1d2d", "arch": "sm_90a", "dtypes": ("e4m3",), "block": (64, 64, 128), "stages": 4}


@given(specs)
def test_the_text_of_any_spec_reads_back_as_that_spec(spec: KernelSpec) -> None:
    assert KernelSpec.from_text(spec.text) == spec


@given(specs, specs)
def test_different_specs_have_different_texts(one: KernelSpec, other: KernelSpec) -> None:
    assert (one.text == other.text) == (one == other)


@given(specs)
def test_a_name_is_a_c_identifier(spec: KernelSpec) -> None:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", spec.name)


@given(shipped_specs, shipped_specs)
def test_different_specs_of_our_families_have_different_names(one: KernelSpec, other: KernelSpec) -> None:
    assert (one.name == other.name) == (one == other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("arch", "sm_90"), ("dtypes", ("e5m2",)), ("block", (64, 32, 128)), ("stages", 5), ("cluster", 2), ("flags", ("ue8m0",))],
)
def test_every_field_shows_in_name_and_text(field: str, value: object) -> None:
    plain, varied = KernelSpec(**VALID), KernelSpec(**{**VALID, field: value})
    assert plain.name != varied.name
    assert plain.text != varied.text


def _damaged() -> list[str]:
    text = KernelSpec(**VALID).text
    return [
        "",
        "nonsense",
        text + ";",
        text + ";groups=4",
        text.replace("stages=4", "stages=04"),
        text.replace("stages=4", "stages=four"),
        text.replace("stages=4", "stages= 4"),
        text.replace("stages=4", "stages=٤"),
        text.replace("family=", "name="),
        ";".join(reversed(text.split(";"))),
        text.replace("arch=sm_90a", "arch=../../x"),
        text + "\n",
    ]


@pytest.mark.parametrize("text", _damaged())
def test_any_other_text_is_refused_and_shown(text: str) -> None:
    with pytest.raises(OperandError) as refusal:
        KernelSpec.from_text(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("given", [None, 5, b"family=a", ["family=a"], {}], ids=repr)
def test_what_is_no_text_is_refused_and_shown(given: Any) -> None:
    with pytest.raises(OperandError) as refusal:
        KernelSpec.from_text(given)
    assert repr(given) in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["x" * 100_000, KernelSpec(**VALID).text.replace("64x64", "9" * 5000), "\x1b[31m\0\udcff\n\u202e"]
)
def test_a_refusal_of_a_text_is_short_and_printable(text: str) -> None:
    with pytest.raises(OperandError) as refusal:
        KernelSpec.from_text(text)
    assert len(str(refusal.value)) < 500
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", "../../x"),
        ("family", ""),
        ("family", "FP8"),
        ("arch", "sm_90a\n"),
        ("arch", 90),
        ("dtypes", ("e4m3", "bf-16")),
        ("dtypes", ()),
        ("block", ()),
        ("block", (64, 0)),
        ("block", (64.0,)),
        ("stages", -1),
        ("stages", True),
        ("cluster", 0),
        ("flags", ("b", "a")),
        ("flags", ("a", "a")),
        *((field, value) for field in ("dtypes", "block", "flags") for value in (None, "e4m3", 64, ["e4m3"], {"e4m3"}, b"e4m3")),
        ("family", None),
        ("family", ["fp8_gemm_1d2d"]),
        ("dtypes", (["e4m3"],)),
        ("flags", (None,)),
        ("flags", ("a", ["b"])),
        ("stages", None),
        ("block", (64, 64, 2**31)),
        ("block", (64, 64, 10**5000)),
        ("cluster", 2**31),
    ],
)
def test_a_field_that_means_nothing_is_refused(field: str, value: object) -> None:
    with pytest.raises(OperandError):
        KernelSpec(**{**VALID, field: value})


@pytest.mark.parametrize(
    ("family", "block"),
    [(FP8_GEMM, (64, 64)), (FP8_GEMM, (64, 64, 128, 1)), (CAST_TO_FP8, (128, 128)), (SCALE_LAYOUT, (64,))],
)
def test_a_block_of_more_or_fewer_sizes_than_those_of_its_family_is_refused(family: str, block: tuple[int, ...]) -> None:
    with pytest.raises(OperandError, match=f"as those of {family}"):
        KernelSpec(**{**VALID, "family": family, "block": block})


def test_all_faults_of_a_spec_are_listed_at_once() -> None:
    with pytest.raises(OperandError) as refusal:
        KernelSpec(**{**VALID, "family": "FP8", "stages": -1, "block": (0,)})
    assert len(refusal.value.faults) == 3


def test_a_spec_is_a_value_and_never_holds_a_problem_size() -> None:
    assert [field.name for field in fields(KernelSpec)] == ["family", "arch", "dtypes", "block", "stages", "cluster", "flags"]
    with pytest.raises(FrozenInstanceError):
        KernelSpec(**VALID).stages = 2  # type: ignore[misc]


@pytest.mark.parametrize("arch", ARCHES)
def test_names_find_their_specs(arch: str) -> None:
    assert kernels_by_name(arch) == {spec.name: spec for spec in kernel_set(arch)}
    assert len(kernels_by_name(arch)) == len(kernel_set(arch))

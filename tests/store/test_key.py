from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepgemm_jit.errors import OperandError
from deepgemm_jit.store import request_key

pytestmark = pytest.mark.none

SOURCE = '#include "a.cuh"\nextern "C" __global__ void f() {}\n'
EDITS: dict[str, dict[str, Any]] = {
    "arch suffix": {"arch": "sm_90"},
    "one byte of the source": {"source": SOURCE.replace("f()", "g()")},
    "a byte at the end of the source": {"source": SOURCE + "\n"},
    "one byte of a deep header": {"headers": {"a.cuh": '#include "b/c.cuh"\n', "b/c.cuh": "// ünïcodf\n"}},
    "a header's name": {"headers": {"a.cuh": '#include "b/c.cuh"\n', "b/d.cuh": "// ünïcode\n"}},
    "contents swapped": {"headers": {"b/c.cuh": '#include "b/c.cuh"\n', "a.cuh": "// ünïcode\n"}},
    "a header more": {"headers": {"a.cuh": '#include "b/c.cuh"\n', "b/c.cuh": "// ünïcode\n", "empty": ""}},
    "no headers": {"headers": {}},
    "entry": {"entry": "sm_90a_sample_bf16_64x33"},
    "value of a define": {"options": ["-arch=sm_90a", "-DX=2", "--maxrregcount=168"]},
    "register limit": {"options": ["-arch=sm_90a", "-DX=1", "--maxrregcount=169"]},
    "order of options": {"options": ["-DX=1", "-arch=sm_90a", "--maxrregcount=168"]},
    "an option twice": {"options": ["-arch=sm_90a", "-DX=1", "-DX=1", "--maxrregcount=168"]},
    "two options in one": {"options": ["-arch=sm_90a-DX=1", "--maxrregcount=168"]},
    "no options": {"options": []},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_any_edit_changes_the_key(sample: ModuleType, edit: dict[str, Any]) -> None:
    assert sample.REQUEST | edit != sample.REQUEST
    assert request_key(**(sample.REQUEST | edit)) != sample.KEY


def test_order_of_the_header_mapping_does_not_matter(sample: ModuleType) -> None:
    backwards = dict(reversed(sample.REQUEST["headers"].items()))
    assert list(backwards) != list(sample.REQUEST["headers"])
    assert request_key(**(sample.REQUEST | {"headers": backwards})) == sample.KEY


def test_options_may_be_any_sequence(sample: ModuleType) -> None:
    assert request_key(**(sample.REQUEST | {"options": tuple(sample.REQUEST["options"])})) == sample.KEY


texts = st.text(alphabet="a:1\n", min_size=1, max_size=3)
requests = st.fixed_dictionaries(
    {
        "arch": texts,
        "source": texts,
        "headers": st.dictionaries(texts, st.text(alphabet="a:1\n", max_size=3), max_size=2),
        "entry": texts,
        "options": st.lists(texts, max_size=2),
    }
)


@given(requests, requests, st.randoms())
def test_keys_are_equal_exactly_when_requests_are(one: dict[str, Any], other: dict[str, Any], rng: random.Random) -> None:
    shuffled = list(one["headers"].items())
    rng.shuffle(shuffled)
    assert request_key(**(one | {"headers": dict(shuffled)})) == request_key(**one)
    assert (request_key(**one) == request_key(**other)) == (one == other)


@pytest.mark.parametrize(
    "env", [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0"}, {"HOME": "/", "TZ": "Asia/Tokyo"}]
)
def test_key_is_the_same_in_another_process(sample: ModuleType, start: Any, tmp_path: Any, env: dict[str, str]) -> None:
    output, _ = start("key", env=env, cwd=tmp_path).communicate()
    assert output.strip() == sample.KEY


@pytest.mark.parametrize(
    "fault",
    [
        {"arch": 0},
        {"arch": ""},
        {"arch": None},
        {"source": 0},
        {"source": ""},
        {"source": b"bytes"},
        {"headers": 0},
        {"headers": None},
        {"headers": [("a.cuh", "")]},
        {"headers": {"a.cuh": 0}},
        {"headers": {"a.cuh": None}},
        {"headers": {0: ""}},
        {"headers": {"": ""}},
        {"entry": 0},
        {"options": 0},
        {"options": None},
        {"options": "-arch=sm_90a"},
        {"options": {"-arch=sm_90a", "-DX=1"}},
        {"options": ["-arch=sm_90a", 0]},
        {"options": ["-arch=sm_90a", ""]},
        {"source": "lone surrogate \ud800"},
    ],
    ids=repr,
)
def test_what_is_not_text_is_refused(sample: ModuleType, fault: dict[str, Any]) -> None:
    with pytest.raises(OperandError, match="request_key"):
        request_key(**(sample.REQUEST | fault))


def test_all_faults_are_told_at_once(sample: ModuleType) -> None:
    with pytest.raises(OperandError) as refusal:
        request_key(**(sample.REQUEST | {"arch": 0, "headers": {"a.cuh": 0}, "options": [0]}))
    assert len(refusal.value.faults) == 3

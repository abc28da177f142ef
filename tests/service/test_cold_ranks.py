"""Ranks of one job, run and judged by `bench/many_gpus.py`: eight processes that share an empty store, and what is a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PATIENCE_S = 300

COUNTING = """
import os
import cuda.bindings.nvrtc as nvrtc
compile_program = nvrtc.nvrtcCompileProgram
def counted(*arguments):
    with open(os.environ["COUNTS"], "ab", buffering=0) as counts:
        counts.write(b"compiled\\n")
    return compile_program(*arguments)
nvrtc.nvrtcCompileProgram = counted
"""


@pytest.mark.nvrtc
def test_eight_ranks_of_one_empty_store_compile_each_kernel_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    counts, result = tmp_path / "counts", tmp_path / "result.json"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]), "COUNTS": str(counts)}
    command = [sys.executable, str(BENCH / "many_gpus.py"), "--without-gpus", "8", "--json", str(result)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(result.read_text())["runs"]
    cold, *others = run["parts"]["ranks"]["ours"]
    assert cold["kernels"] > 1
    assert list(cold["compiles"].values()) == [1] * cold["kernels"]
    assert counts.read_text().splitlines() == ["compiled"] * cold["kernels"], "as many as NVRTC was asked for"
    assert [(row["store"], row["kernels"], row["compiles"]) for row in others] == [
        ("warm store", cold["kernels"], {}),
        ("pack, empty store", cold["kernels"], {}),
    ]
    assert [len(row["seconds"]) for row in (cold, *others)] == [8] * 3


@pytest.fixture
def cold_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCH)
    import cold_ranks

    yield cold_ranks
    for module in ("cold_ranks", "common"):
        sys.modules.pop(module, None)


def row(**changes: Any) -> dict[str, Any]:
    answers = [{"seconds": 1.0, "right": True, "kernels": ["a", "b"]}, {"seconds": 2.0, "right": True, "kernels": ["b"]}]
    return {"store": "empty store", "compiles": {"a": 1, "b": 1}, "answers": answers} | changes


@pytest.mark.none
@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"compiles": {"a": 1, "b": 2}}, ["b was compiled 2 times, not 1"]),
        ({"compiles": {"a": 1}}, ["b was compiled 0 times, not 1"]),
        ({"compiles": {"a": 1, "b": 1, "c": 2}}, ["c was compiled 2 times, not 1"]),
        ({"store": "warm store"}, ["a was compiled 1 times, not 0", "b was compiled 1 times, not 0"]),
        ({"store": "warm store", "compiles": {}}, []),
        ({"answers": row()["answers"][:1], "compiles": {"a": 1, "b": 1}}, ["1 of 2 ranks answered"]),
        ({"answers": [answer | {"right": False} for answer in row()["answers"]]}, ["the result of 2 ranks is wrong"]),
        ({"answers": [answer | {"kernels": []} for answer in row()["answers"]], "compiles": {}}, ["no kernel was loaded"]),
    ],
)
def test_only_one_compile_per_kernel_and_right_results_are_fine(
    cold_ranks: ModuleType, changes: dict[str, Any], faults: list[str]
) -> None:
    assert cold_ranks.faults_of(row(**changes), ranks=2) == faults


RANK = """
import json, os, sys, time
what = os.environ["WHAT"]
print("a library says hello")
if what == "never ready":
    sys.exit("no GPU")
if what == "hangs":
    time.sleep(600)
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit("not told")
if what == "dies":
    sys.exit("launch failed")
print(json.dumps({"seconds": 0.5, "rank": sys.argv[1], "work": sys.argv[2]}))
if what == "ends badly":
    sys.exit(3)
"""


@pytest.mark.none
@pytest.mark.parametrize(
    ("ranks", "answered", "faults"),
    [
        (["fine", "fine"], ["0", "1"], []),
        (["fine", "dies"], ["0"], ["rank 1 ended with status 1: launch failed"]),
        (["ends badly", "fine"], ["0", "1"], ["rank 0 ended with status 3: no error told"]),
        (
            ["fine", "never ready"],
            [],
            ["rank 0 ended with status 1: not told", "rank 1 ended with status 1: no GPU"],
        ),
        (["fine", "hangs"], [], ["rank 0 ended with status -9: no error told", "rank 1 ended with status -9: no error told"]),
    ],
)
def test_a_rank_without_an_answer_is_told_and_ends_the_others(
    cold_ranks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[str],
    answered: list[str],
    faults: list[str],
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    monkeypatch.setattr(cold_ranks, "RANK", script)
    limit_s = 1.0 if "hangs" in ranks else PATIENCE_S
    found = cold_ranks.run_ranks("work", [os.environ | {"WHAT": what} for what in ranks], tmp_path / "logs", limit_s)
    assert [answer["rank"] for answer in found["answers"]] == answered
    assert all(answer["work"] == "work" for answer in found["answers"])
    assert found["faults"] == faults


@pytest.mark.none
def test_kernels_of_deep_gemm_are_counted_in_the_cache_of_each_rank(
    cold_ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "for name in 'xy'[: 1 + int(sys.argv[1])]:\n"
        "    folder = pathlib.Path(os.environ['DG_JIT_CACHE_DIR'], 'cache', name)\n"
        "    folder.mkdir(parents=True)\n"
        "    (folder / 'kernel.cubin').touch()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(json.dumps({'seconds': int(sys.argv[1]), 'right': sys.argv[1] == '0', 'kernels': []}))\n"
    )
    monkeypatch.setattr(cold_ranks, "RANK", script)
    found = cold_ranks.measure_peer(2, tmp_path / "peer")
    assert (found["kernels_per_rank"], found["seconds"], found["slowest_s"]) == ([1, 2], [0, 1], 1)
    assert found["faults"] == ["the result of 1 ranks is wrong"]

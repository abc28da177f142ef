"""What `bench/many_gpus.py` calls right and wrong, shown on made-up results, and its threads on pretended GPUs."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

pytestmark = pytest.mark.none

MODULES = ("many_gpus", "gpu_threads", "cold_ranks", "report", "experts", "gemm", "problems", "common")


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    yield
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.fixture
def many_gpus() -> ModuleType:
    import many_gpus

    return many_gpus


def gpu(number: int) -> dict[str, Any]:
    return {
        "gpu": number,
        "ratio": 0.99,
        "alone_tflops": 1000.0,
        "checked_rounds": 10,
        "different_elements": 0,
        "gemm_error": 1.7e-3,
        "forward_error": 0.03,
    }


RIGHT: dict[str, Any] = {
    "memory": {
        "used": [1],
        "unused": [0, 2],
        "used_mib": {"at_start": [4, 4, 4], "before_calls": [4, 600, 4], "after_calls": [4, 1700, 4]},
        "held_mib": 1024,
        "contexts_on_unused": [],
        "different_elements": 0,
    },
    "speed": {
        "threads_per_gpu": 4,
        "largest_errors": {"gemm_error": 2e-3, "forward_error": 0.06},
        "host_share_alone": 0.05,
        "host_share_together": 0.15,
        "gpus": [gpu(0), gpu(1), gpu(2)],
    },
    "ranks": {
        "ours": [
            {
                "store": "empty store",
                "work": "forward",
                "kernels": 2,
                "compiles": {"a": 1, "b": 1},
                "slowest_s": 1.5,
                "faults": [],
            }
        ],
        "deep_gemm": {
            "store": "an empty cache each",
            "work": "gemms",
            "kernels_per_rank": [2, 2, 2],
            "slowest_s": 9.0,
            "faults": [],
        },
    },
    "model": {
        "rows": [
            {
                "model": "m",
                "activations": "static",
                "layers": 6,
                "distinct_tokens": 9,
                "finite": True,
                "gpus": {"one": [0], "all": [0, 1, 2], "reversed": [0, 1, 2]},
                "same_tokens": {"one": True, "all": True, "reversed": True},
                "same_logits": {"one": True, "all": True, "reversed": True},
            }
        ]
    },
}


def faults(many_gpus: ModuleType, part: str, *changes: tuple[Any, ...]) -> list[str]:
    """Return what is wrong with a part whose value at each path was exchanged."""
    parts = {part: deepcopy(RIGHT[part])}
    for *path, last, value in changes:
        place = parts[part]
        for key in path:
            place = place[key]
        place[last] = value
    return [fault for claim in many_gpus.claims_of({"gpus": 3, "ranks": 3, "parts": parts}) for fault in claim.faults]


@pytest.mark.parametrize("part", RIGHT)
def test_a_right_run_has_no_fault(many_gpus: ModuleType, part: str) -> None:
    assert faults(many_gpus, part) == []


@pytest.mark.parametrize(
    ("part", "change", "fault"),
    [
        ("memory", ("used_mib", "after_calls", [4, 1700, 5]), "GPU 2 is not used and grew by 1 MiB"),
        ("memory", ("contexts_on_unused", [0]), "GPU 0 is not used and has a context"),
        ("memory", ("used_mib", "after_calls", [4, 601, 4]), "GPU 1 holds 1024 MiB more, which its counter does not show"),
        ("memory", ("different_elements", 3), "3 elements differ"),
        ("speed", ("gpus", 1, "ratio", 0.969), "GPU 1 has 0.969 of its speed alone, required 0.97"),
        ("speed", ("gpus", 1, "different_elements", 7), "GPU 1: 7 elements differ from those of the first call"),
        ("speed", ("gpus", 0, "gemm_error", 2.1e-3), "GPU 0: gemm_error 0.0021 is above 0.002"),
        ("speed", ("gpus", 2, "forward_error", None), "GPU 2: forward_error None is above 0.06"),
        ("ranks", ("ours", 0, "faults", ["b was compiled 2 times, not 1"]), "b was compiled 2 times, not 1"),
        ("model", ("rows", 0, "same_tokens", "reversed", False), "other tokens, placed on reversed"),
        ("model", ("rows", 0, "finite", False), "logits are not finite"),
        ("model", ("rows", 0, "distinct_tokens", 1), "all tokens are the same, which tells nothing"),
        ("model", ("rows", 0, "gpus", "all", [0, 1]), "placed on all, it was on GPUs [0, 1]"),
    ],
)
def test_what_is_wrong_is_told(many_gpus: ModuleType, part: str, change: tuple[Any, ...], fault: str) -> None:
    assert faults(many_gpus, part, change) == [fault]


def test_a_part_that_crashed_is_wrong_and_one_that_cannot_run_here_is_not(many_gpus: ModuleType) -> None:
    run = {"gpus": 1, "ranks": 1, "parts": {"memory": {"not_run": "one GPU"}, "model": {"fault": "exit status -11: "}}}
    assert [(claim.seen, claim.faults, claim.verdict) for claim in many_gpus.claims_of(run)] == [
        ("not run: one GPU", (), "-"),
        ("failed", ("exit status -11: ",), "no"),
    ]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("print('loading'); print('{\"a\": 1}')", {"a": 1}),
        ("print('[1]')", {"fault": "no answer"}),
        ("print(float('nan'))", {"fault": "no answer"}),
        ("import sys; print('{}'); sys.exit('no GPU')", {"fault": "exit status 1: no GPU"}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {"fault": "exit status -11: no error told"}),
        ("import time; time.sleep(600)", {"fault": "no end after 1 s"}),
    ],
)
def test_a_part_answers_or_it_is_told_how_it_ended(many_gpus: ModuleType, program: str, answer: dict[str, Any]) -> None:
    limit_s = 1 if "sleep" in program else 100
    assert many_gpus.answer_of(["-c", program], dict(os.environ), limit_s) == answer


def test_what_deep_gemm_does_wrong_is_not_our_fault(many_gpus: ModuleType) -> None:
    run = {"gpus": 3, "ranks": 3, "parts": {"ranks": deepcopy(RIGHT["ranks"])}}
    run["parts"]["ranks"]["deep_gemm"] |= {"faults": ["rank 1 ended with status 1: no nvcc"], "slowest_s": None}
    *_, theirs = many_gpus.claims_of(run)
    assert theirs.faults == ()
    assert "no nvcc" in theirs.seen


def test_a_run_takes_the_place_of_those_that_it_repeats(many_gpus: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results" / "many_gpus.json"
    for gpus, parts in ((2, "speed"), (1, "speed"), (2, "speed ranks"), (2, "model"), (2, "ranks")):
        many_gpus.keep(path, {"gpus": gpus, "parts": dict.fromkeys(parts.split())})
    kept = [(run["gpus"], list(run["parts"])) for run in json.loads(path.read_text())["runs"]]
    assert kept == [(1, ["speed"]), (2, ["speed", "ranks"]), (2, ["model"]), (2, ["ranks"])]


def test_more_gpus_than_there_are_is_wrong_usage(
    many_gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["many_gpus.py", "--gpus", "2"])
    assert many_gpus.main() == 2
    assert "needs 2 GPUs, and torch sees 1" in capfd.readouterr().err


def test_the_page_tells_each_run_with_its_faults_or_that_there_is_none() -> None:
    import report

    assert report.many_gpus_part([]).startswith("No run of `bench/many_gpus.py` on GPUs is on record")
    machine = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "cpus": 32}
    run = {
        "gpus": 3,
        "ranks": 3,
        "date": "2026-12-01",
        "command": "bench/many_gpus.py",
        "machine": machine,
        "versions": {"torch": "2"},
    }
    parts = {"speed": RIGHT["speed"], "model": {"fault": "no end after 400 s"}}
    text = report.many_gpus_part([run | {"parts": parts}])
    assert "3 x NVIDIA H200" in text
    assert "| 30 rounds, 0 elements differ; " in text
    assert "| model | failed; **not as it should be**: no end after 400 s |" in text
    page = f"before\n{report.BEGIN}old\n{report.END}after\n"
    assert report.with_part(page, text) == f"before\n{report.BEGIN}{text}{report.END}after\n"


class Event:
    """Stands for an event of a pretended GPU, which is always done."""

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def synchronize(self) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass


class PretendedCalls:
    """Calls of a pretended GPU: keeps what they are told; its stream is itself."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.gpu, self.stream, self.fails = number, self, fails
        self.told: list[tuple[int, bool]] = []
        self.thread: int | None = None

    def synchronize(self) -> None:
        pass

    def run(self, current: int, *, check: bool) -> None:
        if self.fails:
            raise RuntimeError("a wrong result")
        self.thread = threading.get_ident()
        self.told.append((current, check))


@pytest.fixture
def gpu_threads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import gpu_threads

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return gpu_threads


def test_threads_make_every_other_gpu_current_in_turn_and_count_their_rounds(gpu_threads: ModuleType) -> None:
    threads = {number: [PretendedCalls(number) for _ in range(2)] for number in range(3)}
    paces = gpu_threads.run_pass(threads, [0, 2], seconds=0.05, check_every=3)
    assert list(paces) == [0, 2]
    for number, some in paces.items():
        for calls, pace in zip(threads[number], some, strict=True):
            assert len(calls.told) == pace.rounds > 0
            others = [other for other in threads if other != number]
            assert calls.told == [(others[turn % 2], turn % 3 == 0) for turn in range(pace.rounds)]
    assert threads[1][0].told == []
    assert len({calls.thread for number in (0, 2) for calls in threads[number]}) == 4
    assert gpu_threads.run_pass({0: [PretendedCalls(0)]}, [0], seconds=0.0, check_every=1)[0][0].rounds == 1


def test_a_thread_that_fails_fails_the_pass(gpu_threads: ModuleType) -> None:
    threads = {0: [PretendedCalls(0), PretendedCalls(0, fails=True)]}
    with pytest.raises(RuntimeError, match="a wrong result"):
        gpu_threads.run_pass(threads, [0], seconds=0.05, check_every=1)


def test_rates_and_the_share_of_the_host_are_of_the_time_from_the_first_start_to_the_last_end(gpu_threads: ModuleType) -> None:
    paces = [gpu_threads.Pace(30, 10.0, 12.0, 0.5), gpu_threads.Pace(10, 10.5, 14.0, 0.3)]
    assert gpu_threads.rounds_per_s(paces) == 10.0
    assert gpu_threads.host_share({0: paces[:1], 1: paces[1:]}) == pytest.approx(0.2)
    assert gpu_threads.max_error([0.1, 0.2]) == 0.2
    assert gpu_threads.max_error([0.1, float("nan")]) is None


def test_bits_that_change_are_counted_by_a_checked_round_alone(gpu_threads: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)
    out, right = torch.zeros(4, dtype=torch.bfloat16), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    given = {"gemm": right.clone(), "forward": right.clone()}
    calls = object.__new__(gpu_threads.Calls)
    vars(calls).update(
        gpu=1,
        _out=out,
        _gemm=lambda: out.copy_(given["gemm"]),
        _forward=lambda: given["forward"],
        _different=torch.zeros((), dtype=torch.int64),
        _gemm_bits=right.view(torch.int16),
        _forward_bits=right.view(torch.int16),
    )
    calls.run(0, check=True)
    assert calls.different() == 0
    given["gemm"][1], given["forward"][:2] = 9.0, 9.0
    calls.run(0, check=False)
    assert calls.different() == 0
    calls.run(0, check=True)
    assert calls.different() == 3
    with pytest.raises(RuntimeError, match="GPU 2 was current, and after calls on GPU 1 GPU 0 is"):
        calls.run(2, check=False)


def test_memory_is_read_by_uuid(gpu_threads: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU-bb-2, 1700\\nGPU-aa-1, 4\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_threads.used_mib(["aa-1", "bb-2"]) == [4, 1700]

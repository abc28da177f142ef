"""Ranks that start cold at once: one NVRTC compile per kernel and store, whoever comes first, and the same bytes for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.builder import Builder
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import FP8_GEMM, kernel_set

pytestmark = pytest.mark.nvrtc

RANKS = Path(__file__).with_name("ranks.py")
GEMM = next(spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM and spec.block == (128, 128, 128))
PATIENCE_S = 600


class Job:
    """Some ranks, and what NVRTC was asked for by all of them."""

    def __init__(self, folder: Path, processes: int, threads: int, env: dict[str, str]) -> None:
        self.compiles = folder / "compiles"
        command = [sys.executable, str(RANKS), str(self.compiles), GEMM.text, str(threads)]
        self.ranks = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            for _ in range(processes)
        ]

    def tell(self, line: str) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(line + "\n")
            rank.stdin.flush()

    def answers(self) -> list[str]:
        return [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]

    def build(self, root: Path) -> tuple[int, set[str]]:
        """Build in all ranks at once; return how often NVRTC compiled, and the digests that came out."""
        self.compiles.write_text("")
        self.tell(str(root))
        assert self.answers() == ["ready\n"] * len(self.ranks), [rank.stderr.read() for rank in self.ranks if rank.stderr]
        self.tell("go")
        digests = {digest for answer in self.answers() for digest in json.loads(answer)}
        return len(self.compiles.read_text().splitlines()), digests

    def said(self) -> list[str]:
        return [rank.communicate()[1] for rank in self.ranks]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []
    signal.alarm(PATIENCE_S)  # a rank that waits for ever ends the test

    def start(processes: int, threads: int = 1, **env: str) -> Job:
        path = os.pathsep.join(filter(None, sys.path))
        jobs.append(Job(tmp_path, processes, threads, {**os.environ, "PYTHONPATH": path, **env}))
        return jobs[-1]

    yield start
    signal.alarm(0)
    for started in jobs:
        for rank in started.ranks:
            rank.kill()
            rank.communicate()


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(("processes", "threads"), [(8, 1), (3, 3)], ids=["8 processes", "3 processes of 3 threads"])
def test_a_cold_start_compiles_once_in_every_round(
    job: Callable[..., Job], tmp_path: Path, profile: Any, record: Callable[..., None], processes: int, threads: int
) -> None:
    started, compiles, digests = job(processes, threads), [], set()
    for number in range(profile.rounds):
        root = tmp_path / f"store {number}"
        count, found = started.build(root)
        compiles.append(count)
        digests |= found
        (digest,) = found
        (index,) = (root / "v1/kernels").iterdir()
        assert files_in(root) == [f"v1/kernels/{index.name}", f"v1/objects/{digest[:2]}/{digest}"]
    said = started.said()
    record(
        f"cold starts of {processes} processes with {threads} threads",
        rounds=profile.rounds,
        compiles_per_round={str(count): compiles.count(count) for count in sorted(set(compiles))},
        different_results=len(digests),
    )
    assert set(compiles) == {1}
    assert len(digests) == 1
    assert said == [""] * processes


def test_many_processes_that_start_at_once_compile_once(
    job: Callable[..., Job], cache_dir: Path, profile: Any, record: Callable[..., None]
) -> None:
    started = job(profile.processes)
    compiles, digests = started.build(cache_dir)
    said = started.said()
    record("one cold start of many", processes=profile.processes, compiles=compiles, different_results=len(digests))
    assert (compiles, len(digests)) == (1, 1)
    assert len(files_in(cache_dir)) == 2
    assert said == [""] * profile.processes


def test_a_rank_that_is_killed_while_it_compiles_delays_the_next_by_nothing(
    job: Callable[..., Job], cache_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "def die(*arguments): os.kill(os.getpid(), signal.SIGKILL)\n"
        "import cuda.bindings.nvrtc as nvrtc\n"
        "nvrtc.nvrtcCompileProgram = die\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    first = job(1, PYTHONPATH=path)
    first.tell(str(cache_dir))
    assert first.answers() == ["ready\n"]
    first.tell("go")
    assert first.ranks[0].wait(PATIENCE_S) == -signal.SIGKILL
    assert len(list((tmp_path / "locks").iterdir())) == 1  # left behind, and means nothing
    # No time to wait: the lock is free at once, or this would compile without it and say so.
    second = job(1, DEEPGEMM_JIT_LOCK_TIMEOUT_S="0")
    compiles, digests = second.build(cache_dir)
    assert (compiles, len(digests), second.said()) == (1, 1, [""])


def test_stores_of_different_places_times_and_hosts_are_the_same_bytes(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for number, (folder, env) in enumerate(
        [("a", {}), ("opt/b c", {"TZ": "Asia/Tokyo", "HOME": "/", "USER": "other", "HOSTNAME": "other", "PYTHONHASHSEED": "7"})]
    ):
        root = tmp_path / folder / "store"
        root.parent.mkdir(parents=True)
        prefix = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh"] if number and can_rename_host() else []
        code = (
            "from deepgemm_jit.spec import kernel_set\nimport deepgemm_jit as dj\n[dj.build(s) for s in kernel_set('sm_90a')[:2]]"
        )
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
        command = [*prefix, sys.executable, "-c", code]
        subprocess.run(command, check=True, env={**environ, "DEEPGEMM_JIT_CACHE_DIR": str(root)}, timeout=PATIENCE_S)
        contents.append({name: (root / name).read_bytes() for name in files_in(root)})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4


def can_rename_host() -> bool:
    return subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode == 0


def test_a_damaged_entry_is_compiled_once_more_and_then_hits(job: Callable[..., Job], cache_dir: Path) -> None:
    Builder(read_settings()).build(GEMM)
    (file,) = cache_dir.glob("v1/objects/*/*")
    damages = [
        lambda: file.write_bytes(file.read_bytes()[:1000]),
        lambda: file.write_bytes(b""),
        lambda: (file.unlink(), file.mkdir()),
        lambda: next(cache_dir.glob("v1/kernels/*")).write_bytes(b"\x80\x04}q\x00."),
    ]
    for damage in damages:
        damage()
        started = job(4)
        assert started.build(cache_dir)[0] == 1
        assert started.build(cache_dir)[0] == 0
        # Of the four, whoever found it first says so, and those who read it at the same moment.
        assert any("set aside" in said for said in started.said())

"""What a hit costs: the first of a process, those after it, from the store and from a pack. Needs NVRTC once, no GPU.

The whole kernel set is built into a store, then fresh processes ask for one kernel each. Every figure is a median with a warm
page cache. Exit status: 0; 1 when a first hit takes longer than --require, a later hit reaches the store, or a start reads an
object that it does not use; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Spread, Table, environment, number, without_settings, write_json

RESULT = Path(__file__).parent / "results" / "store.json"
TESTS = Path(__file__).resolve().parents[1] / "tests"
PACKAGES = ("nvidia-cuda-nvrtc", "filelock", "platformdirs")
FIRST_HIT_LIMIT_MS = 2.0
LATER_HITS = 20_000


class Opens:
    """Counts the files that this process opens below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.paths: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(self._folder):
            self.paths.append(str(arguments[0]))

    def objects(self) -> int:
        """Return how many of them are objects of a store."""
        return sum("/objects/" in path for path in self.paths)


def first_hit(root: Path, pack: str | None, way: str) -> dict[str, Any]:
    """Ask for one kernel in this process, which has asked for none; the imports and the key are there beforehand."""
    from deepgemm_jit.builder import Builder
    from deepgemm_jit.compiler import nvrtc_info
    from deepgemm_jit.settings import read_settings
    from deepgemm_jit.spec import FP8_GEMM, kernel_set
    from deepgemm_jit.store import Store

    spec = next(spec for spec in kernel_set("sm_90a") if spec.family == FP8_GEMM)
    settings = read_settings(cache_dir=root, **({"packs": (Path(pack),)} if pack else {}))
    if way == "builder":
        started = time.perf_counter()
        cubin = Builder(settings).build(spec).cubin
        return {"ms": [(time.perf_counter() - started) * 1e3], "bytes": len(cubin.image)}
    key, version = Builder(settings).request(spec).key, nvrtc_info().version
    wish = {"spec_text": spec.text, "nvrtc_version": None if way == "no NVRTC" else version}
    store, times = Store.open(settings), []
    for _ in range(50):
        started = time.perf_counter()
        found = store.get(key, **wish)
        times.append((time.perf_counter() - started) * 1e3)
        assert found is not None
    return {"ms": times, "bytes": len(found.image)}


def later_hits(root: Path) -> dict[str, Any]:
    """Ask the service again and again; count the files that it opens for it."""
    sys.path.insert(0, str(TESTS))
    from doubles.driver import DriverDouble

    from deepgemm_jit.service import KernelService
    from deepgemm_jit.settings import read_settings
    from deepgemm_jit.spec import kernel_set

    opens = Opens(root)
    service = KernelService(settings=read_settings(cache_dir=root, compile="never"), driver=DriverDouble())
    spec = kernel_set("sm_90a")[0]
    with service.call(0, 0) as call:
        call.kernel(spec)
        after_first = len(opens.paths)
        for _ in range(LATER_HITS):
            call.kernel(spec)
    return {
        "later_hits": LATER_HITS,
        "files_opened_by_the_first": after_first,
        "files_opened_later": len(opens.paths) - after_first,
    }


def warm_start(root: Path) -> dict[str, Any]:
    """Read the index of the whole set, then one kernel; count the objects that are read."""
    from deepgemm_jit.settings import read_settings
    from deepgemm_jit.store import Store

    opens, store = Opens(root), Store.open(read_settings(cache_dir=root))
    started = time.perf_counter()
    entries = list(store.entries())
    index_ms, by_index = (time.perf_counter() - started) * 1e3, opens.objects()
    store.get(entries[0].key, spec_text=entries[0].spec, nvrtc_version=entries[0].nvrtc_version)
    return {
        "entries": len(entries),
        "index_ms": index_ms,
        "objects_by_index": by_index,
        "objects_by_a_hit": opens.objects() - by_index,
    }


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    """Run one of the functions above in a process of its own and return what it measured."""
    command = [sys.executable, __file__, "--here", *arguments]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, env=without_settings(), stdout=subprocess.PIPE, check=True).stdout
    )
    return answer


def prepare(folder: Path) -> tuple[Path, Path]:
    """Build the whole set into a store and a pack of it."""
    root, pack = folder / "store", folder / "set.pack"
    for arguments in (["warmup", "--arch", "sm_90a"], ["pack", "create", str(pack), "--arch", "sm_90a"]):
        command = [sys.executable, "-m", "deepgemm_jit", *arguments, "--cache-dir", str(root), "--json"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return root, pack


def measure(folder: Path, processes: int) -> dict[str, Any]:
    root, pack = prepare(folder)
    empty = folder / "empty"
    ways = {
        "the store": (root, "", "own NVRTC"),
        "the store, no NVRTC": (root, "", "no NVRTC"),
        "a pack, empty store": (empty, str(pack), "own NVRTC"),
        "builder: render, ask NVRTC its version, store": (root, "", "builder"),
    }
    table = Table(("a hit in", 46), ("first ms", 8), ("p10", 6), ("p90", 6), ("next ms", 8))
    table.start(f"{processes} fresh processes each; the next ones read and check the files again, which a service never does")
    rows = []
    for name, (store, packed, way) in ways.items():
        in_fresh_process("first_hit", str(store), packed, way)  # warms the page cache
        answers = [in_fresh_process("first_hit", str(store), packed, way)["ms"] for _ in range(processes)]
        first, later = Spread.of([times[0] for times in answers]), [time for times in answers for time in times[1:]]
        after = Spread.of(later) if later else None
        rows.append({"way": name, "first_hit": first.record("ms"), "next_hit": after.record("ms") if after else None})
        table.row(name, *(number(value, 2) for value in (first.median, first.p10, first.p90, after.median if after else None)))
    later_counts, start = in_fresh_process("later_hits", str(root)), in_fresh_process("warm_start", str(root))
    print(f"\nservice: {later_counts['later_hits']} later hits opened {later_counts['files_opened_later']} files")
    print(
        f"index of {start['entries']} kernels: {start['index_ms']:.1f} ms, {start['objects_by_index']} objects read; "
        f"one kernel then: {start['objects_by_a_hit']} object"
    )
    return {"hits": rows, "later": later_counts, "warm_start": start}


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--processes", type=int, default=30, help="fresh processes behind each median; default: 30")
    line.add_argument("--require", type=float, default=FIRST_HIT_LIMIT_MS, metavar="MS", help="longest first hit; default: 2")
    line.add_argument("--json", type=Path, default=RESULT, metavar="PATH", help="default: bench/results/store.json")
    line.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    options = line.parse_args()
    if options.here:
        what, root, *rest = options.here
        functions = {
            "first_hit": lambda: first_hit(Path(root), rest[0] or None, rest[1]),
            "later_hits": lambda: later_hits(Path(root)),
        }
        print(json.dumps(functions.get(what, lambda: warm_start(Path(root)))()))
        return 0
    if options.processes < 1:
        line.error("argument --processes: must be at least 1")
    record = environment(PACKAGES)
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), options.processes)
    first_ms = results["hits"][0]["first_hit"]["median_ms"]
    start = results["warm_start"]
    ok = first_ms <= options.require and not results["later"]["files_opened_later"]
    ok = ok and (start["objects_by_index"], start["objects_by_a_hit"]) == (0, 1)
    write_json(options.json, {**record, "required_first_hit_ms": options.require, "ok": ok, **results})
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())

"""One rank of a job that starts cold: builds what it is told, and counts its NVRTC compiles where they happen.

``ranks.py COUNTS SPEC_TEXT THREADS``: for each line of its input, the root of a store, it says ``ready`` and, upon the next line,
builds the spec there with all threads at once and prints the digests as JSON. Each compile adds a line to the file COUNTS.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from deepgemm_jit.builder import Builder
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import KernelSpec


def count_compiles(path: Path) -> None:
    compile_program = nvrtc.nvrtcCompileProgram

    def counted(*arguments: Any) -> Any:
        result = compile_program(*arguments)
        # One short append: the lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.close(descriptor)
        return result

    nvrtc.nvrtcCompileProgram = counted


def main() -> None:
    logging.basicConfig()  # as a server has it: the library alone says nothing
    counts, text, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    spec = KernelSpec.from_text(text)
    count_compiles(counts)
    for line in sys.stdin:
        builder = Builder(read_settings(cache_dir=Path(line.strip())))
        builder.request(spec)  # rendered beforehand, so that all come to the store at once
        print("ready", flush=True)
        sys.stdin.readline()
        with ThreadPoolExecutor(threads) as pool:
            built = list(pool.map(builder.build, [spec] * threads))
        print(json.dumps([each.cubin.digest for each in built]), flush=True)


if __name__ == "__main__":
    main()

"""Compiles kernels in a process of its own, without a store: ``compile.py TIMES SPEC_TEXT...`` prints digests, by spec."""

from __future__ import annotations

import json
import os
import sys

from deepgemm_jit.compiler import compile_options, compile_source, nvrtc_info
from deepgemm_jit.frontend import render
from deepgemm_jit.spec import KernelSpec


def main() -> None:
    times, texts = int(sys.argv[1]), sys.argv[2:]
    sources = {text: render(KernelSpec.from_text(text)) for text in texts}
    nvrtc_info()
    digests: dict[str, list[str]] = {text: [] for text in texts}
    os.access("/compiles begin", os.F_OK)  # marks for a trace
    for text, source in sources.items():
        arch = KernelSpec.from_text(text).arch
        for _ in range(times):
            compiled = compile_source(
                source=source.text, headers=source.headers, entry=source.entry, arch=arch, options=compile_options(arch)
            )
            digests[text].append(compiled.cubin.digest)
    os.access("/compiles end", os.F_OK)
    print(json.dumps(digests))


if __name__ == "__main__":
    main()

"""The kernel set as built, as kept in ``cache/kernels/<arch>.json``; run as a script, this module writes these files anew."""

from __future__ import annotations

import json
from typing import Any

from deepgemm_jit.compiler import Compiled, compile_options, compile_source, nvrtc_info
from deepgemm_jit.frontend import render
from deepgemm_jit.resources import data_dir
from deepgemm_jit.spec import ARCHES, KernelSpec, kernel_set
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes

FOLDER = data_dir("cache") / "kernels"


def compiled(spec: KernelSpec) -> Compiled:
    """Compile a spec without a store."""
    source = render(spec)
    return compile_source(
        source=source.text, headers=source.headers, entry=source.entry, arch=spec.arch, options=compile_options(spec.arch)
    )


def kernel_facts(spec: KernelSpec, kernel: Compiled) -> dict[str, int]:
    """Return the reviewed numbers of one kernel: registers and local memory per thread, shared memory per block."""
    facts = kernel.cubin.facts
    return {
        "registers": facts.registers,
        "static_shared_memory_bytes": facts.shared_memory_bytes,
        "dynamic_shared_memory_bytes": dynamic_shared_memory_bytes(spec),
        "local_memory_bytes": facts.local_memory_bytes,
        "spill_store_bytes": facts.spill_store_bytes,
        "spill_load_bytes": facts.spill_load_bytes,
        "cubin_size_bytes": len(kernel.cubin.image),
    }


def document(arch: str, nvrtc_version: str, kernels: dict[str, Any]) -> str:
    """Return the text of a file: one kernel per line, by name, so that a diff shows what moved."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels))
    return f'{{\n "arch": "{arch}",\n "nvrtc_version": "{nvrtc_version}",\n "kernels": {{\n{lines}\n }}\n}}\n'


def main() -> None:
    """Write the facts of every arch, as the NVRTC at hand builds it."""
    FOLDER.mkdir(exist_ok=True)
    for arch in ARCHES:
        kernels = {spec.name: kernel_facts(spec, compiled(spec)) for spec in kernel_set(arch)}
        path = FOLDER / f"{arch}.json"
        path.write_text(document(arch, nvrtc_info().version, kernels))
        print(f"{path}: {len(kernels)} kernels, NVRTC {nvrtc_info().version}")


if __name__ == "__main__":
    main()

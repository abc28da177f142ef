"""Kernels that another NVRTC built, on a GPU: a pack made elsewhere serves this machine, with an empty store and no compile.

On the one machine, without a GPU: ``deepgemm-jit warmup --arch sm_90a``, ``deepgemm-jit pack create set.pack``. On the other,
with a Hopper GPU, torch and another NVRTC or none: ``python bench/foreign_pack.py set.pack``.

1. Every byte of the pack is checked, and that it was built by another NVRTC than the one here (--same-nvrtc lets it pass).
2. Each kernel of the set is loaded into a context, under the policy "never".
3. examples/first_forward.py runs with the pack alone and compares its GEMMs with float64.

Exit status: 0 when all of it holds, 1 when not, 2 for wrong usage. Prints one JSON object; ``--json PATH`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import environment, try_driver_version, without_settings

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nvidia-cuda-nvrtc", "cuda-bindings", "torch")


def load_all(pack: Path, empty: Path) -> dict[str, Any]:
    """Load every kernel of the set out of the pack into the first GPU's context; return what came from where."""
    from deepgemm_jit.compiler import nvrtc_info
    from deepgemm_jit.errors import ToolchainError
    from deepgemm_jit.service import KernelService
    from deepgemm_jit.settings import read_settings
    from deepgemm_jit.spec import kernel_set
    from deepgemm_jit.store.pack import read_pack, verify_pack

    opened = read_pack(pack)
    verify_pack(opened)
    try:
        here = nvrtc_info().version
    except ToolchainError:
        here = None
    service = KernelService(settings=read_settings(cache_dir=empty, packs=(pack,), compile="never"))
    loaded = 0
    with service.call(0, 0) as call:
        arch = call.limits.arch
        for spec in kernel_set(arch):
            call.kernel(spec)
            loaded += 1
    return {
        "arch": arch,
        "nvrtc_here": here,
        "nvrtc_of_the_pack": sorted({entry.nvrtc_version for entry in opened.entries}),
        "kernels_of_the_pack": len(opened.entries),
        "kernels_loaded": loaded,
        "files_written": sum(path.is_file() for path in empty.rglob("*")),
    }


def forward(pack: Path) -> subprocess.CompletedProcess[str]:
    """Run the first forward with nothing but the pack."""
    environ = without_settings() | {"DEEPGEMM_JIT_PACKS": str(pack), "DEEPGEMM_JIT_COMPILE": "never"}
    command = [sys.executable, str(ROOT / "examples/first_forward.py")]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)


def main() -> int:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("pack", type=Path)
    line.add_argument("--same-nvrtc", action="store_true", help="the NVRTC here may be the one that built the pack")
    line.add_argument("--json", type=Path, metavar="PATH")
    options = line.parse_args()
    pack = options.pack.absolute()
    if not pack.is_file():
        line.error(f"{pack} is no file")
    with tempfile.TemporaryDirectory() as empty:
        found = load_all(pack, Path(empty))
    done = forward(pack)
    print(done.stdout, file=sys.stderr)
    foreign = found["nvrtc_here"] not in found["nvrtc_of_the_pack"]
    ok = done.returncode == 0 and (foreign or options.same_nvrtc) and not found["files_written"] and found["kernels_loaded"] > 0
    result = {
        **environment(PACKAGES),
        "driver": try_driver_version(),
        "ok": ok,
        "first_forward_exit_status": done.returncode,
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())

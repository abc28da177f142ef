"""The errors that docs/troubleshooting.md quotes, raised for real; ``--write`` puts their texts into the page.

A case is a function that gets an empty folder and raises, or logs, what the block marked with its name shows. What differs from
machine to machine is replaced: the folder is /srv, processes are 4242 and 4243, NVRTC is the one of constraints.txt.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from doubles.builder import InstantBuilder  # noqa: E402 - a test run has these paths, a script makes them
from doubles.driver import DriverDouble  # noqa: E402

from deepgemm_jit.builder import Builder, check_loadable  # noqa: E402
from deepgemm_jit.cli.output import open_store  # noqa: E402
from deepgemm_jit.errors import DeepGemmJitError  # noqa: E402
from deepgemm_jit.service import KernelService  # noqa: E402
from deepgemm_jit.settings import Settings, read_settings  # noqa: E402
from deepgemm_jit.spec import arch_named, arch_of, kernel_set  # noqa: E402
from deepgemm_jit.store.pack import pack_bytes, write_pack  # noqa: E402
from deepgemm_jit.warmup import plan_for  # noqa: E402

PAGE = ROOT / "docs/troubleshooting.md"
MODEL = ROOT / "tests/data/models/deepseek-v3"
SPEC = next(spec for spec in kernel_set("sm_90a") if spec.family == "per_token_cast_to_fp8")
_MARKED = re.compile(r"(?<=^<!-- raised: )(?P<name>[\w ]+) -->\n```text\n(?P<text>.*?)(?=^```$)", re.MULTILINE | re.DOTALL)

# What is not the same everywhere, or changes with each kernel and setting, and what the page has instead.
_VARYING = {
    r"NVRTC \d+\.\d+": "NVRTC 13.5",
    r"objects/[0-9a-f]{2}/[0-9a-f]{64}": "objects/ab/abcd...",
    r"quarantine/[0-9a-f]{64}\.\w+": "quarantine/abcd....x",
    r"Known are: .*": "Known are: ...",
}

Case = Callable[[Path], Any]


class NotHereError(Exception):
    """This machine cannot raise the error; the text says why."""


def settings_in(folder: Path, **more: Any) -> Settings:
    return read_settings({}, cache_dir=folder / "kernels", lock_dir=folder / "locks", **more)


# sitecustomize: the bindings are there and libnvrtc is not, as where the extra was forgotten. A machine may have one elsewhere,
# of a CUDA toolkit, so it is the search that finds nothing.
_WITHOUT_NVRTC = """
from cuda import pathfinder
def search(name):
    raise pathfinder.DynamicLibNotFoundError(f"no lib{name}.so")
pathfinder.load_nvidia_dynamic_lib = search
"""


def without_nvrtc(folder: Path, *command: str) -> str:
    """Run the command line where there is no libnvrtc; return what it says."""
    (folder / "sitecustomize.py").write_text(_WITHOUT_NVRTC)
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)]), "PATH": os.defpath}
    child = subprocess.run(
        [sys.executable, "-m", "deepgemm_jit", *command, "--cache-dir", str(folder / "kernels")],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 1, child.stderr
    return next(line for line in child.stderr.splitlines() if line.startswith("Error: "))


def not_built(folder: Path) -> None:
    Builder(settings_in(folder, compile="never")).build(SPEC)


def no_such_setting(_folder: Path) -> None:
    read_settings({"DEEPGEMM_JIT_COMPLIE": "never"})


def no_such_value(_folder: Path) -> None:
    read_settings({"DEEPGEMM_JIT_COMPILE": "0"})


def no_nvrtc(folder: Path) -> str:
    return without_nvrtc(folder, "warmup", "--arch", "sm_90a")


def old_driver(_folder: Path) -> None:
    check_loadable(12)


def no_driver(_folder: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with KernelService().call(0, 0):
            pass
    raise NotHereError("this machine has a driver")


def unsupported_gpu(_folder: Path) -> None:
    arch_of((8, 0))


def unsupported_arch(_folder: Path) -> None:
    arch_named("sm_90")


def wrong_split(_folder: Path) -> None:
    plan_for("sm_90a", MODEL, tp=12)


def wrong_operands(_folder: Path) -> None:
    if find_spec("torch") is None:
        raise NotHereError("torch is not installed")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from deepgemm_jit import ops

    with FakeTensorMode():
        x, a_scale = torch.empty((512, 2048), dtype=torch.bfloat16), torch.empty((512, 16))
        b, b_scale = torch.empty((1536, 2048), dtype=torch.float8_e4m3fn), torch.empty((1536, 16))
        ops.fp8_gemm_nt((x, a_scale), (b, b_scale), torch.empty((512, 1500), dtype=torch.bfloat16))


def another_device(_folder: Path) -> None:
    driver, service = _pretended()
    with service.call(0, 0) as call:
        kernel = call.kernel(SPEC)
    driver.push_context(driver.retain_primary(1))
    kernel.launch((1, 1, 1), (128, 1, 1), 0, 0)


def reset_context(_folder: Path) -> None:
    driver, service = _pretended()
    driver.push_context(driver.retain_primary(0))
    kernel = service.kernel(SPEC)
    driver.reset_primary(0)
    driver.retain_primary(0)
    kernel.launch((1, 1, 1), (128, 1, 1), 0, 0)


def unloaded_kernel(_folder: Path) -> None:
    driver, service = _pretended()
    driver.push_context(driver.retain_primary(0))
    kernel = service.kernel(SPEC)
    service.unload()
    kernel.launch((1, 1, 1), (128, 1, 1), 0, 0)


def forked_process(_folder: Path) -> str:
    driver, service = _pretended()
    driver.push_context(driver.retain_primary(0))
    kernel = service.kernel(SPEC)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kernel.launch((1, 1, 1), (128, 1, 1), 0, 0)
        except DeepGemmJitError as error:
            text = str(error).replace(f"process {os.getppid()}", "process 4242").replace(f"fork {os.getpid()}", "fork 4243")
            os.write(write, f"{type(error).__name__}: {text}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        return said.read()


def load_in_capture(_folder: Path) -> None:
    driver, service = _pretended()
    driver.refuses_load_in_capture = True
    stream = driver.create_stream(driver.retain_primary(0))
    driver.begin_capture(stream)
    with service.call(0, stream) as call:
        call.kernel(SPEC)


def _pretended() -> tuple[DriverDouble, KernelService]:
    driver = DriverDouble(gpus=2)
    return driver, KernelService(builder=InstantBuilder(), driver=driver)  # type: ignore[arg-type]


def unsafe_store(folder: Path) -> None:
    (folder / "kernels").mkdir()
    (folder / "kernels").chmod(0o777)
    open_store(settings_in(folder))


def unusable_store(folder: Path) -> None:
    (folder / "kernels").touch()
    open_store(settings_in(folder))


def damaged_entry(folder: Path) -> str:
    builder = Builder(settings_in(folder))
    builder.build(SPEC)
    (stored,) = (path for path in (folder / "kernels/v1/objects").rglob("*") if path.is_file())
    cubin = bytearray(stored.read_bytes())
    cubin[len(cubin) // 2] ^= 1
    stored.write_bytes(cubin)
    return _logged(lambda: Builder(settings_in(folder)).build(SPEC))


def open_pack(folder: Path) -> str:
    _pack(folder).chmod(0o664)
    return _logged(lambda: Builder(settings_in(folder / "other", packs=(folder / "kernels.pack",))).build(SPEC))


def pack_of_another_schema(folder: Path) -> str:
    pack = _pack(folder)
    pack.write_bytes(pack.read_bytes().replace(b'"schema":1', b'"schema":2', 1))
    return _logged(lambda: Builder(settings_in(folder / "other", packs=(pack,))).build(SPEC))


def _pack(folder: Path) -> Path:
    builder = Builder(settings_in(folder))
    builder.build(SPEC)
    data = pack_bytes("0", list(builder.store.entries()), lambda entry: builder.store.load(entry).image)
    write_pack(folder / "kernels.pack", data)
    return folder / "kernels.pack"


def _logged(action: Callable[[], object]) -> str:
    """Return the one warning that an action logs."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepgemm_jit")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    (warning,) = said
    return warning


CASES: dict[str, Case] = {
    function.__name__.replace("_", " "): function
    for function in (
        not_built, no_such_setting, no_such_value, no_nvrtc, old_driver, no_driver, unsupported_gpu,
        unsupported_arch, wrong_split, wrong_operands, another_device, reset_context, unloaded_kernel, forked_process,
        load_in_capture, unsafe_store, unusable_store, damaged_entry, open_pack, pack_of_another_schema,
    )
}  # fmt: skip


def text_of(case: Case, folder: Path) -> str:
    """Return what a case raises or returns, as the page shows it.

    Raises:
        NotHereError: this machine cannot tell.
    """
    try:
        text = case(folder)
    except DeepGemmJitError as error:
        text = f"{type(error).__name__}: {error}"
    assert isinstance(text, str) and text, f"{case.__name__} raised nothing"
    text = text.replace(str(folder), "/srv").replace(f"{ROOT}/tests/data/models", "/models")
    for pattern, shown in _VARYING.items():
        text = re.sub(pattern, shown, text)
    return text + "\n"


def quoted() -> dict[str, str]:
    """Return what the page shows, by case."""
    return {found["name"]: found["text"] for found in _MARKED.finditer(PAGE.read_text())}


def main() -> int:
    if sys.argv[1:] != ["--write"]:
        print(__doc__)
        return 2

    def block(found: re.Match[str]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            try:
                text = text_of(CASES[found["name"]], Path(folder))
            except NotHereError:
                text = found["text"]
        return f"{found['name']} -->\n```text\n{text}"

    PAGE.write_text(_MARKED.sub(block, PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

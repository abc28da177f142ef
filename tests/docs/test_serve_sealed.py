"""The server of the examples: it starts only when nothing is left to compile, and compiles nothing afterwards."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from docs.blocks import ROOT

from deepgemm_jit.builder import Builder
from deepgemm_jit.settings import read_settings
from deepgemm_jit.store.pack import pack_bytes, write_pack
from deepgemm_jit.warmup import plan_for

pytestmark = pytest.mark.nvrtc

MODEL = ROOT / "tests/data/models/qwen3-30b-a3b-fp8"
MAX_TOKENS = 64
# sitecustomize: no NVRTC can be loaded, and torch is not installed. What is left of the process is a server without either.
BARE = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "cuda.bindings.nvrtc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""

Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def pack(warm_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack of what the model needs for up to 64 tokens, and nothing else."""
    file = tmp_path_factory.mktemp("pack") / "kernels.pack"
    planned = {spec.name for spec in plan_for("sm_90a", MODEL, max_tokens=MAX_TOKENS).kernels}
    store = Builder(read_settings({}, cache_dir=warm_store)).store
    entries = [entry for entry in store.entries() if entry.entry in planned]
    assert len(entries) == len(planned) > 0
    write_pack(file, pack_bytes("0", entries, lambda entry: store.load(entry).image))
    return file


def _environment(*first: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, first), str(ROOT), *filter(None, sys.path)]), **more}


def _command() -> list[str]:
    script = str(ROOT / "examples/serve_sealed.py")
    return [sys.executable, script, "--model", str(MODEL), "--max-tokens", str(MAX_TOKENS), "--port", "0"]


@contextmanager
def _served(environment: dict[str, str]) -> Iterator[Ask]:
    process = subprocess.Popen(_command(), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), f"it ended with {process.wait(60)}"

        def ask(path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
            try:
                with urllib.request.urlopen(address + path, body, timeout=60) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as refusal:
                with refusal:
                    return refusal.code, json.load(refusal)

        yield ask
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
    assert process.returncode == 0


def test_it_starts_from_a_pack_with_neither_compiler_nor_torch(pack: Path, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/sitecustomize.py").write_text(BARE)
    with _served(_environment(tmp_path / "bare", DEEPGEMM_JIT_PACKS=str(pack))) as ask:
        status, state = ask("/ready")
        assert state["kernels"] == len(plan_for("sm_90a", MODEL, max_tokens=MAX_TOKENS).kernels)
        # Without a GPU the driver's reason, with one torch's: this process has no torch in any case.
        assert (status, state["ready"], state["gpus"]) == (503, False, 0)
        assert state["reason"]
        assert ask("/forward", b'{"tokens": 8}') == (503, {"error": state["reason"]})
    assert list(cache_dir.rglob("*.json")) == []


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/forward", b'{"tokens": 65}', 413, "65 tokens; the kernels were planned for up to 64"),
        ("/forward", b'{"tokens": 0}', 400, "n at least 1"),
        ("/forward", b'{"tokens": true}', 400, "n at least 1"),
        ("/forward", b"[]", 400, "n at least 1"),
        ("/forward", b"\xff", 400, "n at least 1"),
        ("/forward", b" " * 2000, 411, "at most 1024 bytes"),
        ("/other", b"{}", 404, "/forward"),
        ("/", None, 404, "/forward"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(ask: Ask, path: str, body: bytes | None, status: int, part: str) -> None:
    answered, payload = ask(path, body)
    assert answered == status
    assert part in payload["error"]


@pytest.fixture(scope="module")
def ask(pack: Path) -> Iterator[Ask]:
    """Return a function that asks one server, for all requests."""
    with _served(_environment(DEEPGEMM_JIT_PACKS=str(pack), DEEPGEMM_JIT_CACHE_DIR=str(pack.with_name("none")))) as asks:
        yield asks


def test_it_does_not_start_with_a_kernel_missing_and_names_the_command(cache_dir: Path) -> None:
    """NVRTC could compile all of them in this environment."""
    environment = _environment(DEEPGEMM_JIT_COMPILE="auto")
    ended = subprocess.run(_command(), env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"deepgemm-jit warmup --arch sm_90a --cache-dir {cache_dir} --model" in ended.stderr
    assert ended.stderr.rstrip().endswith("--max-tokens 64")
    assert "Traceback" not in ended.stderr
    assert list(cache_dir.rglob("*.json")) == []


def test_it_is_sealed_after_the_start(pack: Path) -> None:
    """In the process of the server: a kernel that was not planned is refused, though NVRTC is there and the policy said auto."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import serve_sealed
from deepgemm_jit.errors import KernelNotBuiltError
from deepgemm_jit.service import default_service
from deepgemm_jit.spec import kernel_set

server = serve_sealed.start({str(MODEL)!r}, {MAX_TOKENS})
others = [spec for spec in kernel_set("sm_90a") if spec not in server.plan.kernels]
refused = 0
for spec in others:
    try:
        default_service().builder.build(spec)
    except KernelNotBuiltError:
        refused += 1
print(refused, len(others))
"""
    environment = _environment(DEEPGEMM_JIT_PACKS=str(pack), DEEPGEMM_JIT_COMPILE="auto")
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    refused, others = map(int, child.stdout.split())
    assert refused == others > 0


@pytest.mark.skipif(find_spec("torch") is None, reason="the layer needs torch, which is not installed")
def test_without_a_gpu_the_layer_comes_as_far_as_the_devices_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults of a call are listed at once, so that shapes and dtypes are right when only devices are wrong."""
    import torch

    from deepgemm_jit.errors import OperandError

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    serve_sealed = importlib.import_module("serve_sealed")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    layer = serve_sealed.Layer(serve_sealed.Sizes(hidden=256, width=128, experts=12, top_k=8), "cpu")
    with pytest.raises(OperandError) as refusal:
        layer.forward(5)
    assert [fault for fault in refusal.value.faults if not fault.endswith("must be on a CUDA device, not cpu")] == []


def _refused(*options: str) -> str:
    """Return what it says that does not start."""
    command = [*_command(), *options]  # of an option that stands twice the last counts
    ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_model_that_it_has_no_layer_for_is_refused(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = _refused("--model", str(tmp_path))
    assert "not started: not supported" in said
    assert "quantization_config" in said


@pytest.mark.parametrize("outer", [True, False])
def test_a_model_with_fp4_experts_is_refused(outer: bool, tmp_path: Path) -> None:
    config = json.loads((ROOT / "tests/data/models/deepseek-v4-flash/config.json").read_text())
    del (config["quantization_config"] if outer else config)["expert_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "with FP4 experts" in _refused("--model", str(tmp_path))


def test_an_address_that_is_not_to_be_had_is_refused_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = _refused("--port", str(port), "--model", "no/such/model")
    assert f"not started: no listening at 127.0.0.1, port {port}: " in said
    assert "in use" in said
    assert "not started: no listening at 127.0.0.1, port 80000: " in _refused("--port", "80000", "--model", "no/such/model")

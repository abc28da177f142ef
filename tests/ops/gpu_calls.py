"""What tests of whole processes share: a call with its reference, and programs that make calls in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from ops.reference import Output, assert_close, m_major, product, random_a, random_b

import deepgemm_jit
from deepgemm_jit import ops

N, K = 264, 400
CHILD_LIMIT_S = 100


class Product:
    """One dense call and its float64 reference; scales lie as the kernel reads them, so that the call is one launch."""

    def __init__(self, m: int = 77, n: int = N, k: int = K, device: str = "cuda:0") -> None:
        self.a, self.b = random_a(m, k, device=device), random_b(n, k, device=device)
        self.scales = m_major(self.a.scales)
        self.out = Output(m, n, device=device)
        self.reference = product(self.a, self.b)
        torch.cuda.synchronize(device)

    def run(self) -> None:
        ops.fp8_gemm_nt((self.a.values, self.scales), self.b.pair, self.out.tensor)

    def check(self, what: str = "") -> None:
        torch.cuda.synchronize(self.out.tensor.device)
        self.out.assert_written()
        assert_close(self.out.tensor, self.reference, what)
        self.out.tensor.fill_(torch.nan)


_BEGIN = """
import atexit, json, os, signal, sys, threading, time
import torch
import deepgemm_jit as dj
from ops.reference import Output, assert_close, m_major, product, random_a, random_b

def multiply(device="cuda:0"):
    from deepgemm_jit import ops
    a, b, out = random_a(77, 400, device=device), random_b(264, 400, device=device), Output(77, 264, device=device)
    scales = m_major(a.scales)
    for _ in range(2):
        ops.fp8_gemm_nt((a.values, scales), b.pair, out.tensor)
    out.assert_written()
    assert_close(out.tensor, product(a, b))
    return a.values, scales, *b.pair, out.tensor
"""


def child(script: str, *arguments: str, file: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", _BEGIN + script]
    if file is not None:
        file.write_text(_BEGIN + script)
        command = [sys.executable, str(file)]
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
    )

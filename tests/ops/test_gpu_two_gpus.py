"""Two GPUs in one process: threads that use both, graphs on both, and memory of the one that is not used."""

from __future__ import annotations

import json
import threading
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from ops.gpu_calls import Product, child
from ops.reference import assert_close, m_major, product, random_a, random_b

from deepgemm_jit import ops
from deepgemm_jit.service import KernelService, default_service

pytestmark = pytest.mark.multigpu


def test_operands_on_the_other_gpu_leave_current_device_and_context_as_they_were() -> None:
    calls = [Product(device=f"cuda:{gpu}") for gpu in (0, 1)]
    contexts = default_service().contexts
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.zeros(1, device="cuda")
            before = contexts.current()
            for _ in range(50):
                for call in calls:
                    call.run()
                    assert torch.cuda.current_device() == current
                    assert contexts.current() is before
            for call in calls:
                call.check(f"current device {current}")


def test_graphs_of_both_gpus_replay_like_eager_also_after_later_loads(cold: KernelService) -> None:
    calls = [Product(device=f"cuda:{gpu}") for gpu in (0, 1)]
    graphs, bits = [], []
    for gpu, call in enumerate(calls):
        call.run()
        bits.append(call.out.bits())
        call.check("eager")
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU: torch's own capture stream is one of the GPU that captured first.
        with torch.cuda.device(gpu), torch.cuda.graph(graph, stream=torch.cuda.Stream(gpu)):
            call.run()
        graphs.append(graph)
    for gpu in (0, 1):
        Product(4096, 4096, 512, device=f"cuda:{gpu}").run()
    for _ in range(3):
        for gpu, (graph, call) in enumerate(zip(graphs, calls, strict=True)):
            with torch.cuda.device(gpu):
                graph.replay()
            torch.cuda.synchronize(gpu)
            assert torch.equal(call.out.bits(), bits[gpu])
            call.check(f"replay on GPU {gpu}")


class GroupedCall:
    """A grouped product whose bits are known: each run poisons D, multiplies, and counts what differs, all on the device."""

    def __init__(self, device: str, stream: torch.cuda.Stream, groups: int = 4, rows: int = 128) -> None:
        self.stream = stream
        m = groups * rows
        self.a, self.b = random_a(m, 512, device=device), random_b(groups, 256, 512, device=device)
        self.scales = m_major(self.a.scales)
        self.index = torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(rows)
        self.out = torch.empty((m, 256), dtype=torch.bfloat16, device=device)
        self.different = torch.zeros((), dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            self._multiply()
        torch.cuda.synchronize(device)
        for group in range(groups):
            part = slice(group * rows, (group + 1) * rows)
            assert_close(self.out[part], product(self.a[part], self.b[group]), f"{device}, group {group}")
        self.bits = self.out.view(torch.int16).clone()
        torch.cuda.synchronize(device)

    def _multiply(self) -> None:
        ops.m_grouped_fp8_gemm_nt_contiguous((self.a.values, self.scales), self.b.pair, self.out, self.index)

    def run(self, current: int) -> None:
        """Run with ``current`` as the current device, on a stream of the operands' device."""
        with torch.cuda.stream(self.stream):
            self.out.fill_(torch.nan)
            torch.cuda.set_device(current)
            self._multiply()
            assert torch.cuda.current_device() == current
            self.different += (self.out.view(torch.int16) != self.bits).sum()


def test_ten_thousand_interleaved_calls_of_four_threads_on_both_gpus_are_all_right(cold: KernelService) -> None:
    """The current device is always the other one."""
    threads_count, calls_each = 4, 2500
    work = [[GroupedCall(f"cuda:{gpu}", torch.cuda.Stream(gpu)) for gpu in (0, 1)] for _ in range(threads_count)]
    barrier, raised = threading.Barrier(threads_count), []

    def run(calls: list[GroupedCall]) -> None:
        barrier.wait()
        try:
            for turn in range(calls_each):
                gpu = turn % 2
                calls[gpu].run(current=1 - gpu)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(calls,)) for calls in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    for gpu in (0, 1):
        torch.cuda.synchronize(gpu)
    assert [[int(call.different) for call in calls] for calls in work] == [[0, 0]] * threads_count


def test_a_process_that_uses_the_second_gpu_takes_no_memory_of_the_first() -> None:
    done = child("""
import subprocess
from deepgemm_jit.runtime import Driver

def used(gpu):
    uuid = str(torch.cuda.get_device_properties(gpu).uuid)
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        found, mebibytes = line.split(", ")
        if uuid in found:
            return int(mebibytes)

torch.cuda.set_device(1)
driver = Driver()
multiply("cuda:1")
before = used(0)
for _ in range(100):
    multiply("cuda:1")
held = torch.ones(1 << 28, device="cuda:1")
torch.cuda.synchronize(1)
print(json.dumps({"before": before, "after": used(0), "second": used(1), "primary of the first": driver.primary_is_active(0)}))
""")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["primary of the first"] is False
    assert found["after"] == found["before"]
    assert found["second"] >= 1024, "the measure sees what is used"

"""How processes begin and end: nothing happens at exit however it comes, and each start method has its own, right outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import deepgemm_jit

pytestmark = pytest.mark.none

LIMIT_S = 60

# A process that loaded kernels in two contexts. A driver call after the end of the program would show on stderr.
_PROGRAM = """
import atexit, os, signal, sys, threading, time
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.service import service as module
from deepgemm_jit.runtime import Launch
from deepgemm_jit.spec import kernel_set

class Watched(DriverDouble):
    ended = False

    def _count(self, method):
        if self.ended:
            os.write(2, f"{method} after the end\\n".encode())
        super()._count(method)

driver = Watched(gpus=2)
module._DEFAULT["service"] = KernelService(builder=InstantBuilder(), driver=driver)

def launch(gpu):
    with default_service().call(gpu, 0) as call:
        for spec in kernel_set("sm_90a")[:3]:
            call.launch(spec, Launch((1, 1, 1), (128, 1, 1), 0))

def end():
    Watched.ended = True

launch(0)
launch(1)
"""

ENDINGS = {
    "end": ("atexit.register(end)", 0, ""),
    "exit": ("atexit.register(end); sys.exit(0)", 0, ""),
    "exit of a failed program": ("atexit.register(end); sys.exit(3)", 3, ""),
    "an exception": ("atexit.register(end); raise SystemError('of the application')", 1, "SystemError: of the application"),
    "an exception in the middle of a call": (
        "atexit.register(end)\nwith default_service().call(1, 0): raise SystemError('of the application')",
        1,
        "SystemError: of the application",
    ),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    "SIGTERM with a handler": (
        (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); atexit.register(end)\n"
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
        ),
        0,
        "",
    ),
    "a daemon thread that goes on launching": (
        (
            "go = threading.Event()\n"
            "def work():\n"
            "    while True:\n"
            "        launch(1); go.set()\n"
            "threading.Thread(target=work, daemon=True).start(); go.wait(30)"
        ),
        0,
        "",
    ),
    "os._exit": ("os._exit(0)", 0, ""),
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_happens_at_exit(ending: str) -> None:
    last_lines, status, told = ENDINGS[ending]
    done = run(_PROGRAM + last_lines)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1:] == ([told] if told else [])
    assert "after the end" not in done.stderr


_CHILDREN = """
import multiprocessing, os, sys
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from deepgemm_jit.errors import ForkedProcessError
from deepgemm_jit.runtime import Launch
from deepgemm_jit.service import KernelService
from deepgemm_jit.spec import kernel_set

SPEC = kernel_set("sm_90a")[0]
driver = DriverDouble()
service = KernelService(builder=InstantBuilder(), driver=driver)

def launches():
    with service.call(0, 0) as call:
        call.launch(SPEC, Launch((1, 1, 1), (128, 1, 1), 0))
    return len(driver.launches)

def work(answers):
    try:
        answers.put(launches())
    except ForkedProcessError as error:
        answers.put([error.loaded_pid == os.getppid(), error.pid == os.getpid(), len(driver.launches)])

if __name__ == "__main__":
    if sys.argv[2] == "after":
        assert launches() == 1
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.Queue()
    child = context.Process(target=work, args=(answers,))
    child.start()
    print(answers.get(timeout=50))
    child.join()
    assert child.exitcode == 0
    print(launches())
"""


@pytest.mark.parametrize("cuda", ["before", "after"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_launch_for_themselves_or_are_told_why_not(method: str, cuda: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_CHILDREN)
    paths = [str(Path(__file__).parents[1]), str(Path(deepgemm_jit.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, str(program), method, cuda],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused = (method, cuda) == ("fork", "after")
    in_child = "[True, True, 1]" if refused else "1"
    in_parent = "2" if cuda == "after" else "1"
    assert done.stdout.splitlines() == [in_child, in_parent]


_NO_CUDA = """
import json, sys
import deepgemm_jit as dj
from click.testing import CliRunner
from deepgemm_jit.cli import main
from deepgemm_jit.service import KernelService, default_service

spec = dj.kernel_set("sm_90a")[0]
default_service(), KernelService()
plan = ["plan", "--arch", "sm_90a", "--model", sys.argv[1], "--reader", "builtin"]
for command in (["kernels", "--arch", "sm_90a"], plan, ["verify"], ["list"]):
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.output
print(json.dumps(sorted(name for name in sys.modules if name.startswith("cuda"))))
"""


def test_import_plan_and_command_line_start_no_cuda() -> None:
    model = Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"
    command = [sys.executable, "-c", _NO_CUDA, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "cuda.bindings.driver" not in done.stdout

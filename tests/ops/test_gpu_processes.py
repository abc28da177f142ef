"""How processes that use a GPU begin and end: exits, forks, spawned children."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from ops.gpu_calls import child

pytestmark = pytest.mark.gpu

ENDINGS = {
    "end": ("", 0, ""),
    "exit": ("sys.exit(0)", 0, ""),
    "an exception": ("raise SystemError('of the application')", 1, "SystemError: of the application"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    "SIGTERM with a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        0,
        "",
    ),
    "a kept kernel": (
        (
            "from deepgemm_jit.service import default_service\n"
            "kept = [kernel for home in default_service()._homes.values() for kernel in home.kernels.values()]"
        ),
        0,
        "",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_happens_at_exit(ending: str) -> None:
    last_lines, status, told = ENDINGS[ending]
    done = child("multiply()\n" + last_lines)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1:] == ([told] if told else [])
    assert "deepgemm_jit" not in done.stderr


def test_import_plan_and_build_start_no_cuda_and_a_fork_can_use_it() -> None:
    done = child(
        """
from deepgemm_jit.warmup.plan import plan_for

from deepgemm_jit.spec import GemmProblem, limits_of

spec = dj.select(GemmProblem(77, 264, 400), limits_of("sm_90a"))
dj.build(spec)
plan_for("sm_90a", sys.argv[1])
service = dj.KernelService()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    try:
        multiply()
        service.kernel(spec)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not torch.cuda.is_initialized()
multiply()
""",
        str(Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fork_of_a_process_that_used_cuda_is_told_so_and_its_parent_goes_on() -> None:
    done = child("""
from deepgemm_jit import ops
from deepgemm_jit.errors import ForkedProcessError
from deepgemm_jit.service import default_service

a, a_scale, b, b_scale, out = multiply()
kernel = next(kernel for home in default_service()._homes.values() for kernel in home.kernels.values())
pid = os.fork()
if pid == 0:
    told = []
    for use in (
        lambda: ops.fp8_gemm_nt((a, a_scale), (b, b_scale), out),
        lambda: kernel.launch((1, 1, 1), (32, 1, 1), 0, 0),
        lambda: default_service().kernel(kernel.spec),
    ):
        try:
            use()
        except ForkedProcessError as error:
            told.append(error.loaded_pid == os.getppid())
        except BaseException as error:
            told.append(repr(error))
    print(json.dumps(told), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
multiply()
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, True]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_of_a_process_that_used_cuda_compute(method: str, tmp_path: Path) -> None:
    done = child(
        """
import multiprocessing

if __name__ == "__main__":
    multiply()
    children = [multiprocessing.get_context(sys.argv[1]).Process(target=multiply) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0, 0]
""",
        method,
        file=tmp_path / "program.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr

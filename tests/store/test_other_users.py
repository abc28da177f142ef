"""Another user, in a container's bare environment: no passwd line, no home worth the name, stores and packs of others.

Real interpreters and real compiles under another uid. Only root can start them, with an interpreter that this uid may run.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.builder import Builder, build
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.store import Entry
from deepgemm_jit.store.pack import pack_bytes, write_pack

pytestmark = pytest.mark.nvrtc

OTHER_UID = 12345
CAST = next(spec for spec in kernel_set("sm_90a") if spec.family == "per_token_cast_to_fp8")

BUILD = """
import json, logging, sys
told = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("deepgemm_jit").addHandler(handler)
import os
before = sorted(os.listdir(os.environ["TMPDIR"]))
import deepgemm_jit as dj
assert sorted(os.listdir(os.environ["TMPDIR"])) == before, "import touched the disk"
from deepgemm_jit.builder import Builder
from deepgemm_jit.spec import KernelSpec
spec = KernelSpec.from_text(sys.argv[1])
builder = Builder()
builds = [builder.build(spec) for _ in range(2)]
print(json.dumps({
    "uid": os.getuid(),
    "outcomes": [built.outcome for built in builds],
    "stored": [built.stored for built in builds],
    "digest": builds[0].cubin.digest,
    "place": builder.store.describe(),
    "told": told,
}))
"""


def as_user(*command: str | Path, env: dict[str, str], check: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", **env}
    user: dict[str, Any] = {"user": OTHER_UID, "group": OTHER_UID, "extra_groups": []}
    finished = subprocess.run(
        list(map(str, command)), check=False, env=environ, cwd="/", capture_output=True, text=True, timeout=300, **user
    )
    assert not check or finished.returncode == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def other_python() -> Iterator[Path]:
    """An interpreter that the other uid may run, with the packages of this environment.

    The one that runs the tests may lie where only its user can go, so another one of the same version is tried, in an environment
    outside of any home whose packages are a link to ours.
    """
    if os.geteuid() != 0:
        pytest.skip(f"only root can become uid {OTHER_UID}; this is uid {os.geteuid()}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = {str(Path(python).resolve()) for python in (sys.executable, f"/usr/bin/python{version}", "/usr/bin/python3")}
    code = f"import sys, deepgemm_jit.compiler as c; c.nvrtc_info(); assert sys.version_info[:2] == {sys.version_info[:2]!r}"
    reasons = []
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for number, candidate in enumerate(sorted(candidates)):
            home = Path(name) / str(number)
            made = subprocess.run(
                [candidate, "-m", "venv", "--without-pip", str(home)], check=False, capture_output=True, text=True
            )
            packages = home / f"lib/python{version}/site-packages"
            if made.returncode == 0 and packages.is_dir():
                packages.rmdir()
                packages.symlink_to(sysconfig.get_path("purelib"))
                try:
                    probe = as_user(home / "bin/python", "-c", code, env={}, check=False)
                except OSError as error:
                    reasons.append(f"{candidate}: {error}")
                    continue
                if probe.returncode == 0:
                    yield home / "bin/python"
                    return
                reasons.append(f"{candidate}: {probe.stderr.strip().splitlines()[-1:]}")
        pytest.skip(f"uid {OTHER_UID} may run no Python {version} that finds this package: {'; '.join(reasons)}")


@pytest.fixture
def build_as_other(open_dir: Path, other_python: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that builds a kernel twice as the other user, from nothing but the variables given."""
    temp = open_dir / "tmp"
    temp.mkdir()
    temp.chmod(0o1777)

    def run(**env: str) -> dict[str, Any]:
        answer = json.loads(as_user(other_python, "-c", BUILD, CAST.text, env={"TMPDIR": str(temp), **env}).stdout)
        assert answer.pop("uid") == OTHER_UID
        return answer

    return run


HOMES = {"unset": None, "root of the file system": "/", "not there": "/nonexistent", "of mode 0555": "home", "of root": "roots"}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_user_without_passwd_line_and_home_builds_and_keeps(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path, home: str | None
) -> None:
    for name, mode in (("home", 0o555), ("roots", 0o700)):
        (open_dir / name).mkdir()
        (open_dir / name).chmod(mode)
    answer = build_as_other(**({} if home is None else {"HOME": str(open_dir / home)}))
    assert (answer["outcomes"], answer["stored"]) == (["compiled", "cached"], [True, True])
    assert f"{open_dir}/tmp/deepgemm_jit-cache-{OTHER_UID}" in answer["place"]
    # One line states the effective place where that is not the first choice; without HOME it is.
    assert len(answer["told"]) == (0 if home is None else 1)
    assert all(told.startswith("store: ") and "deepgemm_jit-cache" in told for told in answer["told"])


def test_the_stores_of_two_users_are_the_same_bytes(build_as_other: Callable[..., dict[str, Any]], open_dir: Path) -> None:
    ours, theirs = open_dir / "ours", open_dir / "tmp/theirs"
    build(CAST, read_settings(cache_dir=ours))
    build_as_other(DEEPGEMM_JIT_CACHE_DIR=str(theirs), TZ="Asia/Tokyo")
    contents = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()} for root in (ours, theirs)
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 2


def test_a_home_of_ones_own_without_passwd_line_is_used(build_as_other: Callable[..., dict[str, Any]], open_dir: Path) -> None:
    (open_dir / "home").mkdir()
    os.chown(open_dir / "home", OTHER_UID, OTHER_UID)
    answer = build_as_other(HOME=str(open_dir / "home"))
    assert (answer["outcomes"], answer["told"]) == (["compiled", "cached"], [])
    assert stat.S_IMODE((open_dir / "home/.cache/deepgemm_jit").stat().st_mode) == 0o700


def test_where_nothing_can_be_written_memory_serves(build_as_other: Callable[..., dict[str, Any]], open_dir: Path) -> None:
    (open_dir / "tmp").chmod(0o555)
    answer = build_as_other(HOME="/nonexistent")
    assert (answer["outcomes"], answer["stored"]) == (["compiled", "cached"], [False, False])
    assert "memory only" in answer["place"]
    assert len(answer["told"]) == 1


@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_a_store_that_root_filled_serves_any_user_and_is_not_written(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path, mode: int
) -> None:
    root = open_dir / "baked"
    cubin = build(CAST, read_settings(cache_dir=root))
    root.chmod(mode)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    answer = build_as_other(DEEPGEMM_JIT_CACHE_DIR=str(root), HOME="/nonexistent")
    assert (answer["outcomes"], answer["digest"], answer["told"]) == (["cached", "cached"], cubin.digest, [])
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_what_a_store_of_root_lacks_stays_in_memory_with_one_warning(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path
) -> None:
    root = open_dir / "baked"
    build(next(spec for spec in kernel_set("sm_90a") if spec != CAST), read_settings(cache_dir=root))
    root.chmod(0o755)
    answer = build_as_other(DEEPGEMM_JIT_CACHE_DIR=str(root))
    assert answer["stored"] == [False, False]
    (told,) = answer["told"]
    assert told.startswith(f"store {root} cannot be written") and "errno 13" in told


@pytest.mark.parametrize("owner", [0, 54321])
def test_a_pack_baked_as_one_user_works_for_another(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path, tmp_path: Path, owner: int
) -> None:
    builder = Builder(read_settings(cache_dir=tmp_path / "store"))
    cubin = builder.build(CAST).cubin
    pack = open_dir / "kernels.pack"
    umask = os.umask(0o077)
    entry = Entry.for_cubin(builder.request(CAST).key, cubin, CAST.text)
    write_pack(pack, pack_bytes("1", [entry], lambda entry: cubin.image))
    os.umask(umask)
    os.chown(pack, owner, owner)
    answer = build_as_other(DEEPGEMM_JIT_PACKS=str(pack), HOME="/nonexistent", DEEPGEMM_JIT_COMPILE="never")
    assert (answer["outcomes"], answer["digest"]) == (["cached", "cached"], cubin.digest)
    assert all("pack" not in told for told in answer["told"])


def test_a_store_that_a_user_filled_serves_neither_root_nor_a_third(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path
) -> None:
    root = open_dir / "tmp/mine"
    assert build_as_other(DEEPGEMM_JIT_CACHE_DIR=str(root))["stored"] == [True, True]
    built = Builder(read_settings(cache_dir=root)).build(CAST)
    assert (built.outcome, built.stored) == ("compiled", False)
    trusting = Builder(read_settings(cache_dir=root, trust_root=root)).build(CAST)
    assert (trusting.outcome, trusting.stored) == ("cached", True)


def test_the_commands_work_for_another_user_in_a_bare_environment(
    build_as_other: Callable[..., dict[str, Any]], open_dir: Path, other_python: Path
) -> None:
    root = open_dir / "baked"
    build(CAST, read_settings(cache_dir=root))
    root.chmod(0o755)
    env = {"DEEPGEMM_JIT_CACHE_DIR": str(root), "TMPDIR": str(open_dir / "tmp")}
    for arguments, status in ((["verify"], 0), (["list"], 0), (["show", CAST.name], 0), (["prune"], 1), (["clear"], 1)):
        finished = as_user(other_python, "-m", "deepgemm_jit", *arguments, env=env, check=False)
        assert finished.returncode == status, (arguments, finished.stderr)
        assert "Traceback" not in finished.stderr
        assert status == 0 or "errno 13" in finished.stderr
    finished = as_user(other_python, "-m", "deepgemm_jit", "warmup", "--arch", "sm_90a", env=env, check=False)
    assert finished.returncode == 1  # its job is to write
    assert str(root) in finished.stderr
    assert len(list(root.glob("v1/kernels/*"))) == 1

"""``pack``, ``prune`` and ``clear``, and what the other commands say of packs and of damage, around real kernels."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepgemm_jit.builder import Builder, build
from deepgemm_jit.cli import main
from deepgemm_jit.errors import KernelNotBuiltError
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import kernel_set
from deepgemm_jit.store import Entry, Store
from deepgemm_jit.store.pack import pack_bytes, read_pack, write_pack

pytestmark = pytest.mark.nvrtc

WHOLE_SET = kernel_set("sm_90a")
CAST = next(spec for spec in WHOLE_SET if spec.family == "per_token_cast_to_fp8")
DEEPSEEK = Path(__file__).parents[1] / "data" / "models" / "deepseek-v3"

Run = Callable[..., Result]
Answer = Callable[..., dict[str, Any]]
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the whole set, and the pack of it."""
    folder = tmp_path_factory.mktemp("full")
    root = str(folder / "store")
    for arguments in (["warmup", "--arch", "sm_90a", "--jobs", "2"], ["pack", "create", str(folder / "whole set.pack")]):
        result = CliRunner().invoke(main, [*arguments, "--cache-dir", root])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def store(full: Path, cache_dir: Path) -> Path:
    shutil.copytree(full / "store", cache_dir)
    return cache_dir


@pytest.fixture
def pack(full: Path) -> Path:
    return full / "whole set.pack"


def test_create_packs_the_whole_store_and_the_same_again(answer: Answer, store: Path, pack: Path, tmp_path: Path) -> None:
    payload = answer("pack", "create", tmp_path / "again.pack", "--arch", "sm_90a")
    data = pack.read_bytes()
    assert (tmp_path / "again.pack").read_bytes() == data
    assert payload == {
        "pack": str(tmp_path / "again.pack"),
        "kernels": len(WHOLE_SET),
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def test_create_packs_what_a_model_needs(answer: Answer, store: Path, tmp_path: Path) -> None:
    planned = {
        kernel["name"] for kernel in answer("plan", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin")["kernels"]
    }
    answer("pack", "create", tmp_path / "model.pack", "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin")
    assert {kernel["name"] for kernel in answer("pack", "inspect", tmp_path / "model.pack")["kernels"]} == planned
    assert 0 < len(planned) < len(WHOLE_SET)


@pytest.mark.parametrize(("fault", "says"), [("missing", "lacks 1 kernel"), ("damaged", "damaged"), ("empty", "holds no kernel")])
def test_create_writes_nothing_when_a_kernel_is_not_sound(run: Run, store: Path, tmp_path: Path, fault: str, says: str) -> None:
    first = next(store.glob("v1/kernels/*"))
    options = ["--arch", "sm_90a"] if fault == "missing" else []
    if fault == "empty":
        shutil.rmtree(store)
    elif fault == "missing":
        first.unlink()
    else:
        first.write_bytes(b"damaged")
    result = run("pack", "create", tmp_path / "some.pack", *options)
    assert result.exit_code == 1
    assert says in result.stderr and "no pack is written" in result.stderr
    assert fault == "damaged" or "deepgemm-jit warmup" in result.stderr
    assert not (tmp_path / "some.pack").exists()


@pytest.mark.parametrize("options", [(), ("--arch", "sm_90a")], ids=["all", "arch"])
@pytest.mark.parametrize("fault", ["object missing", "another kernel"])
def test_create_writes_nothing_when_another_compilers_entry_of_a_kernel_is_not_sound(
    run: Run, store: Path, tmp_path: Path, fault: str, options: tuple[str, ...]
) -> None:
    first, second = (Entry.from_json(file.read_bytes()) for file in sorted(store.glob("v1/kernels/*"))[:2])
    if fault == "object missing":
        bad = replace(first, nvrtc_version="1.0", digest="0" * 64)
    else:
        bad = replace(second, key=first.key, nvrtc_version="1.0")
    (store / "v1/kernels" / f"{bad.key}.1.0.json").write_bytes(bad.to_json())
    result = run("pack", "create", tmp_path / "some.pack", *options)
    assert result.exit_code == 1
    assert "no pack is written" in result.stderr and f"{bad.key}.1.0" in result.stderr
    assert not (tmp_path / "some.pack").exists()


def test_create_for_an_arch_passes_over_damage_that_is_not_its_own(answer: Answer, store: Path, tmp_path: Path) -> None:
    (store / "v1/kernels" / f"{'f' * 64}.1.0.json").write_bytes(b"damaged")
    assert answer("pack", "create", tmp_path / "some.pack", "--arch", "sm_90a")["kernels"] == len(WHOLE_SET)


@pytest.mark.parametrize("path", ["", ".", "/", "fifo"])
def test_create_over_what_is_no_file_is_an_error_and_not_a_traceback(
    answer: Answer, store: Path, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    error = answer("pack", "create", path, status=1)["error"]
    assert error["type"] == "StoreError"
    assert "the pack cannot be written: it is " in error["message"]
    assert (tmp_path / "fifo").is_fifo()


def test_inspect_shows_what_is_in_a_sound_pack(answer: Answer, run: Run, pack: Path) -> None:
    payload = answer("pack", "inspect", pack)
    assert payload["archs"] == ["sm_90a"]
    assert {kernel["name"] for kernel in payload["kernels"]} == {spec.name for spec in WHOLE_SET}
    text = run("pack", "inspect", pack).stdout
    assert all(spec.name in text for spec in WHOLE_SET)
    assert payload["nvrtc_versions"][0] in text and payload["library_version"] in text


@pytest.mark.parametrize("command", ["inspect", "install"])
@pytest.mark.parametrize("place", [10, -1, "middle"])
def test_a_damaged_pack_is_refused_and_nothing_of_it_installed(
    run: Run, pack: Path, tmp_path: Path, cache_dir: Path, command: str, place: int | str
) -> None:
    data = bytearray(pack.read_bytes())
    data[len(data) // 2 if isinstance(place, str) else place] ^= 1
    bad = tmp_path / "bad.pack"
    bad.write_bytes(data)
    result = run("pack", command, bad)
    assert result.exit_code == 1
    assert str(bad) in result.stderr
    assert "Traceback" not in result.output
    assert not list(cache_dir.rglob("*.json"))


@pytest.mark.parametrize("command", ["inspect", "install"])
@pytest.mark.parametrize("path", ["nothing.pack", "."])
def test_what_is_no_pack_is_refused(run: Run, tmp_path: Path, command: str, path: str) -> None:
    result = run("pack", command, tmp_path / path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: store {tmp_path / path}: the pack ")


def test_install_fills_a_store_with_the_same_bytes(answer: Answer, full: Path, pack: Path, cache_dir: Path) -> None:
    installed = answer("pack", "install", pack)
    assert installed == {"pack": str(pack), "kernels": len(WHOLE_SET), "skipped": [], "store": str(cache_dir)}
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (cache_dir, full / "store")
    ]
    assert files[0] == files[1]
    assert answer("verify", "--arch", "sm_90a")["ok"]
    assert answer("warmup", "--arch", "sm_90a")["compiled"] == 0


NEW_SPEC = "family=made_later;arch=sm_90a;lanes=4"


def packed(path: Path, pack: Path, change: Callable[[list[Entry]], list[Entry]]) -> Path:
    """Write a pack of the same objects whose entries are changed."""
    whole = read_pack(pack)
    images = {entry.digest: whole.load_cubin(entry).image for entry in whole.entries}
    write_pack(path, pack_bytes(whole.library_version, change([*whole.entries]), lambda entry: images[entry.digest]))
    return path


def test_kernels_of_a_newer_library_are_named_and_skipped_and_the_others_installed(
    answer: Answer, run: Run, pack: Path, tmp_path: Path, cache_dir: Path
) -> None:
    # In the middle, by key: what comes before and after is installed.
    newer = packed(
        tmp_path / "newer.pack", pack, lambda entries: [*entries, replace(entries[0], key="8" + "0" * 63, spec=NEW_SPEC)]
    )
    name = read_pack(newer).entries[0].entry
    unknown = [{"name": name, "spec": NEW_SPEC}]
    inspected = answer("pack", "inspect", newer)
    assert (inspected["unknown"], len(inspected["kernels"])) == (unknown, len(WHOLE_SET) + 1)
    assert f"does not know them: {name}" in run("pack", "inspect", newer).stdout
    installed = answer("pack", "install", newer)
    assert (installed["skipped"], installed["kernels"]) == (unknown, len(WHOLE_SET))
    assert f"does not know them: {name}" in run("pack", "install", newer).stdout
    assert len(list(cache_dir.glob("v1/kernels/*"))) == len(WHOLE_SET)
    assert answer("verify", "--arch", "sm_90a")["ok"]


def test_a_pack_of_nothing_that_is_known_is_not_installed(run: Run, pack: Path, tmp_path: Path, cache_dir: Path) -> None:
    newer = packed(tmp_path / "newer.pack", pack, lambda entries: [replace(entries[0], key="f" * 64, spec=NEW_SPEC)])
    result = run("pack", "install", newer)
    assert result.exit_code == 1
    assert str(newer) in result.stderr and "Update deepgemm-jit" in result.stderr


def under_the_key_of_another(entries: list[Entry]) -> list[Entry]:
    return [replace(entries[1], key=entries[0].key), *entries[1:]]


def of_another_name(entries: list[Entry]) -> list[Entry]:
    return [replace(entries[1], key="f" * 64, spec=entries[0].spec), *entries]


@pytest.mark.parametrize("change", [under_the_key_of_another, of_another_name])
def test_a_kernel_that_is_not_the_one_of_its_key_or_spec_is_named(
    answer: Answer,
    run: Run,
    pack: Path,
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[Entry]], list[Entry]],
) -> None:
    wrong = packed(tmp_path / "wrong.pack", pack, change)
    key = read_pack(pack).entries[0].key if change is under_the_key_of_another else "f" * 64
    for command in ("inspect", "install"):
        result = run("pack", command, wrong)
        assert result.exit_code == 1
        assert f"store {wrong}: the pack holds another kernel under {key}." in result.stderr
        assert "the spec asks for" in result.stderr
    assert not list(cache_dir.rglob("*.json"))
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", str(wrong))
    (fault,) = answer("verify", status=1)["bad"]
    assert fault["path"] == str(wrong) and key in fault["reason"]
    assert answer("list")["packs"][0]["kernels"] == 0


def test_kernels_of_other_sources_than_this_library_has_are_sound(answer: Answer, pack: Path, tmp_path: Path) -> None:
    older = packed(tmp_path / "older.pack", pack, lambda entries: [replace(entries[0], key="f" * 64), *entries[1:]])
    assert answer("pack", "inspect", older)["unknown"] == []
    assert answer("pack", "install", older)["kernels"] == len(WHOLE_SET)


@pytest.mark.parametrize("command", ["inspect", "install"])
@pytest.mark.parametrize("mode", [0o664, 0o666])
def test_a_pack_that_others_may_write_is_refused_with_what_mends_it(
    run: Run, answer: Answer, pack: Path, tmp_path: Path, command: str, mode: int
) -> None:
    copy = tmp_path / "a copy.pack"
    shutil.copyfile(pack, copy)
    copy.chmod(mode)
    result = run("pack", command, copy)
    assert result.exit_code == 1
    mend = f"chmod go-w '{copy}'"
    assert result.stderr.endswith(f"Run: {mend}\n")
    subprocess.run(mend, shell=True, check=True)
    answer("pack", command, copy)


def test_install_tells_of_kernels_that_the_limit_of_the_store_does_not_keep(
    answer: Answer, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_CACHE_MAX_BYTES", "1000")
    message = answer("pack", "install", pack, status=1)["error"]["message"]
    assert f"{len(WHOLE_SET) - 1} of {len(WHOLE_SET)} kernels of {pack} are not kept" in message
    assert "1000 bytes by DEEPGEMM_JIT_CACHE_MAX_BYTES. Raise or unset" in message
    monkeypatch.setenv("DEEPGEMM_JIT_CACHE_MAX_BYTES", str(2**30))
    answer("pack", "install", pack)


def test_install_that_cannot_go_on_says_how_much_is_there(run: Run, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, done = Store.put, []

    def put_three(store: Store, *arguments: Any, **more: Any) -> bool:
        done.append(arguments)
        return len(done) <= 3 and put(store, *arguments, **more)

    monkeypatch.setattr(Store, "put", put_three)
    result = run("pack", "install", pack)
    assert result.exit_code == 1
    assert f"3 of {len(WHOLE_SET)} kernels of {pack} had been put into it" in result.stderr


def test_install_into_a_store_that_cannot_be_written_exits_with_1_and_the_reason(run: Run, pack: Path) -> None:
    result = run("pack", "install", pack, "--cache-dir", "/proc/no-store-here")
    assert result.exit_code == 1
    assert "/proc/no-store-here" in result.stderr


def test_a_pack_of_the_setting_serves_and_every_command_says_so(
    answer: Answer, run: Run, pack: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", str(pack))
    monkeypatch.setenv("DEEPGEMM_JIT_COMPILE", "never")
    assert build(CAST).entry == CAST.name
    assert answer("verify", "--arch", "sm_90a") == {"ok": True, "checked": 0, "bad": [], "missing": []}
    warmed = answer("warmup", "--arch", "sm_90a")
    assert (warmed["cached"], warmed["compiled"], warmed["failed"]) == (len(WHOLE_SET), 0, [])
    listed = answer("list")
    assert listed["entries"] == []
    assert listed["packs"] == [{"path": str(pack), "origin": "DEEPGEMM_JIT_PACKS", "kernels": len(WHOLE_SET), "reason": ""}]
    assert answer("show", CAST.name)["packs"] == [str(pack)]
    for command in (("verify",), ("list",), ("show", CAST.name)):
        assert str(pack) in run(*command).stdout
    assert not list(cache_dir.rglob("*.json"))


def test_what_a_pack_lacks_is_compiled_and_named_under_never(
    answer: Answer, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.pack"
    answer("pack", "create", model, "--arch", "sm_90a", "--model", DEEPSEEK, "--reader", "builtin")
    held = {kernel["key"] for kernel in answer("pack", "inspect", model)["kernels"]}
    settings = read_settings(cache_dir=tmp_path / "empty", packs=(model,))
    lacking = next(spec for spec in WHOLE_SET if Builder(settings).request(spec).key not in held)
    with pytest.raises(KernelNotBuiltError):
        build(lacking, read_settings(cache_dir=tmp_path / "empty", packs=(model,), compile="never"))
    assert Builder(settings).build(lacking).outcome == "compiled"


def test_a_bad_pack_is_bad_for_verify_and_a_fault_for_doctor_and_no_other_command_fails(
    answer: Answer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    bad = tmp_path / "bad.pack"
    bad.write_bytes(b"PK\x03\x04 and nothing that follows")
    monkeypatch.setenv("DEEPGEMM_JIT_PACKS", str(bad))
    assert [fault["path"] for fault in answer("verify", status=1)["bad"]] == [str(bad)]
    assert answer("list")["packs"][0]["reason"]
    assert str(bad) in run("list").stdout
    finished = program("-m", "deepgemm_jit", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(finished.stdout)["checks"]}
    assert [name for name, check in checks.items() if not check["ok"]] == ["pack"]
    assert str(bad) in checks["pack"]["detail"]
    assert f"DEEPGEMM_JIT_PACKS = {bad} (from DEEPGEMM_JIT_PACKS)" in checks["settings"]["detail"]


def damage(store: Path, name: str, part: str) -> Path:
    index = next(file for file in store.glob("v1/kernels/*") if json.loads(file.read_text())["entry"] == name)
    digest = json.loads(index.read_text())["object"]["sha256"]
    file = index if part == "index" else store / "v1/objects" / digest[:2] / digest
    file.write_bytes(file.read_bytes()[:-1])
    return file


@pytest.mark.parametrize("part", ["index", "object"])
def test_list_and_show_tell_of_damage_and_leave_it_there(answer: Answer, run: Run, store: Path, part: str) -> None:
    file = damage(store, CAST.name, part)
    before = sorted(store.rglob("*"))
    listed = answer("list")
    assert [fault["path"] for fault in listed["bad"]] == [str(file)]
    assert CAST.name not in {entry["name"] for entry in listed["entries"]}
    assert len(listed["entries"]) == len(WHOLE_SET) - 1
    shown = answer("show", CAST.name)
    assert [entry["sound"] for entry in shown["entries"]] == ([] if part == "index" else [False])
    (fault,) = shown["bad"]
    assert fault["entry"].startswith(shown["key"]) and fault["reason"]
    for command in (("list",), ("show", CAST.name)):
        assert "damaged" in run(*command).stdout
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("part", ["index", "object"])
def test_prune_removes_damage_and_a_warm_up_builds_that_again_only(answer: Answer, store: Path, part: str) -> None:
    damage(store, CAST.name, part)
    answer("prune")
    assert answer("verify")["ok"]
    assert answer("warmup", "--arch", "sm_90a", "--jobs", 1)["compiled"] == 1
    assert answer("verify", "--arch", "sm_90a")["ok"]


def test_prune_keeps_to_a_size_and_says_what_it_did(answer: Answer, run: Run, store: Path) -> None:
    whole = answer("prune")
    assert (whole["entries_removed"], whole["freed_bytes"]) == (0, 0)
    limit = whole["kept_bytes"] // 2
    pruned = answer("prune", "--max-bytes", limit)
    assert 0 < pruned["entries_removed"] < len(WHOLE_SET)
    assert pruned["kept_bytes"] == sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) <= limit
    assert pruned["freed_bytes"] + pruned["kept_bytes"] == whole["kept_bytes"]
    assert "removed" in run("prune").stdout
    assert answer("verify")["ok"]


def test_prune_removes_what_was_not_used_and_other_schemas(answer: Answer, store: Path) -> None:
    (store / "v2/objects").mkdir(parents=True)
    index = next(store.glob("v1/kernels/*"))
    os.utime(index, (0, 0))
    assert answer("prune", "--unused-for", "30")["entries_removed"] == 1
    assert (store / "v2").exists()
    assert answer("prune", "--other-schemas")["entries_removed"] == 0
    assert not (store / "v2").exists()


def test_clear_empties_a_store(answer: Answer, store: Path) -> None:
    payload = answer("clear")
    assert (payload["entries_removed"], payload["kept_bytes"]) == (len(WHOLE_SET), 0)
    assert list(store.iterdir()) == []
    assert answer("verify", "--arch", "sm_90a", status=1)["checked"] == 0


def test_clear_and_prune_refuse_a_folder_that_is_no_store(run: Run, cache_dir: Path) -> None:
    (cache_dir / "v1/src").mkdir(parents=True)
    cache_dir.chmod(0o700)
    for command in (["clear"], ["prune", "--other-schemas"]):
        (cache_dir / "v2/src").mkdir(parents=True, exist_ok=True)
        result = run(*command)
        assert result.exit_code == 1
        assert "none of a store's" in result.stderr
    assert (cache_dir / "v1/src").exists() and (cache_dir / "v2/src").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prune", "--max-bytes", "-1"], "--max-bytes"),
        (["prune", "--max-bytes", "1k"], "--max-bytes"),
        (["prune", "--unused-for", "-1"], "--unused-for"),
        (["prune", "--unused-for", "nan"], "--unused-for"),
        (["pack", "create"], "FILE"),
        (["pack", "create", "x.pack", "--model", str(DEEPSEEK)], "--arch"),
        (["pack", "inspect"], "FILE"),
        (["pack", "burn", "x.pack"], "burn"),
        (["pack"], "Usage"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_names_what_is_wrong(run: Run, arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.output

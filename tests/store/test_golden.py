from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepgemm_jit.cubin import Cubin, CubinFacts
from deepgemm_jit.resources import data_dir
from deepgemm_jit.settings import read_settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.store import Store, request_key
from deepgemm_jit.store.pack import pack_bytes

pytestmark = pytest.mark.none

# What was compiled by NVRTC 13.5 when schema 1 was made. These never change: a new schema gets a golden entry of its own.
SPEC = KernelSpec(family="store_two", arch="sm_90a", dtypes=("bf16",), block=(1,))
SOURCE = f'#include "two.cuh"\nextern "C" __global__ void {SPEC.name}(float* out) {{ *out = TWO; }}\n'
HEADERS = {"two.cuh": "#define TWO 2.0f\n"}
OPTIONS = ("-arch=sm_90a", "-default-device", "--no-source-include", "-Xptxas", "-v")
KEY = "14bac4c72a407d786f8f9479b86b13219d786cad8b05d9bd108d8609fd61ee6a"
DIGEST = "abe8a65933f826a376030fa13b795da521f6dc299e54311cfff8a9fd3d17a27d"


@pytest.fixture
def golden(cache_dir: Path) -> Path:
    """A copy with the modes of a store; a checkout may be writable by a group."""
    shutil.copytree(data_dir("cache") / "golden", cache_dir, copy_function=shutil.copyfile)
    for path in [cache_dir, *cache_dir.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return cache_dir


def test_keys_are_computed_as_when_the_golden_entry_was_made() -> None:
    assert request_key(arch="sm_90a", source=SOURCE, headers=HEADERS, entry=SPEC.name, options=OPTIONS) == KEY


def test_the_golden_entry_of_schema_1_is_served(golden: Path) -> None:
    store = Store.open(read_settings())
    cubin = store.get(KEY, spec_text=SPEC.text, max_cuda_major=13)
    assert cubin == Cubin(
        image=(golden / "v1/objects/ab" / DIGEST).read_bytes(),
        arch="sm_90a",
        entry="sm_90a_store_two_bf16_1",
        nvrtc_version="13.5",
        options=OPTIONS,
        facts=CubinFacts(registers=8, shared_memory_bytes=0, local_memory_bytes=0, spill_store_bytes=0, spill_load_bytes=0),
    )
    assert cubin.digest == DIGEST
    assert store.verify() == []
    assert len(list(store.entries())) == 1


def test_the_writer_still_writes_the_golden_bytes(golden: Path, tmp_path: Path) -> None:
    cubin = Store.open(read_settings()).get(KEY, spec_text=SPEC.text)
    assert cubin is not None
    again = tmp_path / "again"
    assert Store.open(read_settings(cache_dir=again)).put(KEY, cubin, spec_text=SPEC.text)
    for path in (Path("v1/kernels") / f"{KEY}.13.5.json", Path("v1/objects/ab") / DIGEST):
        assert (again / path).read_bytes() == (data_dir("cache") / "golden" / path).read_bytes()


PACK = data_dir("cache") / "golden" / "v1.pack"


def test_the_golden_pack_of_schema_1_is_served(golden: Path, cache_dir: Path, tmp_path: Path) -> None:
    pack = tmp_path / "v1.pack"
    pack.write_bytes(PACK.read_bytes())
    pack.chmod(0o644)
    cubin = Store.open(read_settings()).get(KEY, spec_text=SPEC.text)
    served = Store.open(read_settings(cache_dir=tmp_path / "empty", packs=(pack,))).get(KEY, spec_text=SPEC.text)
    assert cubin is not None
    assert served == cubin


def test_the_writer_still_writes_the_golden_pack(golden: Path) -> None:
    store = Store.open(read_settings())
    assert pack_bytes("0.1.0", list(store.entries()), lambda entry: store.load(entry).image) == PACK.read_bytes()

"""Fixtures of the front end's tests: device sources and a cutlass package that a test may damage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepgemm_jit.frontend import render as render_of_the_package
from deepgemm_jit.frontend import sources, wgmma
from deepgemm_jit.frontend.render import _environment
from deepgemm_jit.resources import data_dir

CACHES = (render_of_the_package, _environment, sources._device_headers, wgmma._header, wgmma.wrapper_for)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget all that the front end has read, before and after the test."""
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def kernels_src(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the device sources, which the front end reads instead of the package's."""
    copy = tmp_path / "kernels_src"
    shutil.copytree(data_dir("kernels_src"), copy)
    monkeypatch.setattr(sources, "data_dir", lambda name: tmp_path / name)
    return copy


@pytest.fixture
def cutlass(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install a cutlass package of a given header (None: the file is missing), found before the real one."""

    def install(header: bytes | None, *, recorded: bool = True) -> Path:
        site = tmp_path / "site packages"
        path = site / "somewhere/include" / wgmma.HEADER
        path.parent.mkdir(parents=True)
        if header is not None:
            path.write_bytes(header)
        info = site / "nvidia_cutlass-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wgmma.PACKAGE}\nVersion: 9.9\n")
        (info / "RECORD").write_text(f"somewhere/include/{wgmma.HEADER},,\n" if recorded else "")
        monkeypatch.syspath_prepend(site)
        return path

    return install


@pytest.fixture
def without_packages(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every installed package from the look-up of distributions."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "-packages" not in entry])

"""Configs for the tests of plans: copies of published ones, and variations of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[1] / "data" / "models"
QWEN = MODELS / "qwen3-30b-a3b-fp8"


@pytest.fixture
def models() -> Path:
    return MODELS


@pytest.fixture
def varied(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the Qwen3-30B-A3B config with other values; "quantization_config.fmt" names a nested key,
    and the value ``...`` removes a key."""

    def write(changes: dict[str, Any]) -> Path:
        config = json.loads((QWEN / "config.json").read_text())
        for path, value in changes.items():
            *sections, key = path.split(".")
            section = config
            for name in sections:
                section = section[name]
            if value is ...:
                del section[key]
            else:
                section[key] = value
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write

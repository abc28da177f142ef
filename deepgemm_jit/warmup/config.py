"""Reading a config.json that somebody else wrote: bounded, and refused with all that is wrong with it at once."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepgemm_jit.errors import OperandError
from deepgemm_jit.spec.shown import shown

CONFIG_NAME = "config.json"
SIZE_LIMIT = 2**31
COUNT_NEEDED = f"a whole number from 1 to {SIZE_LIMIT - 1}"

_MOST_BYTES = 16 << 20
"""A thousand times what published configs have, and little enough to parse."""


def config_file(path: str | os.PathLike[str]) -> Path:
    """Return the file that a config.json or the folder of one means.

    Raises:
        OperandError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or "\0" in os.fspath(path):
        raise OperandError(operation="model config", faults=[f"{shown(path)} is no path of a config.json or of its folder"])
    file = Path(path)
    try:
        return file / CONFIG_NAME if file.is_dir() else file
    except OSError:  # a name too long, a folder that may not be entered: reading says so
        return file


def read_config(file: Path) -> Mapping[str, Any]:
    """Return the object that a config file holds.

    Raises:
        OperandError: the file cannot be read, is no regular one or too large, or holds no JSON object in UTF-8.
    """
    data = _read_bytes(file)
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        raise refused_config(file, f"is encoded in {encoding}, needed: UTF-8 without a byte order mark")
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise refused_config(file, f"is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from error
    except json.JSONDecodeError as error:
        raise refused_config(file, f"is not complete JSON ({error}); fetch it again") from error
    except RecursionError as error:
        raise refused_config(file, "nests objects or lists too deeply to be read") from error
    except ValueError as error:  # the interpreter bounds the digits of a whole number
        raise refused_config(file, f"holds a number of too many digits ({error})") from error
    if not isinstance(value, dict):
        raise refused_config(file, f"holds a JSON {type(value).__name__}, needed: an object with the model's keys")
    return value


def refused_config(file: Path, *faults: str) -> OperandError:
    """Return the error that names a config and all that is wrong with it."""
    return OperandError(operation=f"model config {file}", faults=faults)


def _read_bytes(file: Path) -> bytes:
    try:
        # Asked before it is opened: to open a FIFO waits for a writer.
        is_regular = stat.S_ISREG(file.stat().st_mode)
        data = b""
        if is_regular:
            with file.open("rb") as opened:
                data = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        missing = f"no file {file.name} there" if file.parent.is_dir() else "no such folder"
        raise refused_config(file, f"cannot be read: {missing}") from error
    except OSError as error:
        raise refused_config(file, f"cannot be read: {error.strerror or error}") from error
    if not is_regular:
        raise refused_config(file, "is not a regular file")
    if len(data) > _MOST_BYTES:
        raise refused_config(file, f"has more than {_MOST_BYTES >> 20} MiB, which no config has")
    return data


class ConfigKeys:
    """The keys of a config, and what is wrong with them: collected, so that a user sees it all at once.

    Attributes:
        file: the config.
        config: its keys, those of the language model among them.
        faults: what is wrong so far.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self.file = file
        self.faults: list[str] = []
        # Configs of models that also see or hear keep the language model's keys in text_config.
        text = config.get("text_config")
        self.config: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
        if not isinstance(text, dict | None):
            self.wrong("text_config", text, "an object")

    def raise_if_any(self) -> None:
        """Refuse the config if anything is wrong with it."""
        if self.faults:
            raise refused_config(self.file, *self.faults)

    def wrong(self, key: str, value: object, needed: str) -> None:
        """Note a value that means nothing."""
        self.faults.append(f"{key} = {shown(value)}, needed: {needed}")

    def size(self, key: str) -> int:
        """Return a whole number of at least 1; note a fault and return 0 when there is none."""
        value = self.config.get(key)
        if type(value) is int and 0 < value < SIZE_LIMIT:
            return value
        if key in self.config:
            self.wrong(key, value, COUNT_NEEDED)
        else:
            self.faults.append(f"key {key} is missing")
        return 0

    def count(self, key: str) -> int | None:
        """Return a whole number of at least 0; None when there is none, with a fault when there is something else."""
        value = self.config.get(key)
        if type(value) is int and 0 <= value < SIZE_LIMIT:
            return value
        if value is not None:
            self.wrong(key, value, f"a whole number from 0 to {SIZE_LIMIT - 1}")
        return None

    def counts(self, key: str) -> list[int]:
        """Return a list of whole numbers; an empty one when there is none, with a fault when there is something else."""
        value = self.config.get(key)
        if isinstance(value, list) and all(type(entry) is int for entry in value):
            return value
        if value is not None:
            self.wrong(key, value, "a list of whole numbers")
        return []

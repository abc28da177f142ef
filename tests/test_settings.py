"""Settings: strict parsing, origins, and nothing read before it is asked for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from deepgemm_jit.errors import SettingError
from deepgemm_jit.settings import PREFIX, Settings, read_settings, setting_names, setting_text

pytestmark = pytest.mark.none

ACCEPTED = [
    ("CACHE_DIR", "/srv/store", Path("/srv/store")),
    ("CACHE_DIR", "/srv/with space/store", Path("/srv/with space/store")),
    ("LOCK_DIR", "/run/locks", Path("/run/locks")),
    ("TRUST_ROOT", "/opt/image/store", Path("/opt/image/store")),
    ("AUDIT", "/var/log/kernels.jsonl", Path("/var/log/kernels.jsonl")),
    ("COMPILE", "auto", "auto"),
    ("COMPILE", "warn", "warn"),
    ("COMPILE", "never", "never"),
    ("JOBS", "1", 1),
    ("JOBS", "64", 64),
    ("PACKS", "/opt/a b.pack", (Path("/opt/a b.pack"),)),
    ("PACKS", "/opt/a.pack:/srv/b.pack", (Path("/opt/a.pack"), Path("/srv/b.pack"))),
    ("CACHE_MAX_BYTES", "1000000000", 1_000_000_000),
    ("LOCK_TIMEOUT_S", "0", 0.0),
    ("LOCK_TIMEOUT_S", "2.5", 2.5),
]
REFUSED = [
    *(("COMPILE", text) for text in ("", "0", "1", "false", "true", "off", "NEVER", "Auto", " never", "never ", "yes please")),
    *(("JOBS", text) for text in ("", "0", "-1", "+2", "two", "1.5", "1e3", " 2", "٣", "²", "0x2", "1_0")),
    *(("PACKS", text) for text in ("", " ", "a.pack", "/a.pack:", ":/a.pack", "/a.pack::/b.pack", "/a.pack:b.pack")),
    *(("CACHE_MAX_BYTES", text) for text in ("", "0", "-1", "1G", "1e9", "1.5", "9" * 5000)),
    *(("LOCK_TIMEOUT_S", text) for text in ("", "-1", "nan", "inf", "-inf", "ten", "1s")),
    *(("AUDIT", text) for text in ("", " ", "audit.jsonl", "./audit.jsonl", "~/audit.jsonl", "/var/log/")),
    *((name, text) for name in ("CACHE_DIR", "LOCK_DIR", "TRUST_ROOT") for text in ("", " ", "store", "./store", "~/store")),
]


@pytest.mark.parametrize(("name", "text", "value"), ACCEPTED)
def test_a_meaningful_value_is_read(name: str, text: str, value: object) -> None:
    settings = read_settings({PREFIX + name: text})
    assert getattr(settings, name.lower()) == value
    assert settings.origin(name.lower()) == PREFIX + name


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_meaningless_value_is_refused_with_what_is_needed(name: str, text: str) -> None:
    with pytest.raises(SettingError) as refusal:
        read_settings({PREFIX + name: text})
    assert refusal.value.name == PREFIX + name
    assert refusal.value.value == text
    assert refusal.value.needed in str(refusal.value)
    assert refusal.value.needed


@pytest.mark.parametrize(("name", "text", "value"), ACCEPTED)
def test_a_value_is_written_for_another_process_as_it_is_read(name: str, text: str, value: object) -> None:
    assert read_settings({PREFIX + name: setting_text(value) or ""}) == read_settings({PREFIX + name: text})


def test_defaults_that_no_variable_gives_have_no_text() -> None:
    written = {name: setting_text(getattr(Settings(), name)) for name in setting_names()}
    assert {name for name, text in written.items() if text is not None} == {"compile", "lock_timeout_s"}


def test_an_unknown_variable_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(SettingError) as refusal:
        read_settings({PREFIX + "CAHCE_DIR": "/srv/store"})
    assert f"no such setting; did you mean {PREFIX}CACHE_DIR?" in str(refusal.value)
    assert all(PREFIX + name.upper() in str(refusal.value) for name in setting_names())


def test_an_unknown_variable_that_is_like_none_gets_no_guess() -> None:
    with pytest.raises(SettingError, match=r"no such setting; unset it\. Known are: "):
        read_settings({PREFIX + "QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ": "1"})


def test_other_programs_variables_are_none_of_ours() -> None:
    assert read_settings({"DG_JIT_CACHE_DIR": "relative", "JOBS": "two"}) == Settings()


def test_defaults_need_no_environment() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert settings.compile == "auto"
    assert {settings.origin(name) for name in setting_names()} == {"default"}


def test_an_argument_wins_over_the_environment_and_none_means_not_given() -> None:
    environ = {PREFIX + "JOBS": "3", PREFIX + "COMPILE": "never"}
    settings = read_settings(environ, jobs=8, compile=None)
    assert (settings.jobs, settings.origin("jobs")) == (8, "argument")
    assert (settings.compile, settings.origin("compile")) == ("never", PREFIX + "COMPILE")


def test_the_environment_is_read_when_asked_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "JOBS", "5")
    before = read_settings()
    monkeypatch.setenv(PREFIX + "JOBS", "6")
    assert (before.jobs, read_settings().jobs) == (5, 6)


def test_settings_cannot_be_changed_behind_the_back_of_their_owner() -> None:
    settings = read_settings({})
    with pytest.raises(FrozenInstanceError):
        settings.jobs = 2  # type: ignore[misc]

"""The page of reports names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.none

TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (B\d+) \|.*\| (.+) \|$", (TESTS / "reports.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("case", "named"), ROWS, ids=[case for case, _ in ROWS])
def test_every_test_of_a_report_exists(case: str, named: str) -> None:
    file = ""
    found = re.findall(r"`([\w/]*(?:\.py)?)::(\w+)`", named)
    assert len(found) == named.count("::") > 0
    for given, name in found:
        file = given or file
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{case}: {file}::{name}"


def test_every_row_was_read() -> None:
    assert len(ROWS) == sum(line.startswith("| B") for line in (TESTS / "reports.md").read_text().splitlines()) > 0

"""The errors that docs/troubleshooting.md quotes are those that the code raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.troubleshooting import CASES, NotHereError, quoted, text_of


@pytest.mark.none
def test_the_page_quotes_every_case_and_no_other() -> None:
    assert sorted(quoted()) == sorted(CASES)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CASES)
def test_a_quoted_error_is_the_one_that_is_raised(name: str, tmp_path: Path) -> None:
    try:
        text = text_of(CASES[name], tmp_path)
    except NotHereError as reason:
        pytest.skip(str(reason))
    assert quoted()[name] == text, "python tests/docs/troubleshooting.py --write puts the texts into the page"

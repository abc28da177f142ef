"""The pages of the documentation and their links, in the repository and in the site."""

from __future__ import annotations

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from docs.blocks import PAGES, ROOT

pytestmark = pytest.mark.none

needs_mkdocs = pytest.mark.skipif(find_spec("mkdocs") is None, reason="the site needs the docs extra, which is not installed")


@pytest.fixture
def hooks() -> ModuleType:
    """Return the hooks of the site."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not page.parent.joinpath(link).exists()] == []


@needs_mkdocs
def test_every_setting_is_in_the_table_with_what_it_takes_and_means(hooks: ModuleType) -> None:
    from deepgemm_jit.settings import PREFIX, setting_names

    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in hooks.settings_table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{PREFIX}{name.upper()}`" for name in setting_names()]
    assert [row[0] for row in rows if len(row) != 4 or not all(row)] == []
    assert rows[2][1:] == [
        "one of auto, warn, never",
        "`auto`: compile what is missing; `warn`: and log it; `never`: refuse.",
        "`auto`",
    ]
    defaults = {row[0].removeprefix(f"`{PREFIX}").rstrip("`").lower(): row[3] for row in rows}
    assert (defaults["cache_dir"], defaults["lock_timeout_s"], defaults["packs"]) == ("the user's cache folder", "120", "none")
    assert hooks.SETTINGS_MARK in (ROOT / "docs/settings.md").read_text()


@needs_mkdocs
@pytest.mark.parametrize(
    ("link", "lies_at", "shown_at", "becomes"),
    [
        ("[format](../cache/README.md#x)", "docs/cache.md", "cache.md", "[format](cache-format.md#x)"),
        ("[ADR](adr/README.md)", "docs/architecture.md", "architecture.md", "[ADR](adr/README.md)"),
        ("[all](adr)", "docs/architecture.md", "architecture.md", "[all](adr/README.md)"),
        ("[cache](../cache.md)", "docs/adr/README.md", "adr/README.md", "[cache](../cache.md)"),
        ("[cache](../docs/cache.md)", "cache/README.md", "cache-format.md", "[cache](cache.md)"),
        ("[the list](../constraints.txt)", "docs/cache.md", "cache.md", "the list (`constraints.txt`)"),
        ("[mkdocs.yml](../mkdocs.yml)", "docs/cache.md", "cache.md", "`mkdocs.yml`"),
        ("[nothing](nowhere.md)", "docs/cache.md", "cache.md", "[nothing](nowhere.md)"),
        ("![picture](how-it-works.svg)", "docs/how-it-works.md", "how-it-works.md", "![picture](how-it-works.svg)"),
        ("[peer](https://example.org/x.md)", "docs/cache.md", "cache.md", "[peer](https://example.org/x.md)"),
    ],
)
def test_a_link_works_in_the_site_as_in_the_repository(
    hooks: ModuleType, link: str, lies_at: str, shown_at: str, becomes: str
) -> None:
    assert hooks.with_site_links(link, lies_at, shown_at) == becomes

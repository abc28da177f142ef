"""What the site shows beside the files of this folder, for mkdocs (``hooks`` in mkdocs.yml).

Pages that lie elsewhere in the repository, the table of settings, and links that lead out of this folder.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from deepgemm_jit import settings
from deepgemm_jit.errors import SettingError

ROOT = Path(__file__).parents[1]
BORROWED = {"cache/README.md": "cache-format.md", "bench/notes.md": "kernel-notes.md"}
"""Pages that belong beside what they describe, with the names they have in the site."""
SETTINGS_MARK = "<!-- the table of settings -->"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^()#:\s]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the borrowed pages."""
    for source, name in BORROWED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill the page of settings, and turn the repository's links into the site's."""
    shown_at = page.file.src_uri
    lies_at = next((source for source, name in BORROWED.items() if name == shown_at), f"docs/{shown_at}")
    return with_site_links(markdown.replace(SETTINGS_MARK, settings_table()), lies_at, shown_at)


def with_site_links(markdown: str, lies_at: str, shown_at: str) -> str:
    """Return a page of the repository with links that work in the site.

    A link to a file that the site does not hold becomes its path. One that leads nowhere stays, for mkdocs to complain of.
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], posixpath.normpath(posixpath.join(posixpath.dirname(lies_at), found[2])), found[3] or ""
        if not (ROOT / target).exists():
            return found[0]
        page = f"{target}/README.md" if (ROOT / target / "README.md").exists() else target
        if page in BORROWED or page.startswith("docs/"):
            name = BORROWED.get(page, page.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(name, posixpath.dirname(shown_at) or '.')}{anchor})"
        return f"`{target}`" if text.strip("`") in (target, found[2]) else f"{text} (`{target}`)"

    return _LINK.sub(link, markdown)


def settings_table() -> str:
    """Return a row for each setting: what it takes, as its parser says, what it means, as the source says, README's default."""
    rows = ["| variable | takes | means | default |", "| --- | --- | --- | --- |"]
    meanings, defaults = _meanings(), _defaults()
    for name in settings.setting_names():
        variable = settings.PREFIX + name.upper()
        try:
            settings.read_settings({variable: ""})  # empty means nothing to every setting, and the refusal says what does
        except SettingError as refusal:
            takes = refusal.needed
        meaning = meanings[name].replace("``", "`")
        rows.append(f"| `{variable}` | {takes} | {meaning} | {defaults[variable]} |")
    return "\n".join(rows)


def _defaults() -> dict[str, str]:
    """Return the last cell of each variable's row in README: a default of None is a word only for people."""
    rows = re.findall(rf"^\| `({settings.PREFIX}\w+)` \|.*\| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return dict(rows)


def _meanings() -> dict[str, str]:
    """Return the text below each field of the settings, which Python itself does not keep."""
    (fields,) = ast.parse(inspect.getsource(settings.Settings)).body
    assert isinstance(fields, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in zip(fields.body, fields.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }

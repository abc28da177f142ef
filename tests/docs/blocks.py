"""The code blocks of the documentation, and what a page's source says of each.

A comment on the line before a block is its mark; without one, the block runs in CI as it stands:

    <!-- gpu -->             Python that needs a GPU: runs on tensors without memory, which checks every operand
    <!-- gpu: REASON -->     Python that needs a GPU and more than that: parsed, and the names that it uses looked up
    <!-- exit status 1 -->   a command that has to fail
    <!-- not run: REASON --> parsed only
    <!-- raised: NAME -->    text that troubleshooting.py raises

``python tests/docs/blocks.py PAGE`` prints the commands of a page as one script, which is how CI runs the quick start.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARKS = re.compile(r"gpu(: .+)?|exit status 1|not run: .+|raised: .+")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_FAILING = """status=0
(
{commands}) || status=$?
[ $status = 1 ] || {{ echo "exit status $status where 1 was to be" >&2; exit 9; }}"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text()
    return [
        Block(page, text[: found.start("language")].count("\n") + 1, found["language"], found["mark"] or "", found["text"])
        for found in _BLOCK.finditer(text)
    ]


def script_of(page: Path) -> str:
    """Return the commands of a page that can run, as one script that ends at the first that goes wrong."""
    parts = ["set -euo pipefail"]
    for block in blocks_of(page):
        if block.language == "bash" and block.mark == "exit status 1":
            parts.append(
                f"status=0\n(\n{block.text}) || status=$?\n[ $status = 1 ] || {{ echo 'exit status' $status >&2; exit 9; }}"
            )
        elif block.language == "bash" and not block.mark:
            parts.append(block.text)
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(script_of(Path(sys.argv[1]).resolve()))

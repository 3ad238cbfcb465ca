"""Every Python block of the README and the docs runs: page by page, in order, in one namespace."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```python\b[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Empty lines in front, so that a traceback shows the line of the page.
        padding = "\n" * text.count("\n", 0, block.start(2))
        exec(compile(padding + textwrap.dedent(block[2]), page, "exec"), namespace)


def test_readme_and_quickstart_are_among_the_pages():
    assert {ROOT / "README.md", ROOT / "docs" / "quickstart.md"} <= set(PAGES)

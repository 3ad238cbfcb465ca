"""Every Python block of the README and the docs runs: page by page, in order, in one namespace.

Of blocks titled "not run", which need packages that are not here, only the syntax is held. What a
page says that a block prints, it prints; the pictures of axes are of the page's own arrays.
"""

import ast
import contextlib
import io
import re
import textwrap
from pathlib import Path

import pytest

import optax_nora
from docs.figures import axes, left_out

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```python\b([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ' title="not run"'
PRINTED = re.compile(
    r"\s*(which prints\s*)?<!-- printed by the block above -->\n```\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
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
        padding = "\n" * text.count("\n", 0, block.start(3))
        source = padding + textwrap.dedent(block[3])
        if block[2] == NOT_RUN:
            ast.parse(source, page)
            continue
        code = compile(source, page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if said := PRINTED.match(text, block.end()):
            assert said["text"] == printed.getvalue()


def test_readme_and_home_are_among_the_pages():
    assert {ROOT / "README.md", ROOT / "docs" / "index.md"} <= set(PAGES)


def test_all_other_pages_run_whole():
    assert {page.name for page in PAGES if NOT_RUN in page.read_text()} == {"frameworks.md"}


def test_pictures_of_axes_are_of_the_arrays_on_the_page():
    params, rule = axes.model_of_the_page()
    numbers = optax_nora.infer_dimension_numbers(params, rule)
    for name, (path, names) in axes.LEAVES.items():
        shape = axes.at(params, path).shape
        assert len(names.split(", ")) == len(shape)
        picture = (ROOT / "docs" / "images" / f"axes-{name}.svg").read_text()
        for text in (f"{path} {shape}", axes.describe(shape, axes.at(numbers, path))):
            assert f">{text}</text>" in picture


def test_the_table_of_what_was_left_out_is_of_its_rows():
    assert "\n".join(left_out.table()) in (ROOT / "docs" / "beyond.md").read_text()

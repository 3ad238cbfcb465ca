r"""Markdown extension for the docs: the docstrings' mathematics becomes MathML, without a script.

Docstrings hold it as optax's do: a `.. math::` block, and :math:`\beta` inside a line.
"""

import re
import textwrap
from xml.etree import ElementTree

from latex2mathml.converter import convert_to_element
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor


class MathBlock(BlockProcessor):
    """A paragraph that starts with `.. math::`, its formula indented under it."""

    def test(self, parent: ElementTree.Element, block: str) -> bool:
        return block.startswith(".. math::")

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        latex = textwrap.dedent(blocks.pop(0).removeprefix(".. math::")).strip()
        if "&" in latex:
            latex = rf"\begin{{align*}}{latex}\end{{align*}}"
        convert_to_element(latex, display="block", parent=parent)


class MathInline(InlineProcessor):
    """The role :math:`...` inside a line."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[ElementTree.Element, int, int]:  # type: ignore[override]
        return convert_to_element(m[1]), m.start(), m.end()


class MathExtension(Extension):
    """Both of them, ahead of whatever else would read the backslashes."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.parser.blockprocessors.register(MathBlock(md.parser), "math", 200)
        md.inlinePatterns.register(MathInline(r":math:`([^`]+)`", md), "math", 200)


def makeExtension(**config: object) -> MathExtension:
    """Called by Markdown when mkdocs.yml names this module."""
    return MathExtension(**config)

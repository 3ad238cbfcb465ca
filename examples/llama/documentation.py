"""English prose that every machine with this example installed already has: Python documentation.

The docstrings of the standard library and of a few packages that the example needs anyway, and the
language reference behind `help()`. Sources are parsed, never imported, and nothing is downloaded.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("jax", "numpy", "scipy", "flax", "optax")


@functools.cache  # half a minute, and it is asked for three times
def python_documentation(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Prose by document name: one document a module or topic, no paragraph twice."""
    seen: set[str] = set()
    documents = {}
    for name, strings in _sources(packages):
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", "\n\n".join(strings)):
            paragraph = "\n".join(line.strip() for line in paragraph.strip().splitlines())
            if _is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        if paragraphs:
            documents[name] = "\n\n".join(paragraphs)
    return documents


def versions() -> list[str]:
    """What the text depends on."""
    installed = [p for p in PACKAGES if importlib.util.find_spec(p)]
    packages = [f"{p} {importlib.metadata.version(p)}" for p in installed]
    return [f"python {platform.python_version()}", *packages]


def _sources(packages: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    yield from _docstrings(Path(sysconfig.get_path("stdlib")), "python")
    topics = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    for node in ast.walk(ast.parse(topics.read_text("utf-8"))):
        if isinstance(node, ast.Dict):
            yield from ((f"topics.{k}", [v]) for k, v in ast.literal_eval(node).items())
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            yield from _docstrings(Path(spec.origin).parent, package)


def _docstrings(folder: Path, prefix: str) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if {"site-packages", "test", "tests", "idlelib", "pydoc_data"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # the standard library ships such files as tests
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, documented)]
        yield ".".join((prefix, *parts)), [text for text in strings if text]


def _is_prose(paragraph: str) -> bool:
    """Keeps sentences; drops doctests, signatures, tables and rules."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return ">>>" not in paragraph and len(paragraph) > 30 and letters > 0.85 * len(paragraph)

"""Documents of text: from files, from the Hugging Face hub, or built in."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from examples.llama import documentation
from examples.llama.config import UserError

HUB = "hf:"
PIECE = 4_096  # characters: longer text files are cut into documents of this size, at line ends
TEXT = ("", ".txt", ".md", ".rst", ".text")
TABLES = (".jsonl", ".json", ".parquet")  # the first two compressed by gzip as well


def read_documents(path: str | None, field: str) -> Iterator[tuple[str, str]]:
    """Names and texts: of text files, of a field of JSON lines or parquet, or built in.

    Args:
        path: a file, a folder, `hf:` and a data set of the Hugging Face hub with its configuration
            (hf:allenai/c4:en), or None for the documentation of Python.
        field: that holds the text, where there are fields.

    Raises:
        UserError: something is not text, or has no such field.
    """
    if path is None:
        yield from documentation.python_documentation().items()
    elif path.startswith(HUB):
        yield from _hub(path.removeprefix(HUB), field)
    else:
        for file in _files(Path(path)):
            yield from _text(file) if _kind(file) in TEXT else _table(file, field)


def _hub(name: str, field: str) -> Iterator[tuple[str, str]]:
    """The training split of a data set, streamed: nothing but the tokens is kept on disk."""
    import datasets

    repository, _, configuration = name.partition(":")
    stream = datasets.load_dataset(repository, configuration or None, split="train", streaming=True)
    for i, record in enumerate(stream):
        yield f"{name}:{i}", _field(record, field, name, i)


def _table(path: Path, field: str) -> Iterator[tuple[str, str]]:
    for i, record in enumerate(_parquet(path) if path.suffix == ".parquet" else _json_lines(path)):
        yield f"{path.name}:{i}", _field(record, field, str(path), i)


def _parquet(path: Path) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1_000):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not parquet: {error}") from None


def _json_lines(path: Path) -> Iterator[dict]:
    number = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        try:
            for line in lines:
                number += 1
                yield json.loads(line)
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is not JSON lines, near line {number}: {error}") from None


def _field(record: object, field: str, source: str, number: int) -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{source}: record {number + 1} has no text in a field {field!r}")
    return text


def _text(path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: no UTF-8 at byte {error.start}") from None
    if "\0" in text:
        raise UserError(f"{path} is not text: it holds zero bytes")
    start = 0
    while text[start:].strip():
        stop = text.find("\n", start + PIECE) + 1 or len(text)
        yield f"{path.name}:{start}", text[start:stop]
        start = stop


def fingerprint(path: str | None) -> list:
    """What a change of the text would change."""
    if path is None:
        return documentation.versions()
    if path.startswith(HUB):
        return [path]
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(Path(path))]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} does not exist")
    files = [path]
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and _kind(f) in TEXT + TABLES]
    if not files:
        kinds = ", ".join(TEXT[1:] + TABLES)
        raise UserError(f"{path} holds no text: its files should end in {kinds}")
    return files


def _kind(path: Path) -> str:
    """The suffix of a file's name, before any `.gz`."""
    return Path(path.name.removesuffix(".gz")).suffix

"""Documents of text: from files, from the Hugging Face hub, or built in."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from examples.llama import documentation
from examples.llama.config import UserError
from examples.llama.terminal import line, say, silence

HUB = "hf:"
PIECE = 4_096  # characters: longer text files are cut into documents of this size, at line ends
LONGEST = 65_536  # characters of a document from a text file without line ends
TEXT = ("", ".txt", ".md", ".rst", ".text")
TABLES = (".jsonl", ".json", ".parquet")  # the first two compressed by gzip as well
DAMAGED = (OSError, EOFError, zlib.error)  # gzip.BadGzipFile is an OSError


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
        for file in files(Path(path)):
            yield from _text(file) if _kind(file) in TEXT else _table(file, field)


def _hub(name: str, field: str) -> Iterator[tuple[str, str]]:
    """The training split of a data set, streamed: nothing but the tokens is kept on disk."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf:{name} needs the package datasets: pip install datasets") from None
    silence("datasets", "huggingface_hub", "fsspec")
    repository, _, configuration = name.partition(":")
    try:
        stream = datasets.load_dataset(
            repository, configuration or None, split="train", streaming=True
        )
        for i, record in enumerate(stream):
            yield f"{name}:{i}", _field(record, field, name, i)
    except UserError:
        raise
    except Exception as error:  # the library and its network raise many kinds
        raise UserError(f"hf:{name} cannot be read: {line(error)}") from None


def _table(path: Path, field: str) -> Iterator[tuple[str, str]]:
    read = _parquet if path.suffix == ".parquet" else _json_lines
    for i, record in enumerate(read(path)):
        yield f"{path.name}:{i}", _field(record, field, str(path), i)


def _parquet(path: Path) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1_000):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not parquet: {line(error)}") from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _json_lines(path: Path) -> Iterator[dict]:
    number = 0
    try:
        with _open(path) as lines:
            for text in lines:
                number += 1
                if text.strip():
                    yield json.loads(text)
    except (ValueError, RecursionError, *DAMAGED) as error:
        raise UserError(f"{path} is not JSON lines, near line {number}: {line(error)}") from None


def _field(record: object, field: str, source: str, number: int) -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{source}: record {number + 1} has no text in a field {field!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a character (a lone surrogate) at {error.start}"
        raise UserError(f"{source}: record {number + 1} is not text: {half}") from None
    return text


def _text(path: Path) -> Iterator[tuple[str, str]]:
    """Pieces of a text file, which is never held as a whole."""
    start, piece, size = 0, [], 0
    try:
        with _open(path) as file:
            while text := file.readline(LONGEST):
                if "\0" in text:
                    raise UserError(f"{path} is not text: it holds zero bytes")
                piece.append(text)
                size += len(text)
                if size > PIECE and (text.endswith("\n") or size >= LONGEST):
                    yield from _piece(path, start, piece)
                    start, piece, size = start + size, [], 0
        yield from _piece(path, start, piece)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: no UTF-8 at byte {_not_utf8(path)}") from error
    except DAMAGED as error:
        raise UserError(f"{path} cannot be read: {line(error)}") from None


def _piece(path: Path, start: int, lines: list[str]) -> Iterator[tuple[str, str]]:
    text = "".join(lines)
    if text.strip():
        yield f"{path.name}:{start}", text


def _not_utf8(path: Path) -> int:
    """The first byte that is not of UTF-8: what is decoded in chunks does not tell its place."""
    position = 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for raw in file:
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                return position + error.start
            position += len(raw)
    return position


def fingerprint(path: str | None) -> list:
    """What a change of the text would change."""
    if path is None:
        return documentation.versions()
    if path.startswith(HUB):
        return [path]
    stats = ((str(file), file.stat()) for file in files(Path(path)))
    # The time of the last change of anything cannot be set back, as that of the content can.
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def check(path: str | None) -> None:
    """Raises UserError where there is no text; says how many files are left out."""
    if path is None or path.startswith(HUB):
        return
    taken, root = files(Path(path)), Path(path)
    if root.is_dir():
        hidden = sum(f.is_file() for f in root.rglob("*")) - len(taken)
        if hidden:
            say(
                f"{root}: {len(taken):,} files of text; left out, as hidden or not text: {hidden:,}"
            )


def files(path: Path) -> list[Path]:
    """A file, or those of a folder that hold text: not hidden ones, not binary ones."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    found = [f for f in sorted(path.rglob("*")) if f.is_file() and _is_text(f, path)]
    if not found:
        kinds = ", ".join(TEXT[1:] + TABLES)
        raise UserError(f"{path} holds no text: its files should end in {kinds}")
    return found


def _is_text(file: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(root).parts):
        return False
    if _kind(file) != "":
        return _kind(file) in TEXT + TABLES
    with file.open("rb") as content:  # no suffix: zero bytes tell
        return b"\0" not in content.read(8_192)


def _kind(path: Path) -> str:
    """The suffix of a file's name, before any `.gz`."""
    return Path(path.name.removesuffix(".gz")).suffix

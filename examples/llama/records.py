"""JSON lines that are written while a program runs, and that it may be killed in the middle of."""

import json
from pathlib import Path

from examples.llama.config import UserError


def read(path: Path) -> list[dict]:
    """The lines that are whole."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: str) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def append(path: Path, record: dict) -> None:
    """Adds a line in one write: processes may share a file, and a cut line stays by itself."""
    with path.open("ab+", buffering=0) as file:
        file.seek(max(file.seek(0, 2) - 1, 0))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(start + json.dumps(record).encode() + b"\n")

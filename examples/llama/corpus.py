"""Tokens on disk: a folder of shards that prepare.py or tokens.py made, with its manifest."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.llama.config import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Corpus:
    """A folder made by prepare.py, checked."""

    folder: Path
    manifest: dict

    @property
    def end(self) -> int:
        return self.manifest["end"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def splits(self) -> dict[str, list[dict]]:
        """Files, counts and checksums of the training and the held-out text."""
        return {name: self.manifest[name] for name in ("train", "held_out")}

    @property
    def identity(self) -> str:
        """A checksum of all of it."""
        parts = json.dumps([self.splits, self.manifest["tokenizer"]])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def describe(self) -> Iterator[str]:
        """A line on each split."""
        for split, shards in self.splits.items():
            totals = {k: sum(s[k] for s in shards) for k in ("bytes", "documents", "tokens")}
            counts = ", ".join(f"{total:,} {name}" for name, total in totals.items())
            yield f"{split.replace('_', '-')} text: {counts}"

    def shards(self, split: str) -> list[np.ndarray]:
        """The tokens of a split, mapped from disk."""
        names = [shard["file"] for shard in self.splits[split]]
        # Plain views: slicing a np.memmap makes another np.memmap, which takes longer than reading.
        return [np.load(self.folder / name, mmap_mode="r").view(np.ndarray) for name in names]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(manifest: dict) -> dict:
    """With a checksum of all of it."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return rest | {"sha256": hashlib.sha256(json.dumps(rest).encode()).hexdigest()}


def open_corpus(folder: Path) -> Corpus:
    """Reads a prepared folder; refuses a partial, a mismatched or a corrupted one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {MANIFEST}: prepare.py did not finish; run it again"
        ) from None
    except ValueError:
        raise UserError(f"{folder / MANIFEST} is not JSON: run prepare.py again") from None
    if not isinstance(manifest, dict) or manifest != seal(manifest):
        raise UserError(
            f"{folder / MANIFEST} is not what was written (sha256): run prepare.py again"
        )
    parts = [*manifest["train"], *manifest["held_out"], manifest["tokenizer"]]
    for part in parts:
        path = folder / part["file"]
        if not path.exists():
            raise UserError(f"{path} is missing: run prepare.py again")
        if checksum(path) != part["sha256"]:
            raise UserError(
                f"{path} is not the file of its manifest (sha256): run prepare.py again"
            )
    return Corpus(folder, manifest)


def is_prepared(path: str) -> bool:
    """Whether `path` holds tokens, not text."""
    return any(Path(path).glob("*.npy"))

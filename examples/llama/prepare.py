"""Text into token shards: `python -m examples.llama.prepare --path TEXT --out FOLDER`.

The folder it makes holds tokenizer.json, shards of tokens (.npy) and manifest.json with counts and
checksums. It appears under its name only when it is whole.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from examples.llama import check, cli
from examples.llama.config import DataConfig, UserError
from examples.llama.corpus import MANIFEST, Corpus, checksum, is_prepared, open_corpus, seal
from examples.llama.folder import whole
from examples.llama.sources import fingerprint, read_documents
from examples.llama.terminal import counter, run_main, say
from examples.llama.tokenizer import END, end_of, open_tokenizer, train_tokenizer, words_of

SHARD = 1 << 26  # tokens


def prepare(config: DataConfig, vocab_size: int) -> Corpus:
    """The prepared corpus of `config`: opened where it is there, made where it is not."""
    path = config.path
    if path is not None and is_prepared(path):
        return open_corpus(Path(path))
    label = "python-docs" if path is None else Path(path).stem
    key = [vocab_size, config.held_out, fingerprint(path)]
    key += [config.text_field, config.tokenizer and checksum(config.tokenizer)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    folder = config.cache / f"{label}-{digest}"
    if not folder.exists():
        write_corpus(folder, config, vocab_size)
    return open_corpus(folder)


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the name alone: documents of low rank are held out."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32


def write_corpus(folder: Path, config: DataConfig, vocab_size: int) -> None:
    """Tokenizes the text of `config` and writes it to `folder`, whole or not at all."""

    def documents() -> Iterator[tuple[str, str]]:
        return read_documents(config.path, config.text_field)

    source = str(config.path or "the documentation of Python and its packages")
    say(f"reading {source}")
    first = [_rank(name) for name, _ in islice(documents(), 1_000)]
    if not first:
        raise UserError(f"{config.path} is empty")
    held_out = max(config.held_out, min(first))  # of a small text, one document
    if config.tokenizer:
        tokenizer = open_tokenizer(config.tokenizer)
    else:
        say(f"training a tokenizer of {vocab_size:,} words")
        sample = islice((text for _, text in documents()), 200_000)
        tokenizer = train_tokenizer(sample, vocab_size)
    end = end_of(tokenizer, config.tokenizer)

    def tokenized() -> Iterator[Document]:
        stream = iter(documents())
        while batch := list(islice(stream, 1_000)):
            encodings = tokenizer.encode_batch([text for _, text in batch])
            for (name, text), encoding in zip(batch, encodings, strict=True):
                split = "held_out" if _rank(name) <= held_out else "train"
                yield Document(split, [*encoding.ids, end], len(text.encode()))

    write_tokens(folder, source, tokenizer, tokenized())


class Document(NamedTuple):
    """A document as it is stored."""

    split: str  # train or held_out
    tokens: Sequence[int] | np.ndarray  # the last one is `end`
    bytes: int  # of its text


def write_tokens(
    folder: Path, source: str, tokenizer: Tokenizer, documents: Iterable[Document]
) -> None:
    """Writes `documents` to `folder` with their manifest, whole or not at all."""
    with whole(folder) as partial, counter("tokenizing") as progress:
        tokenizer.save(str(partial / "tokenizer.json"))
        size = words_of(tokenizer)
        writers = {name: _Writer(partial, name, size) for name in ("train", "held_out")}
        task, text_bytes = progress.add_task("", total=None, size=""), 0
        for document in documents:
            writers[document.split].add(document.tokens, document.bytes)
            text_bytes += document.bytes
            progress.update(task, advance=1, size=f"{text_bytes / 1e6:,.0f} MB")
        manifest = {
            "source": source,
            "end": tokenizer.token_to_id(END),
            "vocab_size": size,
            "tokenizer": {"file": "tokenizer.json", "sha256": checksum(partial / "tokenizer.json")},
            **{name: writer.close() for name, writer in writers.items()},
        }
        (partial / MANIFEST).write_text(json.dumps(seal(manifest), indent=1))


class _Writer:
    """Collects the tokens of a split and writes them, a shard at a time."""

    def __init__(self, folder: Path, split: str, vocab_size: int):
        self.folder, self.split = folder, split
        self.dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self.done: list[dict] = []
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.size = self.bytes = 0

    def add(self, ids: Sequence[int] | np.ndarray, size: int) -> None:
        self.tokens.append(np.array(ids, self.dtype))
        self.size += len(ids)
        self.bytes += size
        if self.size >= SHARD:
            self._flush()

    def _flush(self) -> None:
        path = self.folder / f"{self.split}-{len(self.done):05}.npy"
        np.save(path, np.concatenate(self.tokens or [np.zeros(0, self.dtype)]))
        counts = {"tokens": self.size, "documents": len(self.tokens), "bytes": self.bytes}
        self.done.append({"file": path.name, **counts, "sha256": checksum(path)})
        self._clear()

    def close(self) -> list[dict]:
        if self.tokens or not self.done:
            self._flush()
        return self.done


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into token shards."""

    path: str
    """Text, JSON lines or parquet, a file or a folder; hf:NAME:CONFIG for a data set of the Hugging
    Face hub, such as hf:allenai/c4:en."""
    out: Path = Path("data/text")
    """Folder to make, for --data.path of train.py."""
    vocab_size: int = 32_000
    """Words of the tokenizer, where it is trained on the text."""
    tokenizer: Path | None = None
    """A tokenizer.json of the `tokenizers` library. None: train one on the text."""
    text_field: str = "text"
    """The field of JSON lines and parquet that holds the text."""
    held_out: float = 0.01
    """Fraction of the documents held out, chosen by a hash of their names."""


def main(arguments: list[str]) -> None:
    options = cli.read(PrepareConfig, arguments, "llama.prepare")
    check.new("out", options.out)
    config = DataConfig(
        path=options.path,
        tokenizer=options.tokenizer,
        text_field=options.text_field,
        held_out=options.held_out,
    )
    check.text(config, options.vocab_size)
    write_corpus(options.out, config, options.vocab_size)
    print("\n".join(open_corpus(options.out).describe()))


if __name__ == "__main__":
    run_main(main)

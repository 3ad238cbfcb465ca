"""Text into token shards: `python -m examples.llama.prepare --help`.

The folder it makes holds tokenizer.json, shards of tokens (.npy) and manifest.json with counts and
checksums. It appears under its name only when it is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.llama import documentation
from examples.llama.config import DataConfig, UserError
from examples.llama.data import MANIFEST, Corpus, checksum, open_corpus

END = "<|endoftext|>"
PIECE = 4_096  # characters: longer text files are cut into documents of this size, at line ends
SHARD = 1 << 26  # tokens
SUFFIXES = ("", ".txt", ".md", ".rst", ".text", ".jsonl", ".parquet")

Documents = Iterable[tuple[str, str]]  # name and text


def prepare(config: DataConfig, vocab_size: int) -> Corpus:
    """The prepared corpus of `config`: opened where it is there, made where it is not."""
    path = config.path
    if path is not None and (path / MANIFEST).exists():
        return open_corpus(path)
    label = "python-docs" if path is None else path.stem
    key = [vocab_size, config.held_out, _fingerprint(path)]
    key += [config.tokenizer and checksum(config.tokenizer)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    folder = config.cache / f"{label}-{digest}"
    if not folder.exists():
        write_corpus(lambda: read_documents(path), folder, config, vocab_size)
    return open_corpus(folder)


def _fingerprint(path: Path | None) -> list:
    """What a change of the text would change."""
    if path is None:
        return documentation.versions()
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(path)]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} does not exist")
    files = [path]
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.suffix in SUFFIXES]
    if not files:
        raise UserError(f"{path} holds no text: its files should end in {', '.join(SUFFIXES[1:])}")
    return files


def read_documents(path: Path | None) -> Iterator[tuple[str, str]]:
    """Names and texts: of text files, of the `text` field of JSON lines or parquet, or built in."""
    if path is None:
        yield from documentation.python_documentation().items()
        return
    for file in _files(path):
        yield from _text(file)


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


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the name alone: documents of low rank are held out."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; its word 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_corpus(
    documents: Callable[[], Documents], folder: Path, config: DataConfig, vocab_size: int
) -> None:
    """Tokenizes documents and writes them to `folder`, whole or not at all."""
    first = [_rank(name) for name, _ in islice(documents(), 1_000)]
    if not first:
        raise UserError(f"{config.path} is empty")
    held_out = max(config.held_out, min(first))  # of a small text, one document
    if config.tokenizer:
        tokenizer = Tokenizer.from_file(str(config.tokenizer))
    else:
        sample = islice((text for _, text in documents()), 200_000)
        tokenizer = train_tokenizer(sample, vocab_size)
    end = tokenizer.token_to_id(END)
    if end is None:
        raise UserError(f"{config.tokenizer} has no word {END} to end a document with")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        tokenizer.save(str(partial / "tokenizer.json"))
        writers = {
            name: _Writer(partial, name, tokenizer.get_vocab_size())
            for name in ("train", "held_out")
        }
        stream = iter(documents())
        while batch := list(islice(stream, 1_000)):
            encodings = tokenizer.encode_batch([text for _, text in batch])
            for (name, text), encoding in zip(batch, encodings, strict=True):
                split = "held_out" if _rank(name) <= held_out else "train"
                writers[split].add([*encoding.ids, end], len(text.encode()))
        manifest = {
            "source": str(config.path or "the documentation of Python and its packages"),
            "end": end,
            "vocab_size": tokenizer.get_vocab_size(),
            "tokenizer": {"file": "tokenizer.json", "sha256": checksum(partial / "tokenizer.json")},
            **{name: writer.close() for name, writer in writers.items()},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if not folder.exists():  # another run may have been faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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

    def add(self, ids: list[int], size: int) -> None:
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

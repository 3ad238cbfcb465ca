"""Token shards on disk, and the batches made of them.

A sequence has context + 1 tokens: inputs are all but the last, targets all but the first. Every
document ends with the token `end`, and sequences are padded with it. One rule then says what is
learned: a target counts unless its input is `end`, so no loss is taken across documents, nor on
padding.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import grain
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


def open_corpus(folder: Path) -> Corpus:
    """Reads a prepared folder; refuses a partial, a mismatched or a corrupted one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {MANIFEST}: prepare.py did not finish; run it again"
        ) from None
    except json.JSONDecodeError:
        raise UserError(f"{folder / MANIFEST} is not JSON: run prepare.py again") from None
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


class Contexts:
    """Documents one after another, cut into sequences; a random-access source for grain.

    Sequences overlap by one token, so that every token but the first of a shard is a target once.
    """

    def __init__(self, shards: list[np.ndarray], context: int, end: int):
        self.shards, self.context, self.end = shards, context, end
        self.stops = list(accumulate(-(-(len(shard) - 1) // context) for shard in shards))

    def __len__(self) -> int:
        return self.stops[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        shard = bisect_right(self.stops, index)
        first = index - (self.stops[shard - 1] if shard else 0)
        return _sequence(self.shards[shard], first * self.context, None, self.context, self.end)


class Documents:
    """One document a sequence, cut or padded to the context, as in the paper."""

    def __init__(self, shards: list[np.ndarray], context: int, end: int):
        self.shards, self.context, self.end = shards, context, end
        self.ends = [np.flatnonzero(shard == end) for shard in shards]
        self.stops = list(accumulate(len(ends) for ends in self.ends))

    def __len__(self) -> int:
        return self.stops[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        shard = bisect_right(self.stops, index)
        i = index - (self.stops[shard - 1] if shard else 0)
        ends = self.ends[shard]
        start = ends[i - 1] + 1 if i else 0
        return _sequence(self.shards[shard], start, ends[i] + 1, self.context, self.end)


def _sequence(
    tokens: np.ndarray, start: int, stop: int | None, context: int, end: int
) -> np.ndarray:
    sequence = np.full(context + 1, end, np.int32)
    piece = tokens[start:stop][: context + 1]
    sequence[: len(piece)] = piece
    return sequence


def sequences(corpus: Corpus, split: str, context: int, packing: str) -> Contexts | Documents:
    shards = corpus.shards(split)
    tokens = sum(len(shard) for shard in shards)
    if tokens <= context:
        side = split.replace("_", "-")
        raise UserError(
            f"{corpus.manifest['source']} is too short: {tokens} tokens of {side} text are less "
            f"than one context of {context}"
        )
    return {"concat": Contexts, "pad": Documents}[packing](shards, context, corpus.end)


def train_batches(
    source, batch: int, seed: int, shard: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator:
    """Batches without end, every epoch shuffled anew, prefetched by threads.

    Args:
        source: `Contexts` or `Documents`.
        batch: sequences of a batch, over all processes.
        seed: of the order.
        shard: this process and the number of processes; each gets its part of every batch.

    Returns:
        An iterator of int32 (batch / processes, context + 1), with `get_state` and `set_state`.
    """
    process, processes = shard
    # Indices, not sequences, go through grain: its bookkeeping of an element takes longer than one.
    indices = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
    dataset = indices[process::processes].batch(
        batch // processes, batch_fn=lambda picked: np.stack([source[i] for i in picked])
    )
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    return iter(dataset.to_iter_dataset(options))


def eval_batches(
    source, batch: int, limit: int, shard: tuple[int, int] = (0, 1)
) -> Iterator[np.ndarray]:
    """The first `limit` sequences in order; what fills up the last batch does not count."""
    process, processes = shard
    count = min(limit, len(source))
    filler = np.full(source.context + 1, source.end, np.int32)
    for start in range(0, count, batch):
        indices = range(start + process, min(start + batch, count), processes)
        picked = [source[i] for i in indices]
        yield np.stack(picked + [filler] * (batch // processes - len(picked)))


def weights(tokens: Any, end: int) -> Any:
    """1 where the target counts: everywhere but after the end of a document."""
    return tokens[..., :-1] != end

"""Sequences of tokens, and the batches made of them.

A sequence has context + 1 tokens: inputs are all but the last, targets all but the first. Every
document ends with the token `end`, and sequences are padded with it. One rule then says what is
learned: a target counts unless its input is `end`, so no loss is taken across documents, nor on
padding.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import grain
import numpy as np

from examples.llama.config import UserError
from examples.llama.corpus import Corpus


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
    shards, side = corpus.shards(split), split.replace("_", "-")
    tokens = sum(len(shard) for shard in shards)
    if tokens <= context:
        raise UserError(
            f"{corpus.manifest['source']} is too short: {tokens} tokens of {side} text are less "
            f"than one context of {context}"
        )
    if tokens == sum(shard["documents"] for shard in corpus.splits[split]):
        raise UserError(f"{corpus.manifest['source']}: all documents of its {side} text are empty")
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
    epochs = 2**62 // len(source)  # all there are: grain cannot count batches of 1 without end
    indices = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat(epochs)
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

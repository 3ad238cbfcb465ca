"""Held-out loss, weighted by tokens, and what it is to be held against."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from examples.llama.config import UserError
from examples.llama.data import Contexts, Documents, eval_batches
from examples.llama.sharding import put_batch


class HeldOut(NamedTuple):
    """Mean cross-entropy in nats a token."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:  # of a loss above 709
            return math.inf


def evaluate(
    step: Callable, params, source: Contexts | Documents, batch: int, limit: int, mesh: Mesh, shard
) -> HeldOut:
    """The loss of the first `limit` sequences: all their losses over all their tokens.

    Args:
        step: `(params, tokens) -> (sum of losses, number of tokens)`.
        params: of the model.
        source: held-out sequences.
        batch: sequences at once; changes nothing but speed.
        limit: sequences to take.
        mesh: where the batches go.
        shard: this process and the number of processes.
    """
    sums = [step(params, put_batch(x, mesh)) for x in eval_batches(source, batch, limit, shard)]
    loss, tokens = np.sum(np.asarray(sums, np.float64), axis=0)
    if not tokens:
        raise UserError("the held-out text that is evaluated has no targets: all of it is empty")
    return HeldOut(float(loss / tokens), int(tokens))


def unigram_entropy(shards: list[np.ndarray]) -> float:
    """Entropy of the words' own frequencies in nats: what no model without context can beat."""
    counts = np.unique(np.concatenate(shards), return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())

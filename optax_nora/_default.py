"""The default routing: a leaf goes somewhere where its name, its rank and its neighbours agree.

Else it is for the user to say. Rules are frozen dataclasses, not functions:
`optax.inject_hyperparams` takes every callable argument for a schedule.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from optax_nora._guess import axes_told, biases_of, guess, out_first, stack_axis
from optax_nora._leaves import Leaf, Shape, Tree
from optax_nora._names import (
    ATTENTION_IN,
    DOUBTS,
    EMBEDDING_DOUBTS,
    MATRIX_NAMES,
    OWN_EMBEDDINGS,
    POSITIONS,
    VECTORS_IN_PATH,
    ZEROS,
    any_word,
    names_embedding,
    names_head,
    names_matrix,
    names_norm,
    names_vector,
    names_weight,
    words,
)

NOT_FLOATING = "not floating: keep it out of the parameters"


class Decision(NamedTuple):
    """Where a leaf goes.

    Attributes:
      numbers: its dimension numbers; None for AdamW.
      note: why, where that is not plain.
      sure: whether all signs agree; `summarize` marks what is unsure.
      ask: whether the user has to say: ``numbers`` are then a proposal.
    """

    numbers: MuonDimensionNumbers | None
    note: str = ""
    sure: bool = True
    ask: bool = False


class Rule:
    """How leaves are routed."""

    def decide(self, leaf: Leaf) -> Decision:
        """Where a leaf of a tree goes."""
        raise NotImplementedError

    def partition_spec(self, leaf: Leaf) -> PartitionSpec:
        """How a leaf is split inside `jax.shard_map`."""
        return PartitionSpec()

    def unmatched(self, leaves: Sequence[Leaf]) -> list[str]:
        """What this rule names and the tree does not have."""
        return []


def ask(leaf: Leaf) -> Decision:
    """The user has to say; the best guess is proposed."""
    numbers, meaning = guess(leaf)
    return Decision(numbers, meaning, sure=False, ask=True)


@dataclasses.dataclass(frozen=True)
class Default(Rule):
    """By name, rank and neighbours."""

    def decide(self, leaf: Leaf) -> Decision:
        if (known := by_name(leaf)) is not None:
            return known
        if leaf.ndim > 2:
            return ask(leaf)
        told, weight = axes_told(leaf), names_weight(leaf.name)
        plain = leaf.name in MATRIX_NAMES or {"lora", "a"} <= set(words(leaf.name))
        in_out = MuonDimensionNumbers(0, 1)
        if told == (0,):
            return Decision(MuonDimensionNumbers(1, 0), "(out, in): its bias is as long as axis 0")
        if told is None and (
            weight
            or leaf.name in out_first(leaf.tree)
            or (not plain and stack_axis(leaf) is not None)
        ):
            return ask(leaf)
        if weight:
            return Decision(in_out, "(in, out): its bias is as long as axis 1")
        mixes = not plain or any(w.startswith("mix") for s in leaf.segments for w in words(s))
        if leaf.shape[0] == leaf.shape[1] <= 8 and mixes:
            return Decision(in_out, "small and square: a matrix that mixes?", sure=False)
        if not plain and told is None:
            return Decision(in_out, "its name is unknown: taken for (in, out)", sure=False)
        return Decision(in_out)


def by_name(leaf: Leaf) -> Decision | None:
    """What name and neighbours say of a leaf that is no matrix; None where it may be one."""
    above, own = leaf.segments[:-1], leaf.name
    matrix = names_matrix(own)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return Decision(None, NOT_FLOATING)
    for at, segment in enumerate(leaf.segments):
        below = leaf.segments[at:]
        embeds = names_embedding(segment) or (segment == own and any_word([own], OWN_EMBEDDINGS))
        if embeds or (names_head(segment) and not any_word(below[1:], ATTENTION_IN)):
            doubt = len(below) > 2 or any_word(below, EMBEDDING_DOUBTS if embeds else DOUBTS)
            kind = "embedding" if embeds else "output head"
            return Decision(None, f"named as an {kind}, perhaps none" if doubt else "", not doubt)
    if any(zero <= set(words(segment)) for segment in leaf.segments[-2:] for zero in ZEROS):
        return Decision(None, "starts at zero")
    if names_vector(own) or any(map(names_norm, above)):
        sure = leaf.ndim < 2 or names_vector(own) or names_norm(above[-1])
        return Decision(None, "" if sure else "under a norm, but perhaps a matrix", sure)
    if leaf.ndim > 1 and any_word(above, VECTORS_IN_PATH):
        return ask(leaf) if matrix else Decision(None)
    if leaf.ndim < 2:
        if leaf.stacked and matrix and leaf.ndim == 1:
            return Decision(None, "one axis once the stack is taken out", sure=False, ask=True)
        return Decision(None)
    if leaf.shape in biases_of(leaf):
        return Decision(None, "its bias has its shape")
    if leaf.ndim > 2 and sum(n > 1 for n in leaf.shape) < 2:
        return Decision(None)
    if leaf.ndim == 2 and _like_the_vocabulary(leaf):
        return Decision(None, "as large as the embedding: an output head?", sure=False)
    return None


@lru_cache(maxsize=1)
def _vocabulary(tree: Tree) -> frozenset[Shape]:
    """The sorted shapes of the embeddings of words."""
    return frozenset(
        tuple(sorted(shape))
        for path, shape in tree.shapes.items()
        if len(shape) == 2 and any(map(names_embedding, path)) and not any_word(path, POSITIONS)
    )


def _like_the_vocabulary(leaf: Leaf) -> bool:
    """Whether a leaf is of an embedding's size, and not one of the many that just happen to be."""
    width, size = pair = tuple(sorted(leaf.shape))
    if width == size or size < 32 or pair not in _vocabulary(leaf.tree.whole):
        return False
    alike = [
        path
        for path, shape in leaf.tree.shapes.items()
        if tuple(sorted(shape)) == pair and not any(map(names_embedding, path))
    ]
    return len(alike) == 1 or size > 16 * width

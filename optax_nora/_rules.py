"""Rules: which dimension numbers a leaf has, by its path, shape, dtype and axis names.

Rules are frozen dataclasses, not functions: `optax.inject_hyperparams` takes every callable
argument for a schedule.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows
from optax_nora._leaves import Leaf, PyTree, path_segments

# Own names of vectors: they have two axes when their layers are stacked.
VECTOR_NAMES = frozenset({"bias", "b", "scale", "gamma", "beta", "offset"})
# Own names of matrices: with three axes or more nobody can tell which of them are a row.
MATRIX_NAMES = frozenset({"kernel", "weight", "w"})
# Path segments of attention layers: their kernels have three axes.
ATTENTION_IN = frozenset({"query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj"})
ATTENTION_OUT = frozenset({"out", "o", "o_proj", "out_proj"})
# What names an embedding or an output head, as whole words of a path segment.
EMBEDDING_WORDS = (
    *("embed", "embeds", "embedder", "embedding", "embeddings", "unembed", "unembedding"),
    *("wte", "wpe", "vocab", "logits", "lm_head", "output_head"),
)
_EMBEDDING = re.compile(rf"(?:^|_)(?:{'|'.join(EMBEDDING_WORDS)})(?:_|$)|^head$")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[-.]")


class Rule:
    """How leaves are routed."""

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        """The dimension numbers of a leaf; None where it is no matrix."""
        raise NotImplementedError

    def partition_spec(self, leaf: Leaf) -> PartitionSpec:
        """How a leaf is split inside `jax.shard_map`."""
        del leaf
        return PartitionSpec()

    def unmatched(self, paths: Sequence[tuple[str, ...]]) -> list[str]:
        """What this rule speaks of and the tree does not have."""
        del paths
        return []


class AmbiguousAxesError(ValueError):
    """A leaf named as a matrix has too many axes to tell which of them are a row."""

    def __init__(self, leaf: Leaf, guess: MuonDimensionNumbers, meaning: str):
        self.leaf, self.guess, self.meaning = leaf, guess, meaning
        super().__init__(
            f"{leaf} is named as a matrix and has {leaf.ndim} axes; nothing says which are a row"
        )


def _names_embedding(segment: str) -> bool:
    return _EMBEDDING.search(_WORD_START.sub("_", segment).lower()) is not None


@dataclasses.dataclass(frozen=True)
class Default(Rule):
    """By name and shape: two floating axes are a matrix unless a name says otherwise."""

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        if (
            leaf.ndim < 2
            or not jnp.issubdtype(leaf.dtype, jnp.inexact)
            or leaf.name in VECTOR_NAMES
            or any(map(_names_embedding, leaf.path))
        ):
            return None
        if leaf.ndim == 2:
            return MuonDimensionNumbers(0, 1)
        if leaf.name not in MATRIX_NAMES:
            return None
        raise AmbiguousAxesError(leaf, *_guess(leaf))


def _guess(leaf: Leaf) -> tuple[MuonDimensionNumbers, str]:
    """What an ambiguous leaf most likely is, for the error to propose."""
    axes, names = tuple(range(leaf.ndim)), set(leaf.path)
    *layers, first, second, third = axes
    stack = "layers, " * len(layers)
    if len(layers) < 2 and names & ATTENTION_OUT:
        return MuonDimensionNumbers((first, second), third), f"({stack}heads, head_dim, embed)"
    if len(layers) < 2 and names & ATTENTION_IN:
        return MuonDimensionNumbers(first, (second, third)), f"({stack}embed, heads, head_dim)"
    if not layers:
        return MuonDimensionNumbers(1, 2), "(layers, in, out) or (experts, in, out)"
    return MuonDimensionNumbers(axes[:-1], third), "convolution (..., in, out)"


@dataclasses.dataclass(frozen=True)
class Kernels(Rule):
    """Every leaf is a Flax kernel (in, out): what a transformation used alone assumes."""

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers:
        if leaf.ndim != 2:
            raise ValueError(
                f"{leaf}: without weight_dimension_numbers every leaf is taken for a kernel "
                f"(in, out), and this one has {leaf.ndim} axes; give weight_dimension_numbers, or "
                "wrap the transformation in optax.masked(..., optax_nora.matrix_mask)"
            )
        return MuonDimensionNumbers(0, 1)


@dataclasses.dataclass(frozen=True)
class Everywhere(Rule):
    """One spec for all leaves."""

    spec: MuonDimensionNumbers

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers:
        return self.spec


def _prefix_in(
    specs: Mapping[tuple[str, ...], object], path: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The longest beginning of ``path`` that ``specs`` has, or None."""
    prefixes = (path[:end] for end in range(len(path), -1, -1))
    return next((prefix for prefix in prefixes if prefix in specs), None)


@dataclasses.dataclass(frozen=True)
class Listed(Rule):
    """Specs by exact path, or by a path that the leaf's path starts with."""

    specs: Mapping[tuple[str, ...], MuonDimensionNumbers | None]
    otherwise: Rule | None = None

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        if (prefix := _prefix_in(self.specs, leaf.path)) is not None:
            return self.specs[prefix]
        if self.otherwise is None:
            raise ValueError(
                f"weight_dimension_numbers says nothing of the leaf {leaf}: give it "
                "MuonDimensionNumbers, or None for AdamW"
            )
        return self.otherwise.numbers(leaf)

    def unmatched(self, paths: Sequence[tuple[str, ...]]) -> list[str]:
        return [
            "/".join(prefix)
            for prefix, spec in self.specs.items()
            if spec is not None and not any(path[: len(prefix)] == prefix for path in paths)
        ]


def _found(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_found(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _found(pattern[1:], path[1:])


def _matches(pattern: str, path: Sequence[str]) -> bool:
    return any(_found(pattern.split("/"), path[i:]) for i in range(len(path)))


@dataclasses.dataclass(frozen=True)
class ByPath(Rule):
    patterns: Mapping[str, "MuonDimensionNumbers | Rule | None"]

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        for pattern, spec in self.patterns.items():
            if _matches(pattern, leaf.path):
                return spec.numbers(leaf) if isinstance(spec, Rule) else spec
        return Default().numbers(leaf)

    def unmatched(self, paths: Sequence[tuple[str, ...]]) -> list[str]:
        return [p for p in self.patterns if not any(_matches(p, path) for path in paths)]


@dataclasses.dataclass(frozen=True)
class Stacked(Rule):
    rule: Rule
    axis: int

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        if not -leaf.ndim <= self.axis < leaf.ndim:
            raise ValueError(
                f"{leaf} has no axis {self.axis} to be stacked along; apply stacked() only to the "
                "stacked layers, with by_path({'layers': stacked()}) for instance"
            )
        axis = self.axis % leaf.ndim
        inner = leaf._replace(shape=leaf.shape[:axis] + leaf.shape[axis + 1 :])

        def outward(numbers: MuonDimensionNumbers) -> MuonDimensionNumbers:
            rows = rows_of(inner, numbers, PartitionSpec())
            shifted = ([a + (a >= axis) for a in axes] for axes in (rows.reduction, rows.output))
            return MuonDimensionNumbers(*(tuple(a) for a in shifted))

        try:
            numbers = self.rule.numbers(inner)
        except AmbiguousAxesError as error:
            guess = outward(error.guess)
            raise AmbiguousAxesError(leaf, guess, f"stacked {error.meaning}") from None
        if numbers is None and leaf.ndim == 2 and leaf.name in MATRIX_NAMES:
            raise ValueError(
                f"{leaf} is named as a matrix, and stacked(axis={self.axis}) leaves it one axis; "
                "apply stacked() only to the stacked layers, with by_path({'layers': stacked()}) "
                "for instance"
            )
        return numbers if numbers is None else outward(numbers)


@dataclasses.dataclass(frozen=True)
class InShardMap(Rule):
    rule: Rule
    specs: Mapping[tuple[str, ...], PartitionSpec]

    def numbers(self, leaf: Leaf) -> MuonDimensionNumbers | None:
        return self.rule.numbers(leaf)

    def partition_spec(self, leaf: Leaf) -> PartitionSpec:
        if (prefix := _prefix_in(self.specs, leaf.path)) is not None:
            return self.specs[prefix]
        raise ValueError(f"in_shard_map has no PartitionSpec for the leaf {leaf}")

    def unmatched(self, paths: Sequence[tuple[str, ...]]) -> list[str]:
        return self.rule.unmatched(paths)


def rows_of(leaf: Leaf, numbers: MuonDimensionNumbers, spec: PartitionSpec) -> Rows:
    """Check dimension numbers against a leaf; axes counted from the front."""
    if leaf.ndim < 2:
        raise ValueError(
            f"{leaf} has dimension numbers {numbers} and fewer than 2 axes; give this leaf None, "
            "for AdamW"
        )
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(f"{leaf} is no floating leaf and has dimension numbers; give it None")

    def axes(field: str) -> tuple[int, ...]:
        value = getattr(numbers, field)
        given = (value,) if isinstance(value, int) else tuple(value)
        for axis in given:
            if not -leaf.ndim <= axis < leaf.ndim:
                raise ValueError(
                    f"{leaf}: {field}={value} is out of range; its axes are 0 to {leaf.ndim - 1}"
                )
        found = tuple(axis % leaf.ndim for axis in given)
        if len(set(found)) != len(found):
            raise ValueError(f"{leaf}: {field}={value} repeats an axis; name each axis once")
        return found

    reduction, output = axes("reduction_axis"), axes("output_axis")
    if not reduction:
        raise ValueError(f"{leaf}: reduction_axis is empty; name the axes that a row runs along")
    if shared := set(reduction) & set(output):
        raise ValueError(
            f"{leaf}: reduction_axis={numbers.reduction_axis} and "
            f"output_axis={numbers.output_axis} overlap in {sorted(shared)}; an axis is reduced "
            "over or numbers the rows, not both"
        )

    def mesh_axes(array_axes: tuple[int, ...]) -> tuple[str, ...]:
        named = [spec[axis] for axis in array_axes if axis < len(spec) and spec[axis] is not None]
        return tuple(
            n for entry in named for n in (entry if isinstance(entry, tuple) else (entry,))
        )

    return Rows(reduction, output, mesh_axes(reduction), mesh_axes(output))


def _one_rule(rule: MuonDimensionNumbers | Rule | None) -> Rule:
    if rule is None:
        return Default()
    return rule if isinstance(rule, Rule) else Everywhere(rule)


def by_path(patterns: Mapping[str, MuonDimensionNumbers | Rule | None]) -> Rule:
    r"""Route leaves by patterns of their paths.

    A pattern is one or more segments between slashes and matches where they stand in a row,
    anywhere in the leaf's path. ``*`` stands for any one segment, ``**`` for any number of them,
    and ``layer_*`` for the segments that begin so: a segment matches as a whole or not at all.
    The first pattern that matches wins; a leaf that none matches takes the default routing.

    Args:
      patterns: maps a pattern to `optax.contrib.MuonDimensionNumbers`, to None (AdamW), or to
        another rule such as `stacked()`.

    Returns:
      A rule, for every ``weight_dimension_numbers``.

    Raises:
      ValueError: if a pattern is empty, or its value is none of these.

    Examples:
      >>> from optax.contrib import MuonDimensionNumbers
      >>> import optax_nora
      >>> rule = optax_nora.by_path({
      ...     'attention/out/kernel': MuonDimensionNumbers((0, 1), 2),
      ...     'attention/*/kernel': MuonDimensionNumbers(0, (1, 2)),
      ...     'adapter': None,
      ... })
      >>> tx = optax_nora.nora(0.01, weight_dimension_numbers=rule)
    """
    for pattern, spec in patterns.items():
        if not pattern or "" in pattern.split("/"):
            raise ValueError(f"by_path: the pattern {pattern!r} has an empty segment")
        if not (spec is None or isinstance(spec, MuonDimensionNumbers | Rule)):
            raise ValueError(
                f"by_path: {pattern!r} maps to {spec!r}; give optax.contrib.MuonDimensionNumbers, "
                "a rule, or None for AdamW"
            )
    return ByPath(dict(patterns))


def stacked(rule: MuonDimensionNumbers | Rule | None = None, axis: int = 0) -> Rule:
    """Route layers that are stacked along an axis, as by a scan over layers.

    The axis becomes a batch axis; what ``rule`` says of a single layer holds for the others. So a
    stacked bias ``(layers, features)`` is a vector, and a stacked kernel ``(layers, in, out)`` is a
    matrix with rows along axis 1.

    Args:
      rule: dimension numbers or a rule for one layer, as if it were not stacked. None: the default
        routing.
      axis: the axis of the stack: 0 in Flax, 1 in MaxText.

    Returns:
      A rule. Where only some of the leaves are stacked, give it to `by_path`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_nora
      >>> params = {'layers': {'mlp': {'kernel': jnp.ones((12, 64, 256))}}}
      >>> rule = optax_nora.by_path({'layers': optax_nora.stacked()})
      >>> optax_nora.infer_dimension_numbers(params, rule)
      {'layers': {'mlp': {'kernel': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))}}}
    """
    return Stacked(_one_rule(rule), axis)


def in_shard_map(partition_specs: PyTree, rule: MuonDimensionNumbers | Rule | None = None) -> Rule:
    """Tell rows that are split inside `jax.shard_map` which mesh axes split them.

    There each device sees only its part of an array, and nothing but the user knows of the others.
    Under `jax.jit` with NamedShardings, do not use this: jax then sees whole arrays.

    Args:
      partition_specs: the `jax.sharding.PartitionSpec` of each parameter, as in the ``in_specs`` of
        the shard_map: one for all, or a tree or prefix tree of them.
      rule: dimension numbers or a rule. None: the default routing.

    Returns:
      A rule. Row sums are then summed over the mesh axes that split a reduction axis, one number a
      row each, and the row scale is that of the whole matrix.

    Examples:
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_nora
      >>> rule = optax_nora.in_shard_map({'up': {'kernel': P('tensor', None)}})
      >>> tx = optax_nora.nora(0.01, weight_dimension_numbers=rule)
    """
    specs, _ = jax.tree_util.tree_flatten_with_path(
        partition_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return InShardMap(_one_rule(rule), {path_segments(path): spec for path, spec in specs})

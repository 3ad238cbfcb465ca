"""Rules: which dimension numbers a leaf has, by what a user says of it."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows, mesh_axes
from optax_nora._default import Decision, Default, Rule, by_name
from optax_nora._guess import outward
from optax_nora._leaves import Leaf, Path, PyTree, path_of, prefix_in, split_path


class Frozen(dict):
    """A mapping that is never written to, so that rules have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclasses.dataclass(frozen=True)
class DenseOnly(Rule):
    """Every leaf is a Dense kernel (in, out): what a transformation used alone assumes."""

    def decide(self, leaf: Leaf) -> Decision:
        if leaf.ndim != 2:
            raise ValueError(
                f"{leaf}: without weight_dimension_numbers every leaf is taken for a matrix "
                f"(in, out), and this one has {leaf.ndim} axes; give weight_dimension_numbers, or "
                "wrap the transformation in optax.masked(..., optax_nora.matrix_mask)"
            )
        return Decision(MuonDimensionNumbers(0, 1))


@dataclasses.dataclass(frozen=True)
class Kernels(Rule):
    """One axis out, all others in, whatever the rank."""

    out_axis: int = -1

    def decide(self, leaf: Leaf) -> Decision:
        if (known := by_name(leaf)) is not None and not known.ask:
            return known._replace(sure=True)
        if leaf.ndim < 2:
            return Decision(None)
        out = self.out_axis % leaf.ndim
        return Decision(MuonDimensionNumbers(tuple(a for a in range(leaf.ndim) if a != out), out))


@dataclasses.dataclass(frozen=True)
class Everywhere(Rule):
    """One spec for all leaves; None for AdamW."""

    spec: MuonDimensionNumbers | None

    def decide(self, leaf: Leaf) -> Decision:
        return Decision(self.spec)


ADAMW = Everywhere(None)


@dataclasses.dataclass(frozen=True)
class Listed(Rule):
    """Specs by exact path, or by a path that the leaf's path starts with."""

    specs: Mapping[Path, MuonDimensionNumbers | None]

    def decide(self, leaf: Leaf) -> Decision:
        if (prefix := prefix_in(self.specs, leaf.path)) is not None:
            return Decision(self.specs[prefix])
        raise ValueError(
            f"weight_dimension_numbers says nothing of the leaf {leaf}: give it "
            "MuonDimensionNumbers, or None for AdamW"
        )

    def unmatched(self, leaves: Sequence[Leaf]) -> list[str]:
        return [
            "/".join(prefix)
            for prefix, spec in self.specs.items()
            if spec is not None and not any(one.path[: len(prefix)] == prefix for one in leaves)
        ]


def _found(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_found(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _found(pattern[1:], path[1:])


def matches(pattern: str, leaf: Leaf) -> bool:
    """Whether a pattern stands anywhere in a leaf's path, or at its start after a slash."""
    path, (first, *rest) = split_path(leaf.path), pattern.split("/")
    if not first:
        return _found(rest, path)
    return any(_found((first, *rest), path[i:]) for i in range(len(path)))


@dataclasses.dataclass(frozen=True)
class ByPath(Rule):
    patterns: tuple[tuple[str, Rule], ...]
    optional: bool = False  # whether patterns may match nothing, as those of a family of models

    def decide(self, leaf: Leaf) -> Decision:
        found = (rule for pattern, rule in self.patterns if matches(pattern, leaf))
        return next(found, Default()).decide(leaf)

    def unmatched(self, leaves: Sequence[Leaf]) -> list[str]:
        patterns = () if self.optional else self.patterns
        return [p for p, _ in patterns if not any(matches(p, leaf) for leaf in leaves)]


@dataclasses.dataclass(frozen=True)
class Stacked(Rule):
    rule: Rule
    axis: int

    def decide(self, leaf: Leaf) -> Decision:
        if not -leaf.ndim <= self.axis < leaf.ndim:
            raise ValueError(
                f"{leaf} has no axis {self.axis} to be stacked along; let a pattern of by_path "
                "before stacked() route it, or give stacked() fewer leaves"
            )
        axis = self.axis % leaf.ndim
        inner = leaf.without(axis)
        decision = self.rule.decide(inner)
        if decision.numbers is None:
            return decision
        rows = rows_of(inner, decision.numbers, PartitionSpec())
        numbers = outward(MuonDimensionNumbers(rows.reduction, rows.output), axis)
        note = f"stacked along axis {axis}, {decision.note}" if decision.ask else decision.note
        return decision._replace(numbers=numbers, note=note)


@dataclasses.dataclass(frozen=True)
class InShardMap(Rule):
    rule: Rule
    specs: Mapping[Path, PartitionSpec]

    def decide(self, leaf: Leaf) -> Decision:
        return self.rule.decide(leaf)

    def partition_spec(self, leaf: Leaf) -> PartitionSpec:
        if (prefix := prefix_in(self.specs, leaf.path)) is not None:
            return self.specs[prefix]
        raise ValueError(f"in_shard_map has no PartitionSpec for the leaf {leaf}")

    def unmatched(self, leaves: Sequence[Leaf]) -> list[str]:
        return self.rule.unmatched(leaves)


def axes_of(value: Any, where: str) -> tuple[int, ...]:
    """One axis or several as a tuple of int."""
    if not isinstance(value, bool | str):
        with suppress(TypeError):
            return (operator.index(value),)
        with suppress(TypeError):
            return tuple(map(operator.index, value))
    raise ValueError(f"{where}={value!r} is no axis: give an int or a tuple of int")


def checked(spec: MuonDimensionNumbers) -> MuonDimensionNumbers:
    """Dimension numbers whose axes are int or tuples of int."""
    for field in ("reduction_axis", "output_axis"):
        value = getattr(spec, field)
        axes = axes_of(value, f"{spec}: {field}")
        spec = spec._replace(**{field: axes if isinstance(value, Iterable) else axes[0]})
    return spec


def rows_of(leaf: Leaf, numbers: MuonDimensionNumbers, spec: PartitionSpec) -> Rows:
    """Check dimension numbers against a leaf; axes counted from the front."""
    if leaf.ndim < 2:
        raise ValueError(
            f"{leaf} has dimension numbers {numbers} and fewer than 2 axes; give this leaf None, "
            "for AdamW"
        )
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(f"{leaf} is not floating and has dimension numbers; give it None")

    def axes(field: str) -> tuple[int, ...]:
        value = getattr(numbers, field)
        given = axes_of(value, f"{leaf}: {field}")
        if not all(-leaf.ndim <= axis < leaf.ndim for axis in given):
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

    split = [mesh_axes(spec, part) for part in (reduction, output, output[1:])]
    return Rows(reduction, output, *split)


def rule_of(given: Any, none: Rule, where: str = "") -> Rule:
    """The rule in what an argument gives; ``none`` is that in None."""
    if given is None:
        return none
    if isinstance(given, MuonDimensionNumbers):
        return Everywhere(checked(given))
    if isinstance(given, Rule):
        return given
    raise ValueError(
        f"{where} {repr(given)[:80]}; give optax.contrib.MuonDimensionNumbers, a rule "
        "(called: stacked(), not stacked), or None for AdamW"
    )


def by_path(patterns: Mapping[str, MuonDimensionNumbers | Rule | None]) -> Rule:
    r"""Route leaves by patterns of their paths.

    A pattern is one or more segments between slashes and matches where they stand in a row,
    anywhere in the leaf's path; one that begins with a slash matches at the path's start only.
    ``*`` stands for any one segment, ``**`` for any number of them, and ``layer_*`` for the
    segments that begin so: a segment matches as a whole or not at all. The first pattern that
    matches wins; a leaf that none matches takes the default routing.

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
    if not isinstance(patterns, Mapping):
        raise ValueError(f"by_path takes a dict from patterns to numbers, not {patterns!r:.80}")
    for pattern in patterns:
        if not isinstance(pattern, str) or "" in pattern.removeprefix("/").split("/"):
            raise ValueError(f"by_path: the pattern {pattern!r} has an empty segment")
    return ByPath(
        tuple((p, rule_of(x, ADAMW, f"by_path: {p!r} maps to")) for p, x in patterns.items())
    )


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

    Raises:
      ValueError: if rule is none of these, or axis is no int.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_nora
      >>> params = {'layers': {'mlp': {'kernel': jnp.ones((12, 64, 256))}}}
      >>> rule = optax_nora.by_path({'layers': optax_nora.stacked()})
      >>> optax_nora.infer_dimension_numbers(params, rule)
      {'layers': {'mlp': {'kernel': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))}}}
    """
    one_layer = rule_of(rule, Default(), "stacked: rule is")
    if len(axes := axes_of(axis, "stacked: axis")) != 1:
        raise ValueError(f"stacked: axis={axis!r} is not one axis; stack stacked() for several")
    return Stacked(one_layer, axes[0])


def kernels() -> Rule:
    """Take the last axis of every matrix for the output and reduce over all others.

    Right for any mix of Flax's Dense and Conv, ``(in, out)`` and ``(height, width, in, out)``;
    wrong for attention's ``(embed, heads, head_dim)``, and for stacks unless within `stacked`.
    What its name says to be a vector, an embedding or an output head still goes to AdamW.

    Returns:
      A rule.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'Conv_0': {'kernel': jnp.ones((3, 3, 8, 16)), 'bias': jnp.ones(16)}}
      >>> optax_nora.infer_dimension_numbers(params, optax_nora.kernels())['Conv_0']['kernel']
      MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=(3,))
    """
    return Kernels()


def default_routing() -> Rule:
    """Route by name, rank and neighbours: what `nora` does where nothing is given, as a rule.

    Returns:
      A rule, for the transformations that take every leaf for a matrix unless told otherwise.

    Examples:
      >>> import optax_nora
      >>> tx = optax_nora.row_normalize(weight_dimension_numbers=optax_nora.default_routing())
    """
    return Default()


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

    Raises:
      ValueError: if a spec is no PartitionSpec; at ``init`` if a leaf has none.

    Examples:
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_nora
      >>> rule = optax_nora.in_shard_map({'up': {'kernel': P('tensor', None)}})
      >>> tx = optax_nora.nora(0.01, weight_dimension_numbers=rule)
    """
    specs, _ = jax.tree_util.tree_flatten_with_path(
        partition_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    for _, spec in specs:
        if not isinstance(spec, PartitionSpec):
            raise ValueError(f"in_shard_map: {spec!r:.80} is no jax.sharding.PartitionSpec")
    return InShardMap(
        rule_of(rule, Default(), "in_shard_map: rule is"),
        Frozen((path_of(path), spec) for path, spec in specs),
    )


def listed(specs: Mapping[Path, MuonDimensionNumbers | None]) -> Rule:
    """The rule of a tree of specs, by path."""
    return Listed(Frozen({p: spec and checked(spec) for p, spec in specs.items()}))

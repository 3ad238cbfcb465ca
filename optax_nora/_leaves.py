"""Leaves of a parameter tree under one spelling of their paths.

Flax NNX shows ``['a']['kernel'].value`` to `init` and ``['a']['kernel']`` to `update`, Linen
boxes its leaves, other libraries have attribute or integer keys: here all of them become
``('a', 'kernel')``.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any
Path = tuple[str, ...]
Shape = tuple[int, ...]

# Segments that a library puts behind a leaf's own name.
_WRAPPERS = frozenset({"array", "value", "raw_value"})
_WRAPPED = frozenset({"weight", "bias"})  # and 0 behind these: Haliax' arrays in a sequence


@cache
def split_path(path: Path) -> Path:
    """The segments of a path: Haiku's keys hold slashes."""
    return tuple(segment for key in path for segment in key.split("/"))


@cache
def _segments(path: Path) -> Path:
    segments = split_path(path)
    while len(segments) > 1 and (
        segments[-1] in _WRAPPERS or (segments[-1] == "0" and segments[-2] in _WRAPPED)
    ):
        segments = segments[:-1]
    return segments


def slashed(path: Path) -> str:
    """A path as errors and tables show it."""
    return "/".join(path) or "(root)"


def prefix_in(known: Mapping[Path, Any], path: Path) -> Path | None:
    """The longest beginning of ``path`` that is ``known``, or None."""
    prefixes = (path[:end] for end in range(len(path), -1, -1))
    return next((prefix for prefix in prefixes if prefix in known), None)


class Tree:
    """What the neighbours of a leaf say: the shapes of a whole tree, by their segments.

    ``whole`` is the tree from which axes were taken out.
    """

    def __init__(self, shapes: Iterable[tuple[Path, Shape]] = (), whole: "Tree | None" = None):
        self.shapes = dict(shapes)
        self.whole = whole or self
        self._without: dict[int, Tree] = {}

    @cached_property
    def modules(self) -> dict[Path, dict[str, Shape]]:
        """The leaves of each module: their names and shapes."""
        found: dict[Path, dict[str, Shape]] = defaultdict(dict)
        for segments, shape in self.shapes.items():
            found[segments[:-1]][segments[-1] if segments else ""] = shape
        return found

    @cached_property
    def below(self) -> dict[Path, set[tuple[str, Shape]]]:
        """The names and shapes of all leaves under each module."""
        found: dict[Path, set[tuple[str, Shape]]] = defaultdict(set)
        for segments, shape in self.shapes.items():
            for end in range(len(segments)):
                found[segments[:end]].add((segments[-1], shape))
        return found

    def without(self, axis: int) -> "Tree":
        """The tree with ``axis`` taken out of every leaf that has it."""
        if axis not in self._without:
            shapes = ((p, s[:axis] + s[axis + 1 :]) for p, s in self.shapes.items())
            self._without[axis] = Tree(shapes, self.whole)
        return self._without[axis]


NO_TREE = Tree()


class Leaf(NamedTuple):
    """What routing may know of a leaf: where it is, its shape and dtype, and its tree.

    ``stacked`` tells that an axis of stacked layers was taken out of the shape.
    """

    path: Path
    shape: Shape
    dtype: Any
    tree: Tree = NO_TREE
    stacked: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def segments(self) -> Path:
        """The path as names: keys split at slashes, without a wrapper's last key."""
        return _segments(self.path)

    @property
    def name(self) -> str:
        """The last segment of the path that is not a number."""
        return next((s for s in reversed(self.segments) if not s.isdigit()), "")

    @property
    def slashed(self) -> str:
        return slashed(self.path)

    def without(self, axis: int) -> "Leaf":
        """The leaf of one layer of a stack along ``axis``."""
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return self._replace(shape=shape, tree=self.tree.without(axis), stacked=True)

    def __str__(self) -> str:
        return f"{self.slashed} {self.shape} {self.dtype}"


def kinds(said: Iterable[tuple[Leaf, Any]]) -> list[tuple[str, Any, list[Leaf]]]:
    """Leaves of which the same is said and whose paths differ in numbers alone.

    For each kind the pattern that its paths share, what is said, and the leaves.
    """
    groups: dict[Any, list[Leaf]] = defaultdict(list)
    for leaf, what in said:
        groups[re.sub(r"\d+", "*", leaf.slashed), what].append(leaf)
    return [
        (pattern if len(group) > 1 else group[0].slashed, what, group)
        for (pattern, what), group in groups.items()
    ]


def is_function(given: Any) -> bool:
    """Whether ``given`` is to be called: a tree may be callable too, as Equinox's modules are."""
    leaves = jax.tree.leaves(given)
    return bool(leaves) and all(map(callable, leaves))


def _is_box(node: Any) -> bool:
    # A Linen box or an NNX Variable: one array with metadata. We don't depend on flax.
    return hasattr(type(node), "add_axis") and hasattr(type(node), "remove_axis")


def is_leaf(node: Any) -> bool:
    # Where `optax.masked` took a leaf out, its path still counts.
    return _is_box(node) or isinstance(node, optax.MaskedNode)


def path_of(key_path: tuple[Any, ...]) -> Path:
    """A jax key path as strings, whatever kinds of key it has."""
    return tuple(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in key_path
    )


def nodes_with_paths(
    tree: PyTree, also: Callable[[Any], bool] = lambda _: False
) -> tuple[list[tuple[Path, Any]], Any]:
    """The leaves of ``tree``, boxes and what is one ``also``, with paths; and the structure."""
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_leaf(node) or also(node)
    )
    return [(path_of(path), node) for path, node in nodes], treedef


def array_of(node: Any) -> Any:
    """The array in a box, the array itself, or None where the leaf was taken out."""
    arrays = jax.tree.leaves(node)
    if len(arrays) > 1:
        raise ValueError(f"{type(node).__name__} holds {len(arrays)} arrays; a leaf holds one")
    return arrays[0] if arrays else None


def describe(path: Path, array: Any) -> Leaf:
    """The `Leaf` of an array, a tracer or a `jax.ShapeDtypeStruct`."""
    if hasattr(array, "dtype"):
        return Leaf(path, tuple(array.shape), array.dtype)
    if isinstance(array, int | float | complex):
        return Leaf(path, (), jnp.result_type(array))
    raise ValueError(
        f"the leaf {slashed(path)} is {repr(array)[:80]}, not an array: keep it out of the "
        "parameters"
    )


def map_leaves(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """``fn(leaf, array, *arrays_of_rest)`` for every leaf of ``tree``, put back in its box.

    Leaves are paired by their paths; containers and boxes may differ, paths and shapes may not (a
    boolean speaks for a leaf of any shape). Leaves that a mask took out of ``tree`` stay out;
    ``fn`` may take out more by returning `optax.MaskedNode()`.
    """
    nodes, treedef = nodes_with_paths(tree)
    columns = [_paired([path for path, _ in nodes], other) for other in rest]

    def one(path: Path, node: Any, *others: Any) -> Any:
        array = array_of(node)
        if array is None:
            return node
        leaf, arrays = describe(path, array), [array_of(other) for other in others]
        for other in arrays:
            # What is no array is what the caller made for himself.
            shape = getattr(other, "shape", leaf.shape)
            if shape != leaf.shape and other.dtype != bool:
                raise ValueError(
                    f"the leaf {leaf.slashed} is {leaf.shape} in one tree and {shape} in another: "
                    "gradients, state and parameters must have the same shapes"
                )
        out = fn(leaf, array, *arrays)
        masked = isinstance(out, optax.MaskedNode)
        return out if masked else jax.tree.unflatten(jax.tree.structure(node), [out])

    return treedef.unflatten(
        [one(path, node, *others) for (path, node), *others in zip(nodes, *columns, strict=True)]
    )


def check_paired(tree: PyTree, *rest: PyTree) -> None:
    """Raise where these trees differ in the paths or shapes of their leaves."""
    map_leaves(lambda _, array, *others: array, tree, *rest)


def _paired(paths: list[Path], tree: PyTree) -> list[Any]:
    """The nodes of ``tree`` in the order of ``paths``."""
    found, known = dict(nodes_with_paths(tree)[0]), set(paths)
    other = next((p for p in (*paths, *found) if p not in found or p not in known), None)
    if other is not None:
        raise ValueError(
            f"the leaf {slashed(other)} is in one tree and not in another: give "
            "gradients, state and parameters as trees of one structure"
        )
    return [found[path] for path in paths]

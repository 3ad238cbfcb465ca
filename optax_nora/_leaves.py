"""Leaves of a parameter tree under one spelling of their paths.

Flax NNX shows ``['a']['kernel'].value`` to ``init`` and ``['a']['kernel']`` to ``update``, Linen
boxes its leaves, other libraries have attribute or integer keys: here all of them become
``('a', 'kernel')``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


class Leaf(NamedTuple):
    """What routing may know of a leaf: where it is, its shape and its dtype."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def name(self) -> str:
        """The last segment of the path that is not a number."""
        return next((s for s in reversed(self.path) if not s.isdigit()), "")

    @property
    def slashed(self) -> str:
        return "/".join(self.path) or "(root)"

    def __str__(self) -> str:
        return f"{self.slashed} {self.shape} {self.dtype}"


def _is_box(node: Any) -> bool:
    # A Linen box or an NNX Variable: one array with metadata. We don't depend on flax.
    return hasattr(type(node), "add_axis") and hasattr(type(node), "remove_axis")


def _is_leaf(node: Any) -> bool:
    # Where `optax.masked` took a leaf out, its path still counts.
    return _is_box(node) or isinstance(node, optax.MaskedNode)


def path_segments(key_path: tuple[Any, ...]) -> tuple[str, ...]:
    """A jax key path as plain segments, whatever kinds of key it has; Haiku's keys hold slashes."""
    keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in key_path)
    return tuple(segment for key in keys for segment in str(key).split("/"))


def nodes_with_paths(tree: PyTree) -> tuple[list[tuple[tuple[str, ...], Any]], Any]:
    """The leaves of ``tree`` with their paths, boxes taken as leaves, and the structure."""
    nodes, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    return [(path_segments(path), node) for path, node in nodes], treedef


def array_of(node: Any) -> Any:
    """The array in a box, the array itself, or None where the leaf was taken out."""
    arrays = jax.tree.leaves(node)
    if len(arrays) > 1:
        raise ValueError(f"{type(node).__name__} holds {len(arrays)} arrays; a leaf holds one")
    return arrays[0] if arrays else None


def describe(path: tuple[str, ...], array: Any) -> Leaf:
    """The `Leaf` of an array, a tracer or a `jax.ShapeDtypeStruct`."""
    dtype = array.dtype if hasattr(array, "dtype") else jnp.result_type(array)
    return Leaf(path, tuple(np.shape(array)), dtype)


def map_leaves(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """``fn(leaf, array, *arrays_of_rest)`` for every leaf of ``tree``, put back in its box.

    The ``rest`` trees have their leaves in the same order; their boxes may differ. Leaves that a
    mask took out of ``tree`` stay out; ``fn`` may take out more by returning `optax.MaskedNode()`.
    """
    nodes, treedef = nodes_with_paths(tree)
    columns = [[node for _, node in nodes_with_paths(other)[0]] for other in rest]
    for column in columns:
        if len(column) != len(nodes):
            raise ValueError(
                f"the updates have {len(nodes)} leaves, the parameters or the state {len(column)}: "
                "give trees of one structure"
            )

    def one(path: tuple[str, ...], node: Any, *others: Any) -> Any:
        array = array_of(node)
        if array is None:
            return node
        out = fn(describe(path, array), array, *(array_of(other) for other in others))
        masked = isinstance(out, optax.MaskedNode)
        return out if masked else jax.tree.unflatten(jax.tree.structure(node), [out])

    return treedef.unflatten(
        [one(path, node, *others) for (path, node), *others in zip(nodes, *columns, strict=True)]
    )

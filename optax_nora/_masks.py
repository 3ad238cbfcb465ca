"""Masks of weight decay: whatever a user gives, as one boolean a leaf."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_nora._leaves import (
    Leaf,
    Path,
    PyTree,
    array_of,
    is_function,
    map_leaves,
    nodes_with_paths,
    prefix_in,
    slashed,
)


def decay_mask(mask: Any) -> Callable[[PyTree], PyTree] | None:
    """The function from parameters to a tree of bool like them; None, where all decay, stays None.

    A mask and the parameters are paired by path: one in the boxes of `jax.tree.map` serves
    parameters without boxes, and the other way round.
    """
    if mask is None:
        return None
    by_function = is_function(mask)
    if not by_function and () in _booleans(mask):
        raise TypeError(
            f"weight_decay_mask={mask!r} is one boolean for all leaves, which is what "
            "optax.inject_hyperparams makes of a function: name it in static_args there"
        )

    def of(params: PyTree) -> PyTree:
        decays = _booleans(mask(params) if by_function else mask)

        def one(leaf: Leaf, _: Any) -> bool:
            if (prefix := prefix_in(decays, leaf.path)) is None:
                raise ValueError(f"weight_decay_mask says nothing of the leaf {leaf}")
            return decays[prefix]

        return map_leaves(one, params)

    return of


def _booleans(mask: PyTree) -> dict[Path, bool]:
    found = {}
    for path, node in nodes_with_paths(mask)[0]:
        yes = array_of(node)
        if yes is None:  # another mask took the leaf out
            continue
        of_numpy = isinstance(yes, np.bool_ | np.ndarray | jax.Array) and yes.dtype == np.bool_
        if not (isinstance(yes, bool) or (of_numpy and np.shape(yes) == ())):
            raise TypeError(
                f"weight_decay_mask has {repr(yes)[:80]} at {slashed(path)}, not a "
                "bool; give a tree, a prefix tree or a function of the parameters that gives one"
            )
        found[path] = bool(yes)
    return found

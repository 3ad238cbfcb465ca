"""States that another optimizer made: one error in the place of what comes of them."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_nora._leaves import PyTree, is_leaf


class StateError(ValueError):
    """A state that was made under other settings, where the error says of itself which."""


@contextlib.contextmanager
def explained(init: Callable[[PyTree], PyTree], params: PyTree, state: PyTree) -> Iterator[None]:
    """Inside, an error that comes of a state unlike those of ``init`` says where they differ."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        found = ""
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            found = _difference(state, jax.eval_shape(init, params))
        if not found:
            raise
        raise ValueError(
            f"this state was made by another optimizer or under other settings: {found}. A mask of "
            "weight decay, a schedule, masters, routing and every part of a chain have their place "
            "in the state; make it anew with init"
        ) from error


def _difference(state: PyTree, own: PyTree, where: str = "") -> str:
    """Where two states first differ in kind, as a clause; nothing where they do not."""
    (kind, parts), (own_kind, own_parts) = _look(state), _look(own)
    if kind == own_kind and parts.keys() != own_parts.keys():
        kind, own_kind = (f"only {', '.join(p) or 'nothing'}" for p in (parts, own_parts))
    if kind != own_kind:
        return f"at {where or 'its root'} it has {kind}, and this optimizer has {own_kind}"
    below = (_difference(part, own_parts[key], where + key) for key, part in parts.items())
    return next(filter(None, below), "")


def _look(node: PyTree) -> tuple[str, dict[str, Any]]:
    """The kind of a node of a tree, and what is right below it."""
    if hasattr(node, "dtype") or (is_leaf(node) and jax.tree.leaves(node)):
        return "an array", {}
    below, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return type(node).__name__, {jax.tree_util.keystr(path): part for path, part in below}

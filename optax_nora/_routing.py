"""Routing: whatever a user gives as ``weight_dimension_numbers``, applied to a tree of parameters.

One spec, a tree or a prefix tree of specs, a rule, a function of the parameters, or nothing: each
becomes a `Rule`, and a rule says of each leaf which axes are its rows, or that it is no matrix.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows
from optax_nora._leaves import (
    Leaf,
    PyTree,
    array_of,
    describe,
    map_leaves,
    nodes_with_paths,
    path_segments,
)
from optax_nora._rules import (
    AmbiguousAxesError,
    Default,
    Everywhere,
    Kernels,
    Listed,
    Rule,
    rows_of,
)

Path = tuple[str, ...]
Routes = Mapping[Path, Rows | None]  # None where a leaf is no matrix
WeightDimensionNumbers = MuonDimensionNumbers | Rule | PyTree | Callable[[PyTree], PyTree] | None


def as_rule(weight_dimension_numbers: WeightDimensionNumbers, default: Rule, tree: PyTree) -> Rule:
    """The rule in whatever a user gave; ``tree`` is for functions of the parameters."""
    given = weight_dimension_numbers
    if given is None:
        return default
    if isinstance(given, Rule):
        return given
    if isinstance(given, MuonDimensionNumbers):
        return Everywhere(given)
    if callable(given):
        return as_rule(given(tree), default, tree)
    specs, _ = jax.tree_util.tree_flatten_with_path(
        given, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    )
    for path, spec in specs:
        if not (spec is None or isinstance(spec, MuonDimensionNumbers)):
            where = "/".join(path_segments(path)) or "(root)"
            raise ValueError(
                f"weight_dimension_numbers has {spec!r} at {where}; give "
                "optax.contrib.MuonDimensionNumbers(reduction_axis, output_axis), or None for AdamW"
            )
    return Listed({path_segments(path): spec for path, spec in specs})


def route(leaf: Leaf, rule: Rule) -> Rows | None:
    """The rows of one leaf, None where it is no matrix."""
    numbers = rule.numbers(leaf)
    return None if numbers is None else rows_of(leaf, numbers, rule.partition_spec(leaf))


def routed_tree(choose: Callable[[Leaf, Rows | None], Any], tree: PyTree, rule: Rule) -> PyTree:
    """``choose(leaf, rows)`` in the place of every leaf; all ambiguous leaves in one error."""
    nodes, treedef = nodes_with_paths(tree)
    out, ambiguous = [], []
    for path, node in nodes:
        if (array := array_of(node)) is None:
            out.append(node)
            continue
        leaf = describe(path, array)
        try:
            out.append(choose(leaf, route(leaf, rule)))
        except AmbiguousAxesError as error:
            ambiguous.append(error)
    if ambiguous:
        raise ValueError(_how_to_route(ambiguous))
    return treedef.unflatten(out)


def check(tree: PyTree, rule: Rule) -> None:
    """Raise what is wrong with ``rule`` for the leaves of ``tree``."""
    routed_tree(lambda leaf, rows: None, tree, rule)


def check_matched(params: PyTree, weight_dimension_numbers: WeightDimensionNumbers) -> None:
    """Raise for a tree of specs, warn for patterns, that speak of leaves which are not there."""
    rule = as_rule(weight_dimension_numbers, Default(), params)
    paths = [path for path, _ in nodes_with_paths(params)[0]]
    if not paths or not (unmatched := rule.unmatched(paths)):
        return
    known = ", ".join("/".join(path) for path in paths[:8])
    message = (
        f"weight_dimension_numbers speaks of {', '.join(unmatched)}, which matches no leaf; "
        f"the leaves are {known}{', ...' if len(paths) > 8 else ''}"
    )
    if isinstance(rule, Listed):
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def _how_to_route(errors: Sequence[AmbiguousAxesError]) -> str:
    lines = [
        "these leaves are named as matrices and have 3 axes or more, and nothing says which axes "
        "are a row:",
        *(f"  {error.leaf}" for error in errors),
        "Say so. If each is what its comment says, paste",
        "  weight_dimension_numbers=optax_nora.by_path({",
        *(
            f"      {error.leaf.slashed!r}: MuonDimensionNumbers"
            f"({error.guess.reduction_axis}, {error.guess.output_axis}),  # {error.meaning}"
            for error in errors
        ),
        "  })",
        "with `from optax.contrib import MuonDimensionNumbers`; for layers stacked along axis 0, "
        "(layers, in, out), take",
        "  optax_nora.by_path({'layers': optax_nora.stacked()})",
        "with the name of your stack; None sends a leaf to AdamW.",
    ]
    return "\n".join(lines)


def for_nora(leaf: Leaf, rows: Rows | None) -> Rows | None:
    """``rows``, but None for rows of one weight: nothing is orthogonal to one, so AdamW has it."""
    if rows is None or (rows.reduction_mesh == () and rows.fan_in(leaf.shape) <= 1):
        return None
    return rows


def whole_model(
    choose: Callable[[Leaf, Rows | None], Any],
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> PyTree:
    """``choose(leaf, rows)`` in the place of every leaf, with rows for what goes to Nora alone."""
    rule = as_rule(weight_dimension_numbers, Default(), params)
    return routed_tree(lambda leaf, rows: choose(leaf, for_nora(leaf, rows)), params, rule)


# What an enclosing `with_adamw` found for the whole tree: its parts see the matrices alone.
_ENCLOSING: ContextVar[Routes | None] = ContextVar("routes", default=None)


@contextlib.contextmanager
def enclosing(routes: Routes) -> Iterator[None]:
    """Inside, parts that were given no dimension numbers take these rows."""
    token = _ENCLOSING.set(routes)
    try:
        yield
    finally:
        _ENCLOSING.reset(token)


def routes_of(
    tree: PyTree, weight_dimension_numbers: WeightDimensionNumbers, whole_model: bool = False
) -> Routes:
    """The rows of each leaf by its path, None where it is no matrix.

    Without dimension numbers every leaf is a kernel ``(in, out)``, or what the default routing of a
    ``whole_model`` says, whose leaves of fan-in 1 are no matrices.
    """
    if weight_dimension_numbers is None and (routes := _ENCLOSING.get()) is not None:
        return routes
    default = Default() if whole_model else Kernels()
    rule = as_rule(weight_dimension_numbers, default, tree)
    routes: dict[Path, Rows | None] = {}

    def note(leaf: Leaf, rows: Rows | None) -> None:
        routes[leaf.path] = for_nora(leaf, rows) if whole_model else rows

    routed_tree(note, tree, rule)
    return routes


def map_rows(fn: Callable[..., Any], routes: Routes, tree: PyTree, *rest: PyTree) -> PyTree:
    """``fn(rows, array, *arrays_of_rest)`` for every matrix of ``tree``; other leaves stay."""

    def one(leaf: Leaf, array: Any, *others: Any) -> Any:
        rows = routes[leaf.path]
        return array if rows is None else fn(rows, array, *others)

    return map_leaves(one, tree, *rest)


def infer_dimension_numbers(
    params: PyTree, weight_dimension_numbers: WeightDimensionNumbers = None
) -> PyTree:
    """The routing as a tree: `optax.contrib.MuonDimensionNumbers` for Nora, None for AdamW.

    By default a floating leaf of two axes is a matrix ``(in, out)``, unless its own name is that of
    a vector or of an embedding, or its path names an embedding or an output head.

    Args:
      params: the parameters: arrays, `jax.ShapeDtypeStruct`, Linen boxes or an NNX state.
      weight_dimension_numbers: as for `nora`. None: the default routing.

    Returns:
      A tree like ``params`` with one entry a leaf.

    Raises:
      ValueError: if a leaf named as a matrix has three axes or more and nothing says which are a
        row, or if the dimension numbers do not fit.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'dense': {'kernel': jnp.ones((4, 8)), 'bias': jnp.ones(8)}}
      >>> optax_nora.infer_dimension_numbers(params)['dense']['kernel']
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))
    """
    check_matched(params, weight_dimension_numbers)
    return whole_model(
        lambda leaf, rows: rows and MuonDimensionNumbers(rows.reduction, rows.output),
        params,
        weight_dimension_numbers,
    )


def matrix_mask(params: PyTree, weight_dimension_numbers: WeightDimensionNumbers = None) -> PyTree:
    """The routing as booleans: True for Nora, False for AdamW; a mask for `optax.masked`.

    Args:
      params: the parameters, as for `infer_dimension_numbers`.
      weight_dimension_numbers: as for `nora`. None: the default routing.

    Returns:
      A tree like ``params`` with one boolean a leaf.

    Raises:
      ValueError: as `infer_dimension_numbers`.

    Examples:
      >>> import optax, optax_nora
      >>> tx = optax.masked(optax_nora.row_normalize(), optax_nora.matrix_mask)
    """
    check_matched(params, weight_dimension_numbers)
    return whole_model(lambda leaf, rows: rows is not None, params, weight_dimension_numbers)

"""Routing: whatever a user gives as ``weight_dimension_numbers``, applied to a tree of parameters.

One spec, a tree or a prefix tree of specs, a rule, a function of the parameters, or nothing: each
becomes a `Rule`, and a rule says of each leaf which axes are its rows, or that it is no matrix.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from glob import escape
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows, mesh_axes
from optax_nora._default import NOT_FLOATING, Decision, Default, Rule
from optax_nora._leaves import (
    Leaf,
    Path,
    PyTree,
    Tree,
    array_of,
    describe,
    is_function,
    kinds,
    map_leaves,
    nodes_with_paths,
    slashed,
)
from optax_nora._rules import ByPath, DenseOnly, Listed, listed, matches, rows_of, rule_of

Routes = Mapping[Path, Rows | None]  # None where a leaf is no matrix
WeightDimensionNumbers = MuonDimensionNumbers | Rule | PyTree | Callable[[PyTree], PyTree] | None
_MAKERS = ("optax_nora._rules", "optax_nora.rules")  # of rules, by functions to be called first


def as_rule(weight_dimension_numbers: WeightDimensionNumbers, default: Rule, tree: PyTree) -> Rule:
    """The rule in whatever a user gave; ``tree`` is for functions of the parameters."""
    given = weight_dimension_numbers
    if given is None or isinstance(given, Rule | MuonDimensionNumbers):
        return rule_of(given, default)
    of_params = getattr(given, "__name__", "") == "haliax"  # as from_logical_axes
    if (getattr(given, "__module__", "") in _MAKERS and not of_params) or isinstance(given, type):
        raise ValueError(
            f"weight_dimension_numbers is {given.__name__} itself; call it: {given.__name__}(...)"
        )
    if is_function(given):
        return as_rule(given(tree), default, tree)
    nodes = nodes_with_paths(given, _is_spec)[0]
    specs = {p: _unboxed(node) for p, node in nodes if not isinstance(node, optax.MaskedNode)}
    for path, spec in specs.items():
        if not _is_spec(spec):
            raise ValueError(
                f"weight_dimension_numbers has {repr(spec)[:80]} at {slashed(path)}; give "
                "optax.contrib.MuonDimensionNumbers(reduction_axis, output_axis), or None for "
                "AdamW (under optax.inject_hyperparams a rule: it takes functions for schedules)"
            )
    return listed(specs)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _unboxed(node: Any) -> Any:
    """What `jax.tree.map` over boxes leaves in them."""
    inside = [node] if _is_spec(node) else jax.tree.leaves(node, is_leaf=_is_spec)
    return inside[0] if len(inside) == 1 else node


class Routed(NamedTuple):
    """A leaf, its rows if it is a matrix, and why; ``error`` where its numbers do not fit."""

    leaf: Leaf
    decision: Decision
    rows: Rows | None
    error: str = ""

    @property
    def goes_to(self) -> str:
        """The optimizer; ``"?"`` where the user has to say, ``"refused"`` where nothing fits."""
        if self.error or self.decision.note == NOT_FLOATING:
            return "refused"
        if self.decision.ask:
            return "?"
        if self.rows is None or self.of_one_weight:
            return "adamw"
        return "nora"

    @property
    def of_one_weight(self) -> bool:
        """Whether rows are of one weight: nothing is orthogonal to one, so AdamW has them."""
        rows = self.rows
        return rows is not None and not rows.reduction_mesh and rows.fan_in(self.leaf.shape) <= 1


def survey(tree: PyTree, rule: Rule) -> list[Routed]:
    """Where each leaf of ``tree`` goes, with all that is wrong; not those that a mask took out."""
    if isinstance(tree, optax.GradientTransformation):
        raise ValueError("this is an optimizer; give the parameters, whose leaves are to be routed")
    found, routed = [], []
    for path, node in nodes_with_paths(tree)[0]:
        try:
            if (array := array_of(node)) is not None:
                found.append(describe(path, array))
        except ValueError as error:
            routed.append(Routed(Leaf(path, (), "?"), Decision(None), None, str(error)))
    whole = [_whole(leaf, rule) for leaf in found]
    around = Tree((leaf.segments, leaf.shape) for leaf in whole)
    for leaf, one in zip(found, whole, strict=True):
        decision, rows, error = Decision(None), None, ""
        try:
            decision = rule.decide(one._replace(tree=around))
            if decision.numbers is not None:
                rows = rows_of(leaf, decision.numbers, rule.partition_spec(leaf))
        except ValueError as wrong:
            error = str(wrong)
        routed.append(Routed(leaf, decision, rows, error))
    return routed


def _whole(leaf: Leaf, rule: Rule) -> Leaf:
    """The leaf as it is over all devices, where it is split inside `jax.shard_map`."""
    try:
        spec = rule.partition_spec(leaf)
        parts = [jax.lax.axis_size(mesh_axes(spec, (a,))) for a in range(leaf.ndim)]
    except (NameError, ValueError):  # outside of it; or no spec, which is told when it is needed
        return leaf
    return leaf._replace(shape=tuple(n * p for n, p in zip(leaf.shape, parts, strict=True)))


def check_matched(params: PyTree, weight_dimension_numbers: WeightDimensionNumbers) -> None:
    """Raise for a tree of specs, warn for patterns, that name leaves which are not there."""
    rule = as_rule(weight_dimension_numbers, Default(), params)
    if message := unmatched(params, rule):
        if isinstance(rule, Listed):
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)


def unmatched(params: PyTree, rule: Rule) -> str:
    """What a rule names and the tree does not have, as a sentence; masked leaves count."""
    paths = [path for path, _ in nodes_with_paths(params)[0]]
    missing = rule.unmatched([Leaf(path, (), None) for path in paths])
    if not paths or not missing:
        return ""
    known = ", ".join("/".join(path) for path in paths[:8])
    return (
        f"weight_dimension_numbers names {', '.join(missing)}, which matches no leaf; "
        f"the leaves are {known}{', ...' if len(paths) > 8 else ''}"
    )


def how_to_route(routed: Sequence[Routed], rule: Rule) -> str:
    """Each kind of leaf for which the user has to say, and what to paste."""
    unclear = (one.leaf for one in routed if one.goes_to == "?")
    listing = kinds((leaf, (leaf.shape, leaf.dtype)) for leaf in unclear)
    return "\n".join(
        [
            "these leaves may be matrices, and nothing says which axes are a row:",
            *(
                f"  {pattern} {shape} {dtype}"
                + (f", {len(group)} of them" if len(group) > 1 else "")
                for pattern, (shape, dtype), group in listing
            ),
            "Say so. If each is what its comment says, paste",
            *code_to_paste(routed, rule),
            "with `from optax.contrib import MuonDimensionNumbers`; for layers stacked along axis "
            "0, (layers, in, out), take",
            "  optax_nora.by_path({'layers': optax_nora.stacked()})",
            "with the name of your stack; None sends a leaf to AdamW.",
        ]
    )


def code_to_paste(routed: Sequence[Routed], rule: Rule) -> list[str]:
    """Lines of code that route each unclear leaf as it is guessed, and no other leaf."""
    unclear = ((one.leaf, one.decision) for one in routed if one.goes_to == "?")
    lines = ["  weight_dimension_numbers=optax_nora.by_path({"]
    for pattern, (numbers, note, *_), group in kinds(unclear):
        short = (escape(pattern) if len(group) == 1 else pattern, "/" + pattern)
        exact = [p for p in short if [o.leaf for o in routed if matches(p, o.leaf)] == group]
        each = ["/" + (escape(leaf.slashed) if leaf.path else "**") for leaf in group]
        axes = [a[0] if isinstance(a, tuple) and len(a) == 1 else a for a in numbers or ()]
        spec = f"MuonDimensionNumbers({axes[0]}, {axes[1]})" if numbers else None
        lines += [f"      {p!r}: {spec},  # {note}" for p in exact[:1] or each]
    if isinstance(rule, ByPath):
        lines.append("      # your own patterns follow here")
    elif not isinstance(rule, Default):
        lines.append("      '**': ...,  # in place of the dots what you gave before")
    return [*lines, "  })"]


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
    ``whole_model`` says, whose leaves of fan-in 1 are no matrices. Raises what is wrong, and all
    for which the user has to say in one error.
    """
    if weight_dimension_numbers is None and (routes := _ENCLOSING.get()) is not None:
        return routes
    rule = as_rule(weight_dimension_numbers, Default() if whole_model else DenseOnly(), tree)
    routed = survey(tree, rule)
    if wrong := next((one.error for one in routed if one.error), None):
        raise ValueError(wrong)
    if any(one.goes_to == "?" for one in routed):
        raise ValueError(how_to_route(routed, rule))
    return {
        one.leaf.path: None if whole_model and one.of_one_weight else one.rows for one in routed
    }


def route_tree(
    choose: Callable[[Rows | None], Any],
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> tuple[PyTree, Routes]:
    """``choose(rows)`` in the place of every leaf of a whole model, and the rows by path."""
    routes = routes_of(params, weight_dimension_numbers, whole_model=True)
    nodes, treedef = nodes_with_paths(params)
    chosen = (node if array_of(node) is None else choose(routes[path]) for path, node in nodes)
    return treedef.unflatten(list(chosen)), routes


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

    By default a floating leaf of two axes is a matrix ``(in, out)``, unless its bias tells
    otherwise or names say that it is a vector, an embedding or an output head.

    Args:
      params: the parameters: arrays, `jax.ShapeDtypeStruct`, Linen boxes or an NNX state.
      weight_dimension_numbers: as for `nora`. None: the default routing.

    Returns:
      A tree like ``params`` with one entry a leaf.

    Raises:
      ValueError: if a leaf may be a matrix and nothing says which axes are a row, or if the
        dimension numbers do not fit.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'dense': {'kernel': jnp.ones((4, 8)), 'bias': jnp.ones(8)}}
      >>> optax_nora.infer_dimension_numbers(params)['dense']['kernel']
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))
    """
    check_matched(params, weight_dimension_numbers)

    def numbers(rows: Rows | None) -> MuonDimensionNumbers | None:
        return rows and MuonDimensionNumbers(rows.reduction, rows.output)

    return route_tree(numbers, params, weight_dimension_numbers)[0]


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
    return route_tree(lambda rows: rows is not None, params, weight_dimension_numbers)[0]

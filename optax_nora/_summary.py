"""A table of where each leaf goes."""

import sys
from typing import TextIO

from optax_nora._axes import Rows
from optax_nora._blocks import block_size, check_block_rows
from optax_nora._default import Default
from optax_nora._leaves import Leaf, PyTree, kinds
from optax_nora._routing import (
    Routed,
    WeightDimensionNumbers,
    as_rule,
    code_to_paste,
    survey,
    unmatched,
)
from optax_nora._rows import check_row_scale, row_scale_of
from optax_nora._weak_rows import weak_rows


def summarize(
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    row_scale: str = "fan_ratio",
    base_fan_in: float | None = None,
    block_rows: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Print where each leaf goes: the first thing to run on a new model.

    Leaves that differ in numbers of their paths alone share a line. ``?`` is what `nora` would ask
    for at ``init``, with the axes that are likely; the code to paste stands below the table. What
    is unsure or wrong is said in the last column, and where the parameters are arrays, which
    matrices have rows that are zero or far shorter than the others.

    Args:
      params: the parameters, as for `infer_dimension_numbers`.
      weight_dimension_numbers: as for `nora`. None: the default routing.
      row_scale: as for `nora`.
      base_fan_in: as for `nora`.
      block_rows: as for `nora`. Given, a column shows how many blocks of how many rows each matrix
        has, and operations a weight that they cost. A device that holds whole blocks of whole rows
        sends nothing.
      file: where to print. None: standard output.

    Raises:
      ValueError: as `scale_by_row_shape`, and if params is an optimizer.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'dense': {'kernel': jnp.ones((4, 16)), 'bias': jnp.ones(16)}}
      >>> optax_nora.summarize(params)  # doctest: +NORMALIZE_WHITESPACE
      path          shape    dtype    optimizer  reduction  output  batch  row scale
      dense/bias    (16,)    float32  adamw
      dense/kernel  (4, 16)  float32  nora       (0,)       (1,)    ()     2
      <BLANKLINE>
      nora: 1 leaf, 64 parameters (80.0 %); adamw: 1 leaf, 16 parameters (20.0 %)
    """
    check_row_scale(row_scale, base_fan_in)
    if block_rows is not None:
        check_block_rows(block_rows)
    head = ("path", "shape", "dtype", "optimizer", "reduction", "output", "batch", "row scale")
    head += ("",) if block_rows is None else ("blocks", "")
    remarks = []
    try:
        rule = as_rule(weight_dimension_numbers, Default(), params)
        remarks += [unmatched(params, rule)]
    except ValueError as error:
        rule = Default()
        remarks += [f"the default routing, as these weight_dimension_numbers are wrong: {error}"]
    routed = survey(params, rule)

    def line(one: Routed) -> tuple[str, ...]:
        leaf, rows = one.leaf, one.rows
        where = (str(leaf.shape), str(leaf.dtype), one.goes_to)
        if rows is None or one.goes_to == "adamw":
            return (*where, *[""] * (len(head) - 5), _note(one))
        axes = (str(rows.reduction), str(rows.output), str(rows.batch(leaf.ndim)))
        fans = (rows.fan_in(leaf.shape), rows.fan_out(leaf.shape))
        scale = f"{row_scale_of(row_scale, *fans, base_fan_in):.4g}"
        own = () if block_rows is None else (_blocks(leaf, rows, block_rows),)
        return (*where, *axes, "" if one.goes_to == "?" else scale, *own, _note(one))

    table = [head] + [
        (pattern + (f" x{len(group)}" if len(group) > 1 else ""), *cells)
        for pattern, cells, group in kinds((one.leaf, line(one)) for one in routed)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if any(one.goes_to == "?" for one in routed):
        remarks += [
            "? is for you to say. If each is what its last column says, paste",
            *code_to_paste(routed, rule),
            "with `from optax.contrib import MuonDimensionNumbers`",
        ]
    remarks += dict.fromkeys(one.error for one in routed)
    matrices = {one.leaf.path: one.rows for one in routed if one.goes_to == "nora"}
    remarks += weak_rows(params, matrices)
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    lines += ["", _totals(routed), *filter(None, remarks)]
    print("\n".join(lines), file=file or sys.stdout)


def _blocks(leaf: Leaf, rows: Rows, block_rows: int) -> str:
    """The blocks of a matrix, and operations a weight: two products and five quintics."""
    size = block_size(leaf.shape, rows, block_rows)
    if not size:
        return ""
    count, rest = divmod(rows.fan_out(leaf.shape), size)
    cost = 4 * size + 34 * size**2 // rows.fan_in(leaf.shape) if size > 1 else 0
    return f"{count} x {size}" + (f" + {rest}" if rest else "") + f", {cost} ops"


def _note(one: Routed) -> str:
    decision = one.decision
    if one.error:
        return "see below"
    if one.of_one_weight and not decision.ask:
        return "rows of one weight"
    return decision.note if decision.sure or decision.ask else f"unsure: {decision.note}"


def _totals(routed: list[Routed]) -> str:
    total = max(1, sum(one.leaf.size for one in routed))
    sizes = {
        name: [one.leaf.size for one in routed if one.goes_to == name]
        for name in ("nora", "adamw", "?", "refused")
    }
    return "; ".join(
        f"{name}: {len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}, "
        f"{sum(leaves):,} parameters ({sum(leaves) / total:.1%})".replace("%", " %")
        for name, leaves in sizes.items()
        if leaves or name in ("nora", "adamw")
    )

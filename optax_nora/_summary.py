"""A table of where each leaf goes."""

import math
import sys
from typing import TextIO

from optax_nora._axes import Rows
from optax_nora._leaves import Leaf, PyTree
from optax_nora._routing import WeightDimensionNumbers, check_matched, whole_model
from optax_nora._rows import check_row_scale, row_scale_of


def summarize(
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    row_scale: str = "fan_ratio",
    base_fan_in: float | None = None,
    file: TextIO | None = None,
) -> None:
    """Print where each leaf goes: the first thing to run on a new model.

    Args:
      params: the parameters, as for `infer_dimension_numbers`.
      weight_dimension_numbers: as for `nora`. None: the default routing.
      row_scale: as for `nora`.
      base_fan_in: as for `nora`.
      file: where to print. None: standard output.

    Raises:
      ValueError: as `infer_dimension_numbers`, and as `scale_by_row_shape`.

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
    check_matched(params, weight_dimension_numbers)
    head = ("path", "shape", "dtype", "optimizer", "reduction", "output", "batch", "row scale")
    table: list[tuple[str, ...]] = [head]
    sizes: dict[str, list[int]] = {"nora": [], "adamw": []}

    def add(leaf: Leaf, rows: Rows | None) -> None:
        sizes["nora" if rows else "adamw"].append(math.prod(leaf.shape))
        where = (leaf.slashed, str(leaf.shape), str(leaf.dtype))
        if rows is None:
            table.append((*where, "adamw", "", "", "", ""))
            return
        shape = leaf.shape
        s = row_scale_of(row_scale, rows.fan_in(shape), rows.fan_out(shape), base_fan_in)
        axes = (str(rows.reduction), str(rows.output), str(rows.batch(leaf.ndim)))
        table.append((*where, "nora", *axes, f"{s:.4g}"))

    whole_model(add, params, weight_dimension_numbers)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    total = max(1, sum(map(sum, sizes.values())))
    totals = "; ".join(
        f"{name}: {len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}, "
        f"{sum(leaves):,} parameters ({sum(leaves) / total:.1%})".replace("%", " %")
        for name, leaves in sizes.items()
    )
    print("\n".join([*lines, "", totals]), file=file or sys.stdout)

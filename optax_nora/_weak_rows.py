"""Rows that are zero or far shorter than the others: turning them does not make them longer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_nora._axes import Rows
from optax_nora._leaves import Path, PyTree, array_of, describe, kinds, nodes_with_paths

SHORT = 1 / 30  # of the others' length; scaled residual layers start at a tenth


@partial(jax.jit, static_argnums=1)
def _measure(w: jax.Array, rows: Rows) -> tuple[jax.Array, ...]:
    size = jnp.abs(w).astype(jnp.promote_types(jnp.abs(w).dtype, jnp.float32))
    norms = jnp.sqrt(rows.sums(size * size)[0])
    return jnp.sum(norms == 0), jnp.min(norms), jnp.mean(norms)


def weak_rows(params: PyTree, rows_at: Mapping[Path, Rows | None]) -> list[str]:
    """One sentence for each kind of matrix with weak rows; only where arrays are at hand."""
    leaves, measured = [], []
    for path, node in nodes_with_paths(params)[0]:
        array, rows = array_of(node), rows_at.get(path)
        if rows is None or rows.reduction_mesh or not _is_at_hand(array):
            continue
        leaves.append(describe(path, array))
        with jax.ensure_compile_time_eval():  # in a trace too, the arrays are at hand
            measured.append(_measure(array, rows))
    measured = jax.device_get(measured)
    means = [mean for _, _, mean in measured if mean > 0]
    typical = float(np.median(means)) if means else 0.0
    said = []
    for leaf, (zeros, least, mean) in zip(leaves, measured, strict=True):
        if zeros:
            said.append((leaf, "has rows of zeros"))
        elif mean < SHORT * typical:
            said.append((leaf, "has rows far shorter than those of the other matrices"))
        elif least < SHORT * mean:
            said.append((leaf, "has a row far shorter than its others"))
    return [
        f"{pattern} {what}: Nora turns rows and hardly makes them longer; None in "
        "weight_dimension_numbers sends it to AdamW"
        for pattern, what, _ in kinds(said)
    ]


def _is_at_hand(array: Any) -> bool:
    if isinstance(array, Tracer) or not isinstance(array, jax.Array | np.ndarray):
        return False
    return bool(array.size) and getattr(array, "is_fully_addressable", True)

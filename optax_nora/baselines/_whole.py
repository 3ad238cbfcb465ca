"""For rules that multiply whole matrices."""

from collections.abc import Callable
from typing import Any

import jax

from optax_nora._axes import Rows
from optax_nora._leaves import PyTree


def require_whole(rows: Rows) -> None:
    """Raise where `jax.shard_map` splits a matrix whose products need it whole."""
    if rows.reduction_mesh or rows.output_mesh:
        raise ValueError(
            "this optimizer multiplies whole matrices, and in_shard_map splits one over "
            f"{', '.join(rows.reduction_mesh + rows.output_mesh)}; gather it, or take nora"
        )


def sharded_by_jax(fn: Callable[..., Any], out: PyTree) -> Callable[..., Any]:
    """``fn``, whose results are sharded like ``out``, with products on meshes of Explicit axes.

    Such a mesh refuses products whose sharding is ambiguous: inside, jax chooses it.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return fn
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, out)
    return jax.sharding.auto_axes(fn, out_sharding=specs)

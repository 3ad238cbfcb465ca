"""For rules that multiply whole matrices."""

from optax_nora._axes import Rows


def require_whole(rows: Rows) -> None:
    """Raise where `jax.shard_map` splits a matrix whose products need it whole."""
    if rows.reduction_mesh or rows.output_mesh:
        raise ValueError(
            "this optimizer multiplies whole matrices, and in_shard_map splits one over "
            f"{', '.join(rows.reduction_mesh + rows.output_mesh)}; gather it, or take nora"
        )

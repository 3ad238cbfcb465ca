"""Routing by the logical axis names that Flax parameters carry."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from optax_nora._leaves import PyTree, array_of, describe, nodes_with_paths
from optax_nora._rules import VECTOR_NAMES, Default, Listed, Rule


def _axis_names(node: Any) -> tuple[Any, ...] | None:
    # Linen boxes hold `names`; NNX Variables have metadata, whose key was `sharding_names` before.
    # Their attributes of these names would warn, or give the sharding of the array.
    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        names = metadata.get("out_sharding", metadata.get("sharding_names"))
    else:
        names = getattr(node, "names", None)
    return tuple(names) if isinstance(names, tuple | PartitionSpec) else None


def from_logical_axes(
    params: PyTree,
    *,
    batch_axes: Sequence[str] = ("layers", "layer", "stage", "expert", "experts"),
    joint_axes: Sequence[str] = ("heads", "q_heads", "kv_heads", "kv", "head_dim", "kv_head_dim"),
    adamw_axes: Sequence[str] = ("vocab",),
) -> Rule:
    """Route by the logical axis names that Flax parameters carry.

    Of the axes that are no batch axes, the last is the output, all before it are reduced over;
    neighbours of ``joint_axes`` count as one axis. So ``(embed, heads, kv)`` is reduced over axis
    0, ``(heads, kv, embed)`` over axes 0 and 1, ``(layers, embed, mlp)`` over axis 1.

    Args:
      params: boxed Linen parameters (`nn.with_partitioning`, `nn.with_logical_partitioning`) or an
        NNX state whose Variables carry names; arrays or their shapes. The names are read here, as
        NNX no longer shows them at update.
      batch_axes: names of the axes along which layers or experts are stacked.
      joint_axes: names of axes that are one side of a matrix together.
      adamw_axes: a leaf with one of these names goes to AdamW.

    Returns:
      A rule. A leaf without names takes the default routing.

    Raises:
      ValueError: if a leaf has another number of names than of axes.

    Examples:
      >>> import flax.linen as nn, jax, optax_nora
      >>> init = nn.with_partitioning(nn.initializers.lecun_normal(), ('embed', 'heads', 'kv'))
      >>> params = {'query': init(jax.random.key(0), (64, 4, 16))}
      >>> optax_nora.infer_dimension_numbers(params, optax_nora.from_logical_axes(params))
      {'query': MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))}
    """
    specs: dict[tuple[str, ...], MuonDimensionNumbers | None] = {}
    for path, node in nodes_with_paths(params)[0]:
        names = _axis_names(node)
        if names is None or array_of(node) is None:
            continue
        leaf = describe(path, array_of(node))
        if len(names) != leaf.ndim:
            raise ValueError(f"{leaf} has {leaf.ndim} axes and the logical axis names {names}")
        sides: list[list[int]] = []
        for axis, name in enumerate(names):
            if name in batch_axes:
                continue
            if name in joint_axes and sides and names[sides[-1][-1]] in joint_axes:
                sides[-1].append(axis)
            else:
                sides.append([axis])
        vector = (
            len(sides) < 2 or leaf.name in VECTOR_NAMES or not set(names).isdisjoint(adamw_axes)
        )
        reduction = tuple(axis for side in sides[:-1] for axis in side)
        specs[path] = None if vector else MuonDimensionNumbers(reduction, tuple(sides[-1]))
    return Listed(specs, otherwise=Default())

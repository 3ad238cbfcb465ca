"""The axes of the rows of one leaf, and sums over them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Array = jax.Array


class Rows(NamedTuple):
    """Where the rows of one leaf lie.

    Attributes:
      reduction: the axes that a row runs along (fan-in).
      output: the axes that number the rows of one matrix (fan-out); all others are batch axes.
      reduction_mesh: mesh axes that split the reduction axes, inside `jax.shard_map`.
      output_mesh: mesh axes that split the output axes, inside `jax.shard_map`.
      inner_mesh: those of them that split other output axes than the first: then a device's rows
        do not follow each other.
    """

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    reduction_mesh: tuple[str, ...] = ()
    output_mesh: tuple[str, ...] = ()
    inner_mesh: tuple[str, ...] = ()

    def batch(self, ndim: int) -> tuple[int, ...]:
        """The axes that neither run along a row nor number the rows of one matrix."""
        return tuple(a for a in range(ndim) if a not in self.reduction + self.output)

    @property
    def across(self) -> "Rows":
        """The columns: rows of the transposed matrix."""
        return Rows(self.output, self.reduction, self.output_mesh, self.reduction_mesh)

    def fan_in(self, shape: tuple[int, ...]) -> int:
        """Weights in a row, over all devices."""
        return _size(shape, self.reduction, self.reduction_mesh)

    def fan_out(self, shape: tuple[int, ...]) -> int:
        """Rows in a matrix, over all devices."""
        return _size(shape, self.output, self.output_mesh)

    def sums(self, *arrays: Array) -> tuple[Array, ...]:
        """Each array summed along its rows, one number a row, axes kept."""
        local = tuple(jnp.sum(a, axis=self.reduction, keepdims=True) for a in arrays)
        return jax.lax.psum(local, self.reduction_mesh) if self.reduction_mesh else local


def _size(shape: tuple[int, ...], axes: tuple[int, ...], mesh_axes: tuple[str, ...]) -> int:
    return math.prod(shape[a] for a in axes) * math.prod(jax.lax.axis_size(m) for m in mesh_axes)


def mesh_axes(spec: Sequence[Any] | PartitionSpec, axes: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes by which a PartitionSpec splits these axes of an array."""
    named = [spec[axis] for axis in axes if axis < len(spec) and spec[axis] is not None]
    return tuple(n for entry in named for n in (entry if isinstance(entry, tuple) else (entry,)))

"""A function of what one device holds of a leaf, run on whole arrays and any mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_nora._axes import Rows, mesh_axes

Function = Callable[..., Any]


def by_parts(
    part: Callable[[Rows], Function],
    plain: Callable[[Rows], Function],
    rows: Rows,
    like: int = 0,
    whole: tuple[int, ...] = (),
) -> Function:
    """A function of arrays that runs ``part`` on each device's part of them.

    Args:
      part: makes it of the rows of such a part, which say over which mesh axes they are split.
      plain: as ``part``, of jnp: what runs under `jax.vmap` and derivatives.
      rows: of the arrays. Operands of fewer axes than these have are on every device whole.
      like: the operand that says how work is divided: where a state is split further than its
        weight, so is the step.
      whole: axes that a device must hold whole.
    """

    def step(*operands: Any) -> Any:
        sharding, shape = jax.typeof(operands[like]).sharding, operands[like].shape
        kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        if explicit := {name for name, kind in kinds.items() if kind is AxisType.Explicit}:
            local, spec = _split(rows, sharding, shape, whole)
            specs = tuple(_spec(spec, x, shape) for x in operands)
            function = jax.shard_map(
                _with_rules(part(local), plain(local)),
                mesh=sharding.mesh,
                in_specs=specs,
                out_specs=spec,
                axis_names=explicit,
                check_vma=part is plain,  # kernels don't know what varies
            )
            placed = [NamedSharding(sharding.mesh, spec) for spec in specs]
            out = function(*map(jax.sharding.reshard, operands, placed))
            return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), out)
        function = part(rows)
        # What custom_partitioning leaves in a program keeps it out of jax's compilation cache.
        if AxisType.Manual not in kinds.values() and jax.device_count() > 1:
            # Numbers of axes, not the arrays: what stays in a program must hold no tracer.
            divided = _partitioned(part, rows, tuple(x.ndim for x in operands), like, whole)
            # libtpu has no custom_partitioning (jax issue 38196): there XLA divides jnp as it can.
            function = functools.partial(
                jax.lax.platform_dependent, default=divided, tpu=plain(rows)
            )
        return _with_rules(function, plain(rows))(*operands)

    return jax.jit(step)


def _partitioned(
    part: Callable[[Rows], Function],
    rows: Rows,
    ndims: tuple[int, ...],
    like: int,
    whole: tuple[int, ...],
) -> Function:
    """On Auto axes, of which only the partitioner knows: a trace does not see the sharding.

    `jax.shard_map` would gather what is split. Within a partitioned function, jax runs another one
    as it stands.
    """

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        leaf = operands[like]
        local, spec = _split(rows, leaf.sharding, leaf.shape, whole)
        where = jax.tree.map(
            lambda x: NamedSharding(mesh, _spec(spec, x, leaf.shape)), (results, operands)
        )
        return mesh, part(local), *where

    def rule(mesh: Any, _: Any, results: Any) -> Any:
        del mesh
        axes = " ".join(f"axis{k}" for k in range(ndims[like]))
        of = [axes if n == ndims[like] else f"whole{k}" for k, n in enumerate(ndims)]
        replicated = tuple(name for name in of if name != axes)
        names = f"{', '.join(of)} -> {', '.join([axes] * len(results))}"
        return names, {"need_replication_factors": replicated}

    def infer(mesh: Any, operands: Any, results: Any) -> Any:  # the same, where Shardy is off
        del mesh
        return jax.tree.map(lambda _: operands[like].sharding, results)

    function = custom_partitioning(part(rows))
    function.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return function


def _split(
    rows: Rows, sharding: Any, shape: tuple[int, ...], whole: tuple[int, ...]
) -> tuple[Rows, PartitionSpec]:
    """Where each device holds its part, and the rows of that; an uneven axis it holds whole."""
    given = getattr(sharding, "spec", ())  # none where the program has no mesh: all is whole then
    spec = (*given, *(None,) * (len(shape) - len(given)))

    def divides(axis: int) -> bool:
        parts = [sharding.mesh.shape[name] for name in mesh_axes(spec, (axis,))]
        return axis not in whole and shape[axis] % math.prod(parts) == 0

    spec = PartitionSpec(*(entry if divides(axis) else None for axis, entry in enumerate(spec)))
    reduction, output = (mesh_axes(spec, axes) for axes in (rows.reduction, rows.output))
    local = rows._replace(
        reduction_mesh=rows.reduction_mesh + reduction, output_mesh=rows.output_mesh + output
    )
    return local, spec


def _spec(spec: PartitionSpec, x: Any, shape: tuple[int, ...]) -> PartitionSpec:
    return spec if len(x.shape) == len(shape) else PartitionSpec()


def _with_rules(function: Function, plain: Function) -> Function:
    """``function``, but ``plain`` under `jax.vmap` and derivatives."""
    mappable = jax.custom_batching.custom_vmap(function)

    @mappable.def_vmap
    def mapped(axis_size: int, batched: list[bool], *operands: Any) -> Any:
        axes = [0 if mapped else None for mapped in batched]
        out = jax.vmap(plain, axes, axis_size=axis_size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    wrapped = jax.custom_jvp(mappable)
    wrapped.defjvp(lambda operands, tangents: jax.jvp(plain, operands, tangents))
    return wrapped


def shaped_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Inside `jax.shard_map` a result varies over the mesh axes that its operands do."""
    of = jax.typeof(x)
    name = "vma" if hasattr(of, "vma") else "manual_axis_type"  # the latter from jax 0.11 on
    return jax.ShapeDtypeStruct(shape, dtype, **{name: getattr(of, name)})

"""The door to the kernels: which leaves have one, and how it runs on any mesh; else XLA."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_nora._axes import Rows, mesh_axes
from optax_nora._blocks import Blocks, block_size
from optax_nora._checks import check_choice
from optax_nora._rows import project_and_normalize
from optax_nora._step import Coefficients, Direction, by_xla

Array = jax.Array

BACKENDS = ("auto", "xla", "pallas")
DTYPES = ("float32", "bfloat16", "float16")
# Compute capabilities with float64 at half the rate of float32: A100; H100 and H200; B200. The
# kernels were measured on 9.0; where float64 is slow their row sums would be too.
FAST_FLOAT64 = ("8.0", "9.0", "10.0")


def check_backend(backend: str) -> None:
    """Raise for a backend that is unknown, or that this jax does not have."""
    check_choice("backend", backend, BACKENDS)
    if backend == "pallas" and _kernels() is None:
        raise ValueError(
            f"backend='pallas' needs the Triton backend of Pallas, and jax {jax.__version__} has "
            "none; take 'xla', or 'auto', which takes kernels where there are some"
        )


@functools.cache
def _kernels() -> Any:
    """The module of the kernels, None where jax has no such backend. pallas is slow to import."""
    try:
        return importlib.import_module("optax_nora._kernels")
    except ImportError:
        return None


def matrix_step(
    backend: str,
    rows: Rows,
    direction: Direction,
    write_weights: bool,
    g: Array,
    mu: Array,
    w: Array,
) -> Callable[[Coefficients, Array, Array, Array], tuple[Array, Array]]:
    """``step(coefficients, g, mu, w)``, to the momentum and the weight or its update."""
    # The kernels of blocks were not held against float64 on a GPU yet: docs/results/block-notes.md.
    measured = direction is project_and_normalize and _kernels_win()
    kernels = backend == "pallas" or (backend == "auto" and measured)
    if not (kernels and _has_kernel(rows, direction, g, mu, w)):
        return functools.partial(_JITTED, rows, direction, write_weights=write_weights)
    kernel = _by_kernel(rows, direction, w.ndim, backend, write_weights)

    def step(c: Coefficients, g: Array, mu: Array, w: Array) -> tuple[Array, Array]:
        return kernel(jnp.stack([jnp.asarray(x, jnp.float32) for x in c]), g, mu, w)

    return step


def _has_kernel(rows: Rows, direction: Direction, g: Array, mu: Array, w: Array) -> bool:
    arrays = [jax.typeof(x) for x in (g, mu, w)]
    shape = arrays[0].shape
    return (
        not rows.reduction_mesh
        and all(x.dtype in DTYPES and x.shape == shape for x in arrays)
        and _is_whole(rows, direction, *arrays)
        and _kernel_of(rows, direction, shape) is not None
    )


def _kernel_of(rows: Rows, direction: Direction, shape: tuple[int, ...]) -> Any:
    """The kernel of a direction, None where such rows have none."""
    if direction is project_and_normalize and _kernels().fits(rows, shape):
        return functools.partial(_kernels().step, rows=rows)
    if isinstance(direction, Blocks) and not direction.project:
        blocks = importlib.import_module("optax_nora._block_kernels")
        if blocks.fits(rows, shape, direction.block_rows):
            return functools.partial(blocks.step, rows=rows, block_rows=direction.block_rows)
    return None


def _kernels_win() -> bool:
    device = jax.devices()[0]
    return getattr(device, "compute_capability", None) in FAST_FLOAT64 and _kernels() is not None


def _is_whole(rows: Rows, direction: Direction, *arrays: Any) -> bool:
    """Whether devices hold whole rows and blocks. Of Auto axes a trace doesn't know."""
    kinds = set(arrays[0].sharding.mesh.axis_types)
    if AxisType.Explicit not in kinds:
        # Inside a shard_map over some axes of a mesh only, it is XLA's.
        return len(kinds) < 2 and _whole_blocks(rows, direction, arrays[0].shape, arrays[0].shape)
    if len(kinds) > 1 or len({x.sharding.spec for x in arrays}) > 1:
        return False
    shape, local = arrays[0].shape, arrays[0].sharding.shard_shape(arrays[0].shape)
    rows_whole = all(local[axis] == shape[axis] for axis in rows.reduction)
    return rows_whole and _whole_blocks(rows, direction, shape, local)


def _whole_blocks(
    rows: Rows, direction: Direction, shape: tuple[int, ...], local: tuple[int, ...]
) -> bool:
    """Whether a device's part ``local`` of an array begins and ends with a block."""
    if not isinstance(direction, Blocks) or (local == shape and not rows.output_mesh):
        return True
    held = math.prod(local[axis] for axis in rows.output)
    inner_whole = all(local[axis] == shape[axis] for axis in rows.output[1:])
    return inner_whole and held % block_size(shape, rows, direction.block_rows) == 0


def _varies(x: Array) -> bool:
    of = jax.typeof(x)
    return bool(of.vma if hasattr(of, "vma") else of.manual_axis_type.varying)


# Leaves of one shape share one trace.
_JITTED = jax.jit(by_xla, static_argnums=(0, 1), static_argnames="write_weights")


@functools.cache
def _by_kernel(
    rows: Rows, direction: Direction, ndim: int, backend: str, write_weights: bool
) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    """The step with its coefficients as one vector of float32.

    Under `jax.vmap`, under derivatives, and on a CPU where ``backend`` is ``"auto"``, it is XLA's.
    """
    xla = _by_xla(rows, direction, write_weights)

    def kernel(*operands: Array, interpret: bool = False) -> tuple[Array, Array]:
        step = _kernel_of(rows, direction, operands[-1].shape)
        return step(*operands, write_weights=write_weights, interpret=interpret)

    def local(*operands: Array) -> tuple[Array, Array]:
        # Pallas' interpreter has no values that vary over the mesh axes of a shard_map.
        interpret = backend == "pallas" and not _varies(operands[-1])
        default = functools.partial(kernel, interpret=True) if interpret else xla
        return jax.lax.platform_dependent(*operands, cuda=kernel, default=default)

    partitioned = _partitioned(local, rows, direction, ndim, write_weights)

    @jax.custom_batching.custom_vmap
    def placed(*operands: Array) -> tuple[Array, Array]:
        sharding = jax.typeof(operands[-1]).sharding
        kinds = sharding.mesh.axis_types
        if AxisType.Manual in kinds:
            return local(*operands)
        if AxisType.Explicit in kinds:
            spec = sharding.spec
            return jax.shard_map(
                local,
                mesh=sharding.mesh,
                in_specs=(PartitionSpec(), spec, spec, spec),
                out_specs=(spec, spec),
                check_vma=False,
            )(*operands)
        # What custom_partitioning leaves in a program keeps it out of jax's compilation cache.
        return local(*operands) if jax.device_count() == 1 else partitioned(*operands)

    @placed.def_vmap
    def mapped(axis_size: int, batched: list[bool], *operands: Array) -> Any:
        axes = [0 if mapped else None for mapped in batched]
        return jax.vmap(xla, axes, axis_size=axis_size)(*operands), (True, True)

    step = jax.custom_jvp(placed)
    step.defjvp(lambda operands, tangents: jax.jvp(xla, operands, tangents))
    return jax.jit(step)


def _by_xla(
    rows: Rows, direction: Direction, write_weights: bool
) -> Callable[..., tuple[Array, Array]]:
    """What the kernels do, of jnp, for any mesh; row sums go over ``rows.reduction_mesh`` too."""

    def step(coefficients: Array, *arrays: Array) -> tuple[Array, Array]:
        c = Coefficients(*coefficients)
        return by_xla(rows, direction, c, *arrays, write_weights=write_weights)

    return step


def _partitioned(
    local: Callable[..., Any], rows: Rows, direction: Direction, ndim: int, write_weights: bool
) -> Callable[..., Any]:
    """``local`` on each device's part of a leaf, or XLA's where rows or blocks are split.

    On Auto axes only the partitioner knows which: a trace does not see the sharding, and
    `jax.shard_map` would gather what is split. The momentum says how the work is divided: where
    the state is split further than the weight, so is the step.
    """

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        momentum = operands[2]
        spec = (*momentum.sharding.spec, *(None,) * (ndim - len(momentum.sharding.spec)))
        if isinstance(direction, Blocks):  # rows are counted through all output axes but the first
            spec = tuple(None if axis in rows.output[1:] else x for axis, x in enumerate(spec))
        where = NamedSharding(mesh, PartitionSpec(*spec))
        everywhere = NamedSharding(mesh, PartitionSpec())
        reduction, output = (mesh_axes(spec, axes) for axes in (rows.reduction, rows.output))
        whole = _whole_blocks(rows, direction, momentum.shape, where.shard_shape(momentum.shape))
        split = rows._replace(reduction_mesh=reduction, output_mesh=output)
        step = local if whole and not reduction else _by_xla(split, direction, write_weights)
        return mesh, step, (where, where), (everywhere, where, where, where)

    axes = " ".join(f"axis{k}" for k in range(ndim))
    function = custom_partitioning(local)
    function.def_partition(
        partition,
        sharding_rule=f"number, {axes}, {axes}, {axes} -> {axes}, {axes}",
        need_replication_factors=("number",),
    )
    return function

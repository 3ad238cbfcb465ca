"""The door to the kernels: which leaves have one, and how it runs on any mesh; else XLA."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_nora._axes import Rows
from optax_nora._blocks import Blocks, block_size
from optax_nora._checks import check_choice
from optax_nora._partition import by_parts
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
    if backend == "pallas" and _triton() is None and jax.default_backend() != "tpu":
        raise ValueError(
            f"backend='pallas' needs the Triton backend of Pallas, and jax {jax.__version__} has "
            "none; take 'xla', or 'auto', which takes kernels where there are some"
        )


@functools.cache
def _triton() -> Any:
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
    kernels = backend == "pallas" or (backend == "auto" and _kernels_win())
    if not (kernels and _have_kernel(backend, rows, direction, g, mu, w)):
        return functools.partial(_JITTED, rows, direction, write_weights=write_weights)
    kernel = _by_kernel(rows, direction, backend, write_weights)

    def step(c: Coefficients, g: Array, mu: Array, w: Array) -> tuple[Array, Array]:
        return kernel(jnp.stack([jnp.asarray(x, jnp.float32) for x in c]), g, mu, w)

    return step


# Before 0.9 the partitioner fails on kernels of blocks beside rows that are split.
_OLD = jax.__version_info__ < (0, 9)


def _have_kernel(
    backend: str, rows: Rows, direction: Direction, g: Array, mu: Array, w: Array
) -> bool:
    arrays = [jax.typeof(x) for x in (g, mu, w)]
    return (
        not rows.reduction_mesh
        and all(x.dtype in DTYPES and x.shape == arrays[0].shape for x in arrays)
        and _alike(*arrays)
        and bool(_kernels(backend, rows, direction, *arrays))
        and not (_OLD and isinstance(direction, Blocks) and jax.device_count() > 1)
    )


def _kernels(
    backend: str, rows: Rows, direction: Direction, *arrays: Any
) -> dict[str, Callable[..., Any]]:
    """The kernels of a direction by platform; none where there is none for such rows."""
    found: dict[str, Callable[..., Any]] = {}
    shape = arrays[-1].shape
    if direction is project_and_normalize and _triton() and _triton().fits(rows, shape):
        found["cuda"] = functools.partial(_triton().step, rows=rows)
    if isinstance(direction, Blocks) and not direction.project and _triton():
        blocks = importlib.import_module("optax_nora._block_kernels")
        if blocks.fits(rows, shape, direction.block_rows):
            step = functools.partial(blocks.step, rows=rows, block_rows=direction.block_rows)
            found["cuda"] = step
    if backend == "auto":
        return found  # the others were compiled for TPUs, and not yet timed on one
    tpu = importlib.import_module("optax_nora._tpu_kernels")
    if tpu.fits(rows, shape, direction) and all(x.dtype != "float16" for x in arrays):
        found["tpu"] = functools.partial(tpu.step, rows=rows, direction=direction)
    return found


def _kernels_win() -> bool:
    device = jax.devices()[0]
    return getattr(device, "compute_capability", None) in FAST_FLOAT64 and _triton() is not None


def _alike(*arrays: Any) -> bool:
    """Whether a trace knows of arrays that they lie alike; of Auto axes it knows nothing."""
    kinds = set(arrays[0].sharding.mesh.axis_types)
    # Inside a shard_map over some axes of a mesh only, it is XLA's.
    return len(kinds) < 2 and len({x.sharding.spec for x in arrays}) == 1


def _varies(x: Array) -> bool:
    of = jax.typeof(x)
    return bool(of.vma if hasattr(of, "vma") else of.manual_axis_type.varying)


def _by_xla(
    rows: Rows, direction: Direction, *operands: Any, write_weights: bool
) -> tuple[Array, Array]:
    """`by_xla`, with one thing more for GPUs.

    There, rows summed in the pass that makes them would keep XLA from writing the momentum in
    place: it would copy it.
    """

    def apart(rows: Rows, h: Array, w: Array, eps: Any) -> Array:
        h = jax.lax.platform_dependent(h, cuda=jax.lax.optimization_barrier, default=lambda h: h)
        return direction(rows, h, w, eps)

    return by_xla(rows, apart, *operands, write_weights=write_weights)


# Leaves of one shape share one trace.
_JITTED = jax.jit(_by_xla, static_argnums=(0, 1), static_argnames="write_weights")


@functools.cache
def _by_kernel(
    rows: Rows, direction: Direction, backend: str, write_weights: bool
) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    """The step with its coefficients as one vector of float32.

    Under `jax.vmap`, under derivatives, on a CPU where ``backend`` is ``"auto"``, and where devices
    hold parts of rows or of blocks, it is XLA's.
    """

    def xla(local: Rows) -> Callable[..., tuple[Array, Array]]:
        def step(coefficients: Array, *arrays: Array) -> tuple[Array, Array]:
            c = Coefficients(*coefficients)
            return _by_xla(local, direction, c, *arrays, write_weights=write_weights)

        return step

    def part(local: Rows) -> Callable[..., tuple[Array, Array]]:
        def step(*operands: Array) -> tuple[Array, Array]:
            if not _whole(local, direction, operands[-1].shape):
                return xla(local)(*operands)
            kernels = {
                platform: functools.partial(kernel, write_weights=write_weights)
                for platform, kernel in _kernels(backend, rows, direction, *operands[1:]).items()
            }
            # Pallas' interpreter has no values that vary over the mesh axes of a shard_map.
            if backend == "pallas" and kernels and not _varies(operands[-1]):
                kernels["cpu"] = functools.partial(next(iter(kernels.values())), interpret=True)
            return jax.lax.platform_dependent(*operands, **kernels, default=xla(local))

        return step

    inner = rows.output[1:] if isinstance(direction, Blocks) else ()
    return by_parts(part, xla, rows, like=2, whole=inner)


def _whole(rows: Rows, direction: Direction, shape: tuple[int, ...]) -> bool:
    """Whether a device's part of a leaf, of such a shape, has whole rows and blocks."""
    if not isinstance(direction, Blocks) or not rows.output_mesh:
        return not rows.reduction_mesh
    held = math.prod(shape[axis] for axis in rows.output)
    return not rows.reduction_mesh and held % block_size(shape, rows, direction.block_rows) == 0

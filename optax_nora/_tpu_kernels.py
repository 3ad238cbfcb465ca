"""A step of one matrix as a Pallas kernel, for TPUs: XLA's own step, on tiles of whole rows.

A tile also holds whole blocks, and lies in the memory of the core, so nothing is read or written
twice: 20 bytes a float32 weight, where AdamW moves 28. What is no number spreads within its tile.

Compiled for v4 to v7x and run interpreted, not yet on a TPU: so ``backend="auto"`` leaves them out.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from optax_nora._axes import Rows
from optax_nora._blocks import FLOAT32, Blocks, block_size, inverse_root
from optax_nora._partition import shaped_like
from optax_nora._step import Direction, by_xla, read

Array = jax.Array
Ref = Any

LANES = 128  # of a register; rows of a tile are a multiple
LINES = 16  # of a register of bfloat16: XLA lays such arrays out as kernels take them
MOST_ROWS = 256  # of a block
# What a kernel takes of a core's memory, in tiles of float32: five arrays twice, to read and write
# while it computes, and what it computes. The compiler took 13 to 15 on five kinds of TPU.
TILES = 16
GRAMS = 24  # and in Gram matrices
MEMORY = 2**26  # of a core, where there is none to ask: v5p's and v7x's


class _View(NamedTuple):
    """An array as (batch, lines, columns), and tiles of it."""

    batch: int
    lines: int
    columns: int
    along: int  # the axis of a matrix that a row runs along: 0 or 1
    tile: int  # rows in a tile

    @property
    def matrix(self) -> tuple[int, int]:
        return self.lines, self.columns

    @property
    def rows(self) -> int:
        """Of a matrix."""
        return self.matrix[1 - self.along]

    @property
    def bytes(self) -> int:
        return 4 * self.tile * (TILES * self.matrix[self.along] + GRAMS * self.tile)


def _view(rows: Rows, shape: tuple[int, ...], direction: Direction) -> _View | None:
    """None where a row's axes, or those that number rows, must be moved, or tiles are too large."""
    end = len(shape) - 1
    along = 1 if rows.reduction == (end,) else 0
    before, last = (rows.output, rows.reduction) if along else (rows.reduction, rows.output)
    start = end - len(before)
    if last != (end,) or not before or before != tuple(range(start, end)):
        return None
    if math.prod(shape) == 0 or shape[-1] % LANES or shape[-2] % LINES:
        return None
    blocks = isinstance(direction, Blocks)
    size = block_size(shape, rows, direction.block_rows) if blocks else 1
    lines, columns = math.prod(shape[start:-1]), shape[-1]
    tile = min(max(size, LANES), columns if along == 0 else lines)
    view = _View(math.prod(shape[:start]), lines, columns, along, tile)
    whole = tile % size == 0 or tile == view.rows  # blocks lie in tiles
    return view if whole and size <= MOST_ROWS and view.bytes <= _memory() else None


def _memory() -> int:
    return tpu.get_tpu_info().vmem_capacity_bytes if jax.default_backend() == "tpu" else MEMORY


def fits(rows: Rows, shape: tuple[int, ...], direction: Direction) -> bool:
    """Whether there is a kernel for such rows of a leaf of such a shape."""
    return _view(rows, shape, direction) is not None


def step(
    coefficients: Array,
    g: Array,
    mu: Array,
    w: Array,
    rows: Rows,
    direction: Direction,
    *,
    write_weights: bool,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """The momentum after one step, and the weight or its update.

    ``coefficients`` is a vector of float32 in the order of `Coefficients`.
    """
    view = _view(rows, w.shape, direction)
    assert view is not None  # `fits` comes first
    block = list(view.matrix)
    block[1 - view.along] = view.tile

    def at(batch: Any, tile: Any) -> tuple[Any, ...]:
        return (batch, 0, tile) if view.along == 0 else (batch, tile, 0)

    tiles = pl.BlockSpec((None, *block), at)
    folded = [x.reshape(view.batch, *view.matrix) for x in (g, mu, w)]
    new_mu, out = pl.pallas_call(
        functools.partial(_kernel, view=view, direction=direction, write_weights=write_weights),
        grid=(view.batch, pl.cdiv(view.rows, view.tile)),
        in_specs=[pl.BlockSpec(memory_space=tpu.SMEM), *[tiles] * 3],
        out_specs=[tiles] * 2,
        out_shape=[shaped_like(x, x.shape, x.dtype) for x in folded[1:]],
        input_output_aliases={2: 0, 3: 1} if write_weights else {2: 0},
        interpret=interpret,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=max(view.bytes, 2**24),
        ),
    )(coefficients, *folded)
    return new_mu.reshape(mu.shape), out.reshape(w.shape)


def _kernel(
    coefficients: Ref,
    g: Ref,
    mu: Ref,
    w: Ref,
    mu_out: Ref,
    out: Ref,
    *,
    view: _View,
    direction: Direction,
    write_weights: bool,
) -> None:
    if isinstance(direction, Blocks):
        there = view.rows - pl.program_id(1) * view.tile
        direction = direction._replace(mix=functools.partial(_mix, there=there))
    rows = Rows((view.along,), (1 - view.along,))
    mu_out[...], out[...] = by_xla(
        rows, direction, read(coefficients), g[...], mu[...], w[...], write_weights=write_weights
    )


def _mix(u: Array, rows: Rows, block_rows: int, there: Array) -> Array:
    """`_blocks.mix` of a tile, of which the first rows are ``there``: others may be anything."""
    (along,), (across,) = rows.reduction, rows.output
    u = jnp.where(jax.lax.broadcasted_iota(jnp.int32, u.shape, across) < there, u, 0)
    gram = _dot(u, u, along, along)
    size = block_size(u.shape, rows, block_rows)
    line, column = (
        jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, gram.shape, k), size) for k in (0, 1)
    )

    def within(x: Array) -> Array:
        return jnp.where(line == column, x, 0)

    def total(x: Array) -> Array:
        """For each row of a block, the sum of all of it."""
        return jnp.sum(within(jnp.sum(x, axis=0, keepdims=True)), axis=1, keepdims=True)

    root = inverse_root(within(gram), total=total)
    return _dot(root, u, 1, 0) if along == 1 else _dot(u, root, 1, 1)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), precision=FLOAT32.exact)

"""A step with blocks of rows of one matrix as Pallas kernels, for GPUs.

Three passes over memory, 32 bytes a float32 weight where AdamW moves 28: one makes the momentum and
the Gram matrices, one multiplies blocks by inverse roots and sums the squares of the result, and
one, which XLA makes, writes the weight. Between the first two a kernel iterates on the Gram
matrices, each within one multiprocessor. Products are of pairs of half-precision numbers, about as
good as float32; docs/results/block-notes.md says what was tried. Rows are not projected.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from optax_nora import _kernels
from optax_nora._axes import Rows
from optax_nora._blocks import QUINTICS, SHIFT, block_size
from optax_nora._kernels import MOST_BATCHES, _fold, launch
from optax_nora._partition import shaped_like
from optax_nora._step import Coefficients, read

Array = jax.Array
Ref = Any

MOST_ROWS = 128  # of a block: one program multiplies all of them
# The quintics whose products need twice the digits: after these no eigenvalue is under 1e-3.
PRECISE = 2
PROGRAMS = 512  # a few for each multiprocessor
# What orthonormal rows are times while they wait in float16 for their lengths: no number is
# subnormal that matters, and none overflows.
HALF_SCALE = 1024.0


# Rows are times this before they are squared: those of 1e-12 to 1e23 neither over- nor underflow.
SHRINK = 2.0**-14


class Tuning(NamedTuple):
    """How two kernels divide rows: weights at a time, weights in all, tiles under way at once."""

    gram: tuple[int, int, int] = (64, 1024, 3)
    apply: tuple[int, int, int] = (64, 1024, 1)


TUNING = Tuning()
WARPS = 8


def fits(rows: Rows, shape: tuple[int, ...], block_rows: int) -> bool:
    """Whether there is a kernel for blocks of such rows of a leaf of such a shape."""
    size = block_size(shape, rows, block_rows)
    return 1 < size <= MOST_ROWS and 0 < math.prod(shape) < 2**31 and _view(rows, shape) is not None


class _View(NamedTuple):
    """An array as (batch, n, groups * rows), or with the last two swapped, ``last``."""

    batch: int
    n: int
    groups: int
    rows: int  # of one matrix, one after another in each group
    last: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        lines = self.groups * self.rows
        return (1, lines, self.n) if self.last else (self.batch, self.n, lines)


def _view(rows: Rows, shape: tuple[int, ...]) -> _View | None:
    """Rows next to each other in memory, along the last axes or across them; None if neither."""
    if max(rows.reduction) - min(rows.reduction) >= len(rows.reduction):
        return None
    before, n, after = _fold(rows, shape)
    last = after == 1
    end = min(rows.reduction) if last else len(shape)
    if rows.output != tuple(range(end - len(rows.output), end)) or (
        before > MOST_BATCHES and not last
    ):
        return None
    fan_out = math.prod(shape[a] for a in rows.output)
    groups = (before if last else after) // fan_out
    return _View(1 if last else before, n, groups, fan_out, last)


class _Static(NamedTuple):
    """What a kernel knows when it is compiled."""

    view: _View
    size: int  # rows in a block
    tile: int  # and the power of two over it
    width: int
    part: int
    interpret: bool

    @property
    def blocks(self) -> int:
        """Blocks of a matrix."""
        return pl.cdiv(self.view.rows, self.size)

    @property
    def parts(self) -> int:
        return pl.cdiv(self.view.n, self.part)


def step(
    coefficients: Array,
    g: Array,
    mu: Array,
    w: Array,
    rows: Rows,
    block_rows: int,
    *,
    write_weights: bool,
    interpret: bool = False,
    tuning: Tuning = TUNING,
) -> tuple[Array, Array]:
    """The momentum after one step, and the weight or its update; rows are not projected.

    ``coefficients`` is a vector of float32 in the order of `Coefficients`. The look-ahead is of the
    momentum as it is stored. Rows of it under 1e-12 or over 1e23 stand still.
    """
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    view, size = _view(rows, w.shape), block_size(w.shape, rows, block_rows)
    assert view is not None  # `fits` comes first
    static = _Static(view, size, max(16, pl.next_power_of_2(size)), 0, 0, interpret)
    flat_g, flat_mu, flat_w = (x.reshape(view.shape) for x in (g, mu, w))
    new_mu, grams, squares = _gram(coefficients, flat_g, flat_mu, static, tuning)
    root = _roots(grams, squares, static)
    mixed, lengths = _apply(coefficients, root, flat_g, new_mu, static, tuning)
    update = _finish(Coefficients(*coefficients), mixed, squares, lengths, flat_w, static)
    update = update.astype(w.dtype)
    out = (flat_w + update).astype(w.dtype) if write_weights else update
    return new_mu.reshape(mu.shape), out.reshape(w.shape)


_call = functools.partial(launch, warps=WARPS)


def _divided(static: _Static, x: Array, width: int, part: int, stages: int) -> tuple[_Static, int]:
    """Rows in parts of ``part`` weights, or of less where there would be few programs."""
    if x.shape[-1] * x.dtype.itemsize % 16:
        # Lines start anywhere: then Triton's copies to shared memory move 4 bytes at a time.
        width, stages = 128, 1
    view = static.view
    turns = pl.cdiv(view.n, width)
    few = max(2, turns * view.batch * view.groups * static.blocks // PROGRAMS)
    part = width * min(turns, max(1, part // width), few)
    return static._replace(width=width, part=part), stages


def _gram(
    coefficients: Array, g: Array, mu: Array, static: _Static, tuning: Tuning
) -> tuple[Array, Array, Array]:
    """The new momentum, Gram matrices (batch, blocks, parts, b, b), squares (.., parts, b)."""
    view = static.view
    static, stages = _divided(static, mu, *tuning.gram)
    blocks, tile = view.groups * static.blocks, static.tile
    lead = (view.batch, blocks, static.parts)
    return _call(
        _gram_kernel,
        static,
        (blocks, static.parts, view.batch),
        (coefficients, g, mu),
        [
            shaped_like(mu, mu.shape, mu.dtype),
            shaped_like(mu, (*lead, tile, tile), jnp.float32),
            shaped_like(mu, (*lead, tile), jnp.float32),
        ],
        stages,
        {2: 0},
    )


def _roots(grams: Array, squares: Array, static: _Static) -> Array:
    """What rows are multiplied by: inverse roots of the Gram matrices of rows at length 1."""
    batch, blocks, parts, b, _ = grams.shape
    (root,) = _call(
        _root_kernel,
        static,
        (batch * blocks,),
        (
            # Of scalars, as `custom_partitioning` takes no constant arrays.
            jnp.stack([jnp.stack(list(map(jnp.float32, q))) for q in QUINTICS]),
            grams.reshape(batch * blocks, parts, b, b),
            squares.reshape(batch * blocks, parts, b),
        ),
        [shaped_like(grams, (batch * blocks, b, b), jnp.float32)],
        1,
        {},
    )
    return root.reshape(batch, blocks, b, b)


def _apply(
    coefficients: Array, root: Array, g: Array, mu: Array, static: _Static, tuning: Tuning
) -> tuple[Array, Array]:
    """Orthonormal rows times HALF_SCALE in float16, and squares (batch, blocks, parts, rows)."""
    view = static.view
    static, stages = _divided(static, mu, *tuning.apply)
    blocks = view.groups * static.blocks
    return _call(
        _apply_kernel,
        static,
        (blocks, static.parts, view.batch),
        (coefficients, root, g, mu),
        [
            shaped_like(mu, mu.shape, jnp.float16),
            shaped_like(mu, (view.batch, blocks, static.parts, static.tile), jnp.float32),
        ],
        stages,
        {},
    )


def _finish(
    c: Coefficients, mixed: Array, squares: Array, lengths: Array, w: Array, static: _Static
) -> Array:
    """The update: rows at their length, and weight decay."""
    view = static.view
    before, after = (_by_row(jnp.sum(x, axis=2), static) for x in (squares, lengths))
    # A row shorter than eps takes a shorter step, as with one row.
    norm = jnp.sqrt(before) / SHRINK
    factor = c.row_scale * jnp.where(norm < c.eps, norm / c.eps, 1.0) * _inverse(after)
    factor = factor[:, :, None] if view.last else factor[:, None, :]
    wide = w.astype(jnp.float32)
    unit = jnp.where(factor == 0, 0, mixed.astype(jnp.float32) * factor)
    return -c.learning_rate * (unit + c.weight_decay * wide)


def _inverse(square: Array) -> Array:
    """One over the root, 0 of 0; NaN of NaN, so that it shows."""
    return jnp.where(square == 0, 0.0, 1 / jnp.sqrt(jnp.where(square == 0, 1.0, square)))


def _by_row(x: Array, static: _Static) -> Array:
    """Of numbers of tiles' rows, those of rows that there are, in their order: (batch, rows)."""
    view = static.view
    x = x.reshape(view.batch, view.groups, static.blocks, static.tile)
    x = x[..., : static.size].reshape(view.batch, view.groups, static.blocks * static.size)
    return x[..., : view.rows].reshape(view.batch, view.groups * view.rows)


# Within a kernel


def _ids() -> list[Array]:
    """The block, the part and the batch of a program."""
    return [pl.program_id(k) for k in range(3)]


def _tile(ids: Sequence[Array], k: Array, static: _Static) -> tuple[tuple[Any, ...], Array]:
    """The index of the k-th tile of a block's part, and a mask of what there is of it."""
    (block, part, batch), view = ids, static.view
    group, number = block // static.blocks, block % static.blocks
    first, column = number * static.size, part * static.part + k * static.width
    within = jnp.arange(static.tile)
    there = (within < static.size) & (first + within < view.rows)
    inside = column + jnp.arange(static.width) < view.n
    rows = pl.ds(group * view.rows + first, static.tile)
    columns = pl.ds(column, static.width)
    if view.last:
        return (batch, rows, columns), there[:, None] & inside[None, :]
    return (batch, columns, rows), inside[:, None] & there[None, :]


def _load(ref: Ref, at: tuple[Any, ...], mask: Array) -> Array:
    return triton.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)


def _multiply_add(a: Array, b: Array, c: Array, static: Any) -> Array:
    return _kernels._fused_multiply_add(a, b, c, static)


def _pair(x: Array, dtype: Any, interpret: bool) -> tuple[Array, Array]:
    """A float32 as the sum of two numbers of half the size."""
    if interpret:  # or XLA drops a rounding that is undone at once
        of = jnp.finfo(dtype)
        high = jax.lax.reduce_precision(x, of.nexp, of.nmant)
    else:
        high = x.astype(dtype).astype(jnp.float32)
    return high.astype(dtype), (x - high).astype(dtype)


def _dot(a: Array, b: Array, axis_a: int = 1, axis_b: int = 0) -> Array:
    return jax.lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32
    )


def _dot_pairs(a: Sequence[Array], b: Sequence[Array], axis_a: int = 1, axis_b: int = 0) -> Array:
    """The product of two sums of pairs, less the product of the small parts."""
    small = _dot(a[1], b[0], axis_a, axis_b) + _dot(a[0], b[1], axis_a, axis_b)
    return small + _dot(a[0], b[0], axis_a, axis_b)


def _look_ahead(c: Coefficients, g: Array, mu: Array, static: _Static) -> Array:
    return SHRINK * _multiply_add(c.ahead, mu, c.one_minus_ahead * g, static)


def _gram_kernel(
    coefficients: Ref, g: Ref, mu: Ref, mu_out: Ref, grams: Ref, squares: Ref, *, static: _Static
) -> None:
    ids, c = _ids(), read(coefficients)
    along = 1 if static.view.last else 0

    def turn(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        gram, square = carry
        at, mask = _tile(ids, k, static)
        scaled = c.grad_scale * _load(g, at, mask)
        new = _multiply_add(c.beta, _load(mu, at, mask), c.one_minus_beta * scaled, static)
        new = new.astype(mu_out.dtype)
        triton.store(mu_out.at[at], new, mask=mask)
        h = _look_ahead(c, scaled, new.astype(jnp.float32), static)
        pair = _pair(h, jnp.bfloat16, static.interpret)
        return gram + _dot_pairs(pair, pair, along, along), square + jnp.sum(h * h, axis=along)

    zeros = jnp.zeros((static.tile, static.tile)), jnp.zeros(static.tile)
    gram, square = jax.lax.fori_loop(0, static.part // static.width, turn, zeros)
    block, part, batch = ids
    triton.store(grams.at[batch, block, part], gram)
    triton.store(squares.at[batch, block, part], square)


def _root_kernel(numbers: Ref, grams: Ref, squares: Ref, out: Ref, *, static: _Static) -> None:
    """`_blocks.inverse_root`, of products that are as precise as they need be."""
    block = pl.program_id(0)
    tile, parts = static.tile, grams.shape[1]

    def total(part: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return (
            carry[0] + triton.load(grams.at[block, part]),
            carry[1] + triton.load(squares.at[block, part]),
        )

    zeros = jnp.zeros((tile, tile)), jnp.zeros(tile)
    gram, square = jax.lax.fori_loop(0, parts, total, zeros)
    inverse = _inverse(square)  # 0 of rows too short or too long, which are no part of the block
    lines, columns = (jax.lax.broadcasted_iota(jnp.int32, (tile, tile), k) for k in range(2))
    diagonal = lines == columns
    there = (inverse != 0)[:, None] & (inverse != 0)[None, :]
    # The diagonal is known better than its products, which leave out the smallest.
    gram = jnp.where(diagonal, 1.0, gram * inverse[:, None] * inverse[None, :])
    gram = jnp.where(there, gram, 0.0)
    pair = functools.partial(_pair, dtype=jnp.float16, interpret=static.interpret)
    # No more than 1 before it is squared, for float16.
    bound = jnp.sqrt(jnp.sum(gram * gram))
    bound = jnp.where(bound == 0, 1.0, bound)
    gram = gram / bound
    pairs = pair(gram)
    twice = _dot_pairs(pairs, pairs)
    fourth = jnp.sum(twice * twice)
    greatest = jnp.where(fourth == 0, 1.0, jnp.sqrt(jnp.sqrt(fourth))) * (1 + SHIFT)
    gram = gram / greatest + jnp.where(diagonal, SHIFT, 0.0)
    twice = twice / (greatest * greatest) + (2 * SHIFT) * gram - jnp.where(diagonal, SHIFT**2, 0.0)
    half = jnp.float16

    def factor_of(quintic: Sequence[Any], gram: Array, twice: Array) -> Array:
        a, b, c = quintic
        return jnp.where(diagonal, a, 0.0) + b * gram + c * twice

    def multiply_root(factor: Array) -> Array:
        high, low = pair(triton.load(out.at[block]))
        return _dot(factor.astype(half), low) + _dot(factor.astype(half), high)

    def keep(root: Array) -> None:
        """The root waits in memory: no registers are left for it."""
        if not static.interpret:
            triton.debug_barrier()
        triton.store(out.at[block], root)
        if not static.interpret:
            triton.debug_barrier()

    for k in range(PRECISE):
        if k:
            pairs = pair(gram)
            twice = _dot_pairs(pairs, pairs)
        factor = factor_of(QUINTICS[k], gram, twice)
        factors, pairs = pair(factor), pair(gram)
        gram = _dot_pairs(factors, pair(_dot_pairs(pairs, factors)))
        keep(_dot_pairs(factors, pair(triton.load(out.at[block]))) if k else factor)

    def quintic(k: Array, gram: Array) -> Array:
        rounded = gram.astype(half)
        factor = factor_of([numbers[k, j] for j in range(3)], gram, _dot(rounded, rounded))
        keep(multiply_root(factor))
        return _dot(factor.astype(half), _dot(rounded, factor.astype(half)).astype(half))

    gram = jax.lax.fori_loop(PRECISE, len(QUINTICS) - 1, quintic, gram)
    rounded = gram.astype(half)
    factor = factor_of(QUINTICS[-1], gram, _dot(rounded, rounded))
    root = multiply_root(factor) * inverse[None, :] / jnp.sqrt(greatest * bound)
    keep(root)


def _apply_kernel(
    coefficients: Ref, roots: Ref, g: Ref, mu: Ref, mixed: Ref, squares: Ref, *, static: _Static
) -> None:
    ids, c = _ids(), read(coefficients)
    block, part, batch = ids
    pair = functools.partial(_pair, dtype=jnp.bfloat16, interpret=static.interpret)
    root = pair(triton.load(roots.at[batch, block]))

    def turn(k: Array, square: Array) -> Array:
        at, mask = _tile(ids, k, static)
        h = pair(_look_ahead(c, c.grad_scale * _load(g, at, mask), _load(mu, at, mask), static))
        found = _dot_pairs(root, h) if static.view.last else _dot_pairs(h, root, 1, 1)
        half = (HALF_SCALE * found).astype(jnp.float16)
        triton.store(mixed.at[at], half, mask=mask)
        found = half.astype(jnp.float32)
        return square + jnp.sum(found * found, axis=1 if static.view.last else 0)

    zeros = jnp.zeros(static.tile)
    square = jax.lax.fori_loop(0, static.part // static.width, turn, zeros)
    triton.store(squares.at[batch, block, part], square)

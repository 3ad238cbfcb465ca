"""Blocks of rows made orthonormal: between Nora, blocks of one row, and Muon, one block of all.

A block is b consecutive rows of one matrix, a (b, fan_in) matrix A. The orthonormal matrix nearest
to it is its polar factor ``U V^T = (A A^T)^(-1/2) A``. That needs A twice: for the b x b Gram
matrix ``A A^T``, and to be multiplied by its inverse root; all iterations are on b x b matrices.
Both products contract over axes where they lie, and only the output axis is cut into blocks: so
nothing is transposed, and a device that holds whole blocks of whole rows sends nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_nora._axes import Rows
from optax_nora._partition import by_parts
from optax_nora._rows import (
    divide_by_norm,
    normalize,
    product,
    project_and_normalize,
    project_twice,
    squares,
)
from optax_nora._step import Direction

Array = jax.Array

# What is added to the eigenvalues of a Gram matrix, as a part of the greatest. It is above all
# rounding, so that none is negative, where iterations would diverge.
SHIFT = 4e-6


class Precisions(NamedTuple):
    """Of products: nearly as exact as float32, and where errors of 1e-3 do no harm."""

    exact: Any
    rough: Any


FLOAT32 = Precisions(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
# On tensor cores, from A100 on: three products of bfloat16, as in the kernels, and one of tf32.
TENSOR_CORES = Precisions(
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, jax.lax.DotAlgorithmPreset.TF32_TF32_F32
)
# Each a x + b x^3 + c x^5 is the quintic nearest to 1 on what those before it make of
# [SHIFT ** 0.5, 1], less the lowest 1/20 where that is more, lest it send large values to nearly 0.
# Together they take the interval to 1 +- 0.03. The idea is that of Amsel, Persson, Musco and
# Gower, "The Polar Express" (arXiv 2505.16932); the tests remake the numbers.
QUINTICS = (
    (8.04728112, -21.8701421, 15.8067666),
    (3.9589373, -2.73362566, 0.501982372),
    (3.69771195, -2.68035664, 0.516703132),
    (2.86084917, -2.13775362, 0.47052472),
    (2.02245862, -1.4055945, 0.390868275),
)


def block_size(shape: tuple[int, ...], rows: Rows, block_rows: int) -> int:
    """Rows in a block: not more than a matrix has, nor than can be orthonormal."""
    size = min(block_rows, rows.fan_in(shape), rows.fan_out(shape))
    if size > 1 and math.prod(map(jax.lax.axis_size, rows.inner_mesh)) > 1:
        raise ValueError(
            f"block_rows={block_rows}: in_shard_map splits a matrix over {rows.inner_mesh}, by "
            f"another output axis than the first of {rows.output}, so that no device holds "
            "consecutive rows; split the first one alone, or make the others batch axes"
        )
    return size


def mix(u: Array, rows: Rows, block_rows: int) -> Array:
    """The polar factor of each block of unit rows; rows of 0 stay 0.

    A block's singular values of at least 1/10 of its greatest end in 0.97 to 1.06, those of 1/100
    in 0.9 to 1.06, those of 1/1000 in 0.2 to 1.06, and none above 1.06: with b rows, a ratio r
    becomes ``r / (r^2 + b^(1/4) SHIFT)^(1/2)`` or more, but for 0.03 and rounding.
    """
    return _mixer(rows, block_rows)(u)


class Blocks(NamedTuple):
    """The direction of a step with blocks: each made orthonormal, then each row of length 1.

    A hashable value, as one function for all leaves.

    Attributes:
      block_rows: rows in a block, counted in the order of the output axes, over all devices: the
        last one of a matrix may have fewer, and none has more than ``fan_in``. With 1 rows are
        normalised, bit for bit.
      project: rows go across their weights before and after. Then they end exactly across them at
        length exactly 1, and blocks a little less than orthonormal.
      mix: `mix`, or what does the same where it cannot run.
    """

    block_rows: int
    project: bool
    mix: Callable[[Array, Rows, int], Array] = mix

    def __call__(self, rows: Rows, h: Array, w: Array, eps: Any) -> Array:
        """Of rows h at the weights w, float32 at the least; complex ones count as twice as many.

        Blocks are made of rows at length 1, as the length of a row's gradient says nothing in Nora:
        then no row is lost beside longer ones. A row shorter than eps ends shorter than 1 in
        proportion; a row of 0, or noise across its weight, ends as 0 and is no part of its block.
        """
        if block_size(h.shape, rows, self.block_rows) <= 1:
            if self.project:
                return project_and_normalize(rows, h, w, eps)
            return normalize(rows, h, eps)
        if self.project:
            u, square, power = project_twice(rows, h, w)
        else:
            square, power = squares(rows, h)
            u = power * h
        d = self.mix(divide_by_norm(u, square, 0), rows, self.block_rows)
        if self.project:
            d = project_and_normalize(rows, d, w, 0)
        else:
            (length,) = rows.sums(product(d, d))  # no row is much longer than 1: no overflow
            d = divide_by_norm(d, length, 0)
        return d * _shortfall(square, power, eps)


def direction_of(block_rows: int | None, project: bool) -> Direction:
    """Nora's direction, or that of blocks of rows."""
    # None, not 1, is the default, as `optax.inject_hyperparams` makes an array of every int.
    block_rows = 1 if block_rows is None else block_rows
    check_block_rows(block_rows)
    if not isinstance(project, bool):
        raise TypeError(f"project={project!r} is not a bool")
    if block_rows == 1 and project:
        return project_and_normalize
    return Blocks(int(block_rows), project)


def check_block_rows(block_rows: int) -> None:
    """Raise for what is no number of rows."""
    if isinstance(block_rows, bool) or not isinstance(block_rows, int | np.integer):
        raise TypeError(
            f"block_rows={block_rows!r} is not an int, a number of rows; in "
            "optax.inject_hyperparams name it in static_args"
        )
    if block_rows < 1:
        raise ValueError(f"block_rows={block_rows} is out of range: it is at least 1")


def _shortfall(square: Array, power: Array, eps: Any) -> Array:
    """The length that `divide_by_norm` gives a row: 1, or less for a row shorter than eps."""
    norm = jnp.sqrt(jnp.where(square == 0, 1, square))
    return jnp.where(square == 0, 1, norm / jnp.maximum(norm, power * eps))


@functools.cache
def _mixer(rows: Rows, block_rows: int) -> Callable[[Array], Array]:
    def part(local: Rows) -> Callable[[Array], Array]:
        return lambda u: _mix(u, local, block_rows)

    # Rows are counted through all output axes, so a device can hold a part of the first one alone.
    return by_parts(part, part, rows, whole=rows.output[1:])


def _mix(u: Array, rows: Rows, block_rows: int) -> Array:
    """`mix` of what a device holds: all output axes in one, and all rows of the blocks in it."""
    size = block_size(u.shape, rows, block_rows)
    others = [axis for axis in range(u.ndim) if axis not in rows.output]
    axis = sum(other < rows.output[0] for other in others)
    # Output axes next to each other, as they nearly always are, need no transpose.
    order = [*others[:axis], *rows.output, *others[axis:]]
    moved = jnp.transpose(u, order)
    shape = [u.shape[other] for other in others]
    shape.insert(axis, math.prod(u.shape[a] for a in rows.output))
    kept = [*others[:axis], rows.output[0], *others[axis:]]
    one = rows._replace(reduction=tuple(map(kept.index, rows.reduction)), output=(axis,))
    mixed = _mix_axis(moved.reshape(shape), one, size)
    inverse = sorted(range(u.ndim), key=order.__getitem__)
    return jnp.transpose(mixed.reshape(moved.shape), inverse)


def _mix_axis(u: Array, rows: Rows, size: int) -> Array:
    """`mix` of rows numbered by one axis, with their neighbours from other devices if need be."""
    (axis,) = rows.output
    held = u.shape[axis]
    if not rows.output_mesh or held % size == 0:
        return _mix_local(u, rows, size)
    # A block straddles devices: each mixes all blocks of which it holds a row.
    start = jax.lax.axis_index(rows.output_mesh) * held
    devices = math.prod(jax.lax.axis_size(name) for name in rows.output_mesh)
    # Parts and blocks begin at multiples of what divides both: so far is no block's other end.
    far = size - math.gcd(held, size)
    before, after = _neighbours(u, axis, far, rows.output_mesh, devices)
    blocks = max(-(-(k * held % size + held) // size) for k in range(devices))
    rest = jnp.zeros_like(u, shape=(*u.shape[:axis], size * blocks, *u.shape[axis + 1 :]))
    near = jnp.concatenate([before, u, after, rest], axis)
    first = before.shape[axis] - start % size
    near = jax.lax.dynamic_slice_in_dim(near, first, size * blocks, axis)
    return jax.lax.dynamic_slice_in_dim(_mix_local(near, rows, size), start % size, held, axis)


def _neighbours(
    u: Array, axis: int, count: int, mesh_axes: tuple[str, ...], devices: int
) -> tuple[Array, Array]:
    """``count`` rows before and after a device's own, or all there are; 0 past the matrix."""
    held = u.shape[axis]
    before, after = [], []
    for hop in range(1, devices):
        take = min(held, count - (hop - 1) * held)
        if take <= 0:
            break
        last = jax.lax.slice_in_dim(u, held - take, None, axis=axis)
        first = jax.lax.slice_in_dim(u, 0, take, axis=axis)
        up = [(k, k + hop) for k in range(devices - hop)]
        down = [(k, j) for j, k in up]
        before.insert(0, jax.lax.ppermute(last, mesh_axes, up))
        after.append(jax.lax.ppermute(first, mesh_axes, down))
    return jnp.concatenate(before, axis), jnp.concatenate(after, axis)


def _mix_local(u: Array, rows: Rows, size: int) -> Array:
    """`mix` of blocks that begin with an array and lie in it; the rest of rows is a block too."""
    mix = functools.partial(_mix_blocks, rows=rows, size=size)
    plain, fast = (functools.partial(mix, by=by) for by in (FLOAT32, TENSOR_CORES))
    if u.dtype != jnp.float32 or not _have_tensor_cores():
        return plain(u)
    return jax.lax.platform_dependent(u, cuda=fast, default=plain)


def _have_tensor_cores() -> bool:
    """Whether the GPUs here multiply bfloat16 and tf32: NVIDIA's from A100 on."""
    major = getattr(jax.devices()[0], "compute_capability", "").partition(".")[0]
    return major.isdigit() and int(major) >= 8  # AMD's are such as gfx942


def _mix_blocks(u: Array, rows: Rows, size: int, by: Precisions) -> Array:
    """`_mix_local` with products of these precisions."""
    (axis,) = rows.output
    whole = u.shape[axis] // size * size
    parts = [
        part.reshape(*u.shape[:axis], -1, min(size, part.shape[axis]), *u.shape[axis + 1 :])
        for part in (jnp.split(u, [whole], axis) if 0 < whole < u.shape[axis] else [u])
    ]
    # Axes by number: `axis` numbers blocks, the next one a block's rows, one more its columns.
    axes = tuple(range(u.ndim + 1))
    batch = (*(a + (a > axis) for a in rows.batch(u.ndim)), axis)
    # For tensor cores XLA moves these axes to the front, once for each product if not once here.
    first = batch if by is TENSOR_CORES else ()
    order = (*first, *(a for a in axes if a not in first))
    back = sorted(axes, key=order.__getitem__)
    parts = [jnp.transpose(part, order) for part in parts]
    columns = tuple(u.ndim + 1 if a == axis + 1 else a for a in order)
    matrix = (*batch, axis + 1, u.ndim + 1)
    times = functools.partial(jnp.einsum, precision=by.exact)
    grams = [jnp.real(times(part, order, part.conj(), columns, matrix)) for part in parts]
    grams = jax.lax.psum(grams, rows.reduction_mesh) if rows.reduction_mesh else grams
    # Gram matrices are small: there, a short block may become a whole one.
    roots = inverse_root(jnp.concatenate([_pad(gram, size) for gram in grams], axis=-3), by)
    split = jnp.split(roots, [whole // size], axis=-3) if len(parts) == 2 else [roots]
    mixed = []
    for part, root in zip(parts, split, strict=True):
        held = part.shape[order.index(axis + 1)]
        out = times(root[..., :held, :held], matrix, part, columns, order)
        mixed.append(jnp.transpose(out, back).reshape(*u.shape[:axis], -1, *u.shape[axis + 1 :]))
    return jnp.concatenate(mixed, axis)


def _pad(gram: Array, size: int) -> Array:
    return jnp.pad(gram, [(0, 0)] * (gram.ndim - 2) + [(0, size - gram.shape[-1])] * 2)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=(-2, -1), keepdims=True)


def inverse_root(
    gram: Array, by: Precisions = FLOAT32, total: Callable[[Array], Array] = _sum
) -> Array:
    """The inverse square roots of matrices ``(..., b, b)`` without negative eigenvalues, about.

    A matrix may be made of several along its diagonal: then ``total`` sums within each.

    An eigenvalue t comes out as ``t^(-1/2)`` where it is more than SHIFT of the greatest, and as a
    finite number if not: no more than ``(SHIFT (sum of t^4)^(1/4))^(-1/2)``.
    """
    times = functools.partial(jnp.matmul, precision=by.exact)
    one = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    square = times(gram, gram)
    # The fourth moment of the eigenvalues bounds the greatest, closer than a trace would.
    fourth = total(square**2)
    greatest = jnp.where(fourth > 0, jnp.where(fourth > 0, fourth, 1) ** 0.25, 1) * (1 + SHIFT)
    shifted = gram / greatest + SHIFT * one
    square = square / greatest**2 + (2 * SHIFT) * shifted - SHIFT**2 * one
    gram, root = shifted, greatest**-0.5
    for k, (a, b, c) in enumerate(QUINTICS):
        # After two, eigenvalues are so large that rough products of them are exact enough.
        near = times if k < 2 else functools.partial(jnp.matmul, precision=by.rough)
        factor = a * one + b * gram + c * (near(gram, gram) if k else square)
        # The new factor from the left: from the right, what rounding mixes into small eigenvalues
        # would be multiplied by all factors before it. See docs/results/block-notes.md.
        root = times(factor, root) if k else factor * root
        if k + 1 < len(QUINTICS):
            gram = near(factor, near(gram, factor))
    return root

"""A whole Nora step of one matrix as Pallas kernels, to see what the memory of a GPU allows.

No part of the package: `optax_nora` leaves fusion to XLA. Rows along the last axis: one kernel
holds whole rows and moves 20 bytes a float32 weight. Rows along another axis: one kernel sums the
rows and a second writes, 32 bytes. docs/results/kernel-notes.md tells why not less.

Row sums are in float64, in one pass. The projection itself rounds in float32, which leaves about
eps |h| / (|u| sqrt(n)) of the step along the weight, more than the package's two projections do.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from optax_nora._rows import NOISE

Array = jax.Array
Ref = Any

# Tiles of (weights of a row, rows): what was fastest on an H100, four warps a program.
SUMS_TILE = (64, 128)
WRITE_TILE = (8, 256)


def step(
    g: Array,
    mu: Array,
    w: Array,
    reduction: Sequence[int],
    *,
    learning_rate: Any,
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    weight_decay: Any = 0.0,
    row_scale: Any = 1.0,
    grad_scale: Any = 1.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The momentum and the weight after one step; under jit and donation both are in place.

    ``reduction`` are neighbouring axes. Every other axis numbers rows. ``grad_scale`` multiplies
    the gradient. Updates round to the weight's dtype first, as `optax.apply_updates` has them.
    """
    first, last = min(reduction), max(reduction)
    if sorted(reduction) != list(range(first, last + 1)):
        raise ValueError(f"reduction axes {tuple(reduction)} are not neighbours")
    n = math.prod(w.shape[first : last + 1])
    folded = math.prod(w.shape[:first]), n, math.prod(w.shape[last + 1 :])
    momentum = beta if momentum is None else momentum
    numbers = (grad_scale, beta, momentum, eps, row_scale, weight_decay, learning_rate)
    coefficients = jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])
    fold = functools.partial(jnp.reshape, shape=folded)
    whole = _last if folded[2] == 1 else _first
    out = whole(coefficients, fold(g), fold(mu), fold(w), interpret)
    return out[0].reshape(mu.shape), out[1].reshape(w.shape)


def _last(coefficients: Array, g: Array, mu: Array, w: Array, interpret: bool) -> Sequence[Array]:
    rows, n, _ = w.shape
    width = pl.next_power_of_2(n)
    tile = max(1, 2048 // width), width
    return _call(
        functools.partial(_row_kernel, shape=(rows, n), tile=tile),
        (pl.cdiv(rows, tile[0]),),
        (coefficients, *(x.reshape(rows, n) for x in (g, mu, w))),
        (jax.typeof(mu.reshape(rows, n)), jax.typeof(w.reshape(rows, n))),
        interpret,
        warps=4 if width <= 8192 else 8,
    )


def _first(coefficients: Array, g: Array, mu: Array, w: Array, interpret: bool) -> Sequence[Array]:
    batch, n, rows = w.shape
    parts = pl.cdiv(n, SUMS_TILE[0])
    (sums,) = _call(
        functools.partial(_sums_kernel, shape=(n, rows), tile=SUMS_TILE),
        (pl.cdiv(rows, SUMS_TILE[1]), parts, batch),
        (coefficients, g, mu, w),
        (jax.ShapeDtypeStruct((batch, parts, 6, rows), jnp.float32),),
        interpret,
    )
    with jax.enable_x64(True):
        total = jnp.sum(_double(sums[:, :, 0::2]) + _double(sums[:, :, 1::2]), axis=1)
        hw, ww, hh = (total[:, k] for k in range(3))
    found = _finish(hw, ww, hh, coefficients[3], coefficients[4])
    return _call(
        functools.partial(_write_kernel, shape=(n, rows), tile=WRITE_TILE),
        (pl.cdiv(rows, WRITE_TILE[1]), pl.cdiv(n, WRITE_TILE[0]), batch),
        (coefficients, jnp.stack(found, axis=1), g, mu, w),
        (jax.typeof(mu), jax.typeof(w)),
        interpret,
    )


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Sequence[Array],
    outputs: Sequence[Any],
    interpret: bool,
    warps: int = 4,
) -> Sequence[Array]:
    """The kernel on references to whole arrays; two outputs are mu and w, the last inputs."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    in_place = {len(inputs) - 2: 0, len(inputs) - 1: 1} if len(outputs) == 2 else {}
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[anywhere] * len(inputs),
        out_specs=[anywhere] * len(outputs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        input_output_aliases=in_place,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
    )(*inputs)


def _row_kernel(
    coefficients: Ref,
    g: Ref,
    mu: Ref,
    w: Ref,
    mu_out: Ref,
    w_out: Ref,
    *,
    shape: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    row = pl.program_id(0) * tile[0]
    column = row * 0  # traced, as a slice past the edge may only be: it is masked
    inside = _inside(row, column, shape, tile)

    def at(ref: Ref) -> Ref:
        return ref.at[pl.ds(row, tile[0]), pl.ds(column, tile[1])]

    new_mu, h, wide = _momentum(coefficients, (at(g), at(mu), at(w)), inside)
    hw, ww, hh = _sums(h, wide, axis=1)
    found = _finish(hw, ww, hh, coefficients[3], coefficients[4])
    along, rest, factor = (x[:, None] for x in found)
    end = _weight(coefficients, h, wide, along, rest, factor, w_out.dtype)
    triton.store(at(mu_out), new_mu.astype(mu_out.dtype), mask=inside)
    triton.store(at(w_out), end, mask=inside)


def _sums_kernel(
    coefficients: Ref,
    g: Ref,
    mu: Ref,
    w: Ref,
    sums: Ref,
    *,
    shape: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    part, at, of_panel, inside, in_panel = _tile(shape, tile)
    _, h, wide = _momentum(coefficients, (at(g), at(mu), at(w)), inside)
    for k, total in enumerate(_sums(h, wide, axis=0)):
        for j, half in enumerate(_halves(total)):
            triton.store(of_panel(sums, part, 2 * k + j + 0 * part), half, mask=in_panel)


def _write_kernel(
    coefficients: Ref,
    found: Ref,
    g: Ref,
    mu: Ref,
    w: Ref,
    mu_out: Ref,
    w_out: Ref,
    *,
    shape: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    part, at, of_panel, inside, in_panel = _tile(shape, tile)
    new_mu, h, wide = _momentum(coefficients, (at(g), at(mu), at(w)), inside)
    along, rest, factor = (
        triton.load(of_panel(found, k + 0 * part), mask=in_panel, other=0.0) for k in range(3)
    )
    end = _weight(coefficients, h, wide, along[None], rest[None], factor[None], w_out.dtype)
    triton.store(at(mu_out), new_mu.astype(mu_out.dtype), mask=inside)
    triton.store(at(w_out), end, mask=inside)


def _tile(shape: tuple[int, int], tile: tuple[int, int]) -> tuple[Any, ...]:
    """A program's part of its panel's rows: its number, two references into arrays, two masks."""
    panel, part, batch = (pl.program_id(k) for k in range(3))
    row, column = part * tile[0], panel * tile[1]
    columns = pl.ds(column, tile[1])

    def at(ref: Ref) -> Ref:
        return ref.at[batch, pl.ds(row, tile[0]), columns]

    def of_panel(ref: Ref, *index: Array) -> Ref:
        return ref.at[batch, *index, columns]

    in_panel = column + jnp.arange(tile[1]) < shape[1]
    return part, at, of_panel, _inside(row, column, shape, tile), in_panel


def _inside(row: Array, column: Array, shape: tuple[int, int], tile: tuple[int, int]) -> Array:
    rows, columns = row + jnp.arange(tile[0]), column + jnp.arange(tile[1])
    return (rows < shape[0])[:, None] & (columns < shape[1])[None, :]


def _momentum(coefficients: Ref, refs: Sequence[Ref], inside: Array) -> Sequence[Array]:
    """The new momentum, the look-ahead h and the weight of a tile in float32; 0 outside."""
    g, mu, w = (triton.load(ref, mask=inside, other=0.0).astype(jnp.float32) for ref in refs)
    beta, ahead = coefficients[1], coefficients[2]
    g = coefficients[0] * g
    mu = (1 - beta) * g + beta * mu
    return mu, (1 - ahead) * g + ahead * mu, w


def _double(x: Array) -> Array:
    with jax.enable_x64(True):
        return jax.lax.convert_element_type(x, jnp.float64)


def _single(x: Array) -> Array:
    return jax.lax.convert_element_type(x, jnp.float32)


def _halves(x: Array) -> tuple[Array, Array]:
    """A float64 as the sum of two float32."""
    with jax.enable_x64(True):
        high = _single(x)
        return high, _single(x - _double(high))


def _sums(h: Array, w: Array, axis: int) -> Sequence[Array]:
    """<h, w>, <w, w> and <h, h> of every row."""
    h, w = _double(h), _double(w)
    with jax.enable_x64(True):
        return [jnp.sum(x, axis=axis) for x in (h * w, w * w, h * h)]


def _finish(hw: Array, ww: Array, hh: Array, eps: Array, row_scale: Array) -> Sequence[Array]:
    """<h, w> / |w|^2 in two halves, and row_scale / |u|, which is 0 where u is rounding noise."""
    with jax.enable_x64(True):
        along = jnp.where(ww > 0, hw / jnp.where(ww > 0, ww, 1.0), 0.0)
        square = hh - hw * along
        least = NOISE * float(jnp.finfo(jnp.float32).eps) * jnp.sqrt(hh)
        noise = (square <= 0) | (jnp.sqrt(square) <= least)
        norm = _single(jnp.sqrt(jnp.where(noise, 1.0, square)))
    return *_halves(along), jnp.where(noise, 0, row_scale / jnp.maximum(norm, eps))


def _weight(
    coefficients: Ref, h: Array, w: Array, along: Array, rest: Array, factor: Array, dtype: Any
) -> Array:
    unit = jnp.where(factor == 0, 0, ((h - along * w) - rest * w) * factor)
    update = -coefficients[6] * (unit + coefficients[5] * w)
    return (w + update.astype(dtype).astype(jnp.float32)).astype(dtype)

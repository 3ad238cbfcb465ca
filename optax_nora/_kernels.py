"""A whole Nora step of one matrix as Pallas kernels, for GPUs.

Rows along the last axes: one kernel holds whole rows and moves 20 bytes a float32 weight. Rows
along other axes: one kernel sums the rows and a second writes, 32 bytes; why not less is in
docs/results/kernel-notes.md. Import this module where a kernel is used: pallas is slow to import.

Row sums are in float64, and the projection rounds once, relative to its result: so one projection
does what two in float32 do elsewhere (docs/numerics.md).
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

from optax_nora._axes import Rows
from optax_nora._checks import LARGEST
from optax_nora._partition import shaped_like
from optax_nora._rows import NOISE
from optax_nora._step import Coefficients, read

Array = jax.Array
Ref = Any

# Tiles of (weights of a row, rows): what was fastest on an H100, four warps a program.
SUMS_TILE = (64, 128)
WRITE_TILE = (8, 256)
LONGEST = 16384  # weights of a row along the last axis: one program holds them in registers
TINY = 2.0**-160  # times this, the square of a float32 is one
MOST_BATCHES = 65535  # of CUDA's third grid axis


def fits(rows: Rows, shape: tuple[int, ...]) -> bool:
    """Whether there is a kernel for such rows of a leaf of such a shape."""
    batch, n, after = _fold(rows, shape)
    neighbours = max(rows.reduction) - min(rows.reduction) < len(rows.reduction)
    return (
        neighbours
        and 0 < batch * n * after < 2**31
        and (n <= LONGEST if after == 1 else batch <= MOST_BATCHES)
    )


def step(
    coefficients: Array,
    g: Array,
    mu: Array,
    w: Array,
    rows: Rows,
    *,
    write_weights: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The momentum after one step, and the weight or its update.

    ``coefficients`` is a vector of float32 in the order of `Coefficients`. An update is rounded to
    the weight's dtype before it is added, as in `optax.apply_updates`. Under jit and donation
    momentum and weight are written in place.
    """
    # jax 0.11 and 0.12 call this backend of Pallas deprecated wherever it is lowered. A user can do
    # nothing about that; where it is gone, the XLA form takes over.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    folded = _fold(rows, w.shape)
    along = _last if folded[2] == 1 else _first
    run = functools.partial(along, write_weights=write_weights, interpret=interpret)
    new_mu, out = run(coefficients, *(x.reshape(folded) for x in (g, mu, w)))
    return new_mu.reshape(mu.shape), out.reshape(w.shape)


def _fold(rows: Rows, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Axes before a row's, its own, and those after: all but its own number rows."""
    first, last = min(rows.reduction), max(rows.reduction) + 1
    return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


class _Static(NamedTuple):
    """What a kernel knows when it is compiled."""

    shape: tuple[int, int]  # of one matrix of the batch
    tile: tuple[int, int]
    write_weights: bool
    interpret: bool


def _last(
    coefficients: Array, g: Array, mu: Array, w: Array, *, write_weights: bool, interpret: bool
) -> Sequence[Array]:
    rows, n, _ = w.shape
    width = pl.next_power_of_2(n)
    static = _Static((rows, n), (max(1, 2048 // width), width), write_weights, interpret)
    return _call(
        _row_kernel,
        static,
        (pl.cdiv(rows, static.tile[0]),),
        (coefficients, *(x.reshape(rows, n) for x in (g, mu, w))),
        2 if write_weights else 1,
        warps=4 if width <= 8192 else 8,
    )


def _first(
    coefficients: Array, g: Array, mu: Array, w: Array, *, write_weights: bool, interpret: bool
) -> Sequence[Array]:
    batch, n, rows = w.shape
    sums = _Static((n, rows), SUMS_TILE, write_weights, interpret)
    parts = pl.cdiv(n, SUMS_TILE[0])
    (found,) = _call(
        _sums_kernel,
        sums,
        (pl.cdiv(rows, SUMS_TILE[1]), parts, batch),
        (coefficients, g, mu, w),
        0,
        out_shape=[shaped_like(w, (batch, parts, 6, rows), jnp.float32)],
    )
    with jax.enable_x64(True):
        high, low = _double(found[:, :, 0::2]), _double(found[:, :, 1::2])
        total = jnp.sum(jnp.where(jnp.isinf(high), low / TINY, high + low), axis=1)
        along, factor = _finish(Coefficients(*coefficients), *(total[:, k] for k in range(3)))
        # Not `_halves`: XLA drops a rounding that is undone at once, and low would be 0.
        high = jax.lax.reduce_precision(along, exponent_bits=8, mantissa_bits=23)
        high, low = _single(high), _single(along - high)
    return _call(
        _write_kernel,
        sums._replace(tile=WRITE_TILE),
        (pl.cdiv(rows, WRITE_TILE[1]), pl.cdiv(n, WRITE_TILE[0]), batch),
        (coefficients, jnp.stack([high, low, factor], axis=1), g, mu, w),
        2 if write_weights else 1,
    )


def _call(
    kernel: Any,
    static: _Static,
    grid: tuple[int, ...],
    inputs: Sequence[Array],
    in_place: int,
    warps: int = 4,
    out_shape: Sequence[Any] | None = None,
) -> Sequence[Array]:
    """`launch` of a kernel of steps.

    Outputs are like momentum and weight, the last inputs, unless ``out_shape`` says otherwise; the
    first ``in_place`` of them take their buffers.
    """
    first = len(inputs) - 2
    if out_shape is None:
        out_shape = [shaped_like(x, x.shape, x.dtype) for x in inputs[first:]]
    aliases = {first + k: k for k in range(in_place)}
    return launch(kernel, static, grid, inputs, out_shape, 1, aliases, warps)


def launch(
    kernel: Any,
    static: Any,
    grid: tuple[int, ...],
    inputs: Sequence[Array],
    out_shape: Sequence[Any],
    stages: int,
    aliases: dict[int, int],
    warps: int,
) -> Any:
    """The kernel on references to whole arrays; outputs take the buffers of inputs by aliases."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, static=static),
        grid=grid,
        in_specs=[anywhere] * len(inputs),
        out_specs=[anywhere] * len(out_shape),
        out_shape=out_shape,
        input_output_aliases=aliases,
        interpret=static.interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )(*inputs)


def _row_kernel(
    coefficients: Ref, g: Ref, mu: Ref, w: Ref, mu_out: Ref, out: Ref, *, static: _Static
) -> None:
    row = pl.program_id(0) * static.tile[0]
    column = row * 0  # traced, as a slice past the edge may only be: it is masked
    inside = _inside(row, column, static)

    def at(ref: Ref) -> Ref:
        return ref.at[pl.ds(row, static.tile[0]), pl.ds(column, static.tile[1])]

    c = read(coefficients)
    new_mu, h, wide = _momentum(c, (at(g), at(mu), at(w)), inside, static)
    along, factor = _finish(c, *_sums(h, wide, axis=1))
    end = _end(c, h, wide, along[:, None], factor[:, None], out.dtype, static)
    triton.store(at(mu_out), new_mu.astype(mu_out.dtype), mask=inside)
    triton.store(at(out), end, mask=inside)


def _sums_kernel(coefficients: Ref, g: Ref, mu: Ref, w: Ref, sums: Ref, *, static: _Static) -> None:
    part, at, of_panel, inside, in_panel = _tile(static)
    _, h, wide = _momentum(read(coefficients), (at(g), at(mu), at(w)), inside, static)
    for k, total in enumerate(_sums(h, wide, axis=0)):
        high, low = _halves(total)
        with jax.enable_x64(True):  # a total past float32 is in the second half alone
            low = jnp.where(jnp.isinf(high), _single(TINY * total), low)
        for j, half in enumerate((high, low)):
            triton.store(of_panel(sums, part, 2 * k + j + 0 * part), half, mask=in_panel)


def _write_kernel(
    coefficients: Ref,
    found: Ref,
    g: Ref,
    mu: Ref,
    w: Ref,
    mu_out: Ref,
    out: Ref,
    *,
    static: _Static,
) -> None:
    # What the sums read last is still in the cache, and is read first here.
    part, at, of_panel, inside, in_panel = _tile(static, backwards=True)
    c = read(coefficients)
    new_mu, h, wide = _momentum(c, (at(g), at(mu), at(w)), inside, static)
    high, low, factor = (
        triton.load(of_panel(found, k + 0 * part), mask=in_panel, other=0.0) for k in range(3)
    )
    with jax.enable_x64(True):
        along = _double(high) + _double(low)
    end = _end(c, h, wide, along[None], factor[None], out.dtype, static)
    triton.store(at(mu_out), new_mu.astype(mu_out.dtype), mask=inside)
    triton.store(at(out), end, mask=inside)


def _tile(static: _Static, backwards: bool = False) -> tuple[Any, ...]:
    """A program's part of its panel's rows: its number, two references into arrays, two masks."""
    ids = [pl.program_id(k) for k in range(3)]
    if backwards:
        ids = [pl.num_programs(k) - 1 - x for k, x in enumerate(ids)]
    panel, part, batch = ids
    row, column = part * static.tile[0], panel * static.tile[1]
    columns = pl.ds(column, static.tile[1])

    def at(ref: Ref) -> Ref:
        return ref.at[batch, pl.ds(row, static.tile[0]), columns]

    def of_panel(ref: Ref, *index: Array) -> Ref:
        return ref.at[batch, *index, columns]

    in_panel = column + jnp.arange(static.tile[1]) < static.shape[1]
    return part, at, of_panel, _inside(row, column, static), in_panel


def _inside(row: Array, column: Array, static: _Static) -> Array:
    rows, columns = (
        start + jnp.arange(k) for start, k in zip((row, column), static.tile, strict=True)
    )
    return (rows < static.shape[0])[:, None] & (columns < static.shape[1])[None, :]


def _momentum(
    c: Coefficients, refs: Sequence[Ref], inside: Array, static: _Static
) -> Sequence[Array]:
    """The new momentum, the look-ahead h and the weight of a tile in float32; 0 outside."""
    g, mu, w = (triton.load(ref, mask=inside, other=0.0).astype(jnp.float32) for ref in refs)
    g = c.grad_scale * g
    mu = _fused_multiply_add(c.beta, mu, c.one_minus_beta * g, static)
    return mu, _fused_multiply_add(c.ahead, mu, c.one_minus_ahead * g, static), w


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


def _fused_multiply_add(a: Array, b: Array, c: Array, static: _Static) -> Array:
    """``a * b + c``, rounded once: left to a compiler, h might differ from use to use."""
    a = jnp.broadcast_to(a, b.shape)
    if static.interpret:
        with jax.enable_x64(True):
            return _single(_double(a) * _double(b) + _double(c))
    (out,) = triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(b.shape, b.dtype)],
    )
    return out


def _sums(h: Array, w: Array, axis: int) -> Sequence[Array]:
    """<h, w>, <w, w> and <h, h> of every row in float64."""
    h, w = _double(h), _double(w)
    with jax.enable_x64(True):
        return [jnp.sum(x, axis=axis) for x in (h * w, w * w, h * h)]


def _finish(c: Coefficients, hw: Array, ww: Array, hh: Array) -> tuple[Array, Array]:
    """<h, w> / |w|^2 in float64, and row_scale / |u|, which is 0 where u is rounding noise."""
    with jax.enable_x64(True):
        along = jnp.where(ww > 0, hw / jnp.where(ww > 0, ww, 1.0), 0.0)
        along = jnp.where(jnp.abs(along) > LARGEST, 0.0, along)  # beside h, w is nothing
        square = hh - hw * along
        least = NOISE * float(jnp.finfo(jnp.float32).eps) * jnp.sqrt(hh)
        noise = (square <= 0) | (jnp.sqrt(jnp.abs(square)) <= least)
        norm = jnp.maximum(jnp.sqrt(jnp.where(noise, 1.0, square)), _double(c.eps))
        return along, jnp.where(noise, 0.0, _single(_double(c.row_scale) / norm))


def _end(
    c: Coefficients,
    h: Array,
    w: Array,
    along: Array,
    factor: Array,
    dtype: Any,
    static: _Static,
) -> Array:
    """The weight after the step, or its update."""
    high, low = _halves(along)
    u = _fused_multiply_add(-low, w, _fused_multiply_add(-high, w, h, static), static)
    unit = jnp.where(factor == 0, 0, u * factor)
    update = (-c.learning_rate * (unit + c.weight_decay * w)).astype(dtype)
    return (w + update.astype(jnp.float32)).astype(dtype) if static.write_weights else update

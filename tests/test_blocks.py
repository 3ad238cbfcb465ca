"""Blocks of orthonormal rows against float64, on any axes, spectra and meshes."""

import contextlib
import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tolerance import tolerance

from optax_nora import _blocks
from optax_nora._axes import Rows, mesh_axes
from optax_nora._blocks import (
    QUINTICS,
    SHIFT,
    Blocks,
    block_size,
    inverse_root,
    mix,
)
from optax_nora._rows import normalize, project_and_normalize

P = PartitionSpec
EPS = float(np.finfo(np.float32).eps)
LAST = Rows((1,), (0,))  # rows as NumPy has them
# What the quintics leave: see test_the_quintics_are_the_nearest_to_one.
INTERVAL = 0.03


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@functools.partial(jax.jit, static_argnames=("rows", "block_rows"))
def ortho(u, rows, block_rows):
    return Blocks(block_rows, False)(rows, u, u, 1e-10)


@functools.partial(jax.jit, static_argnames=("rows", "block_rows", "project"))
def step(h, w, rows, block_rows, project=True):
    return Blocks(block_rows, project)(rows, h, w, 1e-10)


def polar(matrix):
    u, _, vt = np.linalg.svd(np.float64(matrix), full_matrices=False)
    return u @ vt


def blocks(x, rows, size):
    """The blocks of an array as matrices in float64, by NumPy."""
    x = np.asarray(x)
    x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    flat = reference.rows_last(x, rows.reduction, rows.output)
    matrices = flat.reshape(-1, *flat.shape[-2:])
    return [m[k : k + size] for m in matrices for k in range(0, m.shape[0], size)]


def expected(u, rows, size):
    """Blocks of rows at length 1, polar factors, rows at length 1 again."""
    return [
        reference.normalize(polar(reference.normalize(block))) for block in blocks(u, rows, size)
    ]


def spectrum(values, n, seed=0):
    """A matrix of these singular values, with rows at length 1."""
    rng, b = np.random.default_rng(seed), len(values)
    left, right = (np.linalg.qr(rng.standard_normal((k, b)))[0] for k in (b, n))
    return reference.normalize((left * values) @ right.T)


# The scalar that each singular value goes through


def nearest_to_one(low, high):
    """The odd quintic with the least greatest |1 - p| on an interval, by Remez' exchange."""
    points = np.array([low, (3 * low + high) / 4, (low + 3 * high) / 4, high])
    for _ in range(100):
        columns = [points, points**3, points**5, [1, -1, 1, -1]]
        a, b, c, _ = np.linalg.solve(np.stack(columns, axis=1), np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return np.array([a, b, c])


def quintic(x, p):
    return p[0] * x + p[1] * x**3 + p[2] * x**5


def test_the_quintics_are_the_nearest_to_one():
    x = np.geomspace(SHIFT**0.5, 1, 100_001)
    for given in QUINTICS:
        low, high = x.min(), x.max()
        p = nearest_to_one(max(low, high / 20), high)
        y = quintic(x, p)
        p *= 2 / (y.min() + y.max())  # in the middle between what it makes of all
        # A hundred thousand points find the extremes of a smooth function to 1e-6.
        np.testing.assert_allclose(given, p, rtol=1e-6)
        x = quintic(x, p)
    assert np.max(np.abs(x - 1)) < INTERVAL


def test_no_quintic_sends_a_value_to_less_than_a_third():
    """Or a well conditioned block would become an ill conditioned one on the way."""
    x = np.linspace(0.05, 1, 1001)
    for p in QUINTICS:
        x = quintic(x, p)
        assert x.min() > 1 / 3
        assert x.max() < 3


# One row, and all rows


@pytest.mark.parametrize("rows", [LAST, Rows((0,), (1,))])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_blocks_of_one_row_are_nora_bit_for_bit(rows, dtype):
    h, w = normal(12, 9).astype(dtype), normal(12, 9, seed=1).astype(dtype)
    for project, want in [
        (True, project_and_normalize(rows, h, w, 1e-10)),
        (False, normalize(rows, h, 1e-10)),
    ]:
        got = Blocks(1, project)(rows, h, w, 1e-10)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(16, 64), (33, 40), (1, 8), (128, 512)])
@pytest.mark.parametrize("block_rows", ["all", 10**9])
def test_one_block_of_all_rows_is_the_polar_factor(shape, block_rows):
    u = normal(*shape)
    d = np.float64(ortho(u, LAST, shape[0] if block_rows == "all" else block_rows))
    (want,) = expected(u, LAST, shape[0])
    # Singular values at 1 +- INTERVAL, then rows made longer or shorter by as much.
    assert np.all(np.linalg.norm(d - want, axis=1) <= 2 * INTERVAL + 100 * EPS)
    np.testing.assert_allclose(np.linalg.norm(d, axis=1), 1, rtol=4 * EPS)


@pytest.mark.parametrize(
    ("shape", "block_rows", "size"),
    [
        ((8, 64), 3, 3),
        ((8, 64), 8, 8),
        ((8, 64), 9, 8),  # a matrix has no more
        ((64, 27), 128, 27),  # no more are orthonormal: a convolution of 3 x 3 from 3 channels
        ((64, 1), 128, 1),
        ((0, 4), 2, 0),
    ],
)
def test_how_many_rows_a_block_has(shape, block_rows, size):
    assert block_size(shape, LAST, block_rows) == size
    assert ortho(jnp.ones(shape), LAST, block_rows).shape == shape


# Any axes

LAYOUTS = {
    "(out, in)": ((37, 24), Rows((1,), (0,))),
    "(in, out)": ((24, 37), Rows((0,), (1,))),
    "(layer, in, out)": ((3, 24, 37), Rows((1,), (2,))),
    "(in, layer, out)": ((24, 3, 37), Rows((0,), (2,))),
    "(embed, heads, head_dim)": ((24, 3, 5), Rows((0,), (1, 2))),
    "(embed, heads as batch, head_dim)": ((24, 3, 10), Rows((0,), (2,))),
    "(heads, head_dim, embed)": ((4, 6, 37), Rows((0, 1), (2,))),
    "(heads, embed, head_dim)": ((3, 24, 5), Rows((1,), (0, 2))),
    "the second output axis counts first": ((24, 3, 5), Rows((0,), (2, 1))),
    "(kh, kw, in, out)": ((3, 3, 2, 11), Rows((0, 1, 2), (3,))),
    "more rows than weights in one": ((6, 40), Rows((0,), (1,))),
    "all of one matrix": ((24, 8), Rows((0,), (1,))),
    "one row": ((24,), Rows((0,), ())),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block_rows", [2, 8])
def test_blocks_are_those_of_a_loop_over_matrices(name, block_rows):
    shape, rows = LAYOUTS[name]
    if not rows.output:
        u = normal(*shape)
        np.testing.assert_array_equal(ortho(u, rows, block_rows), normalize(rows, u, 1e-10))
        return
    u = normal(*shape)
    size = block_size(shape, rows, block_rows)
    got = blocks(ortho(u, rows, block_rows), rows, size)
    for block, want in zip(got, expected(u, rows, size), strict=True):
        assert block.shape == want.shape
        assert np.all(np.linalg.norm(block - want, axis=1) <= 2 * INTERVAL + 100 * EPS)


# On GPUs


@pytest.mark.parametrize("name", list(LAYOUTS)[:-1])
def test_the_order_of_axes_for_tensor_cores_is_no_other_step(name, monkeypatch):
    shape, rows = LAYOUTS[name]
    u = normal(*shape)
    want = mix(u, rows, 8)
    with monkeypatch.context() as patch:
        by = _blocks.Precisions(*_blocks.FLOAT32)  # as on a CPU, but in the order of tensor cores
        patch.setattr(_blocks, "TENSOR_CORES", by)
        patch.setattr(_blocks, "FLOAT32", by)
        _blocks._mixer.cache_clear()
        got = mix(u, rows, 8)
    _blocks._mixer.cache_clear()
    # The same products, summed in another order: conditions of blocks here are under 100.
    np.testing.assert_allclose(got, want, atol=1000 * EPS)


@pytest.mark.parametrize(
    ("capability", "fast"), [("7.5", False), ("gfx942", False), ("8.0", True), ("10.0", True)]
)
def test_what_gpus_multiply(capability, fast, monkeypatch):
    """float32 on the oldest and AMD's; from A100 on bfloat16 thrice, and tf32 at the end."""

    class Device:
        compute_capability = capability

    u = normal(16, 64)
    _blocks._mixer.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: [Device()])
        traced = jax.jit(lambda u: mix(u, LAST, 8)).trace(u)
    _blocks._mixer.cache_clear()
    gpu, cpu = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu"))
    assert "algorithm" not in cpu
    # The Gram matrix, ten products of its size, and the last one; then seven that may be rough.
    assert gpu.count("num_primitive_operations = 3") == (12 if fast else 0)
    assert gpu.count("lhs_precision_type = tf32") == (7 if fast else 0)


@hypothesis.given(
    case=st.sampled_from(list(LAYOUTS.values())[:-1]),
    block_rows=st.sampled_from([2, 5, 8]),
    condition=st.floats(1, 1e6),
    seed=st.integers(0, 2**31),
)
def test_singular_values_of_every_block(case, block_rows, condition, seed):
    shape, rows = case
    rng = np.random.default_rng(seed)
    # Along the reduction axes, weights that fade: blocks of that condition, about.
    u = rng.standard_normal(shape)
    for axis in rows.reduction:
        fade = np.geomspace(1, condition ** (-1 / len(rows.reduction)), shape[axis])
        u *= np.expand_dims(fade, [a for a in range(len(shape)) if a != axis])
    power = np.sqrt(np.sum(u * u, axis=rows.reduction, keepdims=True))
    unit = np.float32(u / power)
    size = block_size(shape, rows, block_rows)
    before = blocks(unit, rows, size)
    after = blocks(mixed(unit, rows, block_rows), rows, size)
    for x, y in zip(before, after, strict=True):
        assert_in_interval(x, y)


@functools.partial(jax.jit, static_argnames=("rows", "block_rows"))
def mixed(u, rows, block_rows):
    return mix(u, rows, block_rows)


def assert_in_interval(x, y):
    """Of a block before and after: what docs/blocks.md says of its singular values."""
    left, values, right = np.linalg.svd(x, full_matrices=False)
    for share, least in [(0.1, 0.97), (0.01, 0.9), (0.001, 0.2)]:
        top = np.count_nonzero((values >= share * values[0]) & (values > 0))
        inner = left[:, :top].T @ y @ right[:top].T
        assert np.all(np.linalg.svd(inner, compute_uv=False) >= least)
    assert np.linalg.norm(y, 2) <= 1.06


# Hard blocks


def hard():
    rng = np.random.default_rng(0)
    b, n = 64, 160
    x = rng.standard_normal((b, n))
    yield "a condition of 1e6", spectrum(np.geomspace(1, 1e-6, b), n)
    yield "a condition of 1e3", spectrum(np.geomspace(1, 1e-3, b), n)
    yield "one large", spectrum(np.r_[1, np.full(b - 1, 1e-3)], n)
    yield "one small", spectrum(np.r_[np.ones(b - 1), 1e-6], n)
    yield "rank 1", np.outer(rng.standard_normal(b), rng.standard_normal(n))
    yield "rank 1, positive", np.abs(np.outer(rng.standard_normal(b), rng.standard_normal(n)))
    yield "rank b / 4", rng.standard_normal((b, b // 4)) @ rng.standard_normal((b // 4, n))
    yield "rows of zeros", np.where(np.arange(b)[:, None] % 3 == 0, 0, x)
    yield "all zeros", 0 * x
    yield "equal rows", np.broadcast_to(x[:1], (b, n))
    yield "pairs of rows", np.repeat(x[: b // 2], 2, axis=0)
    yield "nearly equal rows", x[:1] + 1e-6 * x
    yield "opposite rows", np.concatenate([x[: b // 2], -x[: b // 2]])
    yield "all positive", np.abs(x)


HARD = dict(hard())


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", HARD)
def test_hard_blocks(name, dtype):
    u = np.float32(np.asarray(HARD[name], dtype))
    unit = np.float32(reference.normalize(np.float64(u)))
    assert_in_interval(np.float64(unit), np.float64(mixed(unit, LAST, len(u))))
    d = np.float64(ortho(u, LAST, len(u)))
    zero = ~np.any(u, axis=1)
    assert not d[zero].any()
    np.testing.assert_allclose(np.linalg.norm(d[~zero], axis=1), 1, rtol=4 * EPS)


class TensorCores:
    """jax.numpy whose products are those of a GPU."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def matmul(self, x, y, precision):
        return self.einsum(x, (..., 0, 1), y, (..., 1, 2), (..., 0, 2), precision=precision)

    def einsum(self, x, of_x, y, of_y, out, precision):
        def times(x, y):
            return jnp.einsum(x, of_x, y, of_y, out, precision="highest")

        if precision is _blocks.TENSOR_CORES.exact:
            (a, b), (c, d) = map(self.halves, (x, y))
            return times(a, c) + (times(a, d) + times(b, c))
        assert precision is _blocks.TENSOR_CORES.rough
        return times(self.tf32(x), self.tf32(y))

    def halves(self, x):
        high = jax.lax.reduce_precision(x, 8, 7)
        return high, jax.lax.reduce_precision(x - high, 8, 7)

    def tf32(self, x):
        """Of 10 bits, cut off: what is further off than rounding."""
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)


@pytest.mark.parametrize("name", HARD)
def test_hard_blocks_on_tensor_cores(name, monkeypatch):
    unit = np.float32(reference.normalize(HARD[name]))
    monkeypatch.setattr(_blocks, "jnp", TensorCores())
    mix = functools.partial(_blocks._mix_blocks, rows=LAST, size=len(unit))
    after = jax.jit(functools.partial(mix, by=_blocks.TENSOR_CORES))(unit)
    assert_in_interval(np.float64(unit), np.float64(after))


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("n", [160, 10_000])
def test_no_eigenvalue_of_a_gram_matrix_is_negative_on_the_way(name, n):
    """What SHIFT is for: there the quintics would diverge."""
    u = np.tile(reference.normalize(HARD[name]), n // 160 + 1)[:, :n]
    unit = np.float32(reference.normalize(u))
    gram = np.float64(np.asarray(jnp.matmul(unit, unit.T)))
    values = np.linalg.eigvalsh(gram)
    # The shift is SHIFT of no less than the greatest. Rounding of a Gram matrix took 6e-7 of the
    # greatest where products are summed one after another, on a CPU without AVX-512, and half of
    # that elsewhere.
    assert values[0] >= -SHIFT / 4 * values[-1]
    root = np.float64(inverse_root(jnp.float32(gram)))
    # As far from 0 as the shift says, and of no negative eigenvalue itself.
    assert np.linalg.norm(root, 2) <= 1.05 * (SHIFT * max(values[-1], SHIFT)) ** -0.5
    assert np.linalg.eigvalsh((root + root.T) / 2)[0] > 0


def test_rows_of_any_length():
    """Each row says where, not how much: as with one row."""
    u = normal(16, 40)
    lengths = 2.0 ** np.linspace(-50, 66, 16).round()[:, None]  # 1e-15 to 7e19
    w = normal(16, 40, seed=1)
    for project in (True, False):

        @functools.partial(jax.jit, static_argnames="project")
        def direction(u, project=project):
            return Blocks(8, project)(LAST, u, w, 0.0)

        np.testing.assert_array_equal(direction(np.float32(u * lengths)), direction(u))


def test_rows_under_eps_shrink():
    u = normal(16, 40)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    lengths = np.float32([1, 1e-12] * 8)[:, None]
    norms = np.linalg.norm(ortho(u * lengths, LAST, 8), axis=1)
    # The length itself is a sum of 40 squares.
    np.testing.assert_allclose(norms, [1, 1e-2] * 8, rtol=40 * EPS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_block_alone(bad):
    u, w = normal(24, 40), normal(24, 40, seed=1)
    u[9, 3] = bad
    for d in (ortho(u, LAST, 8), step(u, w, LAST, 8)):
        finite = np.all(np.isfinite(d), axis=1)
        assert not finite[9]
        assert finite[:8].all()
        assert finite[16:].all()


# Across the weights


@hypothesis.given(seed=st.integers(0, 2**31), block_rows=st.sampled_from([2, 5, 16]))
def test_rows_are_across_their_weights_and_of_length_one(seed, block_rows):
    h, w = normal(16, 40, seed=seed), normal(16, 40, seed=seed + 1)
    d = np.float64(step(h, w, LAST, block_rows))
    cosine = np.sum(d * w, axis=1) / np.linalg.norm(w, axis=1)
    # The rounding of a unit vector's entries, as with one row.
    assert np.all(np.abs(cosine) <= 8e-8)
    np.testing.assert_allclose(np.linalg.norm(d, axis=1), 1, rtol=4 * EPS)


def test_with_project_it_is_the_mathematics():
    h, w = normal(16, 40), normal(16, 40, seed=1)
    u = reference.normalize(reference.project(np.float64(h), np.float64(w)))
    want = np.concatenate([polar(u[:8]), polar(u[8:])])
    want = reference.direction(want, np.float64(w))
    d = np.float64(step(h, w, LAST, 8))
    assert np.all(np.linalg.norm(d - want, axis=1) <= 2 * INTERVAL + 100 * EPS)
    np.testing.assert_array_equal(step(h, w, LAST, 8, project=False), ortho(h, LAST, 8))


def test_a_row_along_its_weight_is_zero_and_no_part_of_its_block():
    h, w = normal(16, 40), normal(16, 40, seed=1)
    h[3] = 0.3 * w[3]
    d = np.asarray(step(h, w, LAST, 8))
    assert not d[3].any()
    others = [0, 1, 2, 4, 5, 6, 7]
    want = step(h[others], w[others], LAST, 7)
    # Another Gram matrix to the same polar factor.
    assert np.max(np.abs(d[others] - want)) <= 4 * INTERVAL


def test_row_norms_are_known_over_many_steps():
    """|w'|^2 = (1 - lr wd)^2 |w|^2 + lr^2 for every gradient."""
    w, lr, decay = jnp.float32(normal(16, 40)), 0.02, 0.1
    square = np.sum(np.float64(w) ** 2, axis=1)
    for k in range(50):
        h = normal(16, 40, seed=k + 2)
        w = w - lr * (step(h, w, LAST, 8) + decay * w)
        square = (1 - lr * decay) ** 2 * square + lr**2
    # Each of 50 steps rounds w and the length of d by a few units.
    np.testing.assert_allclose(np.sum(np.float64(w) ** 2, axis=1), square, rtol=50 * 4 * EPS)


def test_orthogonal_maps_from_the_right():
    u = normal(37, 40)
    q = np.linalg.qr(normal(40, 40, seed=1, dtype=np.float64))[0]
    turned = np.float64(ortho(np.float32(np.float64(u) @ q), LAST, 8))
    # Rounding of the products and of what goes in, times conditions of under 10.
    np.testing.assert_allclose(turned, np.float64(ortho(u, LAST, 8)) @ q, atol=200 * EPS)


# dtypes and transformations


def test_complex_rows_are_real_ones_of_twice_the_length():
    h, w = (normal(16, 20, seed=k) + 1j * normal(16, 20, seed=k + 2) for k in range(2))

    def pairs(x):
        return np.concatenate([np.real(x), np.imag(x)], axis=1)

    got, want = step(h, w, LAST, 8), step(pairs(h), pairs(w), LAST, 8)
    # Sums in another order, times conditions of under 10.
    np.testing.assert_allclose(pairs(got), want, atol=200 * EPS)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        h, w = normal(16, 40, dtype=np.float64), normal(16, 40, seed=1, dtype=np.float64)
        d = step(h, w, LAST, 8)
        assert d.dtype == jnp.float64
        np.testing.assert_allclose(np.linalg.norm(d, axis=1), 1, rtol=1e-15)
        assert np.max(np.abs(np.sum(np.asarray(d) * w, axis=1))) <= 1e-15


def test_vmap_and_derivatives():
    h, w = normal(3, 16, 40), normal(3, 16, 40, seed=1)
    h[0, :2] = 0
    h[1, 4] = h[1, 3]
    h[2, 0] = w[2, 0]
    mapped = jax.vmap(lambda h, w: step(h, w, LAST, 8))(h, w)
    batched = step(h, w, Rows((2,), (1,)), 8)
    # The same products, in batches of another shape.
    np.testing.assert_allclose(mapped, batched, atol=200 * EPS)
    for project in (True, False):

        def value(h, w, project=project):
            return jnp.sum(step(h, w, Rows((2,), (1,)), 8, project) ** 3)

        for gradient in jax.grad(value, (0, 1))(h, w):
            assert np.all(np.isfinite(gradient))


def test_the_derivative_is_the_slope():
    h, w, t = (normal(8, 20, seed=k) for k in range(3))
    _, tangent = jax.jvp(lambda h: step(h, w, LAST, 4), (h,), (t,))
    with jax.enable_x64(True):
        ends = [step(np.float64(h) + s * 1e-5 * t, np.float64(w), LAST, 4) for s in (1, -1)]
        slope = (np.asarray(ends[0]) - np.asarray(ends[1])) / 2e-5
    np.testing.assert_allclose(tangent, slope, atol=2e-3 * np.abs(slope).max())


# Meshes

# Axes, rows, how they are split; of each device with blocks of 8, rows that it has a part of, and
# rows that it gets: those of its first and last block as far as 8 and its own rows share no divisor
SHARDED = {
    "whole blocks": ((24, 64), Rows((0,), (1,)), P(None, ("data", "model")), 0, 0),
    "whole blocks of stacked layers": (
        (2, 24, 64),
        Rows((1,), (2,)),
        P("data", None, "model"),
        0,
        0,
    ),
    "rows split": ((24, 64), Rows((0,), (1,)), P("model"), 64, 0),
    "rows and blocks split": ((24, 64), Rows((0,), (1,)), P("data", "model"), 16, 0),
    "straddling": ((24, 40), Rows((0,), (1,)), P(None, "model"), 0, 2 * 6),
    "over several devices": ((24, 24), Rows((0,), (1,)), P(None, ("data", "model")), 0, 2 * 7),
    "rows split and straddling": ((24, 40), Rows((0,), (1,)), P("data", "model"), 10, 2 * 6),
    "straddling and ragged": ((24, 44), Rows((0,), (1,)), P(None, "model"), 0, 2 * 7),
    "straddling, stacked": ((2, 24, 40), Rows((1,), (2,)), P("data", None, "model"), 0, 2 * 6),
    "straddling, rows last": ((40, 24), Rows((1,), (0,)), P("model"), 0, 2 * 6),
    "ragged, rows split": ((24, 37), Rows((0,), (1,)), P("data"), 37, 0),
    "heads": ((24, 8, 6), Rows((0,), (1, 2)), P(None, "model"), 0, 2 * 4),
    "heads, whole": ((24, 8, 8), Rows((0,), (1, 2)), P("data", "model"), 16, 0),
    "heads first": ((8, 24, 8), Rows((1,), (0, 2)), P("model"), 0, 0),
}
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


def collectives(function, *operands):
    """Numbers that each device gets, by collective."""
    found = {}
    for match in COLLECTIVE.finditer(jax.jit(function).lower(*operands).compile().as_text()):
        for shape in re.findall(r"f32\[([\d,]*)\]", match["result"]):
            numbers = math.prod(int(n) for n in shape.split(",") if n)
            found[match["name"]] = found.get(match["name"], 0) + numbers
    return found


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def at(spec, kind):
    return NamedSharding(mesh_of(kind), spec)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SHARDED)
def test_any_mesh_has_the_same_numbers_and_sends_what_is_said(name, kind, project):
    shape, rows, spec, split_rows, neighbours = SHARDED[name]
    h, w = normal(*shape), normal(*shape, seed=1)
    want = step(h, w, rows, 8, project)
    placed = [jax.device_put(x, at(spec, kind)) for x in (h, w)]

    def function(h, w):
        return step(h, w, rows, 8, project)

    got = jax.jit(function)(*placed)
    assert got.sharding.is_equivalent_to(placed[0].sharding, h.ndim)
    # The same sums in another order, times conditions of under 100.
    np.testing.assert_allclose(got, want, atol=1000 * EPS)
    found = collectives(function, *placed)
    # Of a row: its part of the Gram matrix, <u, u> of u and of a tiny u, lest it overflow, and
    # <d, d>; with project the sum of |h|, <h, w>, <w, w>, <u, w>, <u, u>, and these again of d.
    last = split_rows % 8
    grams = split_rows * 8 - last * (8 - last)
    sums = split_rows * (10 if project else 3)
    expected = {"all-reduce": grams + sums} if split_rows else {}
    if neighbours:
        expected["collective-permute"] = neighbours * 24 // (2 if split_rows else 1)
        if split_rows:  # each mixes all blocks of which it has a row
            expected["all-reduce"] = 2 * 8 * 8 + sums
    assert found == expected


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("project", [True, False])
def test_shard_map(name, project):
    shape, rows, spec, _, _ = SHARDED[name]
    reduction, output = (mesh_axes(spec, axes) for axes in (rows.reduction, rows.output))
    local = rows._replace(reduction_mesh=reduction, output_mesh=output)
    h, w = normal(*shape), normal(*shape, seed=1)
    mapped = jax.shard_map(
        lambda h, w: step(h, w, local, 8, project),
        mesh=mesh_of(AxisType.Auto),
        in_specs=spec,
        out_specs=spec,
    )
    np.testing.assert_allclose(mapped(h, w), step(h, w, rows, 8, project), atol=1000 * EPS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "rows", "spec"),
    [
        ((24, 8, 6), Rows((0,), (1, 2)), P("model", None, "data")),
        ((8, 24, 6), Rows((1,), (0, 2)), P("model", None, "data")),
        ((2, 24, 4, 6), Rows((1,), (3, 2)), P(None, None, "model", "data")),
    ],
)
def test_output_axes_that_are_split_within(shape, rows, spec, kind):
    """Rows are counted through all output axes, so only the first can be cut without more."""
    h, w = normal(*shape), normal(*shape, seed=1)
    placed = [jax.device_put(x, at(spec, kind)) for x in (h, w)]
    got = step(*placed, rows, 8)
    assert got.sharding.is_equivalent_to(placed[0].sharding, h.ndim)
    np.testing.assert_allclose(got, step(h, w, rows, 8), atol=1000 * EPS)


@pytest.mark.parametrize(
    "spec", [P(None, "model"), P("model"), P("data", "model"), P(None, ("data", "model"))]
)
def test_axes_that_devices_do_not_divide(spec):
    """Inside a program an axis may be split unevenly; what pads it is no part of a row or block."""
    rows, u = Rows((0,), (1,)), normal(26, 37)

    def function(u):
        return ortho(jnp.cos(u), rows, 8)  # which makes ones of the zeros that pad

    def split(u):
        return function(jax.lax.with_sharding_constraint(2 * u, at(spec, AxisType.Auto)))

    got = jax.jit(split)(jax.device_put(u, at(P(), AxisType.Auto)))
    np.testing.assert_allclose(got, function(2 * u), atol=1000 * EPS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(None, None, "model"), P(None, "data", "model")])
def test_vmap_and_derivatives_on_a_mesh(spec, kind):
    rows, u = Rows((0,), (1,)), normal(3, 24, 40)
    placed = jax.device_put(u, at(spec, kind))

    def mapped(u):
        return jax.vmap(lambda u: ortho(u, rows, 8))(u)

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(mapped(u) ** 3))(u)

    def mapped_gradient(u):
        return jax.vmap(jax.grad(lambda u: jnp.sum(ortho(u, rows, 8) ** 3)))(u)

    want = gradient(u)
    np.testing.assert_allclose(jax.jit(mapped)(placed), mapped(u), atol=1000 * EPS)
    # A derivative stretches the rounding of sums of 24 by the slopes of the quintics at 0.
    stretched = tolerance(24, condition=math.prod(a for a, _, _ in QUINTICS))
    for derivative in (gradient, mapped_gradient):
        np.testing.assert_allclose(jax.jit(derivative)(placed), want, rtol=0, atol=stretched)


SHARDY = "jax_use_shardy_partitioner"
AROUND = ["scan", "cond", "checkpoint", "set_mesh", "eager"]
AROUND += ["older partitioner"] if hasattr(jax.config, SHARDY) else []


@pytest.mark.parametrize("around", AROUND)
def test_what_is_around_it_on_an_auto_mesh(around, request):
    if around == "older partitioner":
        request.addfinalizer(lambda: jax.config.update(SHARDY, True))
        jax.config.update(SHARDY, False)
    rows, u = Rows((0,), (1,)), normal(24, 40)
    placed = jax.device_put(u, at(P(None, "model"), AxisType.Auto))

    def function(u):
        match around:
            case "scan":
                return jax.lax.scan(lambda c, _: (ortho(c, rows, 8), None), u, length=1)[0]
            case "cond":
                return jax.lax.cond(u[0, 0] < 9, lambda u: ortho(u, rows, 8), jnp.zeros_like, u)
            case "checkpoint":
                return jax.checkpoint(lambda u: ortho(u, rows, 8))(u)
        return Blocks(8, False)(rows, u, u, 1e-10)

    with jax.set_mesh(mesh_of(AxisType.Auto)) if around == "set_mesh" else contextlib.nullcontext():
        got = (function if around == "eager" else jax.jit(function))(placed)
        np.testing.assert_allclose(got, ortho(u, rows, 8), atol=1000 * EPS)
        # Of the predicate of cond, each device has the number that one of them holds.
        found = collectives(function, placed)
        assert found.pop("all-reduce", 1) == 1
        assert found == {"collective-permute": 2 * 6 * 24}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_over_some_axes(kind):
    """The others stay what they are within it."""
    rows, spec = Rows((0,), (1,)), P("data", "model")
    u = jax.device_put(normal(24, 64), at(spec, kind))
    local = rows._replace(reduction_mesh=("data",))
    mapped = jax.shard_map(
        lambda u: ortho(u, local, 8),
        mesh=mesh_of(kind),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    np.testing.assert_allclose(jax.jit(mapped)(u), ortho(normal(24, 64), rows, 8), atol=1000 * EPS)


@pytest.mark.parametrize("spec", [P("data", "model"), P("model", "data"), P(None, "model")])
def test_a_mesh_of_both_kinds(spec):
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    rows, u = Rows((0,), (1,)), normal(24, 64)
    got = ortho(jax.device_put(u, NamedSharding(mesh, spec)), rows, 8)
    np.testing.assert_allclose(got, ortho(u, rows, 8), atol=1000 * EPS)

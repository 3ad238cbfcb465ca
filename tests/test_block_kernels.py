"""The kernels of a step with blocks against the arithmetic of arrays, in interpret mode."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from steps import FIRST, LAST, NUMBERS, random
from tolerance import BLOCK_KERNELS

from optax_nora import _block_kernels
from optax_nora._axes import Rows
from optax_nora._blocks import Blocks

PLAIN = NUMBERS._replace(
    grad_scale=1, beta=0, one_minus_beta=1, ahead=1, one_minus_ahead=0, row_scale=1, weight_decay=0
)._replace(learning_rate=-1)  # the update is the direction
SMALL = _block_kernels.Tuning((64, 128, 1), (64, 128, 1))  # so that there are parts


@functools.partial(jax.jit, static_argnames=("rows", "block_rows", "write_weights"))
def run(g, mu, w, rows, block_rows, numbers=NUMBERS, write_weights=False):
    return _block_kernels.step(
        jnp.stack([jnp.float32(x) for x in numbers]),
        g,
        mu,
        w,
        rows,
        block_rows,
        write_weights=write_weights,
        interpret=jax.default_backend() != "gpu",
        tuning=SMALL,
    )


SQUARE = (27, 65)
CASES = [  # ragged everywhere: no tile divides these
    ((70, 200), LAST, 32),
    ((200, 70), FIRST, 32),
    ((2, 50, 130), Rows((2,), (1,)), 16),
    ((2, 130, 50), Rows((1,), (2,)), 16),
    ((130, 3, 50), Rows((0,), (2,)), 20),  # a batch axis between
    ((40, 300), LAST, 27),  # a block that fills no tile
    ((300, 3, 50), Rows((0,), (1, 2)), 64),  # heads
    ((3, 5, 30, 70), Rows((3,), (1, 2)), 64),
    ((4, 30, 70), Rows((0, 1), (2,)), 64),
    (SQUARE, FIRST, 128),  # no more rows than weights in one
    ((300, 330), FIRST, 100),
    ((330, 300), LAST, 128),
]


@hypothesis.settings(max_examples=12)  # each one compiles
@hypothesis.given(
    case=st.sampled_from(CASES),
    dtypes=st.tuples(*[st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])] * 3),
    write_weights=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_layout_and_dtype(case, dtypes, write_weights, seed):
    shape, rows, block_rows = case
    g, mu, w = random(shape, dtypes, seed)
    new_mu, out = run(g, mu, w, rows, block_rows, write_weights=write_weights)
    assert new_mu.dtype == mu.dtype
    assert out.dtype == w.dtype
    c, scaled = NUMBERS, 0.5 * np.float32(g)
    want_mu = c.beta * np.float32(mu) + c.one_minus_beta * scaled
    eps_mu, eps_w = (float(jnp.finfo(x.dtype).eps) for x in (mu, w))
    np.testing.assert_allclose(np.float32(new_mu), want_mu, rtol=eps_mu, atol=4e-7)
    h = c.ahead * np.float32(new_mu) + c.one_minus_ahead * scaled
    if shape == SQUARE:  # its condition may be anything, and multiplies what products round
        lines = h.T / np.linalg.norm(h.T, axis=1, keepdims=True)
        hypothesis.assume(all(np.linalg.cond(lines[k : k + 27]) < 30 for k in (0, 27)))
    d = np.float32(Blocks(block_rows, False)(rows, jnp.asarray(h), w, c.eps))
    wide = np.float32(w)
    update = -c.learning_rate * (c.row_scale * d + c.weight_decay * wide)
    got = np.float32(out) - wide if write_weights else np.float32(out)
    rounding = 2 * eps_w * (np.abs(update) + write_weights * np.abs(wide))
    assert np.all(np.abs(got - update) <= rounding + c.learning_rate * c.row_scale * BLOCK_KERNELS)


def hard(name, n=200, b=32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * b, n))
    match name:
        case "fading":
            return x * np.geomspace(1, 1e-5, n)
        case "rank 1":
            return x[:, :1] * x[:1]
        case "rank 8":
            return x[:, :8] @ x[:8]
        case "rows of zeros":
            return np.where(np.arange(2 * b)[:, None] % 3 == 0, 0, x)
        case "equal rows":
            return np.repeat(x[::4], 4, axis=0)
        case "all zeros":
            return 0 * x
        case "long and short rows":
            return x * np.geomspace(1e-13, 5e21, 2 * b)[:, None]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "fading",
        "rank 1",
        "rank 8",
        "rows of zeros",
        "equal rows",
        "all zeros",
        "long and short rows",
    ],
)
def test_hard_blocks(name, first, dtype):
    u = jnp.asarray(hard(name), dtype)
    g = u.T if first else u
    rows = FIRST if first else LAST
    zero = jnp.zeros_like(g, jnp.float32)
    _, d = run(g, zero, zero, rows, 32, PLAIN._replace(eps=0.0))
    want = np.float64(Blocks(32, False)(rows, jnp.float32(g), zero, 0.0))
    d, want = (np.float64(x.T if first else x) for x in (d, want))
    lengths, norms = (np.linalg.norm(x, axis=1) for x in (d, want))
    np.testing.assert_allclose(lengths, norms.round(), rtol=1e-6)
    for k in (0, 32):
        # Small singular values are as good as pairs of half-precision numbers; none is too great.
        _, _, right = np.linalg.svd(np.float64(u)[k : k + 32])
        assert (
            np.linalg.norm(d[k : k + 32] @ right.T, 2) <= np.linalg.norm(want[k : k + 32], 2) * 1.1
        )


def test_the_same_bits_every_time():
    arrays = random((330, 131), [jnp.float32] * 3)
    first, second = run(*arrays, FIRST, 64), run(*arrays, FIRST, 64)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_under_eps_shrink():
    (u,) = random((64, 200), [jnp.float32])
    u = u / jnp.linalg.norm(u, axis=1, keepdims=True) * jnp.array([1, 1e-12] * 32)[:, None]
    zero = jnp.zeros_like(u)
    lengths = np.linalg.norm(run(u, zero, zero, LAST, 32, PLAIN)[1], axis=1)
    np.testing.assert_allclose(lengths, [1, 1e-2] * 32, rtol=1e-5)


def test_rows_of_any_length():
    (u,), zero = random((64, 200), [jnp.float32]), jnp.zeros((64, 200), jnp.float32)
    plain = PLAIN._replace(eps=0.0)

    def direction(u):
        return run(u, zero, zero, LAST, 32, plain)[1]

    lengths = 2.0 ** np.linspace(-43, 72, 64).round()[:, None]  # 1e-12 to 7e22
    # Entries of the shortest lose bits, where products of their halves underflow.
    assert np.max(np.linalg.norm(direction(u * lengths) - direction(u), axis=1)) <= BLOCK_KERNELS
    without = direction(u.at[3].set(0.0))
    assert not np.any(without[3])
    for size in (1e-22, 1e30):  # as if it were not there
        np.testing.assert_array_equal(direction(u.at[3].multiply(size)), without)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_block_alone(bad):
    g, mu, w = random((96, 200), [jnp.float32] * 3)
    _, out = run(g.at[40, 3].set(bad), mu, w, LAST, 32)
    finite = np.all(np.isfinite(out), axis=1)
    assert not finite[40]
    assert finite[:32].all()
    assert finite[64:].all()


@pytest.mark.parametrize(
    ("shape", "rows", "block_rows", "fits"),
    [
        ((64, 64), LAST, 32, True),
        ((64, 64), LAST, 1, False),  # Nora's own kernels
        ((512, 512), LAST, 129, False),
        ((512, 100), LAST, 512, True),  # a block has 100 rows
        ((8, 3, 64), Rows((0,), (2,)), 4, True),
        ((8, 3, 64), Rows((0,), (1,)), 3, False),  # a matrix's rows are apart
        ((8, 3, 64), Rows((2,), (0,)), 4, False),
        ((3, 64, 5), Rows((1,), (0, 2)), 4, False),
        ((3, 4, 5), Rows((0, 2), (1,)), 4, False),
        ((0, 4), LAST, 4, False),
    ],
)
def test_which_rows_have_a_kernel(shape, rows, block_rows, fits):
    assert _block_kernels.fits(rows, shape, block_rows) == fits

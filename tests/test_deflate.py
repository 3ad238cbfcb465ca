"""The directions that rows share: those of the singular value decomposition, in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from test_rows import apply, every_kernel, normal, rows

import optax_nora
from optax_nora import deflate_rows, nora, row_normalize, row_project, scale_by_nora

EPS = float(np.finfo(np.float32).eps)
IN_OUT, OUT_IN = MuonDimensionNumbers((0,), (1,)), MuonDimensionNumbers((1,), (0,))
MANY = 12  # power steps, after which the directions of `shared` are exact to rounding


def shared(shape, numbers):
    """Random rows that share two directions, the first in larger parts than the second."""
    output, reduction = ([a % len(shape) for a in axes] for axes in reversed(numbers))
    parts = [1 if a in reduction else n for a, n in enumerate(shape)]
    direction = [1 if a in output else n for a, n in enumerate(shape)]
    h = 0.1 * normal(*shape)
    for seed, size in enumerate((3, 1)):
        signs = np.sign(normal(*parts, seed=10 + seed))
        h += size * signs * normal(*direction, seed=20 + seed)
    return h


def without_leading(h, rank):
    """By the singular value decomposition of the unit rows, which lie along the last axis."""
    v = np.linalg.svd(reference.normalize(h))[2][..., :rank, :]
    return h - h @ np.swapaxes(v, -1, -2) @ v


@every_kernel
@pytest.mark.parametrize("rank", [1, 2])
def test_the_leading_directions_are_gone(shape, numbers, rank):
    h = shared(shape, numbers)
    tx = deflate_rows(rank, steps=MANY, weight_dimension_numbers=numbers)
    expected = without_leading(rows(h, numbers), rank)
    # Entries of up to 10, and a direction that is good to a few roundings.
    np.testing.assert_allclose(rows(apply(tx, h), numbers), expected, rtol=0, atol=1e-5)


def test_three_steps_nearly_find_it():
    # Rows at random with a common part of a third of their length, in a matrix as layers have.
    h = normal(256, 128) + 0.35 * normal(256, 1, seed=1) * normal(1, 128, seed=2)

    def top(h):
        return np.linalg.norm(reference.normalize(rows(h, IN_OUT)), ord=2)

    exact = without_leading(rows(h, IN_OUT), 1).T
    assert top(h) > 1.5 * top(exact)
    # What remains of it after three steps is no more than the next direction.
    assert top(apply(deflate_rows(), h)) < 1.01 * top(exact)


def test_centred_rows_and_columns():
    # As the inputs and the gradients of a layer between two layer normalisations.
    h = shared((16, 8), IN_OUT)
    h -= h.mean(axis=0)
    for size in np.linalg.norm(h, axis=0), 1.0:  # until its unit rows are centred as well
        h = h / size - np.mean(h / size, axis=1, keepdims=True)
    left = apply(deflate_rows(steps=MANY), h)
    np.testing.assert_allclose(left.T, without_leading(np.float64(h.T), 1), rtol=0, atol=40 * EPS)


def test_lengths_have_no_vote():
    h = shared((16, 8), IN_OUT)
    powers = np.float32(2.0) ** np.arange(-12, 12, 3)
    left, scaled = (apply(deflate_rows(), x) for x in (h, powers * h))
    np.testing.assert_array_equal(scaled / powers, left)


def test_rows_in_another_order():
    h = shared((16, 8), IN_OUT)
    left = np.asarray(apply(deflate_rows(), h))
    np.testing.assert_allclose(apply(deflate_rows(), h[:, ::-1]), left[:, ::-1], rtol=0, atol=1e-5)


def test_batch_axes_are_matrices_of_their_own():
    stack = np.stack([normal(12, 7, seed=seed) for seed in range(3)])
    left = apply(deflate_rows(weight_dimension_numbers=MuonDimensionNumbers(1, 2)), stack)
    alone = [apply(deflate_rows(), h) for h in stack]
    np.testing.assert_allclose(left, alone, rtol=0, atol=8 * EPS)


# Where nothing is shared, or all is


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 32), (2, 2)])
def test_rows_that_are_all_parallel_become_exactly_zero(shape):
    # Gradients of a single sample. Left as rounding noise, the rows would make full steps of it.
    h = normal(shape[0], 1) * normal(1, shape[1], seed=1)
    assert not np.asarray(apply(deflate_rows(), h)).any()


@pytest.mark.parametrize(("shape", "rank"), [((12, 1), 1), ((12, 3), 3), ((2, 12), 2), ((3, 3), 0)])
def test_few_rows_or_columns_stay_as_they_are(shape, rank):
    h = normal(*shape)
    np.testing.assert_array_equal(apply(deflate_rows(rank), h), h)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 4)])
def test_no_weights_or_no_gradients(shape):
    h = np.zeros(shape, np.float32)
    np.testing.assert_array_equal(apply(deflate_rows(), h), h)


def test_a_zero_row_stays_zero():
    h = normal(6, 5)
    h[:, 1] = 0
    left = np.asarray(apply(deflate_rows(), h))
    assert not left[:, 1].any()
    assert left[:, [0, 2, 3, 4]].all()


# Types


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    h = jnp.asarray(normal(12, 7), dtype)
    half, full = (apply(deflate_rows(), x) for x in (h, jnp.float32(h)))
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, full.astype(dtype))


def test_float64():
    h = np.float64(shared((16, 8), OUT_IN))
    with jax.enable_x64(True):
        left = apply(deflate_rows(steps=30, weight_dimension_numbers=OUT_IN), jnp.asarray(h))
        assert left.dtype == jnp.float64
    np.testing.assert_allclose(left, without_leading(h, 1), rtol=0, atol=2e-14)


def test_gradients_through_it_are_finite():
    h = normal(6, 5)
    h[:, 1] = 0
    for x in (h, np.zeros_like(h), np.ones_like(h)):
        derivative = jax.grad(lambda h: jnp.sum(normal(6, 5) * apply(deflate_rows(), h)))(x)
        assert np.isfinite(derivative).all()


# In nora


def test_nora_with_it_is_the_chain_with_it():
    w = normal(24, 7, seed=99)
    one = scale_by_nora(deflate=1)
    two = optax.chain(
        optax.trace(0.95, nesterov=True), deflate_rows(), row_project(), row_normalize()
    )
    states = [one.init(w), two.init(w)]
    for seed in range(3):
        h = shared((24, 7), IN_OUT) + normal(24, 7, seed=seed)
        a, states[0] = one.update(h, states[0], w)
        b, states[1] = two.update(h, states[1], w)
        # The trace is 20 times the average but for rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6)


def test_without_it_no_bit_of_nora_changes():
    params = {"kernel": normal(24, 7)}
    plain = apply(nora(0.1), params, params)
    for none in (None, 0):
        other = apply(nora(0.1, deflate=none), params, params)
        np.testing.assert_array_equal(other["kernel"], plain["kernel"])
    program = jax.make_jaxpr(nora(0.1).update)
    state = nora(0.1).init(params)
    with_zero = jax.make_jaxpr(nora(0.1, deflate=0).update)(params, state, params)
    assert str(program(params, state, params)) == str(with_zero)
    assert np.abs(apply(nora(0.1, deflate=1), params, params)["kernel"] - plain["kernel"]).max() > 0


def test_its_steps_share_less_and_are_unit_rows_across_w():
    h, w = (
        normal(64, 32) + 2 * normal(64, 1, seed=1) * normal(1, 32, seed=2),
        normal(64, 32, seed=3),
    )
    plain, less = (np.float64(apply(scale_by_nora(deflate=k), h, w)) for k in (0, 1))
    np.testing.assert_allclose(np.linalg.norm(less, axis=0), 1, rtol=4 * EPS)
    np.testing.assert_allclose(np.sum(less * w, axis=0), 0, atol=64 * EPS)
    assert np.linalg.norm(less, ord=2) < 0.6 * np.linalg.norm(plain, ord=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deflate_rows(-1), r"rank=-1 is out of range: it lies in \[0, inf\)"),
        (lambda: deflate_rows(1.0), "rank=1.0 is no Python int"),
        (lambda: deflate_rows(steps=0), r"steps=0 is out of range: it lies in \[1, inf\)"),
        (lambda: scale_by_nora(deflate=-1), "deflate=-1 is out of range"),
        (lambda: nora(0.1, deflate=0.5), "deflate=0.5 is no Python int"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_injected_it_must_be_static():
    params = {"kernel": jnp.asarray(normal(24, 7))}
    inject = optax.inject_hyperparams(nora)
    with pytest.raises(ValueError, match=r"deflate=.* under optax.inject_hyperparams name it in"):
        inject(0.1, deflate=1).init(params)
    static = optax.inject_hyperparams(optax_nora.nora, static_args="deflate")
    got, want = (apply(tx, params, params) for tx in (static(0.1, deflate=1), nora(0.1, deflate=1)))
    np.testing.assert_allclose(got["kernel"], want["kernel"], rtol=0, atol=5e-7)

"""The one buffer of state, and the look-ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora
from optax_nora._momentum import scale_by_momentum

DENSE = MuonDimensionNumbers(0, 1)


def ahead(beta, momentum=None, mu_dtype=None, numbers=None):
    """The look-ahead momentum itself as the direction."""
    return scale_by_momentum(lambda rows, h, w, eps: h, beta, momentum, mu_dtype, numbers)


def grads(steps=4, shape=(6, 3), dtype=np.float32):
    return [np.random.default_rng(t).normal(size=shape).astype(dtype) for t in range(steps)]


def run(tx, gradients, params):
    state, outs = tx.init(params), []
    for g in gradients:
        out, state = tx.update(g, state, params)
        outs.append(out)
    return outs, state


W = np.ones((6, 3), np.float32)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95, 0.999])
def test_the_buffer_is_optax_ema_bit_for_bit(beta):
    ours, _ = run(ahead(beta, momentum=1.0), grads(), W)
    theirs, state = run(optax.ema(beta, debias=False), grads(), W)
    np.testing.assert_array_equal(ours, theirs)
    nora = run(optax_nora.scale_by_nora(beta), grads(), W)[1]
    np.testing.assert_array_equal(nora.mu, state.ema)


@pytest.mark.parametrize(
    ("momentum", "meant"), [(None, 0.9), (0.9, 0.9), (0.5, 0.5), (1.0, 1.0), (0.0, 0.0)]
)
def test_look_ahead(momentum, meant):
    beta, mu, expected = 0.9, np.zeros((6, 3)), []
    for g in grads():
        mu = beta * mu + (1 - beta) * g
        expected.append(meant * mu + (1 - meant) * g)
    ours, _ = run(ahead(beta, momentum), grads(), W)
    # Sums of up to five gradients.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance(5, size=4))
    if meant == 0:
        np.testing.assert_array_equal(ours, grads())


def test_without_bias_correction():
    (first,), _ = run(ahead(0.9, momentum=1.0), grads(1), W)
    np.testing.assert_allclose(first, 0.1 * grads(1)[0], rtol=tolerance())


@pytest.mark.parametrize("mu_dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("gradients", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_dtype_of_the_buffer(params, gradients, mu_dtype):
    tx = optax_nora.scale_by_nora(mu_dtype=mu_dtype)
    w = jnp.ones((6, 3), params)
    _, state = run(tx, grads(2, dtype=gradients), w)
    assert tx.init(w).mu.dtype == state.mu.dtype == (mu_dtype or params)


def test_only_the_storage_is_narrow():
    # The direction of this step is made of the sum before it is rounded.
    (one,), _ = run(ahead(0.9, momentum=1.0, mu_dtype=jnp.bfloat16), grads(1), W)
    (two,), _ = run(ahead(0.9, momentum=1.0), grads(1), W)
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, np.asarray(one).astype(jnp.bfloat16))


def test_the_state_is_one_buffer_a_matrix():
    params = {"kernel": W, "bias": np.ones(3, np.float32)}
    numbers = {"kernel": DENSE, "bias": None}
    tx = ahead(0.9, numbers=numbers)
    state = tx.init(params)
    assert jax.tree.map(jnp.shape, state) == optax_nora.MomentumState(
        mu={"kernel": (6, 3), "bias": optax.MaskedNode()}
    )
    g = {"kernel": grads()[0], "bias": np.full(3, 7.0, np.float32)}
    for _ in range(2):
        updates, state = tx.update(g, state, params)
        np.testing.assert_array_equal(updates["bias"], g["bias"])
    assert isinstance(state.mu["bias"], optax.MaskedNode)


def test_a_rate_in_bfloat16_does_not_round_the_rest():
    # optax.inject_hyperparams may hand the rate over in the parameters' dtype: 0.949 for 0.95,
    # but 1 - 0.949 must not lose more digits.
    rate = jnp.asarray(0.95, jnp.bfloat16)
    ours, _ = run(ahead(rate), grads(), W)
    exact, _ = run(ahead(float(rate)), grads(), W)
    # The same numbers in float32; float64 in Python rounds once more.
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance(5, size=4))


def test_rates_may_be_traced():
    g, w = grads(1)[0], W

    def update(beta, momentum):
        tx = ahead(beta, momentum)
        return tx.update(g, tx.init(w), w)[0]

    # 1 - 0.9 is taken in float32 or in Python: 10 times the rounding, of a tenth.
    np.testing.assert_allclose(
        jax.jit(update)(0.9, 0.5), update(0.9, 0.5), rtol=0, atol=tolerance(size=4)
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"beta": -0.1}, r"beta=-0.1 is out of range: it lies in \[0, 1\)"),
        ({"beta": 1.0}, r"beta=1.0 is out of range: it lies in \[0, 1\)"),
        ({"beta": float("nan")}, "beta=nan is out of range"),
        ({"momentum": 1.5}, r"momentum=1.5 is out of range: it lies in \[0, 1\]"),
        ({"momentum": -1}, "momentum=-1 is out of range"),
        ({"eps": -1e-8}, "eps=-1e-08 is out of range"),
    ],
)
def test_rates_out_of_range(kwargs, message):
    for make in (optax_nora.scale_by_nora, lambda **kw: optax_nora.nora(0.1, **kw)):
        with pytest.raises(ValueError, match=message):
            make(**kwargs)
    with pytest.raises(ValueError, match=message):
        optax_nora.baselines.scale_by_rmnp(**kwargs)


def test_params_are_needed():
    tx = optax_nora.scale_by_nora()
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(W, tx.init(W))

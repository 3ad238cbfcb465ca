"""Rows without a gradient stand still; the others do as they would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_rows import apply, every_kernel, normal

import optax_nora
from optax_nora import nora, rest_idle_rows, scale_by_nora

EVERY_MATRIX = optax_nora.by_path({})


@pytest.mark.usefixtures("optimized")  # two programs to the same bits
@every_kernel
def test_idle_rows_rest_and_the_others_move(shape, numbers):
    params, grads = normal(*shape), [normal(*shape, seed=seed) for seed in (1, 2)]
    idle = grads[1].sum(axis=numbers.reduction_axis, keepdims=True) > 0  # about half of them
    grads[1] = np.where(idle, 0, grads[1])
    inner = scale_by_nora(weight_dimension_numbers=numbers)
    resting = rest_idle_rows(inner, weight_dimension_numbers=numbers)
    states = inner.init(params), resting.init(params)
    for g in grads:
        plain, plain_state = jax.jit(inner.update)(g, states[0], params)
        kept, kept_state = jax.jit(resting.update)(g, states[1], params)
        states = plain_state, kept_state
    np.testing.assert_array_equal(kept, np.where(idle, 0, plain))
    np.testing.assert_array_equal(*(state.mu for state in states))
    assert np.asarray(plain).all()
    assert 0 < idle.mean() < 1


def test_a_whole_model():
    params = {"kernel": normal(6, 4), "bias": normal(4)}
    grads = {"kernel": normal(6, 4, seed=1), "bias": np.zeros(4, np.float32)}
    grads["kernel"][:, 1] = 0
    inner = nora(0.1, weight_decay=0.5, adam_weight_decay=0.5)
    plain = apply(inner, grads, params)
    kept = apply(rest_idle_rows(inner, weight_dimension_numbers=EVERY_MATRIX), grads, params)
    np.testing.assert_array_equal(kept["bias"], plain["bias"])  # AdamW's, and decays
    assert np.all(np.asarray(kept["bias"]))
    assert not np.asarray(kept["kernel"])[:, 1].any()
    assert np.asarray(plain["kernel"])[:, 1].any()  # decay
    others = [0, 2, 3]
    np.testing.assert_array_equal(kept["kernel"][:, others], plain["kernel"][:, others])


def test_tiny_and_bad_gradients_are_not_idle():
    g = np.zeros((4, 3), np.float32)
    g[0] = 2e-38, np.nan, -np.inf
    updates = apply(rest_idle_rows(optax.scale(1.0)), g, g)
    np.testing.assert_array_equal(updates, g)


def test_extra_arguments_reach_inner():
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: factor * u, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx, g = rest_idle_rows(inner), jnp.ones((3, 2))
    np.testing.assert_array_equal(tx.update(g, tx.init(g), g, factor=2.0)[0], 2 * g)


def test_wrong_numbers():
    with pytest.raises(ValueError, match=r"bias \(3,\) .*1 axes"):
        rest_idle_rows(nora(0.1)).init({"bias": jnp.ones(3)})

"""The experiments behind docs/beyond.md: the chosen rule is the library's, and they tell apart."""

import jax.numpy as jnp
import numpy as np
import optax

import optax_nora
from examples import ideas, idle, radial


def test_the_chosen_rule_is_the_librarys():
    h, w = (np.random.default_rng(seed).normal(size=(12, 7)).astype(np.float32) for seed in (0, 1))
    for other in (w, 0 * w):
        chosen, ours = (
            tx.update(jnp.asarray(h), tx.init(other), jnp.asarray(other))[0]
            for tx in (
                radial.CASES["cosine"],
                optax_nora.scale_by_row_radius(),
            )
        )
        # Entries of a few units, with a handful of roundings each.
        np.testing.assert_allclose(chosen, ours, rtol=0, atol=2e-6)


def test_regression_tells_rules_apart():
    assert radial.regression("none (Nora)", 0.05, 0.0) > 1
    assert radial.regression("cosine", 0.05, 0.0) < 1e-3


def test_idle_rows_tell_apart():
    goes_on, rests = (idle.final_loss("Nora", rest, 50, 0.1) for rest in (False, True))
    assert rests < 0.5 * goes_on


def test_cautious_decay_shrinks_only_what_the_step_shrinks():
    u, w = jnp.array([[1.0, -1.0], [0.0, 2.0]]), jnp.array([[3.0, 4.0], [5.0, -6.0]])
    decayed, _ = ideas.cautious_decay(0.1).update(u, optax.EmptyState(), w)
    want = jnp.array([[0.1 * 3.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(decayed - u, want, atol=1e-6)  # a rounding of 1.3


def test_a_second_moment_of_equal_steps_is_their_normalization():
    u = jnp.asarray(np.random.default_rng(0).normal(size=(12, 7)) * np.arange(1, 8), jnp.float32)
    tx = ideas.second_moment()
    state = tx.init(u)
    for _ in range(3):
        steps, state = tx.update(u, state)
    unit, _ = optax_nora.row_normalize().update(u, optax.EmptyState(), u)
    np.testing.assert_allclose(steps, unit, atol=1e-6)  # some roundings of numbers below 1
    steps, _ = tx.update(u * jnp.array([9.0, 1, 1, 1, 1, 1, 1]), state)
    lengths = jnp.linalg.norm(steps, axis=0)
    # A row longer than it was steps further: 9 over the root of (0.1355 + 0.05 * 81) / 0.1855.
    np.testing.assert_allclose(lengths[0] / lengths[1], 1.89, atol=0.01)
    np.testing.assert_allclose(jnp.linalg.norm(lengths), 7**0.5, rtol=1e-6)

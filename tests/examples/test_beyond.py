"""The experiments behind docs/beyond.md: the chosen rule is the library's, and they tell apart."""

import jax.numpy as jnp
import numpy as np

import optax_nora
from examples import idle, radial


def test_the_chosen_rule_is_the_librarys():
    h, w = (np.random.default_rng(seed).normal(size=(12, 7)).astype(np.float32) for seed in (0, 1))
    for other in (w, 0 * w):
        chosen, ours = (
            tx.update(jnp.asarray(h), tx.init(other), jnp.asarray(other))[0]
            for tx in (
                radial.CASES["cosine against chance (chosen)"],
                optax_nora.scale_by_row_radius(),
            )
        )
        # Entries of a few units, with a handful of roundings each.
        np.testing.assert_allclose(chosen, ours, rtol=0, atol=2e-6)


def test_regression_tells_rules_apart():
    assert radial.regression("none (Nora)", 0.05, 0.0) > 1
    assert radial.regression("cosine against chance (chosen)", 0.05, 0.0) < 1e-3


def test_idle_rows_tell_apart():
    goes_on, rests = (idle.final_loss("Nora", rest, 50, 0.1) for rest in (False, True))
    assert rests < 0.5 * goes_on

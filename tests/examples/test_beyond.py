"""The experiments behind docs/beyond.md: the chosen rule is the library's, and they tell apart."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_nora
from examples import deflation, ideas, idle, radial
from examples.llama import records


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


def shared_rows():
    """Columns, Nora's rows, of several lengths that all lean to one direction."""
    noise = np.random.default_rng(0).normal(size=(12, 7))
    return jnp.asarray((noise + 4 * np.ones((12, 1))) * np.arange(1, 8), jnp.float32)


def test_deflation_down_to_one_leaves_a_leading_singular_value_of_one():
    h = shared_rows()
    tx = deflation.partly(deflation.to_one)
    less, _ = tx.update(h, tx.init(h), h)
    lengths = jnp.linalg.norm(h, axis=0)
    q = jnp.linalg.svd(h / lengths)[0][:, 0]
    assert jnp.linalg.norm(q @ (h / lengths)) > 2
    # Three power steps find q to some thousandths here.
    np.testing.assert_allclose(jnp.linalg.norm(q @ (less / lengths)), 1, atol=1e-2)


def test_deflation_in_the_first_steps_alone():
    h = shared_rows()
    tx, always = deflation.until(2), optax_nora.deflate_rows()
    deflated, _ = always.update(h, always.init(h), h)
    state = tx.init(h)
    for want in (deflated, deflated, h):
        found, state = tx.update(h, state, h)
        np.testing.assert_array_equal(found, want)


def test_the_page_says_what_the_runs_of_deflation_said():
    docs = Path(__file__).parents[2] / "docs"
    lines = deflation.table(records.read(docs / "results/deflation.jsonl"))
    assert len(lines) == 2 + len(deflation.CASES)
    assert "\n".join(lines) in (docs / "beyond.md").read_text("utf-8")


@pytest.mark.slow
def test_a_run_of_deflation_is_written(tmp_path):
    out = tmp_path / "rows.jsonl"
    deflation.main(deflation.Args(out, ("small",), ("down to 1",), (0.01,), steps=1))
    (row,) = records.read(out)
    assert (row["case"], row["batch"], row["steps"], row["rate"]) == ("down to 1", 32, 1, 0.01)
    assert row["loss"] < np.log(512) + 0.5  # that of equal chances for every word, about

"""The chunked cross-entropy equals the plain one, and never holds all logits in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tolerance import tolerance

from examples.llama.loss import cross_entropy

B, T, D, V = 3, 8, 16, 96


def plain(hidden, head, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets)
    return jnp.sum(losses * weights)


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, D))
    head = jax.random.normal(keys[1], (D, V))
    targets = jax.random.randint(keys[2], (B, T), 0, V)
    weights = jax.random.bernoulli(keys[3], 0.7, (B, T)) / 20
    return hidden, head, targets, weights


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_equals_the_plain_loss(arrays, chunk):
    hidden, head, targets, weights = arrays

    def both(loss):
        scaled = lambda h, w: 3 * loss(h, w, targets, weights)  # noqa: E731
        return jax.value_and_grad(scaled, argnums=(0, 1))(hidden, head)

    expected = both(plain)
    actual = both(lambda *args: cross_entropy(*args, chunk))
    # sums of up to 96 terms in another order, of logits that are sums themselves, up to 20
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance(V + D), atol=tolerance(V + D))
    np.testing.assert_allclose(
        cross_entropy(*arrays, chunk), plain(*arrays), rtol=tolerance(V + D)
    )  # without a gradient it takes another way


def test_masked_targets_count_nothing(arrays):
    hidden, head, targets, weights = arrays
    other = jnp.where(weights > 0, targets, (targets + 1) % V)
    grad = jax.grad(cross_entropy, argnums=(0, 1))
    a = grad(hidden, head, targets, weights, 4)
    b = grad(hidden, head, other, weights, 4)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    np.testing.assert_array_equal(a[0][weights == 0], 0)


def test_bfloat16_hidden_states_lose_only_their_own_precision(arrays):
    hidden, head, targets, weights = arrays
    low = hidden.astype(jnp.bfloat16)
    value, grads = jax.value_and_grad(cross_entropy, argnums=(0, 1))(low, head, targets, weights, 4)
    exact, expected = jax.value_and_grad(plain, argnums=(0, 1))(hidden, head, targets, weights)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    # bfloat16 keeps 8 bits: logits of size 4 over D = 16 terms are off by up to 4 * 2^-8 or so
    np.testing.assert_allclose(value, exact, rtol=2e-2)
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2e-2 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("chunk", [2, 8])
def test_logits_are_held_a_chunk_at_a_time(arrays, chunk):
    step = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)), static_argnums=4)
    compiled = step.lower(*arrays, chunk).compile().as_text()
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in _floats(compiled)]
    largest_logits = max(size for size in sizes if size % V == 0)
    assert largest_logits == max(B * chunk * V, D * V)


def _floats(hlo: str) -> list[str]:
    return re.findall(r"f32\[([\d,]+)\]", hlo)

"""Next-token cross-entropy without ever holding all logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden_BxTxD: Array, head_DxV: Array, targets_BxT: Array, weights_BxT: Array, chunk: int
) -> Array:
    """Weighted sum of -log softmax(hidden @ head)[target], `chunk` positions of T at a time.

    Chunks are cut along T, which no mesh axis splits, so they need no communication. The gradient
    is made along with the loss, chunk by chunk: the logits are computed once, and never kept. With
    gradients the logits are stored in the dtype of `hidden`, without in float32; sums are float32.
    """
    return _loss(hidden_BxTxD, head_DxV, targets_BxT, weights_BxT, chunk, with_grads=False)[0]


def _loss(hidden, head, targets, weights, chunk, with_grads) -> tuple[Array, Any]:
    head = head.astype(hidden.dtype)

    def step(carry, xs):
        total, head_grad = carry
        h, target, weight = xs
        stored = h.dtype if with_grads else jnp.float32
        logits = jnp.einsum("btd,dv->btv", h, head, preferred_element_type=stored)
        logits = logits.astype(jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        hit = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        total += jnp.sum((log_z - hit) * weight)
        if not with_grads:
            return (total, head_grad), None
        error = jnp.exp(logits - log_z[..., None])
        error -= jax.nn.one_hot(target, logits.shape[-1], dtype=error.dtype)
        error = (error * weight[..., None]).astype(h.dtype)
        grad = jnp.einsum("btv,dv->btd", error, head)
        head_grad += jnp.einsum("btd,btv->dv", h, error, preferred_element_type=jnp.float32)
        return (total, head_grad), grad

    start = jnp.float32(0), jnp.zeros(head.shape, jnp.float32) if with_grads else None
    xs = jax.tree.map(lambda x: _cut(x, chunk), (hidden, targets, weights))
    (total, head_grad), grads = jax.lax.scan(step, start, xs)
    return total, (grads, head_grad)


def _cut(x: Array, chunk: int) -> Array:
    """(B, T, ...) -> (T / chunk, B, chunk, ...)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _forward(hidden, head, targets, weights, chunk):
    total, (grads, head_grad) = _loss(hidden, head, targets, weights, chunk, with_grads=True)
    return total, (jnp.moveaxis(grads, 0, 1).reshape(hidden.shape), head_grad.astype(head.dtype))


def _backward(chunk, grads, cotangent):
    hidden, head = (cotangent.astype(g.dtype) * g for g in grads)
    return hidden, head, None, None


cross_entropy.defvjp(_forward, _backward)

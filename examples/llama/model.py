"""LLaMA in Flax NNX: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, untied head.

Letters in names are dimensions: B sequences, T tokens, S cached tokens, D width, H query heads,
K key heads, C head_dim.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from examples.llama.config import ModelConfig


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, of one block or stacked for all of them."""

    key: Array  # (..., B, S, K, C)
    value: Array


def empty_cache(config: ModelConfig, batch: int, dtype) -> Cache:
    shape = (config.layers, batch, config.context, config.key_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def rotate(x_BxTxHxC: Array, positions_T: Array, theta: float) -> Array:
    """Turns each pair (i, i + C/2) of a head by position * theta^(-2i/C) radians."""
    half = x_BxTxHxC.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = positions_T[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
    return turned.astype(x_BxTxHxC.dtype)


class Parts:
    """Makes the layers of one model: all of them share dtype and random numbers."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
        self.config = config
        self.init = nnx.initializers.normal(config.init_std)
        self.block_init = nnx.initializers.normal(config.init_std * math.sqrt(config.shrink))
        self.common = {"rngs": rngs, "dtype": dtype}

    def linear(self, fan_in: int, fan_out: int, init: Callable | None = None) -> nnx.Linear:
        init = init or self.block_init
        return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, **self.common)

    def head(self) -> nnx.Linear:
        return self.linear(self.config.width, self.config.vocab_size, self.init)

    def norm(self) -> nnx.RMSNorm:
        return nnx.RMSNorm(self.config.width, epsilon=self.config.norm_eps, **self.common)

    def embed(self) -> nnx.Embed:
        """In float32: the gradient of a common word is a sum of thousands, lost in bfloat16."""
        c, common = self.config, self.common | {"dtype": jnp.float32}
        return nnx.Embed(c.vocab_size, c.width, embedding_init=self.init, **common)


class Attention(nnx.Module):
    def __init__(self, parts: Parts):
        self.config = c = parts.config
        self.query = parts.linear(c.width, c.heads * c.head_dim)
        self.key = parts.linear(c.width, c.key_heads * c.head_dim)
        self.value = parts.linear(c.width, c.key_heads * c.head_dim)
        self.out = parts.linear(c.heads * c.head_dim, c.width)

    def __call__(self, x_BxTxD: Array, positions_T: Array, cache: Cache | None):
        c = self.config
        heads = (*x_BxTxD.shape[:2], -1, c.head_dim)
        q = rotate(self.query(x_BxTxD).reshape(heads), positions_T, c.rope_theta)
        k = rotate(self.key(x_BxTxD).reshape(heads), positions_T, c.rope_theta)
        v = self.value(x_BxTxD).reshape(heads)
        if cache is None:
            cuda = jax.default_backend() == "gpu" and q.dtype != jnp.float32
            y = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn" if cuda else None
            )
        else:
            put = jax.lax.dynamic_update_slice_in_dim
            cache = Cache(
                put(cache.key, k, positions_T[0], 1), put(cache.value, v, positions_T[0], 1)
            )
            seen = jnp.arange(cache.key.shape[1]) <= positions_T[:, None]
            y = jax.nn.dot_product_attention(q, *cache, mask=seen[None, None])
        return self.out(y.reshape(*y.shape[:2], -1)), cache


class Mlp(nnx.Module):
    def __init__(self, parts: Parts):
        c = parts.config
        self.gate = parts.linear(c.width, c.mlp_width)
        self.up = parts.linear(c.width, c.mlp_width)
        self.down = parts.linear(c.mlp_width, c.width)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, parts: Parts):
        self.attention_norm = parts.norm()
        self.attention = Attention(parts)
        self.mlp_norm = parts.norm()
        self.mlp = Mlp(parts)

    def __call__(self, x: Array, positions: Array, cache: Cache | None):
        y, cache = self.attention(self.attention_norm(x), positions, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


REMAT: dict[str, Callable] = {
    "none": lambda apply: apply,
    "dots": lambda apply: jax.checkpoint(
        apply, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}


class Llama(nnx.Module):
    """A LLaMA. Calling it gives the last hidden states; `lm_head` makes logits of them.

    Args:
        config: the shape.
        key: a PRNG key; block i gets the same weights whether the blocks are stacked or not.
        dtype: of the computation; parameters are drawn in float32.
        scan_layers: stack the blocks' parameters on a leading axis and scan over it.
        remat: "none", "dots" or "full".
        activations: where the residual stream lives, when the mesh has more than one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        key: Array,
        *,
        dtype=jnp.float32,
        scan_layers: bool = False,
        remat: str = "none",
        activations: jax.sharding.NamedSharding | None = None,
    ):
        def block(key: Array) -> Block:
            return Block(Parts(config, nnx.Rngs(key), dtype))

        key, block_key = jax.random.split(key)
        keys = jax.random.split(block_key, config.layers)
        parts = Parts(config, nnx.Rngs(key), dtype)
        self.config, self.dtype, self.activations = config, dtype, activations
        self.scan_layers, self.remat = scan_layers, remat
        self.embed = parts.embed()
        self.layers: Any = (
            nnx.vmap(block)(keys) if scan_layers else nnx.List([block(k) for k in keys])
        )
        self.norm = parts.norm()
        self.lm_head = parts.head()

    def __call__(self, tokens_BxT: Array, start: int | Array = 0, cache: Cache | None = None):
        """Hidden states (B, T, D) of tokens at positions start, start + 1, ...; the new cache."""
        positions = start + jnp.arange(tokens_BxT.shape[1])
        x = self.embed(tokens_BxT).astype(self.dtype)
        if self.activations is not None and cache is None:
            x = jax.lax.with_sharding_constraint(x, self.activations)
        x, cache = self._blocks(x, positions, cache)
        return self.norm(x) * self.config.shrink, cache

    def _blocks(self, x: Array, positions: Array, cache: Cache | None):
        def apply(x, block_and_cache):
            (graph, state), cache = block_and_cache
            return nnx.merge(graph, state)(x, positions, cache)

        apply = REMAT[self.remat](apply)
        if self.scan_layers:
            graph, states = nnx.split(self.layers)
            return jax.lax.scan(lambda x, y: apply(x, ((graph, y[0]), y[1])), x, (states, cache))
        caches = []
        for i, layer in enumerate(self.layers):
            own = None if cache is None else Cache(cache.key[i], cache.value[i])
            x, own = apply(x, (nnx.split(layer), own))
            caches.append(own)
        return x, jax.tree.map(lambda *c: jnp.stack(c), *caches)

"""Text from a model: `python -m examples.llama.sample runs/NAME --prompt "..."`."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from examples.llama.data import Corpus
from examples.llama.model import empty_cache


@functools.partial(jax.jit, static_argnums=(0, 3))
def generate(
    graph, params, prompt_BxT: Array, length: int, key: Array, temperature: float = 1.0
) -> Array:
    """`length` tokens after each prompt, with a cache of keys and values.

    Args:
        graph: of the model, as `nnx.split` gives it.
        params: of the model.
        prompt_BxT: int32; prompt and length together fit the context.
        length: tokens to make.
        key: of the draws.
        temperature: logits are divided by it; 0 takes the likeliest word.

    Returns:
        int32 (B, length).
    """
    model = nnx.merge(graph, params)
    cache = empty_cache(model.config, prompt_BxT.shape[0], model.embed.dtype)

    def pick(hidden_BxTxD, key):
        logits = model.lm_head(hidden_BxTxD[:, -1]).astype(jnp.float32)
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def step(carry, i):
        token_B, cache = carry
        hidden, cache = model(token_B[:, None], prompt_BxT.shape[1] + i, cache)
        return (pick(hidden, jax.random.fold_in(key, i)), cache), token_B

    hidden, cache = model(prompt_BxT, 0, cache)
    first = pick(hidden, jax.random.fold_in(key, length))
    _, tokens = jax.lax.scan(step, (first, cache), jnp.arange(length))
    return tokens.T


def complete(graph, params, corpus: Corpus, prompt: str, length: int = 100, seed: int = 0) -> str:
    """The prompt and what the model goes on with."""
    tokenizer = corpus.tokenizer()
    ids = jnp.array([tokenizer.encode(prompt).ids], jnp.int32)
    tokens = generate(graph, params, ids, length, jax.random.key(seed), 0.8)
    return prompt + tokenizer.decode(tokens[0].tolist())

"""Text from a model: `python -m examples.llama.sample --run runs/NAME --prompt "..."`."""

import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from tokenizers import Tokenizer

from examples.llama import cli, sharding
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import MeshConfig, UserError
from examples.llama.model import empty_cache
from examples.llama.step import make_program
from examples.llama.terminal import run_main
from examples.llama.tokenizer import end_of, open_tokenizer


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
    cache = empty_cache(model.config, prompt_BxT.shape[0], model.dtype)

    def pick(hidden_BxTxD: Array, key: Array) -> Array:
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


def encode(tokenizer: Tokenizer, prompt: str, context: int) -> list[int]:
    """The tokens of a prompt.

    Raises:
        UserError: there are none, or they leave no room in the context.
    """
    ids = tokenizer.encode(prompt).ids
    if not 0 < len(ids) < context:
        raise UserError(f"the prompt has {len(ids)} tokens: it needs 1 to {context - 1}")
    return ids


def complete(
    graph,
    params,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    length: int = 100,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """The prompt and what the model goes on with.

    Raises:
        UserError: the prompt is empty, or leaves no room in the context.
    """
    context = nnx.merge(graph, params).config.context
    ids = encode(tokenizer, prompt, context)
    room = context - len(ids)
    batch = jnp.array([ids], jnp.int32)
    tokens = generate(graph, params, batch, min(length, room), jax.random.key(seed), temperature)
    return prompt + tokenizer.decode(tokens[0].tolist())


@dataclass(frozen=True)
class SampleConfig:
    """Generate text from the last checkpoint of a run."""

    run: Path
    """Folder of the run."""
    prompt: str = "The "
    """Beginning of the text."""
    length: int = 100
    """Tokens to generate, at most what the context holds."""
    temperature: float = 0.8
    """Below 1: likelier words become likelier still; 0: always the likeliest."""
    count: int = 1
    """Samples."""
    seed: int = 0
    """Of the first sample; the next ones count on from it."""


def main(arguments: list[str]) -> None:
    options = cli.read(SampleConfig, arguments, "llama.sample")
    config = cli.resolve(cli.parse(["--config", str(options.run / "config.json")]))
    tokenizer = open_tokenizer(options.run / "tokenizer.json")
    encode(tokenizer, options.prompt, config.model.context)
    if not (options.run / "checkpoints").is_dir():
        raise UserError(f"{options.run} holds no checkpoint")
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    program = make_program(config, mesh, end_of(tokenizer, options.run))
    identity = cli.identity(config)
    with Checkpoints(options.run / "checkpoints", config.keep, identity) as checkpoints:
        if not checkpoints.steps():
            raise UserError(f"{options.run} holds no checkpoint")
        state, _ = checkpoints.restore(program.state)
    for i in range(options.count):
        print(
            complete(
                program.graph,
                state.params,
                tokenizer,
                options.prompt,
                length=options.length,
                seed=options.seed + i,
                temperature=options.temperature,
            )
        )


if __name__ == "__main__":
    run_main(main)

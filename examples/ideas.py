"""Two ideas around Nora's step on a LLaMA: ``python -m examples.ideas --json RESULTS.json``.

Cautious weight decay, and a second moment of each row's steps. Neither is an option of `nora`:
docs/beyond.md says what came out.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import optax_nora
from examples.llama.config import PRESETS
from examples.llama.prepare import prepare
from examples.trials import SMALL, held_out_losses, with_momentum

MODELS = {"small": (SMALL, 0.01), "tiny": (PRESETS["tiny"], 0.005)}  # with a learning rate


def cautious_decay(weight_decay: Any) -> optax.GradientTransformation:
    """Decays a weight only where that is the direction of its step."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decayed = jax.tree.map(lambda u, w: u + weight_decay * w * (u * w > 0), updates, params)
        return decayed, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def second_moment(b2: float = 0.95) -> optax.GradientTransformation:
    """Rows of ``(in, out)`` over the root of the mean of their squares so far.

    All rows of a matrix together are as long as if each were of length 1, as Nora's are.
    """

    def init(params: Any) -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros((1, p.shape[1])), params)
        return zeros, jnp.zeros((), jnp.int32)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        moments, count = state
        squares = jax.tree.map(lambda u: jnp.sum(u * u, axis=0, keepdims=True), updates)
        moments = optax.tree.update_moment(squares, moments, b2, 1)
        mean = optax.tree.bias_correction(moments, b2, count + 1)

        def scale(u: Any, m: Any) -> Any:
            u = u / jnp.sqrt(m + 1e-30)
            return u * jnp.sqrt(u.shape[1]) / jnp.maximum(jnp.linalg.norm(u), 1e-30)

        return jax.tree.map(scale, updates, mean), (moments, count + 1)

    return optax.GradientTransformation(init, update)


NORA = optax.chain(optax_nora.row_project(), optax_nora.row_normalize())
MOMENT = optax.chain(optax_nora.row_project(), second_moment())
CASES = {  # direction, decay and its strength
    "Nora": (NORA, optax.add_decayed_weights, 0.0),
    "Nora, decay 0.1": (NORA, optax.add_decayed_weights, 0.1),
    "Nora, cautious decay 0.1": (NORA, cautious_decay, 0.1),
    "a second moment of rows": (MOMENT, optax.add_decayed_weights, 0.0),
}


@dataclass(frozen=True)
class Args:
    """Compare ideas on a LLaMA of two sizes."""

    models: tuple[Literal["small", "tiny"], ...] = ("small", "tiny")
    """Of width 64, or that of `make train`."""
    cases: tuple[str, ...] = tuple(CASES)
    """Which of them."""
    seeds: tuple[int, ...] = (0, 1)
    """Of initial weights and data."""
    steps: int = 300
    """Of each run."""
    json: Path | None = None
    """Results are written here as they come."""


def main(args: Args) -> None:
    results: dict[str, Any] = {"jax": jax.__version__, "rows": []}
    for model in args.models:
        base, rate = MODELS[model]
        base = dataclasses.replace(base, precision="float32")
        corpus = prepare(base.data, base.model.vocab_size)
        for name in args.cases:
            direction, decay, strength = CASES[name]
            rule = with_momentum(direction, decay)
            losses = held_out_losses(
                base, corpus, name, rule, [rate], args.seeds, args.steps, weight_decay=strength
            )
            for found in losses:
                row = {"model": model, "case": name, "seed": found["seed"], "loss": found["loss"]}
                print(row, flush=True)
                results["rows"].append(row)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

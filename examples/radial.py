"""Rules for the length of a row, compared: ``python -m examples.radial --json RESULTS.json``.

Each rule gives the relative change of a row's length from the part of the momentum along it;
turning is Nora's. The tasks are linear regression from zero and small weights, where lengths must
be found, and a small LLaMA on the text that `make train` takes. See docs/beyond.md.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import Array

import optax_nora
from examples.llama.prepare import prepare
from examples.trials import SMALL, held_out_losses, with_momentum


class Radial(NamedTuple):
    """The radial part of one matrix's momentum, a number a row.

    Attributes:
      length: <h_i, w_i> / |w_i|, positive where the loss wants the row shorter.
      cosine: that over |h_i|.
      fan_in: weights in a row.
    """

    length: Array
    cosine: Array
    fan_in: int


def over_the_rows(radial: Radial) -> Array:
    return radial.length / jnp.sqrt(jnp.mean(radial.length**2) + 1e-30)


# What a row's length shrinks by, relatively and before the learning rate.
RULES: dict[str, Callable[[Radial], Array]] = {
    "none (Nora)": lambda radial: jnp.zeros_like(radial.cosine),
    "growth, whatever the loss": lambda radial: -jnp.ones_like(radial.cosine),
    "cosine": lambda radial: radial.cosine,
    "cosine against chance": lambda radial: jnp.clip(radial.fan_in**0.5 * radial.cosine, -1, 1),
    "over its root mean square": over_the_rows,
    "sign": lambda radial: jnp.sign(radial.length),
}


def turn_and_stretch(rule: Callable[[Radial], Array]) -> optax.GradientTransformation:
    """Nora's unit rows, and the rule's change of length, for kernels ``(in, out)``."""
    turn = optax.chain(optax_nora.row_project(), optax_nora.row_normalize())

    def stretch(d: Array, h: Array, w: Array) -> Array:
        h_norm, w_norm = (jnp.linalg.norm(x, axis=0) for x in (h, w))
        length = jnp.sum(h * w, axis=0) / jnp.where(w_norm > 0, w_norm, 1)
        radial = Radial(length, length / jnp.where(h_norm > 0, h_norm, 1), len(w))
        return d + rule(radial) * w

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        turned, state = turn.update(updates, state, params)
        return jax.tree.map(stretch, turned, updates, params), state

    return optax.GradientTransformation(turn.init, update)


CASES = {name: turn_and_stretch(rule) for name, rule in RULES.items()}
CASES["no projection (RMNP)"] = optax_nora.row_normalize()


@functools.partial(jax.jit, static_argnames="case")
def regression(case: str, rate: float, size: float) -> Array:
    """The last loss of linear regression, 32 inputs and 64 outputs, from weights of that size."""
    steps = 500
    inputs = jax.random.normal(jax.random.key(0), (1024, 32))
    target = jax.random.normal(jax.random.key(1), (32, 64)) / 4
    tx = with_momentum(CASES[case])(optax.linear_schedule(rate, 0.0, steps), 0.0)

    def loss(w: Array) -> Array:
        return jnp.mean(jnp.sum((inputs @ (w - target)) ** 2, axis=-1)) / 2

    def step(carry: Any, _: None) -> tuple[Any, None]:
        w, state = carry
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    w = size * jax.random.normal(jax.random.key(2), target.shape)
    (w, _), _ = jax.lax.scan(step, (w, tx.init(w)), length=steps)
    return loss(w)


@dataclass(frozen=True)
class Args:
    """Compare rules for the length of a row."""

    cases: tuple[str, ...] = tuple(CASES)
    """Which of them."""
    rates: tuple[float, ...] = (0.01,)
    """Learning rates of the LLaMA's matrices."""
    seeds: tuple[int, ...] = (0, 1)
    """Of the LLaMA's initial weights and data."""
    steps: int = 300
    """Of the LLaMA; of 2,048 tokens each."""
    json: Path | None = None
    """Results are written here as they come."""


def main(args: Args) -> None:
    results: dict[str, Any] = {"jax": jax.__version__, "regression": [], "llama": []}

    def add(task: str, **row: Any) -> None:
        print(task, row, flush=True)
        results[task].append(row)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    for case in args.cases:
        for rate in (0.02, 0.05, 0.1):
            for size in (0.0, 1e-3, 0.02):
                loss = float(regression(case, rate, size))
                add("regression", case=case, rate=rate, size=size, loss=loss)
    corpus = prepare(SMALL.data, SMALL.model.vocab_size)
    for case in args.cases:
        rule = with_momentum(CASES[case])
        for row in held_out_losses(SMALL, corpus, case, rule, args.rates, args.seeds, args.steps):
            add("llama", case=case, steps=args.steps, **row)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

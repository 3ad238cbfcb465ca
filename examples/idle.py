"""Rows that see a gradient only now and then: ``python -m examples.idle --json RESULTS.json``.

Linear regression whose outputs are on for a tenth of the time, in turns of some length, as experts
are; with rows that go on without a gradient, and with `optax_nora.rest_idle_rows`.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import Array

import optax_nora

DIRECTIONS = {
    "Nora": optax_nora.scale_by_nora(),
    "Nora, radial=1.0": optax_nora.scale_by_nora(radial=1.0),
    "RMNP": optax.chain(optax.trace(0.95, nesterov=True), optax_nora.row_normalize()),
}
STEPS, SHARE = 1000, 0.1


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def final_loss(direction: str, rest: bool, turn: int, rate: float) -> Array:
    """The last loss, over all outputs, from weights as long as those that are wanted."""
    inputs = jax.random.normal(jax.random.key(0), (1024, 32))
    target = jax.random.normal(jax.random.key(1), (32, 64)) / 4
    tx = DIRECTIONS[direction]
    if rest:
        tx = optax_nora.rest_idle_rows(tx)
    tx = optax.chain(tx, optax.scale_by_learning_rate(optax.linear_schedule(rate, 0.0, STEPS)))

    def loss(w: Array) -> Array:
        return jnp.mean(jnp.sum((inputs @ (w - target)) ** 2, axis=-1)) / 2

    def step(carry: Any, count: Array) -> tuple[Any, None]:
        w, state = carry
        key = jax.random.fold_in(jax.random.key(2), count // turn)
        on = jax.random.bernoulli(key, SHARE, (64,))
        updates, state = tx.update(on * jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    start = jax.random.normal(jax.random.key(3), target.shape)
    w = start * jnp.linalg.norm(target, axis=0) / jnp.linalg.norm(start, axis=0)
    (w, _), _ = jax.lax.scan(step, (w, tx.init(w)), jnp.arange(STEPS))
    return loss(w)


@dataclass(frozen=True)
class Args:
    """Compare rows that rest without a gradient with rows that go on."""

    turns: tuple[int, ...] = (1, 50, 200)
    """Steps that an output stays on, or off."""
    rates: tuple[float, ...] = (0.02, 0.05, 0.1)
    """Learning rates."""
    json: Path | None = None
    """Results are written here."""


def main(args: Args) -> None:
    rows = [
        {
            **{"direction": direction, "turn": turn, "rate": rate},
            "goes_on": float(final_loss(direction, False, turn, rate)),
            "rests": float(final_loss(direction, True, turn, rate)),
        }
        for direction in DIRECTIONS
        for turn in args.turns
        for rate in args.rates
    ]
    for row in rows:
        print(row)
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "idle": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

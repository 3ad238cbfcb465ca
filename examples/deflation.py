"""When does deflation pay? ``python -m examples.deflation --out ROWS.jsonl``

A small LLaMA with few large batches and with many small ones, as many tokens in all, at several
learning rates: no deflation, `deflate_rows`, and what could be done in its place. A row is appended
as each run ends. docs/beyond.md says what came out.
"""

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from examples.llama import records
from examples.llama.plot import markdown
from examples.llama.prepare import prepare
from examples.trials import SMALL, held_out_losses, with_momentum
from optax_nora import deflate_rows, row_normalize, row_project

REGIMES = {"large": (128, 75), "small": (32, 300)}  # sequences in a batch, steps


def partly(share: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """Removes only a share of what `deflate_rows` does.

    Args:
        share: of a kernel and the same deflated.
    """
    whole = deflate_rows()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        deflated, state = whole.update(updates, state, params)
        kept = jax.tree.map(lambda h, d: h + share(h, d) * (d - h), updates, deflated)
        return kept, state

    return optax.GradientTransformation(whole.init, update)


def to_one(h: jax.Array, deflated: jax.Array) -> jax.Array:
    """The share that leaves the leading singular value of the unit rows at 1."""
    lengths = jnp.linalg.norm(h, axis=0)  # of the rows of (in, out)
    leading = jnp.linalg.norm((h - deflated) / jnp.maximum(lengths, 1e-30))
    return 1 - 1 / jnp.maximum(leading, 1)


def until(last: int) -> optax.GradientTransformation:
    """`deflate_rows` in the first steps alone."""
    return optax.conditionally_transform(deflate_rows(), lambda step, **_: jnp.less(step, last))


CASES: dict[str, Callable[[int], optax.GradientTransformation]] = {  # of the number of steps
    "none": lambda steps: optax.identity(),
    "deflate_rows()": lambda steps: deflate_rows(),
    "rank 2": lambda steps: deflate_rows(2),
    "1 power step": lambda steps: deflate_rows(steps=1),
    "20 power steps": lambda steps: deflate_rows(steps=20),
    "half of it": lambda steps: partly(lambda h, deflated: 0.5),
    "down to 1": lambda steps: partly(to_one),
    "in the warm-up": lambda steps: until(steps // 10),
    "in the first half": lambda steps: until(steps // 2),
}


@dataclass(frozen=True)
class Args:
    """Deflation and its variants on a LLaMA of width 64."""

    out: Path
    """JSON lines, a row a run; appended to."""
    regimes: tuple[str, ...] = tuple(REGIMES)
    """large: few large batches; small: many small ones."""
    cases: tuple[str, ...] = tuple(CASES)
    """Which of them."""
    rates: tuple[float, ...] = (0.01, 0.02, 0.04, 0.08)
    """Learning rates of the matrices."""
    seeds: tuple[int, ...] = (0,)
    """Of initial weights and data."""
    steps: int | None = None
    """Of each run. None: those of the regime."""


def table(rows: list[dict]) -> list[str]:
    """A Markdown table: losses from all seeds at each case's best rate, by regime."""
    head = ["held-out loss", *(f"{steps} steps of {batch}" for batch, steps in REGIMES.values())]
    body = []
    for case in CASES:
        cells = [case]
        for batch, _ in REGIMES.values():
            rates: dict[float, list[float]] = {}
            for row in rows:
                if (row["batch"], row["case"]) == (batch, case):
                    rates.setdefault(row["rate"], []).append(row["loss"])
            if rates:
                best = min(rates, key=lambda rate: statistics.mean(rates[rate]))
                cells.append(", ".join(f"{loss:.3f}" for loss in rates[best]) + f" ({best:g})")
            else:
                cells.append("not run")
        body.append(cells)
    return markdown(head, body)


def main(args: Args) -> None:
    corpus = prepare(SMALL.data, SMALL.model.vocab_size)
    for regime in args.regimes:
        batch, usual = REGIMES[regime]
        steps = args.steps or usual
        base = dataclasses.replace(SMALL, batch=batch)
        for case in args.cases:
            rule = with_momentum(optax.chain(CASES[case](steps), row_project(), row_normalize()))
            for found in held_out_losses(base, corpus, case, rule, args.rates, args.seeds, steps):
                row = {"batch": batch, "steps": steps, "case": case} | found
                print(row, flush=True)
                records.append(args.out, row | {"jax": jax.__version__})
    print("\n".join(table(records.read(args.out))))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

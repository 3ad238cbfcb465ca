"""The cost of one optimizer step: ``python -m benchmarks.step``.

Update and `optax.apply_updates` together, on the matrices of a LLaMA, against the least memory
traffic that Nora could do with: read gradient, momentum and weight, write momentum and weight.
"nora" and "nora-pallas" are its ``update`` by XLA and by kernels; "step", "step-xla" and
"step-pallas" are its ``step``, which writes no updates, by each backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from optax.contrib import MuonDimensionNumbers

from benchmarks import measure
from benchmarks.sets import (
    SETS,
    Layout,
    RowsAlong,
    SetName,
    StepName,
    dimension_numbers,
    matrices,
    nora,
    optimizer,
)


@dataclass(frozen=True)
class Args:
    """Time one step of each optimizer on each set of parameters."""

    sets: tuple[SetName, ...] = ()
    """Models whose matrices are stepped. None given: 60M on a CPU, 60M and 1B elsewhere."""
    optimizers: tuple[StepName, ...] = ()
    """None given: AdamW and Nora on a CPU, all elsewhere."""
    layouts: tuple[Layout, ...] = ("stacked", "leaves")
    """Layers stacked into one leaf, or one leaf a matrix."""
    rows: tuple[RowsAlong, ...] = ("first", "last")
    """Rows along the first axis, as in a Flax kernel (in, out), or along the last."""
    block_rows: tuple[int, ...] = (1,)
    """Rows that Nora makes orthonormal together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, gradients and state."""
    seconds: float = 0.2
    """Length of one repeat."""
    repeats: int = 5
    """The median over these is reported."""
    out: Path | None = None
    """JSON file to write. None given: the results are only shown."""


class Case(NamedTuple):
    set: SetName
    layout: Layout
    rows: RowsAlong
    optimizer: StepName
    block_rows: int | None  # None: no Nora


COLUMNS = {
    "set": "set",
    "layout": "layout",
    "rows": "rows along",
    "optimizer": "optimizer",
    "block_rows": "block rows",
    "milliseconds": "ms|.3f",
    "of_limit": "× limit|.2f",
    "of_adamw": "× AdamW|.2f",
    "temporary_mib": "temporaries, MiB|.0f",
    "compile_seconds": "compile, s|.1f",
}


def parameters(shapes: dict[str, tuple[int, ...]], dtype: Any, seed: int) -> dict[str, jax.Array]:
    """Random: zeros would be faster to move than what is trained."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def stepper(
    chosen: StepName, numbers: MuonDimensionNumbers, block_rows: int | None
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """The state for parameters, and ``step((params, state), grads)``."""
    block_rows = block_rows or 1
    if chosen in ("step", "step-xla", "step-pallas"):
        stepping = nora(numbers, block_rows, chosen.partition("-")[2] or "auto")
        return stepping.init, lambda carry, grads: stepping.step(grads, carry[1], carry[0])
    if chosen == "nora-pallas":
        tx = nora(numbers, block_rows, "pallas")
    else:
        tx = optimizer(chosen, numbers, block_rows)

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def run(case: Case, args: Args, bandwidth: float) -> dict[str, Any]:
    shapes = matrices(SETS[case.set], case.layout, case.rows)
    numbers = dimension_numbers(case.layout, case.rows)
    init, step = stepper(case.optimizer, numbers, case.block_rows)
    params, grads = (parameters(shapes, args.dtype, seed) for seed in (0, 1))
    weights = sum(p.size for p in params.values())
    state = jax.jit(init)(params)
    timing = measure.time_steps(
        step, (params, state), grads, seconds=args.seconds, repeats=args.repeats
    )
    least = 5 * weights * jnp.dtype(args.dtype).itemsize
    return {
        **case._asdict(),
        "dtype": args.dtype,
        "weights": weights,
        "milliseconds": 1e3 * timing.seconds,
        "of_limit": timing.seconds * bandwidth / least,
        "temporary_mib": timing.temporary_bytes / 2**20,
        "compile_seconds": timing.compile_seconds,
    }


def main(args: Args) -> list[dict[str, Any]]:
    measure.check_counts(repeats=args.repeats, block_rows=args.block_rows)
    cpu = jax.default_backend() == "cpu"
    sets = args.sets or (("60M",) if cpu else ("60M", "1B"))
    optimizers = args.optimizers or (
        ("adamw", "nora") if cpu else ("adamw", "nora", "nora-pallas", "step", "muon")
    )
    cases = [
        Case(name, layout, rows, chosen, block_rows)
        for name in sets
        for layout in args.layouts
        for rows in args.rows
        for chosen in optimizers
        for block_rows in (args.block_rows if chosen.startswith(("nora", "step")) else (None,))
    ]
    bandwidth = measure.copy_bandwidth()
    rows = measure.rows_with_progress("steps", cases, lambda case: run(case, args, bandwidth))
    adamw = {
        (row["set"], row["layout"], row["rows"]): row.get("milliseconds")
        for row in rows
        if row["optimizer"] == "adamw"
    }
    for row in rows:
        base = adamw.get((row["set"], row["layout"], row["rows"]))
        if base and "milliseconds" in row:
            row["of_adamw"] = row["milliseconds"] / base
    machine = measure.machine()
    measure.show(
        f"one step, {args.dtype}, {machine['device']}, copy {bandwidth / 1e9:.0f} GB/s",
        COLUMNS,
        rows,
    )
    results = {"machine": machine, "copy_bytes_a_second": bandwidth, "steps": rows}
    measure.write_json(args.out, results)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

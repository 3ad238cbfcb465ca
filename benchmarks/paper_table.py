"""The runtime table of the Nora paper, measured here: ``python -m benchmarks.paper_table``.

Project and normalise, as `optax_nora` does, against five Newton-Schulz iterations, as optax's Muon
does, in bfloat16 on the paper's twelve shapes. A row of a matrix (out, in) is contiguous, as in the
paper. The paper measured kernels that it launched one by one, so its small shapes show the launch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from benchmarks import measure
from optax_nora._axes import Rows
from optax_nora._rows import project_and_normalize, widen

# Nora paper, table "Runtime comparison between row normalization and five-step Newton-Schulz".
PAPER = {
    (512, 512): (0.0689, 0.6554),
    (1376, 512): (0.0682, 0.6853),
    (512, 1376): (0.0688, 0.6623),
    (768, 768): (0.0686, 0.6520),
    (2048, 768): (0.0692, 0.6871),
    (768, 2048): (0.0691, 0.6534),
    (1024, 1024): (0.0674, 0.6397),
    (2816, 1024): (0.0687, 0.8625),
    (1024, 2816): (0.0675, 0.6941),
    (2048, 2048): (0.0684, 2.0552),
    (5461, 2048): (0.0985, 6.9985),
    (2048, 5461): (0.1084, 7.9678),
}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # optax's default coefficients
COLUMNS = {
    "shape": "shape",
    "row_ms": "project, normalise, ms|.4f",
    "newton_schulz_ms": "NS(5), ms|.4f",
    "ratio": "ratio|.1f",
    "paper_row_ms": "paper: normalise, ms|.4f",
    "paper_newton_schulz_ms": "paper: NS(5), ms|.4f",
    "paper_ratio": "paper: ratio|.1f",
}


@dataclass(frozen=True)
class Args:
    """Time both ways to a direction on each shape."""

    largest: int | None = None
    """Leave out shapes of more weights. None given: 1 000 000 on a CPU, no limit elsewhere."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seconds: float = 0.05
    """Length of one repeat."""
    repeats: int = 5
    """The median over these is reported."""
    out: Path | None = None
    """JSON file to write. None given: the results are only shown."""


class Case(NamedTuple):
    shape: tuple[int, int]


def project_normalize(h: jax.Array, w: jax.Array) -> jax.Array:
    return project_and_normalize(Rows((1,), (0,)), widen(h), widen(w), 1e-10).astype(h.dtype)


def newton_schulz(h: jax.Array, _: jax.Array) -> jax.Array:
    a, b, c = NEWTON_SCHULZ
    x = h.T if h.shape[0] > h.shape[1] else h
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _step in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if h.shape[0] > h.shape[1] else x


def run(case: Case, args: Args) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    h, w = (jax.random.normal(key, case.shape, args.dtype) for key in keys)
    times = [
        # What comes out goes in again, so that no step can be left out.
        measure.time_steps(direction, jnp.copy(h), w, seconds=args.seconds, repeats=args.repeats)
        for direction in (project_normalize, newton_schulz)
    ]
    row, iterations = (1e3 * timing.seconds for timing in times)
    paper = PAPER[case.shape]
    return {
        "shape": f"{case.shape[0]} × {case.shape[1]}",
        "row_ms": row,
        "newton_schulz_ms": iterations,
        "ratio": iterations / row,
        "paper_row_ms": paper[0],
        "paper_newton_schulz_ms": paper[1],
        "paper_ratio": paper[1] / paper[0],
    }


def main(args: Args) -> list[dict[str, Any]]:
    measure.check_counts(repeats=args.repeats)
    largest = args.largest or (1_000_000 if jax.default_backend() == "cpu" else None)
    cases = [Case(shape) for shape in PAPER if largest is None or shape[0] * shape[1] <= largest]
    rows = measure.rows_with_progress("shapes", cases, lambda case: run(case, args))
    machine = measure.machine()
    measure.show(f"a direction, {args.dtype}, {machine['device']}", COLUMNS, rows)
    measure.write_json(args.out, {"machine": machine, "dtype": args.dtype, "shapes": rows})
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

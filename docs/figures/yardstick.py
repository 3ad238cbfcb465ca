"""What the runs of docs/comparison.md say: the best of each optimizer, noise, steps of Muon."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from examples.llama import records
from examples.llama.plot import RATES, by_rates, mean_loss
from examples.llama.sweep import identity_of

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "comparison"
ROWS = [RESULTS / f"{name}.jsonl" for name in ("rates", "adam", "rest")]
MORE = [RESULTS / "more.jsonl"]  # one seed
AGAIN = [RESULTS / "again.jsonl", DOCS / "results" / "blocks" / "60m.jsonl"]
OTHERS = ("long", "muon", "paper", "paper_long", "blocks_large")
USUAL = {"batch": 64, "steps": 3000, "precision": "mixed", "momentum": None, "row_scale": None}
USUAL |= {"keep_row_norms": None}
OPTIMIZERS = ("nora", "rmnp", "mano", "muon", "adamw")
BLOCKS = ("blocks of 128", "blocks of 256")


def read(paths: list[Path]) -> list[dict]:
    """The rows of the files that are there; the others are not run yet."""
    return named([row for path in paths if path.exists() for row in records.read(path)])


def named(rows: list[dict]) -> list[dict]:
    """Each row with its loss and its name: of runs that are the same, the last.

    Whether layers were stacked makes no difference; blocks of rows are optimizers of their own.
    """
    last = {}
    for row in rows:
        run = {k: v for k, v in identity_of(row).items() if k != "scan_layers"}
        if run["block_rows"] > 1:
            run["optimizer"] = f"blocks of {run['block_rows']}"
        loss = math.inf if row["held_out_loss"] is None else row["held_out_loss"]
        last[tuple(sorted(run.items()))] = row | {
            "run": run,
            "name": run["optimizer"],
            "loss": loss,
        }
    return list(last.values())


def load() -> list[dict]:
    """All rows of the page."""
    return read(ROWS + MORE + AGAIN + [RESULTS / f"{name}.jsonl" for name in OTHERS])


def usual_decay(row: dict) -> bool:
    """Whether the weight decay is the one that the paper gives the optimizer."""
    return row["run"]["weight_decay"] == (0.0 if row["run"]["optimizer"] == "nora" else 0.1)


def pick(rows: list[dict], **fields) -> list[dict]:
    """The rows of the usual settings but for `fields`."""
    wanted = USUAL | fields
    return [row for row in rows if all(row["run"].get(k) == v for k, v in wanted.items())]


def seeds_of_best(rows: list[dict], optimizer: str) -> list[dict]:
    """The runs at the best pair of rates of those with two seeds or more, with the usual decay."""
    own = [row for row in pick(rows, optimizer=optimizer) if usual_decay(row)]
    return min((g for g in by_rates(own, optimizer).values() if len(g) > 1), key=mean_loss)


def at_best(rows: list[dict], optimizer: str, **fields) -> list[dict]:
    """The runs with the tuned rates and the usual decay, but for `fields`."""
    best = seeds_of_best(rows, optimizer)[0]["run"]
    same = {k: best[k] for k in ("optimizer", *RATES, "weight_decay")}
    return pick(rows, **(same | fields))


def spread(groups: Iterable[list[dict]]) -> tuple[float, float]:
    """Standard deviation of a loss over seeds, pooled over groups, and its standard error."""
    losses = [[row["loss"] for row in group] for group in groups]
    free = sum(len(group) - 1 for group in losses)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in losses)
    deviation = math.sqrt(squares / free)
    return deviation, deviation / math.sqrt(2 * free)


def noise(rows: list[dict]) -> float:
    """Standard deviation of one run."""
    return spread(seeds_of_best(rows, name) for name in OPTIMIZERS + BLOCKS)[0]


def muon_by_steps(rows: list[dict]) -> dict[int, list[dict]]:
    """The runs of tuned Muon at each number of steps."""
    lengths = sorted({row["run"]["steps"] for row in rows if row["run"]["steps"] <= USUAL["steps"]})
    runs = {steps: at_best(rows, "muon", steps=steps) for steps in lengths}
    return {steps: some for steps, some in runs.items() if some}


def more_steps(rows: list[dict], runs: list[dict]) -> str:
    """How many more steps than Muon `runs` took to their loss, with its standard error.

    The logarithm of Muon's steps is taken as a parabola in the loss that they end at.
    """
    muon = muon_by_steps(rows)
    lengths = np.array(list(muon))
    if len(lengths) < 2:
        return "not run"

    def more(losses: np.ndarray) -> float:
        fit = np.polyfit(losses[:-1], np.log(lengths), min(2, len(lengths) - 1))
        return 100 * (USUAL["steps"] / np.exp(np.polyval(fit, losses[-1])) - 1)

    groups = [*muon.values(), runs]
    losses = np.array([mean_loss(group) for group in groups])
    if losses[-1] > losses[0]:
        return f"over {100 * (USUAL['steps'] / lengths[0] - 1):.0f} %"
    errors = np.diag([noise(rows) / math.sqrt(len(group)) for group in groups])
    error = math.hypot(*(more(losses + shift) - more(losses) for shift in errors))
    return f"{more(losses):+z.0f} ± {error:.0f} %"

"""What the runs of docs/comparison.md say: the best of each optimizer, noise, steps of Muon."""

import itertools
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

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


def steps_of_muon(rows: list[dict]) -> list[tuple[int, float, float]]:
    """Steps of tuned Muon, most first, with the mean loss that they end at and its variance."""
    lengths = {row["run"]["steps"] for row in rows if row["run"]["steps"] <= USUAL["steps"]}
    runs = [(x, at_best(rows, "muon", steps=x)) for x in sorted(lengths, reverse=True)]
    return [(x, mean_loss(some), noise(rows) ** 2 / len(some)) for x, some in runs if some]


def more_steps(rows: list[dict], runs: list[dict]) -> str:
    """How many more steps than Muon `runs` took to their loss, with its standard error.

    Between two lengths Muon's loss is taken as linear in the logarithm of its steps.
    """
    points, loss = steps_of_muon(rows), mean_loss(runs)
    most, least = points[0][0], points[-1][0]
    if most == least:
        return "not run"
    if loss > points[-1][1]:
        return f"over {100 * (most / least - 1):.0f} %"
    pairs = itertools.pairwise(points)
    (x1, loss1, variance1), (x2, loss2, variance2) = next(p for p in pairs if loss <= p[1][1])
    part, slope = (loss - loss1) / (loss2 - loss1), math.log(x1 / x2) / (loss2 - loss1)
    ratio = most / x1 * math.exp(slope * (loss - loss1))
    variance = noise(rows) ** 2 / len(runs) + (1 - part) ** 2 * variance1 + part**2 * variance2
    return f"{100 * (ratio - 1):+z.0f} ± {100 * ratio * slope * math.sqrt(variance):.0f} %"

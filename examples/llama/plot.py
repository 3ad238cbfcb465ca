"""Pictures: `python -m examples.llama.plot runs/A runs/B`, or `--sweep rows.jsonl`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.llama import cli, records
from examples.llama.config import UserError

matplotlib.use("agg")
AGAINST = {"step": "steps", "tokens": "tokens", "seconds": "seconds of training"}


def series(metrics: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two fields, over the lines that have both."""
    points = [(line[x], line[y]) for line in metrics if x in line and y in line]
    return [p[0] for p in points], [p[1] for p in points]


def draw_run(run: Path, out: Path) -> None:
    """Training and held-out loss of one run against steps, with the unigram entropy."""
    metrics = records.read(run / "metrics.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*series(metrics, "step", "loss"), color="tab:blue", alpha=0.4, label="training")
    axes.plot(*series(metrics, "step", "held_out_loss"), "o-", color="tab:blue", label="held out")
    for entropy in (line["unigram_entropy"] for line in metrics if "unigram_entropy" in line):
        axes.axhline(entropy, color="gray", linestyle=":", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=run.name)
    axes.legend()
    figure.savefig(out, dpi=120)


def draw_runs(runs: list[Path], out: Path) -> None:
    """Losses against steps, tokens and seconds, and row norms, of several runs together."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for run in runs:
        metrics = records.read(run / "metrics.jsonl")
        for axes, x in zip(panels[:3], AGAINST, strict=True):
            (line,) = axes.plot(*series(metrics, x, "held_out_loss"), "o-", ms=3, label=run.name)
            axes.plot(*series(metrics, x, "loss"), color=line.get_color(), alpha=0.25)
        _draw_norms(panels[3], metrics, run.name)
    for axes, label in zip(panels[:3], AGAINST.values(), strict=True):
        axes.set(xlabel=label, ylabel="loss (nats a token)")
        axes.legend(title="held out; pale: training")
    panels[3].set(xlabel="steps", ylabel="row norm, mean over matrices", yscale="log")
    figure.savefig(out, dpi=120)


def _draw_norms(axes: Axes, metrics: list[dict], label: str) -> None:
    """Mean row norm over all matrices, between the least and the greatest."""
    lines = [line for line in metrics if "rows" in line]
    if not lines:
        return
    steps = [line["step"] for line in lines]
    rows = [line["rows"].values() for line in lines]
    mean = [sum(row["norm_mean"] for row in at) / len(at) for at in rows]
    low = [min(row["norm_min"] for row in at) for at in rows]
    high = [max(row["norm_max"] for row in at) for at in rows]
    (line,) = axes.plot(steps, mean, label=label)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.legend(title="shade: least to greatest")


def read_rows(paths: Sequence[Path]) -> list[dict]:
    """The rows of sweeps; `rate`, `loss` and `name` (what is not a rate or a seed) are added."""
    rows = [row for path in paths for row in records.read(path)]
    common = set.intersection(*(set(row["run"].items()) for row in rows)) if rows else set()
    for row in rows:
        own = dict(row["run"].items() - common) | {"optimizer": row["run"]["optimizer"]}
        given = {k: v for k, v in own.items() if k not in ("optimizer", "learning_rate", "seed")}
        row["name"] = ", ".join([own["optimizer"], *(f"{k} {v}" for k, v in sorted(given.items()))])
        row["rate"] = row["run"]["learning_rate"]
        row["loss"] = math.inf if row["held_out_loss"] is None else row["held_out_loss"]
    return rows


def losses_by_rate(rows: list[dict], name: str) -> dict[float, list[float]]:
    """The final losses of all seeds at each rate."""
    rates = sorted({row["rate"] for row in rows if row["name"] == name})
    return {r: [w["loss"] for w in rows if (w["name"], w["rate"]) == (name, r)] for r in rates}


def draw_sweep(rows: list[dict], out: Path) -> None:
    """Final held-out loss against the learning rate, a line for each optimizer."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["name"] for row in rows):
        losses = losses_by_rate(rows, name)
        axes.plot(
            list(losses), [statistics.mean(seeds) for seeds in losses.values()], "o-", label=name
        )
    axes.set(xlabel="learning rate of matrices", ylabel="held-out loss", xscale="log")
    axes.legend()
    figure.savefig(out, dpi=120)


def table(rows: list[dict]) -> list[str]:
    """A Markdown table, best first: final loss at the best rate, and how it depends on the rate."""
    reference = [row["loss"] for row in rows if row["run"]["optimizer"] == "adamw"]
    goal = min(reference, default=-math.inf)
    lines = []
    for name in {row["name"] for row in rows}:
        losses = {r: statistics.mean(seeds) for r, seeds in losses_by_rate(rows, name).items()}
        rate = min(losses, key=lambda r: losses[r])
        best = [row for row in rows if (row["name"], row["rate"]) == (name, rate)]
        seeds = [row["loss"] for row in best]
        spread = f" ± {statistics.stdev(seeds):.4f}" if len(seeds) > 1 else ""
        times = [[s for _, x, s in row["held_out"] if x and x <= goal] for row in best]
        seconds = f"{statistics.mean(t[0] for t in times):.0f}" if all(times) else "never"
        speed = statistics.mean(row["tokens_per_second"] for row in best)
        cells = (name, f"{losses[rate]:.4f}{spread}", len(seeds), f"{rate:g}")
        worst = f"{max(losses.values()) - losses[rate]:.4f} over {len(losses)} rates"
        lines.append((losses[rate], *cells, worst, f"{speed:,.0f}", seconds))
    head = ("optimizer", "held-out loss", "seeds", "best rate", "worst rate is worse by")
    head += ("tokens/s", "seconds to AdamW's loss")
    body = [map(str, line[1:]) for line in sorted(lines)]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


@dataclass(frozen=True)
class PlotConfig:
    """Draw runs together."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of the runs."""
    sweep: tuple[Path, ...] = ()
    """Rows of sweep.py, drawn in place of runs; their table is printed."""
    out: Path = Path("runs/plot.png")
    """The picture, of any format that matplotlib writes."""


def main(arguments: list[str]) -> None:
    options = tyro.cli(PlotConfig, args=arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.sweep:
        rows = read_rows(options.sweep)
        if not rows:
            raise UserError(f"no rows in {', '.join(map(str, options.sweep))}")
        draw_sweep(rows, options.out)
        print("\n".join(table(rows)))
    elif options.runs:
        draw_runs(list(options.runs), options.out)
    else:
        raise UserError("nothing to draw: give folders of runs, or --sweep")
    print(f"written: {options.out}")


if __name__ == "__main__":
    cli.run_main(main)

"""Pictures of runs: `python -m examples.llama.plot runs/A runs/B --out together.png`."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.llama import cli
from examples.llama.config import UserError

matplotlib.use("agg")
AGAINST = {"step": "steps", "tokens": "tokens", "seconds": "seconds of training"}


def read_metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def series(metrics: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two fields, over the lines that have both."""
    points = [(line[x], line[y]) for line in metrics if x in line and y in line]
    return [p[0] for p in points], [p[1] for p in points]


def draw_run(run: Path, out: Path) -> None:
    """Training and held-out loss of one run against steps, with the unigram entropy."""
    metrics = read_metrics(run)
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
        metrics = read_metrics(run)
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


@dataclass(frozen=True)
class PlotConfig:
    """Draw runs together."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of the runs."""
    out: Path = Path("runs/plot.png")
    """The picture, of any format that matplotlib writes."""


def main(arguments: list[str]) -> None:
    options = tyro.cli(PlotConfig, args=arguments)
    if not options.runs:
        raise UserError("no runs to draw")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(list(options.runs), options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    cli.run_main(main)

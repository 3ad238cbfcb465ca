"""Pictures: `python -m examples.llama.plot --runs runs/A runs/B`, or `--sweep results.jsonl`."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.llama import cli, records
from examples.llama.config import UserError
from examples.llama.report import METRICS
from examples.llama.terminal import run_main

matplotlib.use("agg")
RATES = ("learning_rate", "adam_learning_rate")
AGAINST = {"step": "steps", "tokens": "tokens", "seconds": "seconds of training"}


def series(metrics: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two fields, over the lines that have both."""
    points = [(line[x], line[y]) for line in metrics if x in line and y in line]
    return [p[0] for p in points], [p[1] for p in points]


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run that has measured something."""
    metrics = records.read(run / METRICS)
    if not any("loss" in line or "held_out_loss" in line for line in metrics):
        raise UserError(f"{run / METRICS} holds no loss: there is nothing to draw")
    return metrics


def plain(text: str) -> str:
    """For matplotlib, to which $ would begin mathematics."""
    return text.replace("$", r"\$")


def draw_run(run: Path, out: Path, title: str) -> None:
    """Training and held-out loss of one run against steps, with the unigram entropy."""
    metrics = read_metrics(run)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    training, held_out = (series(metrics, "step", y) for y in ("loss", "held_out_loss"))
    axes.plot(*training, color="tab:blue", alpha=0.4, label="training (single batches)")
    axes.plot(*held_out, "o-", color="tab:blue", label="held out")
    for entropy in (line["unigram_entropy"] for line in metrics if "unigram_entropy" in line):
        axes.axhline(entropy, color="gray", linestyle=":", label="word frequencies alone")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.set_title(f"{title}\nfinal held-out loss {held_out[1][-1]:.4f}", fontsize="medium")
    axes.legend()
    figure.savefig(out, dpi=120)


def draw_runs(runs: list[Path], out: Path) -> None:
    """Losses against steps, tokens and seconds, and row norms, of several runs together."""
    curves = {plain(run.name): read_metrics(run) for run in runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for label, metrics in curves.items():
        for axes, x in zip(panels[:3], AGAINST, strict=True):
            (line,) = axes.plot(*series(metrics, x, "held_out_loss"), "o-", ms=3, label=label)
            axes.plot(*series(metrics, x, "loss"), color=line.get_color(), alpha=0.25)
        _draw_norms(panels[3], metrics, label)
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


def read_results(paths: Sequence[Path]) -> list[dict]:
    """The results of sweeps, each with its `loss` and a `name`: what is not a rate or a seed."""
    results = [result for path in paths for result in records.read(path)]
    common = (
        set.intersection(*(set(result["run"].items()) for result in results)) if results else set()
    )
    for result in results:
        own = dict(result["run"].items() - common)
        given = {k: v for k, v in own.items() if k not in ("optimizer", *RATES, "seed")}
        fields = (f"{k} {v}" for k, v in sorted(given.items()) if v is not None)
        result["name"] = ", ".join([result["run"]["optimizer"], *fields])
        result["loss"] = math.inf if result["held_out_loss"] is None else result["held_out_loss"]
    return results


def by_rates(results: list[dict], name: str) -> dict[tuple[float, float], list[dict]]:
    """The results of a name at each pair of rates: one a seed."""
    groups: dict[tuple[float, float], list[dict]] = {}
    for result in results:
        if result["name"] == name:
            groups.setdefault(tuple(result["run"][rate] for rate in RATES), []).append(result)
    return groups


def mean_loss(results: list[dict]) -> float:
    return statistics.mean(result["loss"] for result in results)


def losses_by_rate(results: list[dict], name: str) -> dict[float, float]:
    """The loss at each rate of the matrices, at the rate of everything else that is best."""
    best = best_runs(results, name)[0]["run"]["adam_learning_rate"]
    groups = by_rates(results, name).items()
    return dict(
        sorted((rate, mean_loss(group)) for (rate, other), group in groups if other == best)
    )


def best_runs(results: list[dict], name: str) -> list[dict]:
    """The results at the best pair of rates."""
    return min(by_rates(results, name).values(), key=mean_loss)


def draw_sweep(results: list[dict], out: Path) -> None:
    """Final held-out loss against the rate; held-out loss of the best runs against seconds."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, curves = figure.subplots(1, 2)
    for name in dict.fromkeys(result["name"] for result in results):
        losses = losses_by_rate(results, name)
        (line,) = rates.plot(list(losses), list(losses.values()), "o-", label=name)
        for result in best_runs(results, name):
            points = [(seconds, loss) for _, loss, seconds in result["held_out"] if loss]
            curves.plot(*zip(*points, strict=True), "o-", ms=3, color=line.get_color(), label=name)
    rates.set(xlabel="learning rate of matrices", ylabel="final held-out loss", xscale="log")
    curves.set(xlabel="seconds of training", ylabel="held-out loss, best rates")
    rates.legend()
    figure.savefig(out, dpi=120)


def table(results: list[dict]) -> list[str]:
    """A Markdown table, best first: final loss at the best rates, and at other rates beside."""
    lines = []
    for name in dict.fromkeys(result["name"] for result in results):
        best = best_runs(results, name)
        rate, other = (best[0]["run"][key] for key in RATES)
        spread = f" ± {statistics.stdev(r['loss'] for r in best):.4f}" if len(best) > 1 else ""
        beside = losses_by_rate(results, name).items()
        others = ", ".join(f"{r:g}: {loss:.4f}" for r, loss in beside if r != rate) or "none"
        speed = statistics.mean(result["tokens_per_second"] for result in best)
        cells = (name, f"{mean_loss(best):.4f}{spread}", len(best), f"{rate:g}", f"{other:g}")
        lines.append((mean_loss(best), *cells, others, f"{speed:,.0f}"))
    head = ("optimizer", "held-out loss", "seeds", "best rate", "AdamW's rate", "other rates")
    head += ("tokens/s",)
    body = [map(str, line[1:]) for line in sorted(lines)]
    return markdown(head, body)


def markdown(head: Sequence[str], body: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


@dataclass(frozen=True)
class PlotConfig:
    """Draw runs together."""

    runs: tuple[Path, ...] = ()
    """Folders of the runs."""
    sweep: tuple[Path, ...] = ()
    """Results of sweep.py, drawn in place of runs; their table is printed."""
    out: Path = Path("runs/plot.png")
    """The picture, of any format that matplotlib writes."""


def main(arguments: list[str]) -> None:
    options = cli.read(PlotConfig, arguments, "llama.plot")
    kinds = Figure().canvas.get_supported_filetypes()
    if options.out.suffix[1:] not in kinds:
        raise UserError(f"out is {options.out}: it must end in one of .{', .'.join(sorted(kinds))}")
    if options.sweep:
        results = read_results(options.sweep)
        if not results:
            raise UserError(f"no results in {', '.join(map(str, options.sweep))}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw_sweep(results, options.out)
        print("\n".join(table(results)))
    elif options.runs:
        draw_runs(list(options.runs), options.out)
    else:
        raise UserError("nothing to draw: give --runs or --sweep")
    print(f"written: {options.out}")


if __name__ == "__main__":
    run_main(main)

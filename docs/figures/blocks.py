"""Table and pictures of docs/blocks.md, of its results: `python -m docs.figures.blocks --write`."""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures import yardstick
from docs.figures.comparison import write_tables
from docs.figures.yardstick import DOCS
from examples.llama import cli, records
from examples.llama.plot import best_runs, markdown, mean_loss

matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "blocks", "font.size": 9})
RESULTS = DOCS / "results" / "blocks"
GRAY = "#808080"  # as far from a white page as from a dark one
COLORS = ("#e8791c", "#4a86cf", "#5aa469", "#a05195")
SIZES = ("60m", "350m")
HEAD = ("learning rate", "held-out loss", "other rates", "ms a step", "of AdamW's")


def load(size: str) -> list[dict]:
    """The rows of a model, each with its loss and its name."""
    rows = records.read(RESULTS / f"{size}.jsonl")
    return [row | {"name": name(row), "loss": row["held_out_loss"]} for row in rows]


def name(row: dict) -> str:
    run = row["run"]
    if run["optimizer"] != "nora":
        return {"adamw": "AdamW", "muon": "Muon"}[run["optimizer"]]
    if run["block_rows"] == 1:
        return "Nora, one row"
    rows = "all" if run["block_rows"] >= run["model.width"] else run["block_rows"]
    return f"blocks of {rows}" + (", projected, no decay" if run["project"] else "")


def milliseconds(size: str, runs: list[dict]) -> float | None:
    """Of a training step, by `examples.llama.speed`; else of a run that had its card to itself.

    Not of such a run with blocks, whose steps have become faster since.
    """
    for row in records.read(RESULTS / "speed.jsonl"):
        config = cli.parse(row["flags"].split())
        if config.preset == size and name({"run": cli.identity(config)}) == runs[0]["name"]:
            return 1e3 * row["step_seconds"]
    own = [row for row in runs if not row.get("shared_card") and row["run"]["block_rows"] == 1]
    return min((1e3 * row["seconds"] / row["run"]["steps"] for row in own), default=None)


def times_adamw(size: str, runs: list[dict]) -> float | None:
    """The time of a training step over AdamW's."""
    took, adamw = milliseconds(size, runs), milliseconds(size, [{"name": "AdamW"}])
    return took / adamw if took and adamw else None


def table(size: str) -> list[str]:
    rows = load(size)
    lines = []
    for label in dict.fromkeys(row["name"] for row in rows):
        runs = best_runs(rows, label)
        rate = runs[0]["run"]["learning_rate"]
        others = sorted(
            (row["run"]["learning_rate"], row["held_out_loss"])
            for row in rows
            if row["name"] == label and row["run"]["learning_rate"] != rate
        )
        took, times = milliseconds(size, runs), times_adamw(size, runs)
        lines.append(
            (
                label,
                f"{rate:g}",
                ", ".join(f"{row['held_out_loss']:.4f}" for row in runs),
                ", ".join(f"{r:g}: {loss:.4f}" for r, loss in others) or "none",
                f"{took:.1f}" if took else "not timed",
                f"{times:.2f}" if times else "",
            )
        )
    lines.sort(key=lambda line: float(line[2].split(",")[0]), reverse=True)
    return markdown((size.upper(), *HEAD), lines)


def in_the_time_of_adamw(label: str) -> tuple[float, float]:
    """The steps that fit into AdamW's time at 60M, and the loss after a schedule of so many.

    Fewer steps are taken to cost what they cost Muon, which was run with whole schedules of several
    lengths: its loss is a parabola in the logarithm of its steps.
    """
    runs = best_runs(load("60m"), label)
    taken, times = runs[0]["run"]["steps"], times_adamw("60m", runs)
    assert times is not None, label
    muon = yardstick.muon_by_steps(yardstick.load())
    fit = np.polyfit(np.log(list(muon)), [mean_loss(group) for group in muon.values()], 2)
    steps = taken / times
    return steps, mean_loss(runs) + np.polyval(fit, np.log(steps)) - np.polyval(fit, np.log(taken))


def draw_idea(path: Path) -> None:
    """What is orthonormal together: a row, blocks of rows, the matrix."""
    figure = Figure(figsize=(7, 2.3), layout="constrained")
    for axes, (title, block) in zip(
        figure.subplots(1, 3),
        (("Nora: each row", 1), ("blocks of 4 rows", 4), ("Muon: all rows", 12)),
        strict=True,
    ):
        for row in range(12):
            color = COLORS[row // block % len(COLORS)]
            for column in range(16):
                axes.add_patch(Rectangle((column, 11 - row), 0.9, 0.9, color=color, lw=0))
        for start in range(0, 12, block):
            axes.add_patch(
                Rectangle((-0.3, 12 - start - block - 0.1), 16.6, block, fill=False, ec=GRAY, lw=1)
            )
        axes.set(xlim=(-0.6, 16.6), ylim=(-0.4, 12.4), aspect="equal")
        axes.set_title(title, color=GRAY)
        axes.axis("off")
    figure.savefig(path, metadata={"Date": None}, transparent=True)


def draw_curve(path: Path) -> None:
    """The loss against rows in a block, and against the time of a training step."""
    rows = load("60m")
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    against_rows, against_time = figure.subplots(1, 2, sharey=True)
    width = rows[0]["run"]["model.width"]
    points = {}
    for label in dict.fromkeys(row["name"] for row in rows):
        runs = best_runs(rows, label)
        points[label] = (
            min(runs[0]["run"]["block_rows"], width),
            mean_loss(runs),
            times_adamw("60m", runs),
        )
    curve = sorted(
        v for k, v in points.items() if k.startswith(("blocks", "Nora")) and "," not in k
    )
    curve = [points["Nora, one row"], *curve]
    against_rows.plot(*np.array(curve)[:, :2].T, "o-", color=COLORS[1])
    for label, color in (("AdamW", COLORS[0]), ("Muon", COLORS[2])):
        against_rows.axhline(points[label][1], color=color, lw=1)
        against_rows.annotate(label, (1.1, points[label][1] + 0.003), color=color)
    against_rows.set_xscale("log", base=2)
    against_rows.set(xlabel="rows in a block", ylabel="held-out loss, nats a token")
    for label, (_, loss, times) in points.items():
        if times and "projected" not in label:
            against_time.plot(times, loss, "o", color=COLORS[1])
            by = {"Muon": (6, 2), "blocks of 256": (6, -9)}.get(label, (6, -4))
            against_time.annotate(label, (times, loss), by, textcoords="offset points", color=GRAY)
    against_time.set(xlabel="time of a training step, AdamW's = 1", xlim=(0.98, 1.25))
    for axes in (against_rows, against_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None}, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table and the pictures")
    if parser.parse_args().write:
        write_tables(DOCS / "blocks.md", map(table, SIZES))
        draw_idea(RESULTS / "idea.svg")
        draw_curve(RESULTS / "curve.svg")
    for size in SIZES:
        print(*table(size), "", sep="\n")


if __name__ == "__main__":
    main()

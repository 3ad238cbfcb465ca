"""Pictures of runs: `python -m examples.llama.plot runs/a runs/b`."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def series(metrics: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of two fields, over the lines that have both."""
    points = [(line[x], line[y]) for line in metrics if x in line and y in line]
    return [p[0] for p in points], [p[1] for p in points]


def draw_run(run: Path, out: Path) -> None:
    """Training and held-out loss of one run against steps, with the unigram entropy."""
    metrics = read_metrics(run)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*series(metrics, "step", "loss"), color="tab:blue", alpha=0.35, label="training")
    axes.plot(*series(metrics, "step", "held_out_loss"), "o-", color="tab:blue", label="held out")
    if entropy := next((m["unigram_entropy"] for m in metrics if "unigram_entropy" in m), None):
        axes.axhline(entropy, color="gray", linestyle=":", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=run.name)
    axes.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)

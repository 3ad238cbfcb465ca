"""The picture of docs/benchmarks.md: ``python -m benchmarks.plot --results A.json --out A.svg``.

Each step's time over the bytes that Nora must move at least, and the line that the memory allows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

STYLES = {
    ("muon", "first"): ("Muon (optax)", "s", "tab:purple"),
    ("nora", "first"): ("Nora by XLA, rows along the first axis", "o", "tab:orange"),
    ("nora", "last"): ("Nora by XLA, rows along the last axis", "^", "tab:orange"),
    ("adamw", "first"): ("AdamW (optax)", "D", "tab:gray"),
    ("step", "first"): ("step by kernels, rows along the first axis", "o", "tab:blue"),
    ("step", "last"): ("step by kernels, rows along the last axis", "^", "tab:blue"),
}


@dataclass(frozen=True)
class Args:
    """Draw what `benchmarks.step --out` wrote."""

    results: Path
    out: Path
    """The picture to draw."""


def main(args: Args) -> None:
    results = json.loads(args.results.read_text())
    bandwidth = results["copy_bytes_a_second"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    bytes_moved = []
    for (optimizer, rows), (label, marker, color) in STYLES.items():
        points = [
            (5 * step["weights"] * np.dtype(step["dtype"]).itemsize, step["milliseconds"])
            for step in results["steps"]
            if (step["optimizer"], step["rows"]) == (optimizer, rows)
            and step["layout"] == "stacked"
            and step["dtype"] == "float32"
        ]
        if points:
            x, y = zip(*points, strict=True)
            bytes_moved += x
            axes.plot(x, y, marker=marker, color=color, linestyle="none", label=label)
    ends = np.array([min(bytes_moved) / 2, 2 * max(bytes_moved)])
    axes.plot(ends, 1e3 * ends / bandwidth, "k-", lw=1, label="what the memory allows")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that a step must move at least",
        ylabel="milliseconds a step",
        title=f"{results['machine']['device']}, float32, layers stacked",
    )
    axes.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "optax_nora"}):  # same numbers, same file
        figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

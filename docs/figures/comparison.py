"""Tables and pictures of docs/comparison.md, from its rows.

`python -m docs.figures.comparison` prints the tables, `--draw` draws the pictures too.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from examples.llama import records
from examples.llama.plot import best_runs, markdown, mean_loss

matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "comparison"})
DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "comparison"
ROWS = [RESULTS / f"{name}.jsonl" for name in ("rates", "adam", "rest")]
MORE = [RESULTS / "more.jsonl"]  # one seed; times say nothing where several runs had one card
LONG = [RESULTS / "long.jsonl"]
AGAIN = [RESULTS / "again.jsonl"]
PASS = 63_197_838 / (64 * 256)  # steps that read the text once
USUAL = {"batch": 64, "steps": 3000, "precision": "mixed", "momentum": None, "row_scale": None}
USUAL |= {"keep_row_norms": False, "scan_layers": False}
OPTIMIZERS = ("nora", "rmnp", "mano", "muon", "adamw")
COLORS = dict(zip(OPTIMIZERS, ("C0", "C1", "C2", "C3", "C7"), strict=True))
TUNED_AT = 0.005  # AdamW's rate while the rates of the matrices were tried
FACTORS = (0.5, 2, 4, 8)  # of the best rate
OPTIONS = {
    "row_scale rms": {"row_scale": "rms"},
    "keep_row_norms": {"keep_row_norms": True},
    "none": {},
    "row_scale unit": {"row_scale": "unit"},
    "row_scale width, base_fan_in 512": {"row_scale": "width"},
    "momentum 1.0": {"momentum": 1.0},
}
HEAD = {
    "main": ("optimizer", "held-out loss", "learning rate", "AdamW's rate"),
    "rates": ("optimizer", "best rate", *(f"times {factor:g}" for factor in FACTORS)),
    "adam": ("optimizer", "0.0025", "0.005", "0.01", "0.02", "0.04"),
    "options": ("Nora with", "rate", "held-out loss"),
    "settings": ("optimizer", "decay 0", "decay 0.1", "bfloat16, float32 copies", "bfloat16"),
    "large": ("optimizer", "rate", "held-out loss", "other rates"),
    "long": ("optimizer", "weight decay", "held-out loss", "training loss", "tokens/s"),
}


def usual_decay(row: dict) -> bool:
    """Whether the weight decay is the one that the paper gives the optimizer."""
    return row["run"]["weight_decay"] == (0.0 if row["run"]["optimizer"] == "nora" else 0.1)


def pick(rows: list[dict], **fields) -> list[dict]:
    """The rows of the usual settings but for `fields`."""
    return [row for row in rows if (USUAL | fields).items() <= row["run"].items()]


def cell(rows: list[dict]) -> str:
    return f"{mean_loss(rows):.4f}" if rows else "not run"


def rate(row: dict) -> str:
    return f"{row['run']['learning_rate']:g}"


def speed(row: dict) -> str:
    return "shared card" if row.get("shared_card") else f"{row['tokens_per_second']:,}"


def seeds_of_best(rows: list[dict], optimizer: str) -> list[dict]:
    """The runs at the rates that were tuned with a card of their own, with the usual decay."""
    own = [row for row in pick(rows) if usual_decay(row) and not row.get("shared_card")]
    return best_runs(own, optimizer)


def same_rates(rows: list[dict], best: list[dict]) -> list[dict]:
    """Of `rows` those of seed 0 at the rates of `best`."""
    wanted = {k: best[0]["run"][k] for k in ("optimizer", "learning_rate", "adam_learning_rate")}
    return [row for row in rows if (wanted | {"seed": 0}).items() <= row["run"].items()]


def noise(rows: list[dict]) -> float:
    """Standard deviation of a loss over seeds, pooled over the optimizers."""
    seeds = [[r["loss"] for r in seeds_of_best(rows, name)] for name in OPTIMIZERS]
    return statistics.mean(map(statistics.variance, seeds)) ** 0.5


def main(rows: list[dict]) -> list[tuple[str, ...]]:
    """At the tuned rates, with the standard error of the mean over seeds."""
    lines = []
    for best in sorted((seeds_of_best(rows, name) for name in OPTIMIZERS), key=mean_loss):
        error = noise(rows) / len(best) ** 0.5
        run = best[0]["run"]
        rates = (f"{run['learning_rate']:g}", f"{run['adam_learning_rate']:g}")
        lines.append((run["optimizer"], f"{cell(best)} ± {error:.4f}", *rates))
    return lines


def losses_by_rate(rows: list[dict], name: str, other: float) -> dict[float, float]:
    """The loss at each rate of the matrices, at one rate of AdamW."""
    same = pick(rows, optimizer=name, adam_learning_rate=other, seed=0)
    losses = {row["run"]["learning_rate"]: row["loss"] for row in same if usual_decay(row)}
    return dict(sorted(losses.items()))


def rates(rows: list[dict]) -> list[tuple[str, ...]]:
    """What another rate than the best costs; AdamW's rate is the same on both sides."""
    lines = []
    for name in OPTIMIZERS:
        best = seeds_of_best(rows, name)[0]["run"]
        cells = []
        for factor in FACTORS:
            wanted = factor * best["learning_rate"]
            for other, mark in ((TUNED_AT, ""), (best["adam_learning_rate"], " *")):
                losses = losses_by_rate(rows, name, other)
                if wanted in losses:
                    cells.append(f"{losses[wanted] - losses[best['learning_rate']]:.3f}{mark}")
                    break
            else:
                cells.append("not run")
        lines.append((name, f"{best['learning_rate']:g}", *cells))
    return lines


def losses_by_adam(rows: list[dict], name: str) -> dict[float, float]:
    """The loss at each rate of AdamW, at the best rate of the matrices."""
    best = seeds_of_best(rows, name)[0]["run"]
    same = {k: best[k] for k in ("optimizer", "learning_rate", "weight_decay")} | {"seed": 0}
    losses = {r["run"]["adam_learning_rate"]: r["loss"] for r in pick(rows, **same)}
    return dict(sorted(losses.items()))


def adam(rows: list[dict]) -> list[tuple[str, ...]]:
    lines = []
    for name in OPTIMIZERS:
        losses = losses_by_adam(rows, name)
        lines.append((name, *(f"{losses[float(x)]:.4f}" for x in HEAD["adam"][1:])))
    return lines


def options(rows: list[dict]) -> list[tuple[str, ...]]:
    """Nora's options, without decay."""
    best = seeds_of_best(rows, "nora")[0]["run"]
    same = {k: best[k] for k in ("optimizer", "adam_learning_rate", "weight_decay")} | {"seed": 0}
    lines = []
    for name, fields in OPTIONS.items():
        row = min(pick(rows, **same, **fields), key=lambda r: r["loss"])
        lines.append((name, rate(row), cell([row])))
    return sorted(lines, key=lambda line: line[-1])


def settings(rows: list[dict]) -> list[tuple[str, ...]]:
    """The tuned rates with and without decay, and in lower precision with the usual decay."""
    lines = []
    for name in OPTIMIZERS:
        best = seeds_of_best(rows, name)
        parts = [pick(rows, weight_decay=x) for x in (0.0, 0.1)]
        own = [row for row in rows if usual_decay(row)]
        parts += [pick(own, precision=mode) for mode in ("bfloat16_master", "bfloat16")]
        lines.append((name, *(cell(same_rates(part, best)) for part in parts)))
    return lines


def large(rows: list[dict]) -> list[tuple[str, ...]]:
    """At the best rate of each, and at the others that were run."""
    groups: dict[str, list[dict]] = {}
    for row in sorted(pick(rows, batch=256, steps=600), key=lambda row: row["loss"]):
        groups.setdefault(row["name"], []).append(row)
    lines = []
    for name, (best, *rest) in groups.items():
        rest.sort(key=lambda row: row["run"]["learning_rate"])
        tried = "; ".join(f"{rate(row)}: {cell([row])}" for row in rest)
        lines.append((name, rate(best), cell([best]), tried))
    return lines


def long(rows: list[dict]) -> list[tuple[str, ...]]:
    """The longest runs; their loss on what they train on is that of the last tenth."""
    lines = []
    for row in sorted(pick(rows, steps=10_000), key=lambda row: row["loss"]):
        last = [loss for step, loss in row["training"] if step > 0.9 * row["run"]["steps"]]
        weight_decay, train = f"{row['run']['weight_decay']:g}", f"{statistics.mean(last):.3f}"
        lines.append((row["name"], weight_decay, cell([row]), train, speed(row)))
    return lines


def named_rows(paths: list[Path]) -> list[dict]:
    """The rows of `paths`, each with its loss and the name of its optimizer."""
    rows = [row for path in paths for row in records.read(path)]
    return [row | {"name": row["run"]["optimizer"], "loss": row["held_out_loss"]} for row in rows]


def tables() -> dict[str, list[str]]:
    """The tables of the page by name."""
    rows = named_rows(ROWS + MORE + LONG)
    parts: dict[str, Callable] = {"main": main, "rates": rates, "adam": adam, "options": options}
    parts |= {"settings": settings, "large": large, "long": long}
    return {name: markdown(HEAD[name], make(rows)) for name, make in parts.items()}


def draw_rates(rows: list[dict], out: Path) -> None:
    """Final loss against the rate of the matrices, and against AdamW's at the best of these."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    matrices, other = figure.subplots(1, 2)
    for name in OPTIMIZERS:
        for axes, losses in (
            (matrices, losses_by_rate(rows, name, TUNED_AT)),
            (other, losses_by_adam(rows, name)),
        ):
            axes.plot(
                list(losses), list(losses.values()), "o-", ms=4, label=name, color=COLORS[name]
            )
    matrices.set(xlabel=f"rate of the matrices, AdamW's {TUNED_AT:g}", ylabel="held-out loss")
    other.set(xlabel="AdamW's rate, matrices at the best of theirs")
    for axes in (matrices, other):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.2g}")
    matrices.set_xticks([0.0005 * 2**i for i in range(6)] + [0.04])
    other.set_xticks([float(x) for x in HEAD["adam"][1:]])
    matrices.legend()
    _save(figure, out)


def draw_long(rows: list[dict], out: Path) -> None:
    """Held-out loss of the long run against steps, as a distance from Muon's at the same step."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    by_name = {row["name"]: row for row in pick(rows, steps=10_000) if usual_decay(row)}
    base = {step: loss for step, loss, _ in by_name["muon"]["held_out"]}
    for name in OPTIMIZERS:
        if name in by_name:
            points = [(step, loss - base[step]) for step, loss, _ in by_name[name]["held_out"]]
            axes.plot(*zip(*points, strict=True), ".-", label=name, color=COLORS[name])
    for passes in (1, 2):
        axes.axvline(passes * PASS, color="grey", lw=0.8, ls=":")
    axes.set(xlabel="step (dotted: the text is read again)", ylabel="held-out loss above Muon's")
    axes.legend()
    _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None})


def run(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="write the pictures beside the rows")
    options = parser.parse_args(None if arguments is None else list(arguments))
    rows = named_rows(ROWS + MORE + LONG)
    for lines in tables().values():
        print("\n".join(lines), end="\n\n")
    print(f"standard deviation over seeds {noise(rows):.4f}")
    if options.draw:
        draw_rates(rows, RESULTS / "rates.svg")
        draw_long(rows, RESULTS / "long.svg")


if __name__ == "__main__":
    run()

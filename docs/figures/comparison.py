"""Tables and pictures of docs/comparison.md, from its rows.

`python -m docs.figures.comparison` prints the tables; `--write` puts them into the page, and draws
the pictures.
"""

import argparse
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from docs.figures.yardstick import (
    BLOCKS,
    DOCS,
    OPTIMIZERS,
    RESULTS,
    at_best,
    load,
    more_steps,
    noise,
    pick,
    seeds_of_best,
    spread,
    usual_decay,
)
from examples.llama.plot import by_rates, markdown, mean_loss

matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "comparison"})
PASS = 63_197_838 / (64 * 256)  # steps that read the text once
COLORS = dict(zip(OPTIMIZERS + BLOCKS, ("C0", "C1", "C2", "C3", "C7", "C4", "C5"), strict=True))
PARAMETERS = {"mixed": "float32", "bfloat16_master": "bfloat16, float32 copies"}
PARAMETERS |= {"bfloat16": "bfloat16"}
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
SCRIPTS = [("muon", "mixed", 0.1, x, 0.01) for x in (0.01, 0.005, 0.001)]
SCRIPTS += [("muon", "bfloat16", 0.0, x, 0.01) for x in (0.01, 0.005, 0.001)]
SCRIPTS += [("rmnp", "bfloat16", 0.0, x, 0.004) for x in (0.01, 0.005)]
SCRIPTS += [("mano", "bfloat16", 0.0, 0.005, 0.002)]
SCRIPTS += [("nora", "bfloat16_master", 0.0, x, 0.002) for x in (0.01, 0.005)]
SCRIPTS += [("nora", "bfloat16_master", 0.0, 0.005, 0.004)]
HEAD = {
    "main": ("optimizer", "held-out loss", "more steps than Muon", "rate", "AdamW's rate", "tried"),
    "noise": ("seeds of", "runs", "standard deviation", "two runs apart", "means of two apart"),
    "rates": ("optimizer", "best rate", *(f"times {factor:g}" for factor in FACTORS)),
    "adam": ("optimizer", "0.0025", "0.005", "0.01", "0.02", "0.04"),
    "options": ("Nora with", "rate", "held-out loss"),
    "settings": ("optimizer", "decay 0", "decay 0.1", "bfloat16, float32 copies", "bfloat16"),
    "large": ("optimizer", "rate", "held-out loss", "other rates"),
    "long": ("optimizer", "weight decay", "held-out loss", "training loss", "tokens/s"),
    "paper": ("optimizer", "parameters", "decay", "AdamW's rate", "rate", "3,000 steps", "10,000"),
}


def cell(rows: list[dict]) -> str:
    return f"{mean_loss(rows):.4f}" if rows else "not run"


def rate(row: dict) -> str:
    return f"{row['run']['learning_rate']:g}"


def speed(row: dict) -> str:
    return "shared card" if row.get("shared_card") else f"{row['tokens_per_second']:,}"


def with_error(rows: list[dict], runs: list[dict]) -> str:
    """The mean of some runs with its standard error."""
    return f"{cell(runs)} ± {noise(rows) / math.sqrt(len(runs)):.4f}" if runs else cell(runs)


def main(rows: list[dict]) -> list[tuple[str, ...]]:
    """At the tuned rates; `tried` counts pairs of rates."""
    lines = []
    for best in sorted((seeds_of_best(rows, name) for name in OPTIMIZERS + BLOCKS), key=mean_loss):
        name, run = best[0]["name"], best[0]["run"]
        own = [row for row in pick(rows, optimizer=name) if usual_decay(row)]
        more = "0" if name == "muon" else more_steps(rows, best)
        rates = (rate(best[0]), f"{run['adam_learning_rate']:g}")
        lines.append((name, with_error(rows, best), more, *rates, f"{len(by_rates(own, name))}"))
    return lines


def noises(rows: list[dict]) -> list[tuple[str, ...]]:
    """How far a run is from another seed's, and how far apart what is ranked must be."""
    groups = [seeds_of_best(rows, name) for name in OPTIMIZERS + BLOCKS]
    muon = [group for group in groups if group[0]["name"] == "muon"]
    lines = []
    for name, some in (("muon", muon), ("all of the table", groups)):
        deviation, error = spread(some)
        apart = (2 * deviation * math.sqrt(2 / n) for n in (1, 2))
        cells = (f"{x:.4f}" for x in apart)
        lines.append((name, f"{sum(map(len, some))}", f"{deviation:.4f} ± {error:.4f}", *cells))
    return lines


def losses_by_rate(rows: list[dict], name: str, other: float) -> dict[float, float]:
    """The loss at each rate of the matrices, at one rate of AdamW."""
    same = pick(rows, optimizer=name, adam_learning_rate=other, seed=0)
    losses = {row["run"]["learning_rate"]: row["loss"] for row in same if usual_decay(row)}
    return dict(sorted(losses.items()))


def rates(rows: list[dict]) -> list[tuple[str, ...]]:
    """What another rate than the best costs; AdamW's rate is the same on both sides."""
    lines = []
    for name in OPTIMIZERS + BLOCKS:
        best = seeds_of_best(rows, name)[0]["run"]
        cells = []
        for factor in FACTORS:
            wanted = factor * best["learning_rate"]
            for other, mark in ((TUNED_AT, ""), (best["adam_learning_rate"], " *")):
                losses = losses_by_rate(rows, name, other)
                if wanted in losses:
                    cells.append(f"{losses[wanted] - losses[best['learning_rate']]:z.3f}{mark}")
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
    """With and without decay, and in lower precision with the usual decay."""
    parts = [{"weight_decay": x} for x in (0.0, 0.1)]
    parts += [{"precision": mode} for mode in ("bfloat16_master", "bfloat16")]
    return [
        (name, *(cell(at_best(rows, name, seed=0, **fields)) for fields in parts))
        for name in OPTIMIZERS
    ]


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


def paper(rows: list[dict]) -> list[tuple[str, ...]]:
    """Towards what the paper's scripts give each optimizer."""
    lines = []
    for name, precision, decay, other, own in SCRIPTS:
        fields = {"optimizer": name, "precision": precision, "weight_decay": decay}
        fields |= {"adam_learning_rate": other, "learning_rate": own}
        ends = (with_error(rows, pick(rows, **fields, steps=steps)) for steps in (3000, 10_000))
        lines.append((name, PARAMETERS[precision], f"{decay:g}", f"{other:g}", f"{own:g}", *ends))
    return lines


def tables() -> dict[str, list[str]]:
    """The tables of the page by name."""
    rows = load()
    parts: dict[str, Callable] = {"main": main, "noise": noises, "rates": rates, "adam": adam}
    parts |= {"options": options, "settings": settings, "large": large, "long": long}
    parts |= {"paper": paper}
    return {name: markdown(HEAD[name], make(rows)) for name, make in parts.items()}


def write_tables(page: Path, tables: Iterable[list[str]]) -> None:
    """Puts each table in the place of the one with the same head."""
    text = page.read_text("utf-8")
    for head, *body in tables:
        old = re.compile(rf"^{re.escape(head)}\n(\|.*\n)+", re.MULTILINE)
        text = old.sub("\n".join((head, *body, "")), text)
    page.write_text(text, "utf-8")


def draw_rates(rows: list[dict], out: Path) -> None:
    """Final loss against the rate of the matrices, and against AdamW's at the best of these."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    matrices, other = figure.subplots(1, 2)
    for axes, names, style, losses_of in (
        (matrices, OPTIMIZERS, "o-", lambda name: losses_by_rate(rows, name, TUNED_AT)),
        (matrices, BLOCKS, "o--", lambda name: losses_by_rate(rows, name, 2 * TUNED_AT)),
        (other, OPTIMIZERS, "o-", lambda name: losses_by_adam(rows, name)),
    ):
        for name in names:
            points = zip(*losses_of(name).items(), strict=True)
            axes.plot(*points, style, ms=4, label=name, color=COLORS[name])
    matrices.set(
        xlabel=f"rate of the matrices; AdamW's {TUNED_AT:g}, dashed {2 * TUNED_AT:g}",
        ylabel="held-out loss",
    )
    other.set(xlabel="AdamW's rate, matrices at the best of theirs")
    for axes in (matrices, other):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.2g}")
    matrices.set_xticks([0.0005 * 2**i for i in range(7)])
    matrices.set_ylim(top=4.3)  # RMNP, Mano and AdamW leave it
    other.set_xticks([0.001, *(float(x) for x in HEAD["adam"][1:])])
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


def draw_paper(rows: list[dict], out: Path) -> None:
    """From the tuned settings to those of the paper's scripts, one after the other."""
    copies = [row["run"] for row in rows if row["run"]["precision"] == "bfloat16_master"]
    lengths = sorted({run["steps"] for run in copies})
    figure = Figure(figsize=(5.5 * len(lengths), 4.2), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    labels = ("tuned", "precision and decay\nof the scripts", "and their rate\nof AdamW")
    for axes, steps in zip(panels, lengths, strict=True):
        for name in ("nora", "mano", "rmnp", "muon"):
            stages = [at_best(rows, name, steps=steps)]
            for other in (0.01, 0.001 if name == "muon" else 0.005):
                low = {"precision": "bfloat16_master" if name == "nora" else "bfloat16"}
                low |= {"weight_decay": 0.0, "adam_learning_rate": other}
                stages.append(at_best(rows, name, steps=steps, **low))
            run = [(x, runs) for x, runs in enumerate(stages) if runs]
            axes.errorbar(
                [x for x, _ in run],
                [mean_loss(runs) for _, runs in run],
                [2 * noise(rows) / math.sqrt(len(runs)) for _, runs in run],
                fmt="o-",
                label=name,
                color=COLORS[name],
            )
        axes.set_xticks(range(3), labels)
        axes.set(title=f"{steps:,} steps; bars: twice the standard error", xlim=(-0.4, 2.4))
    figure.axes[0].set_ylabel("held-out loss")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None})


def run(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tables and pictures")
    options = parser.parse_args(None if arguments is None else list(arguments))
    for lines in tables().values():
        print("\n".join(lines), end="\n\n")
    if options.write:
        write_tables(DOCS / "comparison.md", tables().values())
        rows = load()
        draw_rates(rows, RESULTS / "rates.svg")
        draw_long(rows, RESULTS / "long.svg")
        draw_paper(rows, RESULTS / "paper.svg")


if __name__ == "__main__":
    run()

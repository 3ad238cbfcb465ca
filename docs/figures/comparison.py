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
TOWARDS_SCRIPTS = [("muon", "mixed", 0.1, x, 0.01) for x in (0.01, 0.005, 0.001)]
TOWARDS_SCRIPTS += [("muon", "bfloat16", 0.0, x, 0.01) for x in (0.01, 0.005, 0.001)]
TOWARDS_SCRIPTS += [("rmnp", "mixed", 0.1, 0.01, 0.004)]
TOWARDS_SCRIPTS += [("rmnp", "bfloat16", 0.0, x, 0.004) for x in (0.01, 0.005)]
TOWARDS_SCRIPTS += [("mano", "mixed", 0.1, 0.01, 0.002), ("mano", "bfloat16", 0.0, 0.005, 0.002)]
TOWARDS_SCRIPTS += [("nora", "mixed", 0.0, 0.01, 0.002)]
TOWARDS_SCRIPTS += [("nora", "bfloat16_master", 0.0, x, 0.002) for x in (0.01, 0.005)]
TOWARDS_SCRIPTS += [("nora", "bfloat16_master", 0.0, 0.005, 0.004)]
HEAD = {
    "main": ("optimizer", "held-out loss", "more steps than Muon", "rate", "AdamW's rate", "tried"),
    "noise": ("seeds of", "runs", "standard deviation", "two runs apart", "means of two apart"),
    "rates": ("optimizer", "best rate", *(f"times {factor:g}" for factor in FACTORS)),
    "adam": ("optimizer", "0.0025", "0.005", "0.01", "0.02", "0.04"),
    "options": ("Nora with", "rate", "held-out loss"),
    "settings": ("optimizer", "decay 0", "decay 0.1", "bfloat16, float32 copies", "bfloat16"),
    "large": ("optimizer", "rate", "held-out loss", "other rates"),
    "long": ("optimizer", "weight decay", "held-out loss", "training loss", "tokens/s"),
    "paper": (
        *("optimizer", "settings", "parameters", "decay", "AdamW's rate", "rate"),
        *("3,000 steps", "10,000"),
    ),
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


def scripts(name: str) -> dict:
    """What the paper's scripts give an optimizer."""
    return {
        "precision": "bfloat16_master" if name == "nora" else "bfloat16",
        "weight_decay": 0.0,
        "adam_learning_rate": 0.001 if name == "muon" else 0.005,
    }


def paper(rows: list[dict]) -> list[tuple[str, ...]]:
    """From the tuned settings to those of the paper's scripts."""
    lines = []
    for name, precision, decay, other, own in TOWARDS_SCRIPTS:
        fields = {"precision": precision, "weight_decay": decay, "adam_learning_rate": other}
        label = "scripts" if fields == scripts(name) else ""
        fields |= {"optimizer": name, "learning_rate": own}
        runs = pick(rows, **fields)
        label = "tuned" if runs == seeds_of_best(rows, name) else label
        ends = (with_error(rows, some) for some in (runs, pick(rows, **fields, steps=10_000)))
        numbers = (f"{x:g}" for x in (decay, other, own))
        lines.append((name, label, PARAMETERS[precision], *numbers, *ends))
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
    """Held-out loss after warm-up of the longest runs, as a distance from tuned Muon's."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    (muon,) = at_best(rows, "muon", steps=10_000)
    base = {step: loss for step, loss, _ in muon["held_out"] if step >= muon["run"]["warmup"]}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, settings_of in (
        (panels[0], "tuned", lambda _: {}),
        (panels[1], "settings of the paper's scripts", scripts),
    ):
        for name in OPTIMIZERS:
            for row in at_best(rows, name, steps=10_000, **settings_of(name)):
                points = [(step, loss) for step, loss, _ in row["held_out"] if step in base]
                points = [(step, loss - base[step]) for step, loss in points]
                axes.plot(*zip(*points, strict=True), ".-", label=name, color=COLORS[name])
        for passes in (1, 2):
            axes.axvline(passes * PASS, color="grey", lw=0.8, ls=":")
        axes.axhline(0, color="grey", lw=0.8)
        axes.set(title=title, xlabel="step (dotted: the text is read again)")
        axes.legend()
    panels[0].set_ylabel("held-out loss above tuned Muon's")
    _save(figure, out)


def draw_paper(rows: list[dict], out: Path) -> None:
    """From the tuned settings to those of the paper's scripts."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    halfway = {"adam_learning_rate": 2 * TUNED_AT}
    tuned, part, whole = (
        "tuned",
        "precision and decay\nof the scripts",
        "all settings\nof the scripts",
    )
    steps_and_stages = {3000: (tuned, part, whole), 10_000: (tuned, whole)}
    panels = figure.subplots(1, 2, width_ratios=[len(x) for x in steps_and_stages.values()])
    for axes, (steps, stages) in zip(panels, steps_and_stages.items(), strict=True):
        for name in ("nora", "mano", "rmnp", "muon"):
            settings_of = {tuned: {}, part: scripts(name) | halfway, whole: scripts(name)}
            runs = [at_best(rows, name, steps=steps, **settings_of[stage]) for stage in stages]
            if not all((runs[0], runs[-1])):
                continue
            axes.errorbar(
                [x for x, some in enumerate(runs) if some],
                [mean_loss(some) for some in runs if some],
                [2 * noise(rows) / math.sqrt(len(some)) for some in runs if some],
                fmt="o-",
                label=name,
                color=COLORS[name],
            )
        axes.set_xticks(range(len(stages)), stages)
        axes.set(title=f"{steps:,} steps", xlim=(-0.4, len(stages) - 0.6))
    panels[0].set_ylabel("held-out loss; bars: two standard errors")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
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

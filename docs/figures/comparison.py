"""Tables and pictures of docs/comparison.md, from its rows: `python -m docs.figures.comparison`."""

import statistics
from collections.abc import Callable
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from examples.llama.plot import best_runs, draw_sweep, markdown, mean_loss, read_results, table

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "comparison"
ROWS = [RESULTS / f"{name}.jsonl" for name in ("rates", "adam", "rest")]
MORE = [RESULTS / "more.jsonl"]  # one seed; times say nothing where several runs had one card
LONG = [RESULTS / "long.jsonl"]
AGAIN = [RESULTS / "again.jsonl"]
PASS = 63_197_838 / (64 * 256)  # steps that read the text once
USUAL = {"batch": 64, "steps": 3000, "precision": "mixed", "momentum": None, "row_scale": None}
USUAL |= {"deflate": None, "radial": None, "keep_row_norms": False, "scan_layers": False}
OPTIMIZERS = ("nora", "rmnp", "mano", "muon", "adamw")
OPTIONS = {
    "row_scale rms": {"row_scale": "rms"},
    "keep_row_norms": {"keep_row_norms": True},
    "none": {},
    "radial 1.0": {"radial": 1.0},
    "row_scale unit": {"row_scale": "unit"},
    "row_scale width, base_fan_in 512": {"row_scale": "width"},
    "momentum 1.0": {"momentum": 1.0},
    "deflate 2": {"deflate": 2},
    "deflate 1": {"deflate": 1},
}
HEAD = {
    "adam": ("optimizer", "0.0025", "0.005", "0.01", "0.02", "0.04"),
    "again": ("optimizer", "seed", "before", "again"),
    "options": ("Nora with", "rate", "held-out loss"),
    "decay": ("optimizer", "weight decay 0", "weight decay 0.1"),
    "precision": ("optimizer", "float32", "bfloat16, float32 copies", "bfloat16"),
    "others": ("optimizer", "rate", "held-out loss", "tokens/s"),
    "large": ("optimizer", "rate", "held-out loss", "other rates"),
    "long": ("optimizer", "weight decay", "held-out loss", "training loss", "tokens/s"),
}


def usual_decay(row: dict) -> bool:
    """Whether the weight decay is the one that the paper gives the optimizer."""
    return row["run"]["weight_decay"] == (0.0 if row["run"]["optimizer"] == "nora" else 0.1)


def pick(rows: list[dict], **fields) -> list[dict]:
    """The rows of the usual settings but for `fields`; None in `fields` is any value."""
    wanted = {k: v for k, v in (USUAL | fields).items() if k not in fields or v is not None}
    return [row for row in rows if all(row["run"].get(k) == v for k, v in wanted.items())]


def cell(rows: list[dict]) -> str:
    return f"{mean_loss(rows):.4f}" if rows else "not run"


def rate(row: dict) -> str:
    return f"{row['run']['learning_rate']:g}"


def speed(row: dict) -> str:
    return "shared card" if row.get("shared_card") else f"{row['tokens_per_second']:,}"


def own_cards(rows: list[dict]) -> list[dict]:
    """The usual runs, each with its own decay and a card of its own: they are what is ranked."""
    return [row for row in pick(rows) if usual_decay(row) and not row.get("shared_card")]


def seeds_of_best(rows: list[dict], optimizer: str) -> list[dict]:
    """The runs at the optimizer's best rates, with its own decay."""
    return best_runs(own_cards(rows), optimizer)


def same_rates(rows: list[dict], best: list[dict]) -> list[dict]:
    """Of `rows` those of seed 0 at the rates of `best`."""
    wanted = {k: best[0]["run"][k] for k in ("optimizer", "learning_rate", "adam_learning_rate")}
    return [row for row in rows if (wanted | {"seed": 0}).items() <= row["run"].items()]


def adam(rows: list[dict]) -> list[tuple[str, ...]]:
    """Over AdamW's rate, at the best rate of the matrices."""
    lines = []
    for name in OPTIMIZERS:
        best = seeds_of_best(rows, name)[0]["run"]
        same = {k: best[k] for k in ("optimizer", "learning_rate", "weight_decay")} | {"seed": 0}
        cells = [cell(pick(rows, adam_learning_rate=float(x), **same)) for x in HEAD["adam"][1:]]
        lines.append((name, *cells))
    return lines


def again(rows: list[dict]) -> list[tuple[str, ...]]:
    """What was run once more."""
    lines = []
    for row in named_rows(AGAIN):
        before = next(r for r in rows if r["run"].items() <= row["run"].items())
        name, seed = row["run"]["optimizer"], str(row["run"]["seed"])
        lines.append((name, seed, cell([before]), cell([row])))
    return sorted(lines)


def options(rows: list[dict]) -> list[tuple[str, ...]]:
    """Nora's options, without decay."""
    best = seeds_of_best(rows, "nora")[0]["run"]
    same = {k: best[k] for k in ("optimizer", "adam_learning_rate", "weight_decay")} | {"seed": 0}
    lines = []
    for name, fields in OPTIONS.items():
        row = min(pick(rows, **same, **fields), key=lambda r: r["loss"])
        lines.append((name, rate(row), cell([row])))
    return sorted(lines, key=lambda line: line[-1])


def decay(rows: list[dict]) -> list[tuple[str, ...]]:
    lines = []
    for name in OPTIMIZERS:
        best = seeds_of_best(rows, name)
        cells = [cell(same_rates(pick(rows, weight_decay=x), best)) for x in (0.0, 0.1)]
        lines.append((name, *cells))
    return lines


def precision(rows: list[dict]) -> list[tuple[str, ...]]:
    lines = []
    for name in OPTIMIZERS:
        best = seeds_of_best(rows, name)
        modes = ("mixed", "bfloat16_master", "bfloat16")
        own = [row for row in rows if usual_decay(row)]
        cells = [cell(same_rates(pick(own, precision=mode), best)) for mode in modes]
        lines.append((name, *cells))
    return lines


def others(rows: list[dict]) -> list[tuple[str, ...]]:
    """What was run at one rate."""
    rare = [row for row in rows if row["run"]["optimizer"] not in OPTIMIZERS]
    rare.sort(key=lambda row: row["loss"])
    return [(row["name"], rate(row), cell([row]), speed(row)) for row in rare]


def large(rows: list[dict]) -> list[tuple[str, ...]]:
    """At the best rate of each, and at the others that were run."""
    groups: dict[str, list[dict]] = {}
    chosen = pick(rows, batch=256, steps=600, deflate=None, radial=None)
    for row in sorted(chosen, key=lambda row: row["loss"]):
        given = [f"{k} {row['run'][k]}" for k in ("deflate", "radial") if row["run"].get(k)]
        groups.setdefault(", ".join([row["name"], *given]), []).append(row)
    lines = []
    for name, (best, *rest) in groups.items():
        rest.sort(key=lambda row: row["run"]["learning_rate"])
        tried = "; ".join(f"{rate(row)}: {cell([row])}" for row in rest)
        lines.append((name, rate(best), cell([best]), tried or "none"))
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
    """The rows of `paths` by the name of their optimizer alone: each has its own decay."""
    return [row | {"name": row["run"]["optimizer"]} for row in read_results(paths)]


def tables() -> dict[str, list[str]]:
    """The tables of the page by name."""
    rows = named_rows(ROWS + MORE + LONG)
    parts: dict[str, Callable] = {"adam": adam, "again": again, "options": options}
    parts |= {"decay": decay, "precision": precision, "others": others}
    parts |= {"large": large, "long": long}
    made = {name: markdown(HEAD[name], make(rows)) for name, make in parts.items()}
    return {"main": table(own_cards(rows))} | made


def draw_long(out: Path) -> None:
    """Held-out loss against steps, from shortly before the text is read again."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in filter(usual_decay, named_rows(LONG)):
        points = [(step, loss) for step, loss, _ in row["held_out"] if step > 0.9 * PASS]
        axes.plot(*zip(*points, strict=True), ".-", label=row["name"])
    for passes in (1, 2):
        axes.axvline(passes * PASS, color="grey", lw=0.8, ls=":")
    axes.set(xlabel="step (dotted: the text is read again)", ylabel="held-out loss")
    axes.legend()
    figure.savefig(out)


def main() -> None:
    """Draws the pictures anew, and prints the tables."""
    rates = [row for row in named_rows(ROWS[:2]) if usual_decay(row)]
    draw_sweep(rates, RESULTS / "rates.svg")
    draw_long(RESULTS / "long.svg")
    for lines in tables().values():
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    tyro.cli(main)

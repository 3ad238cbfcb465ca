"""The table of docs/beyond.md, from its rows: `python -m docs.figures.left_out`."""

import json
from collections.abc import Callable

from docs.figures import blocks, yardstick
from examples.llama import records
from examples.llama.plot import markdown

RESULTS = yardstick.DOCS / "results" / "left-out"
HEAD = ("tried", "on", "before", "with it")


def load(name: str, part: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text("utf-8"))[part]


def losses(rows: list[dict], **fields) -> str:
    """The losses of the rows with these fields, one a seed."""
    found = [row["loss"] for row in rows if fields.items() <= row.items()]
    return ", ".join(f"{loss:.3f}" if loss > 0.01 else f"{loss:.0e}" for loss in found)


def at_60m() -> list[tuple[str, ...]]:
    """The runs of docs/comparison.md with a setting more."""
    plain = yardstick.read(yardstick.ROWS + yardstick.MORE)
    own = records.read(RESULTS / "llama-60m.jsonl")
    own = yardstick.named([row for row in own if "radial" in row["run"]])  # of one version

    def lowest(rows: list[dict], **fields) -> str:
        wanted = {"optimizer": "nora", "weight_decay": 0.0, "seed": 0} | fields
        found = yardstick.pick(rows, **wanted)
        return (
            f"{min(row['loss'] for row in found if row['run']['adam_learning_rate'] == 0.01):.3f}"
        )

    lines = []
    for task, shape in {
        "60M, 3,000 steps": {},
        "60M, 600 large batches": {"batch": 256, "steps": 600},
    }.items():
        for name, fields in {
            "`radial=1.0`": {"radial": 1.0, "deflate": None},
            "`deflate=1`": {"deflate": 1, "radial": None},
            "`deflate=2`": {"deflate": 2, "radial": None},
        }.items():
            if yardstick.pick(own, **shape, **fields):
                lines.append((name, task, lowest(plain, **shape), lowest(own, **shape, **fields)))
    return lines


def on_small_models() -> list[tuple[str, ...]]:
    """Regression, and LLaMAs on the text of `make train`."""
    idle, ideas = load("idle.json", "idle"), load("ideas.json", "rows")
    lines = []
    for task, rows, fields in (
        ("regression from zero", load("radial.json", "regression"), {"rate": 0.05, "size": 0.0}),
        ("width 64, 300 steps", load("radial.json", "llama"), {}),
    ):
        pair = (losses(rows, case=case, **fields) for case in ("none (Nora)", "cosine"))
        lines.append(("`radial=1.0`", task, *pair))
    for turn, rate in ((200, 0.1), (1, 0.02)):
        fields = {"direction": "Nora", "turn": turn, "rate": rate}
        (row,) = (row for row in idle if fields.items() <= row.items())
        task = f"rows used in turns of {turn}, rate {rate:g}"
        pair = (f"{row[end]:.2f}" for end in ("goes_on", "rests"))
        lines.append(("`rest_idle_rows`", task, *pair))
    for model, task in (("small", "width 64, 300 steps"), ("tiny", "`tiny`, 300 steps")):
        for name, cases in {
            "cautious decay for decay 0.1": ("Nora, decay 0.1", "Nora, cautious decay 0.1"),
            "second moment of rows": ("Nora", "a second moment of rows"),
        }.items():
            lines.append((name, task, *(losses(ideas, model=model, case=c) for c in cases)))
    return lines


def of_blocks() -> list[tuple[str, ...]]:
    """Blocks of rows that are not made equally long first."""
    own, ours = records.read(RESULTS / "rows-as-long-as-they-are.jsonl"), blocks.load("60m")
    lines = []
    for row in own:
        same = {k: v for k, v in row["run"].items() if k != "direction"}
        (plain,) = (r for r in ours if r["run"] == same)
        pair = (f"{r['held_out_loss']:.3f}" for r in (plain, row))
        label = blocks.name(row)
        lines.append(("rows left as long as they are", f"60M, {label}", *pair))
    return lines


def table() -> list[str]:
    parts: tuple[Callable[[], list[tuple[str, ...]]], ...] = (at_60m, of_blocks, on_small_models)
    return markdown(HEAD, [line for part in parts for line in part()])


if __name__ == "__main__":
    print("\n".join(table()))

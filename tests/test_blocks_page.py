"""docs/blocks.md says what its rows say."""

import re

import pytest

from docs.figures import blocks
from docs.figures.yardstick import DOCS
from examples.llama import records
from examples.llama.plot import best_runs, mean_loss
from examples.llama.sweep import identity_of, read_grid

PAGE = (DOCS / "blocks.md").read_text()
TEXT = " ".join(PAGE.split())


@pytest.mark.parametrize("size", blocks.SIZES)
def test_the_table_is_that_of_the_rows(size):
    assert "\n".join(blocks.table(size)) in PAGE


def test_the_sentences_are():
    (nora,), (adamw,), (muon,) = (
        best_runs(blocks.load("60m"), name) for name in ("Nora, one row", "AdamW", "Muon")
    )
    found = {
        b: sum(r["held_out_loss"] for r in runs) / len(runs)
        for b in (128, 256)
        for runs in [best_runs(blocks.load("60m"), f"blocks of {b}")]
    }
    loss = {
        name: row["held_out_loss"] for name, row in zip("nam", (nora, adamw, muon), strict=True)
    }
    share = (loss["n"] - found[128]) / (loss["n"] - loss["m"])
    assert f"win back {share:.0%} of the way".replace("%", " %") in PAGE
    assert f"end {loss['a'] - found[128]:.2f} below AdamW" in PAGE
    assert abs(found[256] - loss["m"]) < 0.011  # level, by the rule of the comparison
    large = {blocks.name(row): row["held_out_loss"] for row in blocks.load("350m")}
    assert abs(large["blocks of 512"] - large["Muon"]) < 0.011
    assert f"are {large['blocks of 256'] - large['Muon']:.3f} behind" in TEXT
    rates = {
        row["run"]["learning_rate"]: row["held_out_loss"]
        for row in blocks.load("60m")
        if row["name"] == "blocks of 256" and row["run"]["seed"] == 0
    }
    near = max(rates[0.004], rates[0.016]) - found[256]
    assert f"costs blocks of 256 at most {near:.3f}" in TEXT
    assert f"At four times the best rate they lose {rates[0.032] - found[256]:.2f}" in TEXT


def test_every_doubling_of_the_rows_helps():
    labels = [f"blocks of {b}" for b in (16, 32, 64, 128, 256, "all")]
    losses = [mean_loss(best_runs(blocks.load("60m"), label)) for label in labels]
    assert losses == sorted(losses, reverse=True)


def test_what_is_said_of_seconds():
    labels = ("blocks of 128", "blocks of 256", "Muon", "AdamW")
    steps, losses = zip(*map(blocks.in_the_time_of_adamw, labels), strict=True)
    a, b, c, _ = (f"{x:,.0f}" for x in steps)
    assert f"blocks of 128 take {a}, blocks of 256 {b} and Muon {c}" in TEXT
    a, b, c, d = (f"{x:.3f}" for x in losses)
    assert f"they end at {a}, {b} and {c}, and AdamW at {d}" in TEXT


def test_what_is_said_of_attention_and_of_every_tenth_step():
    rows = records.read(DOCS / "results/left-out/blocks-60m.jsonl")
    for row in rows:
        assert f"ends at {row['held_out_loss']:.4f}" in TEXT
    assert {row["run"]["optimizer"] for row in rows} == {"attention-all-128", "full10-128"}


def test_the_table_of_steps_is_that_of_its_rows():
    """XLA's: by kernels see docs/results/block-notes.md."""
    _, *rows = records.read(DOCS / "results/block-xla-h200.jsonl")
    took = {(r["optimizer"], r["block_rows"], r["rows"]): r["milliseconds"] for r in rows}
    adamw = took.pop(("adamw", None, "first"))
    lines = [line.split("|") for line in PAGE[PAGE.index("| blocks of | kernels") :].splitlines()]
    cells = {line[1].strip(): line[3].strip() for line in lines if len(line) == 5}
    for (optimizer, b, along), milliseconds in took.items():
        first, last = cells["Muon, bfloat16" if b is None else str(b)].split(" / ")
        cell = first if along == "first" else last
        digits = len(cell.partition(".")[2])
        assert f"{milliseconds / adamw:.{digits}f}" == cell, (optimizer, b, along)


def test_every_row_is_of_the_grid():
    flags = re.findall(r"-- (--preset 60m.*\\\n.*)", PAGE)[0].replace("\\\n", "").split()
    flags += ["--precision", "mixed"]  # what it is on a GPU
    grid = DOCS.parent / "examples" / "llama" / "grids" / "blocks.yaml"
    rows = blocks.load("60m")
    text = rows[0]["run"]["text"]
    from examples.llama import cli

    wanted = [cli.identity(config, text) for config in read_grid(grid, flags, [])]
    for row in rows:
        assert identity_of(row) in wanted


@pytest.mark.parametrize("size", blocks.SIZES)
def test_rows_are_of_one_device_and_version(size):
    assert len({(r["device"], r["jax"], r["run"]["text"]) for r in blocks.load(size)}) == 1

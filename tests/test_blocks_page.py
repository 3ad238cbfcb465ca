"""docs/blocks.md says what its rows say."""

import re

import pytest

from docs.figures import blocks
from docs.figures.yardstick import DOCS
from examples.llama.plot import best_runs, markdown
from examples.llama.sweep import identity_of, read_grid

PAGE = (DOCS / "blocks.md").read_text()


def test_the_table_is_that_of_the_rows():
    assert "\n".join(markdown(blocks.HEAD, blocks.table("60m"))) in PAGE


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
    behind = large["blocks of 256"] - large["Muon"]
    assert f"{behind:.3f} behind" in PAGE.replace("\n", " ")


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


@pytest.mark.parametrize("size", ["60m", "350m"])
def test_rows_are_of_one_device_and_version(size):
    assert len({(r["device"], r["jax"], r["run"]["text"]) for r in blocks.load(size)}) == 1

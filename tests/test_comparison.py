"""docs/comparison.md says what its rows say."""

import re
from pathlib import Path

import pytest

from docs.figures import comparison
from examples.llama import cli, records
from examples.llama.config import Config
from examples.llama.sweep import identity_of, read_grid

PAGE = Path(comparison.DOCS, "comparison.md").read_text("utf-8")
GRIDS = comparison.DOCS.parent / "examples/llama/grids"


@pytest.mark.parametrize("name", ["main", *comparison.HEAD])
def test_the_tables_are_those_of_the_rows(name):
    lines = comparison.tables()[name]
    assert len(lines) > (3 if name == "others" else 4)  # two were run at one rate
    assert "\n".join(lines) in PAGE


def test_every_row_is_of_one_text_one_model_and_has_a_loss():
    rows = comparison.read_results(comparison.ROWS + comparison.MORE + comparison.LONG)
    assert len(rows) == len({str(sorted(row["run"].items(), key=str)) for row in rows})
    for field in ("text", "model.width", "model.layers", "model.vocab_size", "clip"):
        assert len({row["run"][field] for row in rows}) == 1
    assert all(row["held_out"][-1][:2] == [row["run"]["steps"], row["loss"]] for row in rows)


def test_every_row_is_of_the_grids_that_the_page_names():
    runs = re.findall(r'^    run (\w+) "?([\w ]+?)"?(?: \S*best.*)?$', PAGE, re.M)
    assert [name for name, _ in runs] == ["rates", "adam", "rest", "more", "long", "again"]
    every = re.findall(r"--preset 60m.*\\\n.*(?= &)", PAGE)[0].replace("\\\n", "").split()
    every += ["--precision", "mixed"]  # what it is on a GPU
    best, today = [], cli.identity(Config(), "").keys()
    for name, grids in runs:
        rows = records.read(comparison.RESULTS / f"{name}.jsonl")
        paths = [GRIDS / f"{grid}.yaml" for grid in grids.split()]
        configs = [config for path in paths for config in read_grid(path, every, best)]
        wanted = [cli.identity(config, rows[0]["run"]["text"]) for config in configs]
        still = [run for run in map(identity_of, rows) if run.keys() == today]  # all its flags are
        assert still
        assert all(run in wanted for run in still), name
        best += rows if name in ("rates", "adam") else []

"""docs/comparison.md says what its rows say."""

import re
from pathlib import Path

import pytest

from docs.figures import comparison
from examples.llama import cli, records
from examples.llama.config import Config
from examples.llama.plot import mean_loss
from examples.llama.sweep import read_grid

PAGE = Path(comparison.DOCS, "comparison.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())
GRIDS = comparison.DOCS.parent / "examples/llama/grids"
LEFT_OUT = {"deflate", "radial", "keep_row_norms"}  # flags that the trainer once had


@pytest.fixture(scope="module")
def rows():
    return comparison.named_rows(comparison.ROWS + comparison.MORE + comparison.LONG)


@pytest.mark.parametrize("name", comparison.HEAD)
def test_the_tables_are_those_of_the_rows(name):
    lines = comparison.tables()[name]
    assert len(lines) > 5
    assert "\n".join(lines) in PAGE


def test_what_is_ranked_is_further_apart_than_the_noise(rows):
    noise = comparison.noise(rows)
    assert f"a standard deviation of {noise:.4f} over seeds" in TEXT
    two, one = 2 * noise * (2 / 2) ** 0.5, 2 * noise * 2**0.5
    assert f"{two:.3f} between means of two seeds, {one:.3f} between single runs" in TEXT


def test_the_sentences_say_what_the_rows_say(rows):
    def lowest(**fields):
        return min(row["loss"] for row in comparison.pick(rows, **fields))

    def bfloat16(name):
        return lowest(optimizer=name, precision="bfloat16", weight_decay=0.0)

    def behind_muon(of):
        return f"{of['nora'] - of['muon']:.3f}"

    ends = {name: lowest(optimizer=name, scan_layers=name == "sso") for name in ("sso", "adamp")}
    assert f"SSO ends at {ends['sso']:.4f}" in TEXT
    assert f"AdamP at {ends['adamp']:.4f}" in TEXT
    assert f"RMNP {bfloat16('rmnp'):.4f}, Muon {bfloat16('muon'):.4f}" in TEXT

    pair = ("nora", "muon")
    best = {name: comparison.seeds_of_best(rows, name) for name in comparison.OPTIMIZERS}
    few = behind_muon({name: lowest(optimizer=name, batch=256, steps=600) for name in pair})
    usual = behind_muon({name: mean_loss(best[name]) for name in pair})
    many = behind_muon({name: lowest(optimizer=name, steps=10_000) for name in pair})
    assert f"{few} behind Muon here, {usual} after 3,000 steps, {many} after 10,000" in TEXT

    worst = {}
    for name, tuned in best.items():
        rate, other = (tuned[0]["run"][k] for k in ("learning_rate", "adam_learning_rate"))
        at = [comparison.losses_by_rate(rows, name, x) for x in (comparison.TUNED_AT, other)]
        beside = [
            losses[rate * x] - losses[rate] for losses in at for x in (0.5, 2) if rate * x in losses
        ]
        worst[name] = f"{max(beside):.3f}"
    assert (
        f"costs Muon {worst['muon']}, AdamW {worst['adamw']}, Nora {worst['nora']}, "
        f"RMNP {worst['rmnp']}, Mano {worst['mano']}"
    ) in TEXT


def test_what_was_run_again_came_out_as_before(rows):
    for row in records.read(comparison.AGAIN[0]):
        before = next(r for r in rows if r["run"].items() <= row["run"].items())
        assert abs(row["held_out_loss"] - before["loss"]) <= 0.0011


def test_the_leaders_were_run_again(rows):
    for row in records.read(comparison.DOCS / "results" / "blocks" / "60m.jsonl"):
        if (name := row["run"]["optimizer"]) in ("muon", "adamw"):
            assert f"({row['held_out_loss']:.4f})" in TEXT
            (first,) = (
                r["loss"] for r in comparison.seeds_of_best(rows, name) if r["run"]["seed"] == 0
            )
            assert abs(row["held_out_loss"] - first) <= 0.0005  # as the page says


def test_every_row_is_of_one_text_one_model_and_has_a_loss(rows):
    runs = [{k: v for k, v in row["run"].items() if k not in LEFT_OUT} for row in rows]
    assert len(rows) == len({str(sorted(row["run"].items(), key=str)) for row in rows})
    for field in ("text", "model.width", "model.layers", "model.vocab_size", "clip"):
        assert len({run[field] for run in runs}) == 1
    assert all(row["held_out"][-1][:2] == [row["run"]["steps"], row["loss"]] for row in rows)


def test_every_row_is_of_the_grids_that_the_page_names():
    def known(run):
        return {k: v for k, v in run.items() if k not in LEFT_OUT}

    runs = re.findall(r'^    run (\w+) "?([\w ]+?)"?(?: \S*best.*)?$', PAGE, re.M)
    assert [name for name, _ in runs] == ["rates", "adam", "rest", "more", "long", "again"]
    every = re.findall(r"--preset 60m.*\\\n.*(?= &)", PAGE)[0].replace("\\\n", "").split()
    every += ["--precision", "mixed"]  # what it is on a GPU
    best = []
    fields = cli.identity(
        Config(), ""
    )  # what a record of an older trainer does not hold is default
    for name, grids in runs:
        rows = records.read(comparison.RESULTS / f"{name}.jsonl")
        paths = [GRIDS / f"{grid}.yaml" for grid in grids.split()]
        configs = [config for path in paths for config in read_grid(path, every, best)]
        wanted = [known(cli.identity(config, rows[0]["run"]["text"])) for config in configs]
        rows = [row for row in rows if not any(row["run"].get(flag) for flag in LEFT_OUT)]
        assert all(known(fields | row["run"]) in wanted for row in rows), name
        best += rows if name in ("rates", "adam") else []


def test_help_writes_nothing(capsys):
    pictures = {path: path.stat().st_mtime_ns for path in comparison.RESULTS.glob("*.svg")}
    with pytest.raises(SystemExit):
        comparison.run(["--help"])
    assert "--draw" in capsys.readouterr().out
    assert pictures == {path: path.stat().st_mtime_ns for path in pictures}

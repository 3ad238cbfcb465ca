"""A sweep runs what is missing and compiles once for all rates; its table by hand."""

import json

import pytest

from examples.llama import records, sharding, sweep, train, trainer
from examples.llama.config import UserError
from examples.llama.plot import draw_runs, draw_sweep, read_results, table
from examples.llama.plot import main as plot_main


@pytest.fixture
def grid(corpus, tmp_path, monkeypatch):
    """Settings of a small grid."""
    devices = sharding.jax.devices()
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices[:1])
    flags = f"--data.path {corpus.folder} --steps 4 --eval-every 2 --log-every 1 --batch 4"
    flags += " --model.context 16 --model.width 16 --model.layers 1 --model.heads 2"
    flags += " --model.vocab-size 304 --precision float32"

    def read(text: str, results: list[dict] = []):  # noqa: B006
        path = tmp_path / "grid.yaml"
        path.write_text(text)
        return sweep.read_grid(path, flags.split(" "), results)

    return read


def test_every_combination_in_order(grid):
    configs = grid("[{optimizer: [nora, adamw], seed: [0, 1]}, {optimizer: muon, clip: 2.0}]")
    runs = [(c.optimizer, c.seed, c.clip) for c in configs]
    assert runs == [
        ("nora", 0, 1.0),
        ("nora", 1, 1.0),
        ("adamw", 0, 1.0),
        ("adamw", 1, 1.0),
        ("muon", 0, 2.0),
    ]
    assert all(c.learning_rate and c.weight_decay is not None for c in configs)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{optimizer: nora}", "is not a list of tables"), ("[{a", "cannot be read")],
)
def test_bad_grids(grid, text, message):
    with pytest.raises(UserError, match=message):
        grid(text)


def test_what_is_done_is_skipped_and_rates_share_a_compile(grid, tmp_path, monkeypatch, capsys):
    made = []
    make = trainer.make_program
    monkeypatch.setattr(trainer, "make_program", lambda *a: made.append(make(*a)) or made[-1])
    out = tmp_path / "results.jsonl"
    configs = grid("[{optimizer: nora, learning_rate: [0.01, 0.02], seed: [0, 1]}]")
    sweep.sweep(configs[:1], out)
    first = out.read_text()
    out.write_text(first + '{"run": {"cut": {}')  # as a killed sweep may leave it
    sweep.sweep(configs, out)
    assert len(made) == 2  # one a call
    assert [program.train._cache_size() for program in made] == [1, 1]
    results = records.read(out)
    assert json.dumps(results[0]) + "\n" == first
    runs = [(result["run"]["learning_rate"], result["run"]["seed"]) for result in results]
    assert runs == [(0.01, 0), (0.01, 1), (0.02, 0), (0.02, 1)]
    assert len({result["held_out_loss"] for result in results}) == 4
    assert [step for step, *_ in results[0]["held_out"]] == [2, 4]
    sweep.sweep(configs, out)
    assert len(made) == 2


def test_the_best_value_so_far(grid):
    results = [
        result("nora", 0.1, 0, 3.0),
        result("nora", 0.4, 0, 2.5),
        result("adamw", 0.2, 0, 2.0),
    ]
    results += [result("nora", 9.0, 0, None)]
    text = "[{optimizer: nora, learning_rate: [best, best*0.5, 0.3], seed: [0, 1]}]"
    found = [config.learning_rate for config in grid(text, results)]
    assert found == [0.4, 0.4, 0.2, 0.2, 0.3, 0.3]
    with pytest.raises(UserError, match="best learning_rate: no result is of muon"):
        grid("[{optimizer: muon, learning_rate: best}]", results)


def test_parts_are_all_of_it(grid):
    configs = grid("[{optimizer: nora, seed: [0, 1, 2, 3, 4, 5, 6]}]")
    for parts in (1, 2, 3, 8):
        cut = [sweep.part_of(configs, f"{i}/{parts}") for i in range(1, parts + 1)]
        assert [config for piece in cut for config in piece] == configs
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    for part in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(UserError, match="not of the form 1/4"):
            sweep.part_of(configs, part)


def test_a_run_of_a_sweep_is_that_of_the_trainer(grid, tmp_path, replaced):
    (config,) = grid("[{optimizer: nora}]")
    sweep.sweep([config], tmp_path / "results.jsonl")
    result = json.loads((tmp_path / "results.jsonl").read_text())
    train.train(replaced(config, out=tmp_path, name="run"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert result["training"] == [[m["step"], m["loss"]] for m in metrics if "loss" in m]
    assert (
        result["held_out_loss"] == [m for m in metrics if "held_out_loss" in m][-1]["held_out_loss"]
    )
    draw_runs([tmp_path / "run"], tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def result(
    optimizer: str, rate: float, seed: int, loss: float | None, held_out=(), other: float = 0.5
) -> dict:
    run = {"optimizer": optimizer, "learning_rate": rate, "seed": seed, "clip": 1.0}
    run["adam_learning_rate"] = other
    return {"run": run, "held_out_loss": loss, "tokens_per_second": 10, "held_out": list(held_out)}


def test_the_table_by_hand(tmp_path, capsys):
    results = [
        result("adamw", 0.1, 0, 3.0, [[1, 5.0, 1.0], [2, 3.0, 2.0]]),
        result("nora", 0.1, 0, 2.0, [[1, 3.5, 1.0], [2, 2.9, 4.0], [3, 2.0, 9.0]]),
        result("nora", 0.1, 1, 2.2, [[1, 3.0, 2.0], [2, 2.2, 4.0]]),
        result("nora", 0.2, 0, 4.0, [[1, 4.0, 1.0]]),
        result("nora", 0.2, 0, 3.7, [[1, 3.7, 1.0]], other=0.7),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, results)))
    lines = table(read_results([path]))[2:]
    assert lines == [
        "| nora | 2.1000 ± 0.1414 | 2 | 0.1 | 0.5 | 0.2: 4.0000 | 10 |",
        "| adamw | 3.0000 | 1 | 0.1 | 0.5 | none | 10 |",
    ]
    plot_main(["--sweep", str(path), "--out", str(tmp_path / "sweep.png")])
    assert lines[0] in capsys.readouterr().out
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_a_diverged_run_is_last_and_breaks_nothing(tmp_path):
    results = [result("adamw", 0.1, 0, 3.0), result("sgd", 9.0, 0, None, [[1, None, 1.0]])]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, results)))
    read = read_results([path])
    draw_sweep(read, tmp_path / "sweep.png")
    assert table(read)[-1].startswith("| sgd | inf |")


def test_nothing_to_draw(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"no results in .*empty.jsonl"):
        plot_main(["--sweep", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "x.png")])
    with pytest.raises(UserError, match="nothing to draw"):
        plot_main([])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"run/metrics\.jsonl holds no loss"):
        plot_main(["--runs", str(tmp_path / "run"), "--out", str(tmp_path / "x.png")])
    assert not (tmp_path / "x.png").exists()
    with pytest.raises(UserError, match=r"none/metrics.jsonl cannot be read"):
        plot_main(["--runs", "none", "--out", "/tmp/never.png"])

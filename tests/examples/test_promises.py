"""What examples/llama/README.md promises, held by its commands."""

import sys

import pytest

from examples.llama import sharding, train
from examples.llama.terminal import run_main

TINY = "--model.vocab-size 304 --model.context 8 --model.width 16 --model.layers 2 --model.heads 2"
TINY += " --model.mlp-width 16 --mesh.data 1 --steps 2 --batch 2 --warmup 1"
TINY += " --eval-every 2 --geometry-every 0"


@pytest.fixture
def command(corpus, tmp_path, monkeypatch, capsys):
    """Runs `train` with flags on one device; returns what it printed."""
    devices = sharding.jax.devices()[:1]
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices)

    def run(flags: str) -> str:
        given = f"{TINY} --out {tmp_path} --data.path {corpus.folder} {flags}".split()
        monkeypatch.setattr(sys, "argv", ["train", *given])
        run_main(train.main)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("layers", ["--no-scan-layers", "--scan-layers"])
@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16_master", "bfloat16"])
def test_train_runs_to_its_last_line_in_every_precision(command, tmp_path, precision, layers):
    lines = command(f"--name run --precision {precision} {layers}").splitlines()
    assert any(line.startswith("sample: The ") for line in lines)
    assert lines[-1].startswith(f"written: {tmp_path}/run/")
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "loss.png", "config.json", "checkpoints"} <= made


def test_what_is_shown_is_of_the_optimizer_that_trains(command):
    shown = command("--name run --optimizer muon --learning-rate 0.25 --precision float32")
    assert "nora" not in shown
    # By hand: a block has 4 * 16^2 + 3 * 16^2 = 1,792 in matrices, and 2 * 16 beside them.
    assert "muon: 3,584 parameters; adamw: 9,808" in shown
    assert "muon, learning rate 0.25" in shown

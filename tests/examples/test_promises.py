"""What examples/llama/README.md promises, held by its commands."""

import json
import math
import shutil
import signal
import sys
import time

import pytest

from examples.llama import records, sample, sharding, train
from examples.llama.config import Config
from examples.llama.evaluate import HeldOut
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
    assert any(line.startswith("  | The ") for line in lines)  # the sample
    assert lines[-2].startswith(f"written: {tmp_path}/run/")
    assert lines[-1].endswith("in all")
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "loss.png", "config.json", "checkpoints"} <= made


def test_what_is_shown_is_of_the_optimizer_that_trains(command):
    flags = "--optimizer muon --learning-rate 0.25 --row-scale unit"
    shown = command(f"--name run --precision float32 {flags}")
    assert "nora" not in shown
    # By hand: a block has 4 * 16^2 + 3 * 16^2 = 1,792 in matrices, and 2 * 16 beside them.
    facts = ("muon: 3,584", "adamw: 9,808", "13,392", "muon 0.25", "row_scale unit")
    assert [fact for fact in facts if fact not in shown] == []


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where one run is kept for the tests that go on from it."""
    return tmp_path_factory.mktemp("kept") / "out"


@pytest.fixture
def finished(kept, command, tmp_path):
    """The folder of a run that has ended."""
    if not kept.exists():
        command("--name run --precision float32 --save-every 1")
        shutil.copytree(tmp_path, kept)
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def refused(command, flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command(flags)
    assert "\n" not in str(ended.value)
    return str(ended.value)


def test_a_run_whose_checkpoints_are_gone_loses_nothing_more(command, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    shutil.rmtree(finished / "checkpoints")
    assert "holds no checkpoint any more" in refused(command, "--resume --name run")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_more_steps_than_the_run_has_are_refused_with_the_mend(command, finished):
    line = refused(command, "--resume --name run --steps 3")
    assert "steps is 3, was 2; a run keeps its settings: leave the flags out, or start" in line


def test_a_broken_checkpoint_is_named_and_the_one_before_it_is_offered(command, finished):
    for path in (finished / "checkpoints" / "2" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    line = refused(command, "--resume --name run")
    assert "checkpoints/2 cannot be" in line
    assert line.endswith("step 1 is whole: to go on from it, move 2 elsewhere")
    shutil.rmtree(finished / "checkpoints" / "2")
    assert "sample:" in command("--resume --name run")


def test_sampling_needs_the_run_and_not_its_text(finished, capsys, monkeypatch):
    config = json.loads((finished / "config.json").read_text())
    config["data"]["path"] = "/nowhere"
    (finished / "config.json").write_text(json.dumps(config))
    sample.main(["--run", str(finished), "--prompt=--x", "--count", "2", "--length", "3"])
    assert capsys.readouterr().out.count("--x") == 2


@pytest.mark.parametrize("prompt", ["the row " * 20])
def test_a_bad_prompt_is_refused_before_anything_is_made(command, tmp_path, monkeypatch, prompt):
    line = refused(command, f"--name run --prompt={prompt.replace(' ', '_')}")
    assert "the prompt has" in line
    assert not (tmp_path / "run").exists()


def test_names_of_the_same_second_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda text: text.replace("%", ""))
    names = {train.name_of(Config(out=tmp_path)) for _ in range(3)}
    assert len(names) == 3


def test_a_batch_of_one_and_a_measurement_a_step(command, tmp_path):
    command("--name a$b^ --precision float32 --batch 1 --geometry-every 1")
    lines = records.read(tmp_path / "a$b^" / "metrics.jsonl")
    assert [line["step"] for line in lines if "rows" in line] == [1, 2]


def test_a_run_that_diverges_says_so_and_keeps_what_was_finite(command, tmp_path):
    flags = "--name run --precision float32 --learning-rate 1e30 --adam-learning-rate 1e30"
    line = refused(command, f"{flags} --steps 4 --warmup 0 --geometry-every 1 --eval-every 1")
    assert "is not finite" in line
    lines = records.read(tmp_path / "run" / "metrics.jsonl")
    assert all("rows" not in line or line["step"] < 4 for line in lines)
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()


def test_the_first_ctrl_c_asks_and_the_second_quits():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with train.signals() as stopped:
        assert not stopped(0)
        signal.raise_signal(signal.SIGINT)
        assert stopped(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with train.signals() as stopped:
        signal.raise_signal(signal.SIGTERM)
        assert stopped(0)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_loss_without_end_has_a_perplexity():
    assert HeldOut(1_000.0, 1).perplexity == math.inf

"""The commands of the example's README: all are understood, and what a CPU can run is run."""

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from examples.llama import cli, sweep

README = Path(__file__).parents[2] / "examples" / "llama" / "README.md"
TEXT = README.read_text("utf-8")
CODE = re.sub(r" \\\n +", " ", TEXT)
COMMANDS = re.findall(r"^    python -m (examples\.llama\.\w+) (.*)$", CODE, re.MULTILINE)
ELSEWHERE = ("hf:", "--hosts.", "--help")  # needs a network, other hosts, or ends the process
SMALL = "--data.path data/c4 --steps 2 --warmup 1 --batch 16 --micro-batch 1 --model.vocab-size 304"
SMALL += " --model.context 16 --model.width 32 --model.layers 1 --model.heads 2"
SMALL += " --model.mlp-width 48 --eval-every 2"


@pytest.fixture
def work(tmp_path, monkeypatch, corpus):
    """A folder with all that the commands speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(corpus.folder, tmp_path / "data" / "c4")
    for split in ("train", "held_out"):
        stem = {"train": "train", "held_out": "val"}[split]
        corpus.shards(split)[0].tofile(tmp_path / f"{stem}.bin")
    shutil.copy(corpus.folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "my.yaml").write_text("optimizer: adamw")
    (tmp_path / "grid.yaml").write_text("[{optimizer: nora, learning_rate: [0.01, 0.02]}]")
    importlib.import_module("examples.llama.train").main([*SMALL.split(), "--name", "NAME"])
    for name in "AB":
        shutil.copytree("runs/NAME", f"runs/{name}")
    return tmp_path


def test_every_command_is_understood():
    assert len(COMMANDS) > 12
    for module, arguments in COMMANDS:
        given = shlex.split(arguments, comments=True)
        not_here = {"--help", "my.yaml", "--resume", "..."} & set(given)  # files, or no settings
        if module.endswith(".train") and not not_here:
            cli.parse(given)


@pytest.mark.slow
def test_what_a_cpu_can_run_runs(work):
    for module, arguments in COMMANDS:
        given = [str(Path(x).expanduser()) for x in shlex.split(arguments, comments=True)]
        if any(word in arguments for word in (*ELSEWHERE, "...")):
            continue
        if module.endswith((".train", ".sweep", ".speed")):
            given += SMALL.split()
        importlib.import_module(module).main(given)
    assert {"together.png", "sweep.png", "results.jsonl", "data"} <= {
        p.name for p in work.iterdir()
    }
    assert (work / "data" / "mine" / "manifest.json").exists()


def test_the_grid_on_the_page(work):
    block = re.search(r"((?:^    - \{.*\n)+)", TEXT, re.MULTILINE)
    assert block is not None
    (work / "page.yaml").write_text(block[1])
    configs = sweep.read_grid(work / "page.yaml", SMALL.split(), [])
    assert [config.optimizer for config in configs[::4]] == ["nora", "rmnp", "mano", "nora"]

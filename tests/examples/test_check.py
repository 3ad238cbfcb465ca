"""Every bad setting of every command is one line, before anything is made."""

import dataclasses
import json
import sys

import pytest

from examples.llama import check, cli, plot, prepare, sample, speed, sweep, tokens, train
from examples.llama.config import Config, UserError
from examples.llama.terminal import run_main
from examples.width import coordinates, transfer


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Runs a command that must end with one line, and that must make nothing; returns the line."""
    monkeypatch.chdir(tmp_path)
    for module in (train, sweep, speed):  # what comes after the checks
        monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("was not refused"))

    def run(module, *arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_main(module.main)
        line = str(ended.value)
        assert line.startswith("error: ")
        assert "\n" not in line
        assert sorted(tmp_path.rglob("*")) == before
        return line.removeprefix("error: ")

    return run


BAD = [
    ("--learning-rate=-1", "learning_rate is -1.0: it must be at least 0"),
    ("--learning-rate=nan", "learning_rate is nan: it must be at least 0"),
    ("--learning-rate=inf", "learning_rate is inf: it must be at least 0"),
    ("--adam-learning-rate=-1", "adam_learning_rate is -1.0"),
    ("--weight-decay=-0.1", "weight_decay is -0.1"),
    ("--momentum=1.5", "momentum is 1.5: it must be between 0 and 1"),
    ("--clip=0", "clip is 0.0: it must be above 0"),
    ("--clip=nan", "clip is nan: it must be above 0"),
    ("--warmup=-1", "warmup is -1: it must be at least 0"),
    ("--final-fraction=-0.5", "final_fraction is -0.5: it must be between 0 and 1"),
    ("--seed=-1", "seed is -1: it must be between 0 and 4294967295"),
    ("--steps=0", "steps is 0: it must be at least 1"),
    ("--steps=3000000000", "steps is 3000000000"),
    ("--data.eval-tokens=0", "data.eval_tokens is 0"),
    ("--data.held-out=0", "data.held_out is 0.0: it must be between 0 and 1, ends excluded"),
    ("--model.kv-heads=0", "model.kv_heads is 0"),
    ("--model.init-std=-1", "model.init_std is -1.0: it must be above 0"),
    ("--model.rope-theta=0", "model.rope_theta is 0.0: it must be above 0"),
    ("--model.norm-eps=-1", "model.norm_eps is -1.0: it must be at least 0"),
    ("--model.context=1", "model.context is 1: it must be at least 2"),
    ("--model.base-width=0", "model.base_width is 0"),
    ("--row-scale=width", "optimizer 'nora': "),
    ("--prompt=", "prompt is empty"),
    ("--name=../x", "name is '../x'"),
    ("--name=/x", "name is '/x'"),
    ("--name=a/b", "name is 'a/b'"),
    ("--name=-x", "name is '-x'"),
    ("--name=lr[0.01]", "name is 'lr[0.01]'"),
    ("--out=r[1]", "a path with one of [ ] * ? cannot be used"),
    ("--resume", "--resume needs the --name of the run"),
    ("--data.path=", "data.path is empty"),
    ("--data.tokenizer=none.json", "tokenizer none.json cannot be read"),
    ("--model.vocab-size=200", "vocab_size is 200: a tokenizer has 257 words at least"),
    ("--hosts.coordinator=here:1", "hosts.coordinator needs hosts.count and hosts.index"),
    ("--hosts.coordinator=here", "hosts.coordinator is 'here': it must be host:port, or auto"),
    ("--hosts.count=2", "hosts.count and hosts.index need hosts.coordinator"),
    ("--hosts.coordinator=a:1 --hosts.count=2 --hosts.index=2", "hosts.index is 2: it must be"),
    ("--steps=abc", "Error parsing --steps: invalid literal for int()"),
    ("--precision=float8", "invalid choice 'float8' for argument '--precision'"),
    ("--stepz=3", "Unrecognized options: --stepz=3"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[flags for flags, _ in BAD])
def test_of_a_run(refused, flags, message):
    assert message in refused(train, *flags.split(" "))


@pytest.mark.parametrize("module", [speed, sweep])
def test_of_runs_of_other_commands(refused, tmp_path, module):
    (tmp_path / "grid.yaml").write_text("[{learning_rate: 0.1}]")
    own = ["--grid", "grid.yaml", "--out", "results.jsonl", "--"] if module is sweep else []
    for flags, message in (
        ("--clip=0", "clip is 0.0"),
        ("--row-scale=width", "nora"),
        ("--data.path=", "data.path is"),
    ):
        assert message in refused(module, *own, *flags.split(" "))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("[{learning_rate: [0.1, -0.1]}]", "learning_rate is -0.1"),
        ("[{row_scale: [unit, width]}]", "optimizer 'nora': "),
        ("[{learning_rate: best*x}]", "no result is of"),
        ("[{name: [a, a/b]}]", "name is 'a/b'"),
        ("[]", "grid.yaml holds no run"),
        ("[{seed: []}]", "grid.yaml holds no run"),
    ],
)
def test_of_a_grid_before_its_first_run(refused, tmp_path, grid, message):
    (tmp_path / "grid.yaml").write_text(grid)
    assert message in refused(sweep, "--grid", "grid.yaml", "--out", "results.jsonl")


def test_a_best_value_that_is_no_number():
    result = {"run": {"optimizer": "nora", "learning_rate": 0.1}, "held_out_loss": 1.0}
    with pytest.raises(UserError, match=r"'best\*x': it must be best, or best\*2"):
        sweep.best_of([result], {"optimizer": "nora", "learning_rate": "best*x"})


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (prepare, "--path=text --out=made --held-out=2", "held_out is 2.0: it must be between 0"),
        (prepare, "--path=text --out=made --held-out=0", "held_out is 0.0: it must be between 0"),
        (prepare, "--path=text --out=made --vocab-size=20", "vocab_size is 20"),
        (prepare, "--path= --out=made", "data.path is empty"),
        (prepare, "--path=nowhere --out=made", "nowhere does not exist"),
        (prepare, "--out=made", "--path"),
        (sample, "--run=. --length=-1", "length is -1: it must be at least 1"),
        (sample, "--run=. --count=0", "count is 0: it must be at least 1"),
        (sample, "--run=. --temperature=-1", "temperature is -1.0: it must be at least 0"),
        (sample, "--run=nowhere", "config nowhere/config.json cannot be read"),
        (tokens, "--train=a --held-out=b --tokenizer=c --out=d", "tokenizer c cannot be read"),
        (plot, "--out=x.foo", "out is x.foo: it must end in one of"),
        (plot, "--runs=nowhere --out=x.png", "nowhere/metrics.jsonl cannot be read"),
        (plot, "", "nothing to draw"),
        (transfer, "--widths=0", "model.width is 0: it must be at least 1"),
        (coordinates, "--widths=33", "width 33 is no whole number of heads"),
        (coordinates, "--part=3", "part '3' is not of the form 1/4"),
    ],
)
def test_of_other_commands(refused, tmp_path, module, flags, message):
    (tmp_path / "text").write_text("a few words")
    assert message in refused(module, *flags.split(" ") if flags else [])


def test_every_number_has_its_range():
    kinds = (prepare.PrepareConfig, sample.SampleConfig, sweep.SweepConfig, plot.PlotConfig)
    groups = [Config(), *(f.default for k in kinds for f in dataclasses.fields(k))]
    fields = [f for f in groups if dataclasses.is_dataclass(f)]
    names = {f.name for g in fields for f in dataclasses.fields(g) if "int" in str(f.type)}
    names |= {f.name for g in fields for f in dataclasses.fields(g) if "float" in str(f.type)}
    assert {"steps", "clip"} <= names
    assert names - {"precision"} <= check.RANGES.keys()


def test_what_is_saved_is_read_back_whatever_it_looks_like(tmp_path):
    given = dataclasses.replace(Config(), name="a$b c", prompt="--steps=3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cli.shared(given)))
    assert dataclasses.replace(cli.parse(["--config", str(path)]), config=None) == given

"""Every error of the command line: one clear line, a non-zero exit, and nothing lost."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import collectives, paper_table, step
from examples.llama import cli, sharding
from examples.llama import train as train_module
from examples.llama.config import PRESETS, Config, MeshConfig, UserError
from examples.llama.corpus import seal
from examples.llama.plot import PlotConfig
from examples.llama.prepare import PrepareConfig
from examples.llama.sweep import SweepConfig
from examples.llama.terminal import run_main
from examples.llama.tokens import TokensConfig


@pytest.fixture
def run(corpus, tmp_path, monkeypatch, capsys):
    """Runs the command on a small text; returns its exit status and its last line."""

    def command(*arguments, data=True):
        given = ["--out", str(tmp_path), "--data.cache", str(tmp_path / "cache")]
        given += ["--mesh.data", "1", "--model.vocab-size", "304"]
        if data:
            given += ["--data.path", str(corpus.folder)]
        monkeypatch.setattr(sys, "argv", ["train", *given, *map(str, arguments)])
        monkeypatch.setattr(sharding.jax, "devices", lambda: devices[:1])
        with pytest.raises(SystemExit) as exit:
            run_main(train_module.main)
        return str(exit.value)

    devices = sharding.jax.devices()
    return command


def files(folder) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--optimizer sophia",
            "error: unknown optimizer 'sophia': choose from nora, rmnp, mano, muon",
        ),
        ("--preset 7b", "error: unknown preset '7b': choose from tiny, 60m, 135m, 350m, 1b"),
        ("--resume --name never", "config {out}/never/config.json cannot be read"),
        ("--data.path {out}/nowhere", "error: {out}/nowhere does not exist"),
        ("--model.vocab-size 200", "error: model.vocab_size 200 is less than the 300 words"),
        ("--mesh.data 1 --mesh.fsdp 3", "does not divide the 1 devices there are"),
        ("--mesh.data -1 --mesh.fsdp -1", "one of them may be -1"),
        ("--mesh.data 0", "sizes are positive"),
        ("--batch 16 --micro-batch 3", "error: micro_batch 3 does not divide the 16 sequences"),
        ("--batch 0", "error: batch is 0: it must be at least 1"),
        ("--micro-batch -1", "error: micro_batch is -1: it must be at least 1"),
        ("--model.heads 3", "error: model.width 128 over model.heads 3"),
        ("--model.kv-heads 3", "error: model.kv_heads 3 does not divide heads 4"),
        ("--data.held-out 1.5", "error: data.held_out is 1.5: it must be between 0 and 1"),
        ("--model.context 5000", "is too short"),
        ("--optimizer adamw --row-scale unit", "error: optimizer 'adamw' takes no row_scale"),
        ("--config {out}/none.yaml", "error: config {out}/none.yaml cannot be read"),
    ],
)
def test_mistakes_cost_one_line(run, tmp_path, arguments, message):
    before = files(tmp_path)
    line = run(*arguments.format(out=tmp_path).split(" "))
    assert line.startswith("error: ")
    assert message.format(out=tmp_path) in line
    assert "\n" not in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x81 not text", "is not text: no UTF-8 at byte 0"),
        (b"zero \x00 byte", "is not text: it holds zero bytes"),
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"a few words", "is too short: 0 tokens of train text are less than one context of 128"),
    ],
)
def test_bad_text_files(run, tmp_path, content, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    line = run("--data.path", path, data=False)
    assert line.startswith(f"error: {path} {message}")
    assert "\n" not in line
    assert path.read_bytes() == content


def test_a_folder_without_text(run, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"\x89PNG")
    assert f"{folder} holds no text" in run("--data.path", folder, data=False)


def test_a_run_is_never_overwritten(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("precious")
    line = run("--name", "mine")
    assert line == f"error: {tmp_path}/mine already holds a run: choose another --name, or --resume"
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == "precious"
    assert files(tmp_path / "mine") == {"metrics.jsonl"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a table of fields"),
        ("model: {layers: [", "cannot be read"),
        ("a\0b", "cannot be read"),
    ],
)
def test_bad_config_files(run, tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    line = run("--config", path)
    assert line.startswith(f"error: config {path} {message}")
    assert "\n" not in line


def test_unknown_fields_of_a_file_are_named(run, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {layerz: 3}")
    line = run("--config", path)
    assert line.startswith("error: Unrecognized options: --model.layerz=3")
    assert line.endswith("see python -m examples.llama.train --help")


def test_flags_go_before_the_file_before_the_preset(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{preset: 135m, model: {layers: 3, width: 96}, scan_layers: true, clip: 1e-1}")
    config = cli.parse(["--config", str(path), "--model.layers", "5"])
    assert (config.model.layers, config.model.width) == (5, 96)
    assert config.model.heads == PRESETS["135m"].model.heads
    assert (config.scan_layers, config.clip) == (True, 0.1)
    assert not cli.parse(["--config", str(path), "--no-scan-layers"]).scan_layers


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_saved_is_read_back(tmp_path, preset):
    config = dataclasses.replace(PRESETS[preset], name="x", scan_layers=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cli.to_dict(config)))
    assert cli.parse(["--config", str(path)]) == dataclasses.replace(config, config=path)


def test_every_field_is_explained(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.parse(["--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for group in (
        Config,
        *(type(getattr(Config(), n)) for n in ("model", "data", "mesh", "hosts")),
    ):
        for field in dataclasses.fields(group):
            assert field.name.replace("_", "-") in text
    assert "Parts that each matrix multiplication is split into." in text


def test_a_model_that_the_mesh_does_not_divide(small, replaced, corpus):
    from examples.llama.step import make_program

    def message(**changes) -> str:
        config = replaced(small, **changes)
        mesh = sharding.make_mesh(config.mesh)
        with pytest.raises(UserError) as error:
            make_program(config, mesh, corpus.end)
        return str(error.value)

    odd = {"mlp_width": 45}
    tensor, fsdp = MeshConfig(tensor=2), MeshConfig(fsdp=8)
    assert "mesh.tensor=2 does not divide layers/0/mlp/down/kernel" in message(
        mesh=tensor, model=odd
    )
    narrow = {"width": 20, "mlp_width": 45, "heads": 2}
    assert "mesh.fsdp=8 does not divide" in message(mesh=fsdp, model=narrow)
    assert "batch 6 does not divide over mesh data * fsdp = 8" in message(mesh=fsdp, batch=6)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Where one run is kept for all tests of checkpoints."""
    return tmp_path_factory.mktemp("run_once") / "out"


class TestCheckpoints:
    @pytest.fixture
    def finished(self, run_once, small, replaced, tmp_path, monkeypatch):
        devices = sharding.jax.devices()
        monkeypatch.setattr(sharding.jax, "devices", lambda: devices[:1])
        config = replaced(small, steps=2, batch=2)
        if not run_once.exists():
            train_module.train(dataclasses.replace(config, out=run_once))
        shutil.copytree(run_once, tmp_path, dirs_exist_ok=True)
        return dataclasses.replace(config, resume=True)

    def refused(self, config) -> str:
        folder = config.out / config.name / "checkpoints"
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as error:
            train_module.train(config)
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert before == after
        return str(error.value)

    def test_of_other_settings(self, finished, replaced):
        other = replaced(finished, model={"layers": 1}, seed=3, keep=5)
        message = self.refused(other)
        assert "is of another run: model.layers is 1, was 2; seed is 3, was 0" in message

    def test_of_other_text(self, finished, replaced, corpus, tmp_path):
        folder = tmp_path / "text"
        shutil.copytree(corpus.folder, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["train"][0]["documents"] += 1
        (folder / "manifest.json").write_text(json.dumps(seal(manifest)))
        assert "text is" in self.refused(replaced(finished, data={"path": str(folder)}))

    @pytest.mark.parametrize("of", ["manifest", "arrays"])
    def test_corrupt(self, finished, of):
        folder = finished.out / finished.name / "checkpoints" / "2" / "state"
        files = [path for path in folder.rglob("*") if path.is_file()]
        harmed = [path for path in files if (path.parent.name == "d") == (of == "arrays")]
        for path in harmed:  # all: which of them holds what is a matter of timing
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
        assert harmed
        assert "checkpoints/2 cannot be read" in self.refused(finished)

    def test_foreign(self, finished):
        folder = finished.out / finished.name / "checkpoints" / "2"
        shutil.rmtree(folder / "identity")
        assert "checkpoints/2 cannot be read" in self.refused(finished)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(corpus, tmp_path):
    """Files of a process may not grow beyond a limit that is lowered after the first checkpoint."""
    script = f"""
import pathlib, resource, signal, time
from examples.llama import cli, terminal, train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def limit(step):
    while step == 5 and not pathlib.Path("{tmp_path}/run/checkpoints/4").exists():
        time.sleep(0.1)
    if step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
terminal.run_main(lambda arguments: train.train(cli.parse(arguments), limit))
"""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    one_device = os.environ | {"XLA_FLAGS": flags}
    arguments = f"--out {tmp_path} --name run --data.path {corpus.folder} --steps 8 --batch 2"
    arguments += " --save-every 4 --eval-every 4 --model.vocab-size 304 --model.layers 1"
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments.split(" ")],
        capture_output=True,
        text=True,
        env=one_device,
        timeout=300,
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(ended.stderr.splitlines()) < 20, ended.stderr  # not a page around it
    assert "cannot be written to" in line
    assert line.endswith("the last good one is step 4")
    resumed = f"--resume --out {tmp_path} --name run".split(" ")
    command = [sys.executable, "-m", "examples.llama.train", *resumed]
    subprocess.run(command, check=True, env=one_device, timeout=300)


@pytest.mark.parametrize(
    "options",
    [
        *(Config, PlotConfig, SweepConfig, PrepareConfig, TokensConfig),
        *(step.Args, collectives.Args, paper_table.Args),
    ],
)
def test_what_a_command_writes_goes_to_out_and_has_a_place(options):
    fields = {field.name: field for field in dataclasses.fields(options)}
    assert "json" not in fields
    assert fields["out"].default is not dataclasses.MISSING

"""The command line and the file of a run: how they are read, checked, written and compared."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import tyro
import yaml

from examples.llama.config import PRESETS, Config, UserError

MODEL_SIZES = ("vocab_size", "context", "layers", "width", "heads", "key_heads", "mlp_width")
RUN_SIZES = ("steps", "batch", "loss_chunk", "log_every", "eval_every", "save_every", "keep")
# What may differ when a run goes on: where and how fast it runs, what it prints, never what it is.
FREE = {"preset", "config", "name", "out", "resume", "mesh", "hosts", "micro_batch", "remat"}
FREE |= {"loss_chunk", "log_every", "eval_every", "geometry_every", "save_every", "keep", "prompt"}


def parse(arguments: list[str]) -> Config:
    """The command line over a file (`--config FILE`) over a preset (`--preset NAME`).

    With `--resume --name NAME` the file is that of the run.
    """
    file, name = _value(arguments, "--config"), _value(arguments, "--name")
    if file is None and name and "--resume" in arguments:
        file = Path(_value(arguments, "--out") or Config.out) / name / "config.json"
    if file is not None:
        arguments = [*_from_file(Path(file)), *arguments]
    preset = _value(arguments, "--preset") or "tiny"
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
    config = tyro.cli(Config, args=arguments, default=PRESETS[preset])
    check(config)
    return config


def _value(arguments: list[str], flag: str) -> str | None:
    """What follows the last `flag`, or what is joined to it by "="."""
    values = [b for a, b in itertools.pairwise(arguments) if a == flag]
    values += [a.removeprefix(flag + "=") for a in arguments if a.startswith(flag + "=")]
    return values[-1] if values else None


def _from_file(path: Path) -> Iterator[str]:
    """The fields of a file as flags: their types and their errors are those of the command line."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path} is not a table of fields")
    return _flags({k: v for k, v in values.items() if k not in ("config", "resume")}, "")


def _flags(values: dict, group: str) -> Iterator[str]:
    for name, value in values.items():
        name = str(name).replace("_", "-")
        if isinstance(value, dict):
            yield from _flags(value, f"{group}{name}.")
        elif isinstance(value, bool):
            yield f"--{group}{'' if value else 'no-'}{name}"
        else:
            yield from (f"--{group}{name}", str(value))


def check(config: Config) -> None:
    """Raises UserError for numbers that make no sense, whatever the machine."""
    model = config.model
    positive = {f"model.{name}": getattr(model, name) for name in MODEL_SIZES}
    positive |= {name: getattr(config, name) for name in RUN_SIZES}
    if config.micro_batch is not None:
        positive["micro_batch"] = config.micro_batch
    for name, value in positive.items():
        if value < 1:
            raise UserError(f"{name} is {value}: it must be positive")
    if not 0 < config.data.held_out < 1:
        raise UserError(f"data.held_out is {config.data.held_out}: it must be between 0 and 1")
    if model.width % model.heads or model.head_dim % 2:
        size = f"model.width {model.width} over model.heads {model.heads}"
        raise UserError(f"{size}: the size of a head must be a whole, even number")
    if model.heads % model.key_heads:
        raise UserError(f"model.kv_heads {model.kv_heads} does not divide heads {model.heads}")


def start_hosts(config: Config) -> None:
    """Meets the other processes, where there are any; jax must not have been used before."""
    hosts = config.hosts
    if hosts.coordinator == "auto":
        jax.distributed.initialize()
    elif hosts.coordinator:
        jax.distributed.initialize(hosts.coordinator, hosts.count, hosts.index)


def resolve(config: Config) -> Config:
    """The precision that suits this machine, where it was left open."""
    if config.precision != "auto":
        return config
    cpu = jax.default_backend() == "cpu"
    return dataclasses.replace(config, precision="float32" if cpu else "mixed")


def to_dict(config: Config) -> dict:
    """Plain values that JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def differences(now: dict, then: dict, group: str = "") -> Iterator[str]:
    """Lines on the fields that make another run of it, and differ."""
    for name in sorted((now.keys() | then.keys()) - (set() if group else FREE)):
        a, b = now.get(name), then.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{group}{name}.")
        elif a != b:
            yield f"{group}{name} is {a}, was {b}"


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs a command: what the user can mend is one line on stderr, and exit status 1."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")

"""The command line and the file of a run: how they are read, checked, written and compared."""

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import tyro
import yaml

from examples.llama.config import PRESETS, Config, UserError

MODEL_SIZES = ("vocab_size", "context", "layers", "width", "heads", "key_heads", "mlp_width")
RUN_SIZES = ("steps", "batch", "loss_chunk", "log_every", "eval_every", "save_every", "keep")
# What two runs that are the same may differ in: where they run and how fast, what they print. Their
# text is the same if its checksum is, wherever it lies.
FREE = {"preset", "config", "name", "out", "resume", "micro_batch", "remat", "loss_chunk", "fused"}
FREE |= {"log_every", "eval_every", "geometry_every", "save_every", "keep", "tensorboard", "prompt"}
FREE |= {f"data.{name}" for name in ("path", "cache", "tokenizer", "text_field", "held_out")}
FREE |= {f"mesh.{name}" for name in ("data", "fsdp", "tensor")}
FREE |= {f"hosts.{name}" for name in ("coordinator", "count", "index")}


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
    return flags({k: v for k, v in values.items() if k not in ("config", "resume")})


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command of many runs, and those for every run, which follow `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def flags(values: dict) -> Iterator[str]:
    """Nested fields as arguments of the command line."""
    for name, value in flatten(values):
        group, _, own = name.replace("_", "-").rpartition(".")
        prefix = f"--{group}." if group else "--"
        if isinstance(value, bool):
            yield f"{prefix}{'' if value else 'no-'}{own}"
        else:
            yield from (prefix + own, str(value))


def flatten(values: dict, group: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{group}{name}.")
        else:
            yield f"{group}{name}", value


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
    if config.tensorboard and not importlib.util.find_spec("tensorboardX"):
        mend = "pip install -e '.[examples,tensorboard]'"
        raise UserError(f"--tensorboard needs the package tensorboardX: {mend}")
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


def identity(config: Config, text: str) -> dict:
    """The fields that make a run the one it is, by dotted names, and the checksum of its text."""
    fields = {name: value for name, value in flatten(to_dict(config)) if name not in FREE}
    return fields | {"text": text}


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs a command: what the user can mend is one line on stderr, and exit status 1."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")

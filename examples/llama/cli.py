"""The command line and the file of a run: how they are read, checked, written and compared."""

import contextlib
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro
import yaml

from examples.llama import check
from examples.llama.config import PRESETS, Config, UserError
from examples.llama.terminal import line

Options = TypeVar("Options")

# What two runs that are the same may differ in: where they run and how fast, what they print. Their
# text is the same if its checksum is, wherever it lies.
FREE = {"preset", "config", "name", "out", "resume", "micro_batch", "remat", "loss_chunk", "fused"}
FREE |= {"log_every", "eval_every", "geometry_every", "save_every", "keep", "tensorboard", "prompt"}
FREE |= {f"data.{name}" for name in ("path", "cache", "tokenizer", "text_field", "held_out")}
FREE |= {f"mesh.{name}" for name in ("data", "fsdp", "tensor")}
FREE |= {f"hosts.{name}" for name in ("coordinator", "count", "index", "timeout")}


def parse(arguments: list[str]) -> Config:
    """The command line over a file (`--config FILE`) over a preset (`--preset NAME`).

    With `--resume --name NAME` the file is that of the run.
    """
    file, name = _value(arguments, "--config"), _value(arguments, "--name")
    if file is None and name and "--resume" in arguments:
        check.name(name)
        file = Path(_value(arguments, "--out") or Config.out) / name / "config.json"
    if file is not None:
        arguments = [*_from_file(Path(file)), *arguments]
    preset = _value(arguments, "--preset") or "tiny"
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
    config = read(Config, arguments, "llama.train", default=PRESETS[preset])
    check.settings(config)
    return config


def read(kind: type[Options], arguments: list[str], command: str, **more: Any) -> Options:
    """The arguments of a command as a dataclass, its numbers within their ranges.

    Args:
        kind: the dataclass.
        arguments: what follows the command.
        command: its name in `python -m examples.NAME`.
        **more: as for `tyro.cli`.
    """
    command = f"python -m examples.{command}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = tyro.cli(kind, args=arguments, prog=command, **more)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        _, *lines = said.getvalue().partition("For full helptext")[0].splitlines()  # a box
        words = re.sub(r"[│╰─|+]|-{3,}", " ", " ".join(lines)).split()
        raise UserError(f"{' '.join(words)}; see {command} --help") from None
    check.ranges(options)
    return options


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
        raise UserError(f"config {path} cannot be read: {line(error)}") from None
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
            yield f"{prefix}{own}={value}"  # joined: a value may look like a flag


def flatten(values: dict, group: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{group}{name}.")
        else:
            yield f"{group}{name}", value


def resolve(config: Config) -> Config:
    """The precision that suits this machine, where it was left open."""
    if config.precision != "auto":
        return config
    cpu = jax.default_backend() == "cpu"
    return dataclasses.replace(config, precision="float32" if cpu else "mixed")


def to_dict(config: Config) -> dict:
    """Plain values that JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def shared(config: Config) -> dict:
    """The settings that all processes of a run have, and that its config.json holds."""
    return {name: value for name, value in to_dict(config).items() if name != "hosts"}


def identity(config: Config, text: str | None = None) -> dict:
    """The fields that make a run the one it is, by dotted names, and the checksum of its text.

    Without a text it is that of a run with any text.
    """
    fields = {name: value for name, value in flatten(to_dict(config)) if name not in FREE}
    return fields if text is None else fields | {"text": text}

"""Every setting of every command is checked here, before anything is made."""

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.llama import optimizers, sharding, sources, step
from examples.llama.config import Config, DataConfig, HostsConfig, ModelConfig, UserError
from examples.llama.corpus import is_prepared
from examples.llama.terminal import line
from examples.llama.tokenizer import LEAST, end_of, open_tokenizer, words_of

INT32, FLOAT32 = 2**31 - 1, float(np.finfo(np.float32).max)


class Range(NamedTuple):
    """The numbers that a setting may be."""

    low: float
    high: float = FLOAT32
    ends: bool = True  # whether `low` and `high` are among them

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high if self.ends else self.low < value < self.high

    def __str__(self) -> str:
        if self.high in (INT32, FLOAT32, math.inf):
            return f"{'at least' if self.ends else 'above'} {self.low:g}"
        return f"between {self.low:g} and {self.high:.10g}" + (
            "" if self.ends else ", ends excluded"
        )


COUNTED = ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width", "base_width")
COUNTED += ("eval_tokens", "count", "base_fan_in", "steps", "batch", "micro_batch", "loss_chunk")
COUNTED += ("log_every", "eval_every", "save_every", "keep", "length", "block_rows")
RANGES = {
    **dict.fromkeys(COUNTED, Range(1, INT32)),
    "context": Range(2, INT32),  # a prompt and a token after it
    **dict.fromkeys(("index", "warmup", "geometry_every"), Range(0, INT32)),
    "seed": Range(0, 2**32 - 1),
    **dict.fromkeys(("learning_rate", "adam_learning_rate", "weight_decay"), Range(0)),
    **dict.fromkeys(("norm_eps", "temperature"), Range(0)),
    **dict.fromkeys(("rope_theta", "init_std", "timeout"), Range(0, ends=False)),
    **dict.fromkeys(("momentum", "final_fraction"), Range(0, 1)),
    "held_out": Range(0, 1, ends=False),
    "clip": Range(0, math.inf, ends=False),
    **dict.fromkeys(("data", "fsdp", "tensor"), Range(-1, INT32)),
}


def numbers(options: Any) -> Iterator[tuple[str, float]]:
    """The numbers among the fields of a dataclass, and of those in it, by their dotted names."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((f"{field.name}.{name}", x) for name, x in numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, value


def ranges(options: Any) -> None:
    """Raises UserError for the first number that its setting may not be."""
    for name, value in numbers(options):
        allowed = RANGES[name.rpartition(".")[2]]
        if value not in allowed:
            raise UserError(f"{name} is {value}: it must be {allowed}")


def written(name: str, path: Path) -> None:
    """Raises UserError for a path that checkpoints cannot be read back from."""
    if set("[]*?") & set(str(path.absolute())):
        raise UserError(f"{name} is {path.absolute()}: a path with one of [ ] * ? cannot be used")


def settings(config: Config) -> None:
    """Raises UserError for settings that make no sense, whatever the machine and the text."""
    ranges(config)
    if config.name is not None:
        name(config.name)
    elif config.resume:
        raise UserError("--resume needs the --name of the run")
    written("out", config.out)
    _shape(config.model)
    _hosts(config.hosts)
    if not config.prompt:
        raise UserError("prompt is empty: give at least one character")
    if config.tensorboard and not importlib.util.find_spec("tensorboardX"):
        mend = "pip install -e '.[examples,tensorboard]'"
        raise UserError(f"--tensorboard needs the package tensorboardX: {mend}")
    _optimizer(config)


def name(given: str) -> None:
    """Raises UserError for a run's name that is not one folder's, or looks like a flag."""
    foreign = set("/\\[]*?") & set(given) or not given.isprintable()
    if foreign or given in ("", "None") or given.startswith(("-", ".")):
        raise UserError(f"name is {given!r}: no / \\ [ ] * ? may be in it, and no - or . in front")


def _shape(model: ModelConfig) -> None:
    if model.width % model.heads or model.head_dim % 2:
        size = f"model.width {model.width} over model.heads {model.heads}"
        raise UserError(f"{size}: the size of a head must be a whole, even number")
    if model.heads % model.key_heads:
        raise UserError(f"model.kv_heads {model.kv_heads} does not divide heads {model.heads}")


def _hosts(hosts: HostsConfig) -> None:
    if hosts.coordinator in (None, "auto"):
        if hosts.count is not None or hosts.index is not None:
            raise UserError("hosts.count and hosts.index need hosts.coordinator, as host:port")
        return
    host, _, port = hosts.coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"hosts.coordinator is {hosts.coordinator!r}: it must be host:port, or auto"
        )
    if hosts.count is None or hosts.index is None:
        raise UserError("hosts.coordinator needs hosts.count and hosts.index")
    if hosts.index >= hosts.count:
        raise UserError(f"hosts.index is {hosts.index}: it must be below hosts.count {hosts.count}")


def _optimizer(config: Config) -> None:
    """Makes it once: what it is given is then right, or it says what is not."""
    chosen = optimizers.recipe(config)
    rates = optimizers.Rates(
        chosen.learning_rate,
        chosen.adam_learning_rate,
        chosen.weight_decay,
        config.warmup,
        config.steps,
    )
    try:
        optimizers.make_optimizer(config, rates)
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer {config.optimizer!r}: {line(error)}") from None


def new(name: str, path: Path) -> None:
    """Raises UserError for a path that is there already."""
    if path.exists():
        raise UserError(f"{path} exists: choose another --{name}")


def text(data: DataConfig, vocab_size: int) -> None:
    """Raises UserError where there is no text, no tokenizer, or one that does not fit the model."""
    if data.path == "":
        raise UserError("data.path is empty: name a file or a folder, or leave it out")
    if data.path is not None and is_prepared(data.path):
        return  # it has its own tokenizer
    sources.check(data.path)
    if data.tokenizer is None and vocab_size < LEAST:
        raise UserError(
            f"vocab_size is {vocab_size}: a tokenizer has {LEAST} words at least, one a byte and "
            "one that ends a document"
        )
    if data.tokenizer is not None:
        tokenizer = open_tokenizer(data.tokenizer)
        end_of(tokenizer, data.tokenizer)
        if words_of(tokenizer) > vocab_size:
            words = f"the {words_of(tokenizer)} words of {data.tokenizer}"
            raise UserError(f"vocab_size is {vocab_size}: it is less than {words}")


def run(config: Config) -> None:
    """Raises UserError where text or devices do not suit a run."""
    text(config.data, config.model.vocab_size)
    step.check_fit(config, sharding.make_mesh(config.mesh))

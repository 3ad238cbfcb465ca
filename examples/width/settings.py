"""LLaMAs that differ in width alone, and how a learning rate is written for each row scale.

Embedding, head and everything else that AdamW trains are treated as muP asks (Yang et al., Tensor
Programs V, Table 8): an input or output weight keeps its initial variance and its AdamW learning
rate at every width, and the logits are multiplied by 1 / width. Of the equivalent ways to treat the
head it is the one that needs no learning rate of its own. What is left to find is the rate of the
matrices inside the blocks.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import matplotlib
import numpy as np

from examples.llama import check, cli, records
from examples.llama.config import Config, UserError
from examples.llama.sweep import part_of, with_rates

matplotlib.use("agg")
matplotlib.rcParams["svg.fonttype"] = "none"

RowScale = Literal["fan_ratio", "unit", "width", "rms"]
ROW_SCALES: tuple[RowScale, ...] = ("width", "fan_ratio", "rms", "unit")  # what matters most first
RMS = 0.2  # of nora's row_scale="rms"


@dataclass(frozen=True)
class Args:
    """What the commands of this folder have in common."""

    size: Literal["cpu", "h100"] = "cpu"
    """cpu: some two minutes on two cores. h100: some minutes of one H100."""
    row_scales: tuple[RowScale, ...] = ROW_SCALES
    """In this order."""
    widths: tuple[int, ...] | None = None
    """In this order. None: those of the size."""
    out: Path = Path("runs/width.jsonl")
    """JSON lines, a result a run; appended to."""
    part: str = "1/1"
    """Which part of the runs, such as 1/4: one process for each GPU, all with the same `out`."""
    figure: Path = Path("runs/width.svg")
    """The picture, of all results that are there."""
    draw: bool = False
    """Draw what is there; run nothing."""


Some = TypeVar("Some", bound=Args)


def results_of(
    command: str,
    arguments: list[str],
    kind: type[Some],
    doc: str | None,
    grid: Callable[[Some, list[str]], list[Config]],
    run: Callable[[list[Config], Path], None],
) -> tuple[Some, list[dict]]:
    """Runs what has no result yet; returns the arguments and all results, by row scale.

    Args:
        command: its name in this folder.
        arguments: of the command line.
        kind: what they are read into.
        doc: of the command.
        grid: all runs, from what was read and the flags for every run.
        run: runs them and appends their results to a file.
    """
    own, every = cli.split(arguments)
    args = cli.read(kind, own, f"width.{command}", description=doc)
    if not args.draw:
        configs = part_of(grid(args, every), args.part)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        run(configs, args.out)
    results = records.read(args.out)  # in no order: processes share the file
    return args, sorted(results, key=lambda result: ROW_SCALES.index(result["run"]["row_scale"]))


@dataclass(frozen=True)
class Size:
    """A model at its base width, as flags of examples.llama.train, and what is done with it."""

    base: str
    widths: tuple[int, ...]


def base_config(size: Size, every: list[str]) -> Config:
    """The settings at the base width; `every` are the user's flags for every run, which win."""
    return cli.resolve(cli.parse([*size.base.split(), *every]))


def at_width(base: Config, width: int, row_scale: RowScale, step: float) -> Config:
    """`base` at another width: as many blocks, and heads of the same size.

    Args:
        base: settings at the base width.
        width: of the residual stream; every other size but the vocabulary follows.
        row_scale: of nora.
        step: length of the step of a row at the base width, for a row of that fan-in, before
            `row_scale` fan_ratio lengthens it. The learning rate is this but for rms.

    Raises:
        UserError: if heads of the base model's size do not fill the width.
    """
    model = base.model
    if width * model.heads % model.width:
        raise UserError(f"width {width} is no whole number of heads of size {model.head_dim}")
    wider = dataclasses.replace(
        model,
        width=width,
        heads=model.heads * width // model.width,
        mlp_width=model.mlp_width * width // model.width,
        base_width=model.width,
    )
    rate = step / (RMS * math.sqrt(model.width)) if row_scale == "rms" else step
    config = dataclasses.replace(
        base,
        model=wider,
        row_scale=row_scale,
        base_fan_in=model.width if row_scale == "width" else None,
        learning_rate=float(f"{rate:.4g}"),
    )
    check.settings(config)
    return with_rates(config)


def exponent(widths: list[int], values: list[float]) -> float:
    """The p of the power law values ~ width^p that fits best in logarithms; nan for one width."""
    x, y = np.log(widths), np.log(values)
    x -= x.mean()
    return float(x @ y / (x @ x)) if len(x) > 1 else math.nan

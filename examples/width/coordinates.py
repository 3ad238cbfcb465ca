"""How far do activations move at each width? `python -m examples.width.coordinates`

Trains a LLaMA at each width for 20 steps with one learning rate, and measures on held-out text, for
each kind of layer, the root mean square over coordinates of

- total: how much its output has changed since step 0;
- own: how much of that is its own weight's doing, (W_t - W_0) x_t, which the paper's Theorems 4.1
  and 4.2 are about.

Feature learning that does not depend on width is a line that is flat. Results are appended to --out
as each run ends, and what is there is not run again. What follows `--` are flags of
examples.llama.train for every run, such as `-- --data.path FOLDER`.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

from examples.llama import records
from examples.llama.config import Config
from examples.llama.model import Attention, Llama
from examples.llama.plot import markdown
from examples.llama.sweep import left_to_run
from examples.llama.terminal import run_main
from examples.llama.trainer import Trainer
from examples.width import settings
from examples.width.settings import Size, at_width, base_config, exponent, results_of

CONSTANT = " --warmup 0 --final-fraction 1 --steps 20 --precision float32"  # rates, for all widths
SIZES = {
    "cpu": Size(
        "--preset tiny --model.width 64 --model.heads 4 --model.mlp-width 172 --model.layers 1"
        " --model.vocab-size 512 --model.context 64 --batch 8" + CONSTANT,
        widths=(32, 256),
    ),
    "h100": Size(
        "--preset 60m --model.layers 2 --batch 64 --loss-chunk 16384" + CONSTANT,
        widths=(64, 256, 1024, 4096, 128, 512, 2048),
    ),
}
KINDS = ("embedding", "query", "key", "value", "attention out", "gate", "up", "down", "logits")
AFTER = (1, 5, 20)  # steps
STEP = 0.004  # length of a row's step at the base width
PANELS = (*(("total", step) for step in AFTER), ("own", AFTER[-1]))
Line = tuple[list[int], list[float]]
SEQUENCES = 8  # of held-out text, on which activations are measured


@dataclass(frozen=True)
class Args(settings.Args):
    """Change of activations against width, for several widths and row scales."""

    out: Path = Path("runs/width-coordinates.jsonl")
    figure: Path = Path("runs/width-coordinates.svg")


def mixed(attention: Attention, x: Array, positions: Array) -> Array:
    """What attention gives to its output projection."""
    attention = nnx.clone(attention)
    attention.out.kernel[...] = jnp.eye(x.shape[-1])
    return attention(x, positions, None)[0]


def outputs(model: Llama, weights: Llama, tokens: Array) -> Iterator[tuple[str, Array]]:
    """Outputs of the layers of `weights` on the inputs that those of `model` get, by kind."""
    positions = jnp.arange(tokens.shape[1])
    x = model.embed(tokens).astype(model.dtype)
    yield "embedding", weights.embed(tokens)
    for block, layers in zip(model.layers, weights.layers, strict=True):
        h = block.attention_norm(x)
        for name in ("query", "key", "value"):
            yield name, getattr(layers.attention, name)(h)
        y = mixed(block.attention, h, positions)
        yield "attention out", layers.attention.out(y)
        x = x + block.attention.out(y)
        h = block.mlp_norm(x)
        yield "gate", layers.mlp.gate(h)
        yield "up", layers.mlp.up(h)
        y = jax.nn.silu(block.mlp.gate(h)) * block.mlp.up(h)
        yield "down", layers.mlp.down(y)
        x = x + block.mlp.down(y)
    yield "logits", weights.lm_head(model.norm(x) * model.config.shrink)


@functools.partial(jax.jit, static_argnums=0)
def changes(graph: Any, first: Any, now: Any, tokens: Array) -> dict[str, dict[str, Array]]:
    """Root mean square of the total and the own change of each kind of layer, over its blocks."""
    first, now = nnx.merge(graph, first), nnx.merge(graph, now)
    squares: dict[str, dict[str, list[Array]]] = {}
    for (kind, new), (_, old), (_, kept) in zip(
        outputs(now, now, tokens),
        outputs(first, first, tokens),
        outputs(now, first, tokens),
        strict=True,
    ):
        own = squares.setdefault(kind, {"total": [], "own": []})
        own["total"].append(jnp.mean((new - old) ** 2))
        own["own"].append(jnp.mean((new - kept) ** 2))
    return jax.tree.map(
        lambda blocks: jnp.sqrt(jnp.mean(jnp.stack(blocks))),
        squares,
        is_leaf=lambda x: isinstance(x, list),
    )


def run(trainer: Trainer) -> dict[str, dict[str, dict[str, float]]]:
    """Changes of each kind of layer after 1, 5 and 20 steps."""
    trainer.start()
    first = jax.tree.map(jnp.copy, trainer.state.params)  # the step donates its own
    tokens = jnp.stack([trainer.held_out[i][:-1] for i in range(SEQUENCES)])
    found = {}
    for step in AFTER:
        while trainer.step < step:
            trainer.advance()
        measured = changes(trainer.program.graph, first, trainer.state.params, tokens)
        found[str(step)] = jax.tree.map(lambda x: float(f"{x:.4g}"), measured)
    return found


def measure(configs: list[Config], out: Path) -> None:
    """Runs what has no result yet, and appends a result as each run ends."""
    for place, config, corpus, identity in left_to_run(configs, out):
        device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        changed = run(Trainer(config, corpus))
        records.append(out, {"run": identity, "changes": changed} | device)
        print(f"{place} {config.row_scale}, width {config.model.width}", flush=True)


def grid(args: Args, every: list[str]) -> list[Config]:
    """Every run."""
    base = base_config(SIZES[args.size], every)
    widths = args.widths or SIZES[args.size].widths
    return [at_width(base, n, row_scale, STEP) for row_scale in args.row_scales for n in widths]


def lines(results: list[dict], row_scale: str, step: int, of: str) -> dict[str, Line]:
    """Widths, and the changes at each of them, by kind of layer."""
    chosen = [result for result in results if result["run"]["row_scale"] == row_scale]
    chosen.sort(key=lambda result: result["run"]["model.width"])
    widths = [result["run"]["model.width"] for result in chosen]
    return {
        kind: (widths, [result["changes"][str(step)][kind][of] for result in chosen])
        for kind in KINDS
    }


def row_scales(results: list[dict]) -> list[str]:
    """Those that were run, in order."""
    return list(dict.fromkeys(result["run"]["row_scale"] for result in results))


def table(results: list[dict], of: str) -> list[str]:
    """A Markdown table: the power of the width that the change of each kind of layer follows."""
    head = [f"{of} change of", "steps", *KINDS]
    body = [
        [
            name,
            str(step),
            *(f"{exponent(*line):+.2f}" for line in lines(results, name, step, of).values()),
        ]
        for name, step in itertools.product(row_scales(results), AFTER)
    ]
    return markdown(head, body)


def draw(results: list[dict], out: Path) -> None:
    """Change against width: a row of panels for each row scale, a column for each of PANELS."""
    names = row_scales(results)
    figure = Figure(figsize=(12, 2.5 * len(names) + 0.3), layout="constrained")
    panels = figure.subplots(len(names), len(PANELS), sharex=True, sharey=True, squeeze=False)
    for (i, name), (j, (of, step)) in itertools.product(enumerate(names), enumerate(PANELS)):
        axes = panels[i, j]
        for kind, line in lines(results, name, step, of).items():
            adamw = kind in ("embedding", "logits")
            axes.plot(*line, "--" if adamw else ".-", label=kind)
        axes.set(xscale="log", yscale="log", title=f"{name}: {of}, step {step}")
        axes.minorticks_off()
    widths = sorted({result["run"]["model.width"] for result in results})
    for axes in panels[-1]:
        axes.set_xticks(widths, map(str, widths), rotation=90)
        axes.set_xlabel("width")
    for axes in panels[:, 0]:
        axes.set_ylabel("change (rms)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(arguments: list[str]) -> None:
    args, results = results_of("coordinates", arguments, Args, __doc__, grid, measure)
    draw(results, args.figure)
    for of in ("total", "own"):
        print("\n".join(["", *table(results, of)]))


if __name__ == "__main__":
    run_main(main)

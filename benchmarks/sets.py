"""What is measured: the matrices of LLaMA models, and optimizers by name."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import optax_nora


class Llama(NamedTuple):
    layers: int
    width: int
    mlp_width: int


SETS = {
    "tiny": Llama(2, 64, 172),
    "60M": Llama(8, 512, 1376),
    "135M": Llama(12, 768, 2048),
    "350M": Llama(24, 1024, 2736),
    "1B": Llama(24, 2048, 5461),
    "7B": Llama(32, 4096, 11008),
}
SetName = Literal["tiny", "60M", "135M", "350M", "1B", "7B"]
OptimizerName = Literal["adamw", "nora", "muon", "muon-bfloat16"]
# Nora's update by XLA or by kernels, both with `optax.apply_updates`, and its whole step.
StepName = Literal[
    "adamw", "nora", "nora-pallas", "step", "step-xla", "step-pallas", "muon", "muon-bfloat16"
]
Layout = Literal["leaves", "stacked"]  # one leaf a matrix, or one leaf for all layers
RowsAlong = Literal["first", "last"]  # Flax kernels (in, out), or (out, in) as in PyTorch


def matrices(model: Llama, layout: Layout, rows: RowsAlong) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's matrices by name."""
    width, mlp = model.width, model.mlp_width
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"gate": (width, mlp), "up": (width, mlp), "down": (mlp, width)}
    if rows == "last":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if layout == "stacked":
        return {name: (model.layers, *shape) for name, shape in shapes.items()}
    return {f"{name}_{i}": shape for i in range(model.layers) for name, shape in shapes.items()}


def row_axes(layout: Layout, rows: RowsAlong) -> tuple[int, int]:
    """The axis that a row runs along, and the axis that numbers rows."""
    first = 1 if layout == "stacked" else 0
    return (first, first + 1) if rows == "first" else (first + 1, first)


def dimension_numbers(layout: Layout, rows: RowsAlong) -> MuonDimensionNumbers:
    reduction, output = row_axes(layout, rows)
    return MuonDimensionNumbers((reduction,), (output,))


def nora(
    numbers: MuonDimensionNumbers, block_rows: int = 1, backend: str = "xla"
) -> optax_nora.StepTransformation:
    """With weight decay; blocks without projection, as they train best with decay."""
    return optax_nora.nora(
        1e-3,
        weight_decay=0.1,
        block_rows=block_rows,
        project=block_rows == 1,
        weight_dimension_numbers=numbers,
        backend=backend,
    )


def muon_in_bfloat16() -> optax.GradientTransformation:
    """Muon with five batched iterations in bfloat16: a fast one, to measure against."""

    def direction(h: jax.Array) -> jax.Array:
        x = jnp.swapaxes(h, -1, -2) if h.shape[-2] > h.shape[-1] else h
        norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
        x = (x / (norm + 1e-8)).astype(jnp.bfloat16)
        for _ in range(5):
            gram = x @ jnp.swapaxes(x, -1, -2)
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        x = jnp.swapaxes(x, -1, -2) if h.shape[-2] > h.shape[-1] else x
        return x.astype(h.dtype)

    return optax.chain(
        optax.ema(0.95, debias=False),
        optax.stateless(lambda updates, _: jax.tree.map(direction, updates)),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-3),
    )


def optimizer(
    name: OptimizerName, numbers: MuonDimensionNumbers, block_rows: int = 1
) -> optax.GradientTransformation:
    """The optimizer as a user makes it, with weight decay."""
    match name:
        case "adamw":
            return optax.adamw(1e-3, weight_decay=0.1)
        case "nora":
            return nora(numbers, block_rows)
        case "muon-bfloat16":
            return muon_in_bfloat16()
        case "muon":
            return optax.contrib.muon(
                1e-3,
                weight_decay=0.1,
                muon_weight_dimension_numbers=lambda params: jax.tree.map(
                    lambda _: numbers, params
                ),
            )

"""The pictures of docs/axes.md, of the model and the rule there: `python docs/figures/axes.py`.

Each square is a weight. The last two axes of an array are the rows and columns of a tile, the axis
before them counts tiles from left to right, the one before that from top to bottom.
"""

import functools
import itertools
import math
import operator
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import optax_nora

matplotlib.use("agg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "axes", "font.family": "sans-serif", "font.size": 9}
)
DOCS = Path(__file__).parents[1]
TEXT = "#808080"  # as far from a white page as from a dark one
COLORS = {"reduction": "#e8791c", "output": "#4a86cf", "batch": TEXT}
ALPHAS = {"reduction": 1.0, "output": 0.7, "batch": 0.4}
GAP = 1.0  # between tiles, in weights
SQUARE = 0.2  # inches
LEAVES = {  # name of the picture: path of the leaf, names of its axes
    "dense": ("dense/kernel", "in, out"),
    "attention-in": ("attention/query/kernel", "embed, heads, head_dim"),
    "attention-out": ("attention/out/kernel", "heads, head_dim, embed"),
    "fused-qkv": ("fused/kernel", "embed, qkv, heads, head_dim"),
    "convolution": ("conv/kernel", "height, width, in, out"),
    "depthwise": ("depthwise/kernel", "height, width, in, channels"),
    "stacked": ("layers/kernel", "layers, in, out"),
    "experts": ("experts", "experts, in, out"),
    "lora-a": ("lora/lora_a", "in, rank"),
    "lora-b": ("lora/lora_b", "rank, out"),
    "embedding": ("embed/embedding", "vocab, embed"),
}


def model_of_the_page() -> tuple[Any, Any]:
    """Parameters and rule that the first blocks of docs/axes.md make."""
    page = (DOCS / "axes.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
        if "rule" in names:
            break
    return nnx.to_pure_dict(names["params"]), names["rule"]


def role(axis: int, numbers: Any) -> str:
    """What an axis is: batch too where the leaf is no matrix."""
    if numbers is None:
        return "batch"
    roles = {"reduction": numbers.reduction_axis, "output": numbers.output_axis}
    return next((name for name, axes in roles.items() if axis in axes), "batch")


def place(shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[float, float]:
    """Where the square of a weight lies, x to the right and y down."""
    down, right, y, x = (0,) * (4 - len(index)) + index
    *_, height, width = shape
    return x + right * (width + GAP), y + down * (height + GAP)


def kind_of(index: tuple[int, ...], roles: list[str]) -> str:
    """What a weight is of: the first row (reduction), another row (output), another matrix."""
    moved = {role for i, role in zip(index, roles, strict=True) if i > 0}
    return "batch" if "batch" in moved else "output" if "output" in moved else "reduction"


def draw(title: str, names: str, shape: tuple[int, ...], numbers: Any) -> Figure:
    """One array: its first row in orange, the other rows of that matrix in blue.

    Args:
        title: path of the array.
        names: of its axes.
        shape: of the array.
        numbers: its `MuonDimensionNumbers`, None where it is no matrix.
    """
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    roles = [role(axis, numbers) for axis in range(len(shape))]
    for index in itertools.product(*map(range, shape)):
        kind = kind_of(index, roles) if numbers else "batch"
        square = Rectangle(place(shape, index), 0.86, 0.86, color=COLORS[kind], lw=0, clip_on=False)
        square.set_alpha(ALPHAS[kind])
        axes.add_patch(square)
    width, height = np.add(place(shape, tuple(n - 1 for n in shape)), 1)
    spots = [  # of the axes' names, from the last axis on
        (0, height + 0.1, {"ha": "left", "va": "top"}),
        (-0.2, shape[-2] / 2, {"ha": "right", "va": "center", "rotation": 90}),
        (width / 2, -0.1, {"ha": "center", "va": "bottom"}),
        (-1.5, height / 2, {"ha": "right", "va": "center", "rotation": 90}),
    ]
    labels = [f"{axis} {name}" for axis, name in enumerate(names.split(", "))]
    for label, kind, (x, y, how) in zip(reversed(labels), reversed(roles), spots, strict=False):
        axes.text(x, y, label, color=COLORS[kind], **how)
    axes.text(-0.2, -1.5, f"{title} {shape}", color=TEXT, va="bottom", weight="bold")
    axes.text(-0.2, height + 1.5, describe(shape, numbers), color=TEXT, va="top")
    left, right, top, bottom = -2.6, max(width, 12) + 0.2, -2.7, height + 2.7
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.axis("off")
    figure.set_size_inches(SQUARE * (right - left), SQUARE * (bottom - top))
    return figure


def describe(shape: tuple[int, ...], numbers: Any) -> str:
    """Matrices, rows, and weights in a row."""
    if numbers is None:
        return "no rows: goes to AdamW"
    fan_in, fan_out = (math.prod(shape[a] for a in axes) for axes in numbers)
    matrices = math.prod(shape) // (fan_in * fan_out)
    many = f"{matrices} matrices of " if matrices > 1 else ""
    return f"{many}{fan_out} rows of {fan_in} weights"


def at(tree: Any, path: str) -> Any:
    """The leaf of a tree of dicts."""
    return functools.reduce(operator.getitem, path.split("/"), tree)


def main() -> None:
    """Draws them all."""
    params, rule = model_of_the_page()
    numbers = optax_nora.infer_dimension_numbers(params, rule)
    for name, (path, axis_names) in LEAVES.items():
        figure = draw(path, axis_names, at(params, path).shape, at(numbers, path))
        out = DOCS / "images" / f"axes-{name}.svg"
        figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Does a learning rate hold at another width? `python -m examples.width.transfer`

Trains a LLaMA at each width, with each learning rate, for each row scale, and draws held-out loss
against the rate. Results are appended to --out as each run ends, and what is there is not run
again. What follows `--` are flags of examples.llama.train for every run, such as
`-- --data.path FOLDER`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from examples.llama.config import Config
from examples.llama.plot import markdown
from examples.llama.sweep import sweep
from examples.llama.terminal import run_main
from examples.width import settings
from examples.width.settings import Size, at_width, base_config, exponent, results_of

SIZES = {
    "cpu": Size(
        "--preset tiny --model.width 64 --model.heads 4 --model.mlp-width 172 --model.layers 1"
        " --model.vocab-size 512 --model.context 64 --batch 8 --steps 120 --warmup 12"
        " --eval-every 120 --log-every 12 --data.eval-tokens 20000",
        widths=(32, 128),
    ),
    "h100": Size(
        "--preset 60m --model.layers 4 --scan-layers --batch 64 --steps 300 --warmup 30"
        " --eval-every 300 --log-every 30 --loss-chunk 16384",
        widths=(128, 256, 512, 1024),
    ),
}
STEPS = {
    "cpu": (0.00125, 0.0025, 0.005, 0.01, 0.02),
    "h100": (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032),
}
THEORY = {"width": 0.0, "fan_ratio": -0.5, "unit": -0.5, "rms": -1.0}  # of the best rate's power


@dataclass(frozen=True)
class Args(settings.Args):
    """Held-out loss against learning rate, for several widths and row scales."""

    out: Path = Path("runs/width-transfer.jsonl")
    figure: Path = Path("runs/width-transfer.svg")


def grid(args: Args, every: list[str]) -> list[Config]:
    """Every run; those that differ in their rate alone lie together, to share a compile."""
    base = base_config(SIZES[args.size], every)
    widths = args.widths or SIZES[args.size].widths
    return [
        at_width(base, width, row_scale, step)
        for row_scale in args.row_scales
        for width in widths
        for step in STEPS[args.size]
    ]


def losses(results: list[dict]) -> dict[str, dict[int, dict[float, float]]]:
    """Held-out losses by row scale, width and learning rate; infinity where a run diverged."""
    found: dict[str, dict[int, dict[float, float]]] = {}
    for result in results:
        run, loss = result["run"], result["held_out_loss"]
        curves = found.setdefault(run["row_scale"], {}).setdefault(run["model.width"], {})
        curves[run["learning_rate"]] = math.inf if loss is None else loss
    return found


def best_rate(curve: dict[float, float]) -> float:
    """The bottom of the parabola, in log rate, through the least loss and its two neighbours.

    At the edge of the grid, or beside a run that diverged, it is the rate of the least loss.
    """
    rates = sorted(curve)
    i = min(range(len(rates)), key=lambda i: curve[rates[i]])
    near = rates[i - 1 : i + 2] if i else []
    if len(near) < 3 or not all(math.isfinite(curve[rate]) for rate in near):
        return rates[i]
    (x0, x1, x2), (y0, y1, y2) = map(math.log, near), (curve[rate] for rate in near)
    down, up = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (up - down) / (x2 - x0)
    return math.exp((x0 + x1) / 2 - down / (2 * bend)) if bend > 0 else rates[i]


def table(found: dict[str, dict[int, dict[float, float]]]) -> list[str]:
    """A Markdown table: the best rate at each width, its power of the width, what a miss costs."""
    widths = sorted({width for curves in found.values() for width in curves})
    head = ("row scale", *(f"best at {width}" for width in widths), "power", "theory", "kept rate")
    body = []
    for name, curves in found.items():
        best = {width: best_rate(curve) for width, curve in sorted(curves.items())}
        power = f"{exponent(list(best), list(best.values())):.2f}"
        narrow, wide = curves[min(best)], curves[max(best)]
        kept = wide.get(min(narrow, key=lambda rate: narrow[rate]), math.inf)
        cells = (f"{best[width]:.2g}" if width in best else "" for width in widths)
        miss = f"+{kept - min(wide.values()):.3f}"
        body.append((name, *cells, power, f"{THEORY[name]:g}", miss))
    return markdown(head, body)


def draw(found: dict[str, dict[int, dict[float, float]]], out: Path) -> None:
    """Loss against rate: a panel for each row scale, a line for each width, a dot at its best."""
    figure = Figure(figsize=(3 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    widths = sorted({width for curves in found.values() for width in curves})
    shades = matplotlib.colormaps["viridis"]
    for axes, (name, curves) in zip(panels, found.items(), strict=True):
        for width, curve in sorted(curves.items()):
            shade = shades(0.9 * widths.index(width) / max(len(widths) - 1, 1))
            rates = sorted(rate for rate in curve if math.isfinite(curve[rate]))
            axes.plot(rates, [curve[rate] for rate in rates], color=shade, label=f"{width}")
            best = min(rates, key=lambda rate: curve[rate])
            axes.plot(best, curve[best], "o", color=shade)
        rates = sorted({rate for curve in curves.values() for rate in curve})
        axes.set(xscale="log", title=name, xlabel="learning rate")
        axes.set_xticks(rates, [f"{rate:.2g}" for rate in rates], rotation=45)
        axes.minorticks_off()
    bests = [min(curve.values()) for curves in found.values() for curve in curves.values()]
    room = max(0.2, max(bests) - min(bests))
    panels[0].set(ylabel="held-out loss", ylim=(min(bests) - room / 10, max(bests) + room))
    lines = {line.get_label(): line for axes in panels for line in axes.lines[::2]}
    figure.legend(lines.values(), lines.keys(), title="width", loc="outside right center")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(arguments: list[str]) -> None:
    args, results = results_of("transfer", arguments, Args, __doc__, grid, sweep)
    found = losses(results)
    draw(found, args.figure)
    print("\n".join(table(found)))


if __name__ == "__main__":
    run_main(main)

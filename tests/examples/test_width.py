"""Settings at other widths, changes of activations of known weights, both commands."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import tolerance

import optax_nora
from examples.llama import records, sharding
from examples.llama.config import ModelConfig, UserError
from examples.llama.model import Llama
from examples.width import coordinates, transfer
from examples.width.settings import Size, at_width, base_config, exponent

MODEL = ModelConfig(
    vocab_size=40, context=12, layers=2, width=16, heads=2, mlp_width=24, init_std=0.3
)
SMALL = "--model.vocab-size 304 --model.context 16 --model.width 16 --model.heads 2 --batch 4"
SMALL += " --model.mlp-width 24 --model.layers 1 --data.eval-tokens 100 --precision float32"


@pytest.fixture
def base():
    return base_config(Size("--preset 60m", ()), ["--precision", "float32"])


@pytest.mark.parametrize("row_scale", ["width", "unit", "rms"])
def test_a_step_is_as_long_as_said_at_the_base_width(base, row_scale):
    config = at_width(base, base.model.width, row_scale, 0.01)
    assert config.model.base_width == base.model.width
    assert dataclasses.replace(config.model, base_width=None) == base.model
    scale = optax_nora.scale_by_row_shape(row_scale, base_fan_in=config.base_fan_in)
    square = {"kernel": jnp.eye(base.model.width)}  # rows of length 1
    step = scale.update(square, scale.init(square))[0]["kernel"]
    # learning rates are written with 4 digits
    lengths = jnp.diag(step) * jnp.float32(config.learning_rate)
    np.testing.assert_allclose(lengths, 0.01, rtol=5e-4)


def test_every_size_but_vocabulary_and_depth_follows_the_width(base):
    model = at_width(base, 128, "unit", 0.01).model
    assert (model.width, model.heads, model.head_dim, model.mlp_width) == (128, 2, 64, 344)
    assert (model.layers, model.vocab_size, model.context) == (8, 32_000, 256)
    with pytest.raises(UserError, match="width 100 is no whole number of heads of size 64"):
        at_width(base, 100, "unit", 0.01)


@pytest.mark.parametrize("size", ["cpu", "h100"])
@pytest.mark.parametrize("module", [transfer, coordinates])
def test_runs_of_every_size_differ_in_width_rate_and_row_scale_alone(module, size):
    configs = module.grid(module.Args(size=size), ["--seed", "3"])
    assert {config.model.width for config in configs} == set(module.SIZES[size].widths)
    assert {config.row_scale for config in configs} == {"width", "fan_ratio", "rms", "unit"}
    for same in ("head_dim", "layers", "vocab_size", "base_width"):
        assert len({getattr(config.model, same) for config in configs}) == 1
    assert len({(config.adam_learning_rate, config.steps) for config in configs}) == 1
    assert {config.seed for config in configs} == {3}


def test_exponent_of_a_power_law():
    widths = [64, 128, 1024]
    assert exponent(widths, [3 * n**-0.5 for n in widths]) == pytest.approx(-0.5)
    assert math.isnan(exponent([64], [3.0]))


@pytest.mark.parametrize("at", [0.007, 0.01, 0.03])
def test_best_rate_is_the_bottom_of_a_parabola(at):
    curve = {r: 2 + math.log(r / at) ** 2 for r in (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)}
    assert transfer.best_rate(curve) == pytest.approx(at)


@pytest.mark.parametrize(
    ("curve", "best"),
    [
        ({0.1: 1.0, 0.2: 2.0, 0.4: 3.0}, 0.1),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0}, 0.4),
        ({0.1: 3.0, 0.2: 2.0, 0.4: math.inf}, 0.2),
    ],
)
def test_best_rate_at_the_edge_is_that_of_the_least_loss(curve, best):
    assert transfer.best_rate(curve) == best


def test_table_of_rates_that_go_as_the_root_of_the_width():
    results = [
        {
            "run": {"row_scale": "unit", "model.width": width, "learning_rate": rate},
            "held_out_loss": None if rate > 0.05 else 2 + math.log(rate * width**0.5 / 0.08) ** 2,
        }
        for width in (16, 64, 256)
        for rate in (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
    ]
    head, _, line = transfer.table(transfer.losses(results))
    assert head == (
        "| row scale | best at 16 | best at 64 | best at 256 | power | theory | kept rate |"
    )
    # the rate of width 16, at width 256, is 4 times the best there
    cost = math.log(4) ** 2
    assert line == f"| unit | 0.02 | 0.01 | 0.005 | -0.50 | -0.5 | +{cost:.3f} |"


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, MODEL.context), 0, MODEL.vocab_size)


@pytest.fixture(scope="module")
def model():
    return Llama(dataclasses.replace(MODEL, base_width=32), jax.random.key(0))


def test_outputs_are_those_of_the_model(model, tokens):
    found = list(coordinates.outputs(model, model, tokens))
    assert [kind for kind, _ in found] == [
        *coordinates.KINDS[:1],
        *coordinates.KINDS[1:-1],
        *coordinates.KINDS[1:-1],
        *coordinates.KINDS[-1:],
    ]
    expected = model.lm_head(model(tokens)[0])
    # the same sums in another order, through some ten products
    rounding = tolerance(MODEL.mlp_width, condition=10, size=float(jnp.abs(expected).max()))
    np.testing.assert_allclose(found[-1][1], expected, rtol=0, atol=rounding)


def test_own_change_is_that_of_the_weight_that_moved_and_total_all_that_follows(model, tokens):
    moved_model = nnx.clone(model)
    moved_model.layers[1].attention.out.kernel[...] += 0.1
    (graph, first), (_, now) = nnx.split(model), nnx.split(moved_model)
    found = coordinates.changes(graph, first, now, tokens)
    moved = {of: {k for k, x in found.items() if x[of] > 0} for of in ("own", "total")}
    assert moved["own"] == {"attention out"}
    assert moved["total"] == {"attention out", "gate", "up", "down", "logits"}


@pytest.fixture
def command(corpus, tmp_path, monkeypatch):
    """Runs a command of the folder on a small text and one device; returns its results."""
    devices = sharding.jax.devices()
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices[:1])

    def run(module, flags: str, *more: str) -> list[dict]:
        out, figure = tmp_path / "results" / "results.jsonl", tmp_path / "figures" / "figure.svg"
        paths = ["--out", str(out), "--figure", str(figure)]
        every = ["--data.path", str(corpus.folder), *SMALL.split(), *flags.split()]
        module.main([*paths, "--widths", "32", *more, "--", *every])
        assert figure.read_text().lstrip().startswith("<?xml")
        return records.read(out)

    return run


@pytest.mark.slow
def test_transfer_trains_with_every_rate_and_skips_what_is_done(command, capsys):
    flags = "--steps 2 --eval-every 2 --log-every 1"
    results = command(transfer, flags, "--row-scales", "width")
    assert [result["run"]["learning_rate"] for result in results] == list(transfer.STEPS["cpu"])
    assert {result["run"]["model.width"] for result in results} == {32}
    assert "| width |" in capsys.readouterr().out
    assert command(transfer, flags, "--row-scales", "width") == results
    assert command(transfer, flags, "--draw") == results


@pytest.mark.slow
def test_coordinates_measures_every_kind_and_skips_what_is_done(command, tmp_path, capsys):
    results = command(coordinates, "", "--row-scales", "unit")
    (result,) = results
    assert list(result["changes"]) == ["1", "5", "20"]
    for kinds in result["changes"].values():
        assert set(kinds) == set(coordinates.KINDS)
        assert kinds["embedding"]["total"] == kinds["embedding"]["own"] > 0
    # Theorem 4.1: rows that turn by 0.004 move no output by more than that times |x| = sqrt(n)
    assert 0 < result["changes"]["1"]["query"]["own"] < 0.004 * math.sqrt(32)
    assert "| total change of | steps | embedding |" in capsys.readouterr().out
    with (tmp_path / "results" / "results.jsonl").open("a") as file:
        file.write('{"run": {"cut')  # as a killed run may leave it
    assert command(coordinates, "", "--row-scales", "unit") == results


PAGE = Path(__file__).parents[2].joinpath("docs/width.md").read_text("utf-8")
RESULTS = Path(__file__).parents[2] / "docs/results"


def test_the_page_says_what_the_rows_say(tmp_path, capsys):
    out = str(RESULTS / "width-transfer-h100.jsonl")
    transfer.main(["--draw", "--out", out, "--figure", str(tmp_path / "figure.svg")])
    printed = capsys.readouterr().out
    assert printed.startswith("| row scale | best at ")
    assert printed in PAGE
    rows = records.read(RESULTS / "width-coordinates-h100.jsonl")
    for name in coordinates.row_scales(rows):
        powers = {
            step: {
                kind: f"{exponent(*line):+.2f}"
                for kind, line in coordinates.lines(rows, name, step, "own").items()
            }
            for step in (1, 20)
        }
        kinds = ("query", "value", "attention out", "up", "down")
        cells = " | ".join(f"{powers[20][kind]} ({powers[1][kind]})" for kind in kinds)
        assert f'| `"{name}"` | {cells} |' in PAGE

"""The table that a careful user reads first."""

import io

import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_nora

PARAMS = {
    "embed": {"embedding": jax.ShapeDtypeStruct((100, 8), jnp.bfloat16)},
    "layers": {
        "mlp": {"kernel": jax.ShapeDtypeStruct((3, 8, 32), jnp.float32)},
        "norm": {"scale": jax.ShapeDtypeStruct((3, 8), jnp.float32)},
    },
    "out": {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
}
RULE = optax_nora.by_path({"layers": optax_nora.stacked()})


def table(params=PARAMS, rule=RULE, **kwargs):
    file = io.StringIO()
    assert optax_nora.summarize(params, rule, file=file, **kwargs) is None
    return file.getvalue().splitlines()


def test_each_leaf_has_a_line():
    lines = [" ".join(line.split()) for line in table()]
    assert lines[:5] == [
        "path shape dtype optimizer reduction output batch row scale",
        "embed/embedding (100, 8) bfloat16 adamw",
        "layers/mlp/kernel (3, 8, 32) float32 nora (1,) (2,) (0,) 2",
        "layers/norm/scale (3, 8) float32 adamw",
        "out/kernel (8, 4) float32 nora (0,) (1,) () 1",
    ]


def test_the_totals():
    # 3 * 8 * 32 + 8 * 4 = 800 for Nora; 100 * 8 + 3 * 8 = 824 for AdamW.
    assert table()[-1] == (
        "nora: 2 leaves, 800 parameters (49.3 %); adamw: 2 leaves, 824 parameters (50.7 %)"
    )


def test_columns_are_aligned():
    lines = table()
    for word in ("float32", "nora"):
        columns = {line.index(word) for line in lines[1:5] if word in line}
        assert len(columns) == 1


@pytest.mark.parametrize(
    ("kwargs", "scales"),
    [
        ({"row_scale": "unit"}, ["1", "1"]),
        ({"row_scale": "width", "base_fan_in": 2}, ["0.5", "0.5"]),
        ({"row_scale": "rms"}, ["0.5657", "0.5657"]),  # 0.2 * sqrt(8)
        ({"row_scale": "rms", "rms": 1.0}, ["2.828", "2.828"]),
    ],
)
def test_the_scale_is_that_of_the_optimizer(kwargs, scales):
    lines = table(**kwargs)
    assert [lines[2].split()[-1], lines[4].split()[-1]] == scales
    unit = jax.tree.map(lambda x: jnp.ones(x.shape), PARAMS["out"])
    tx = optax_nora.scale_by_row_shape(**kwargs)
    assert f"{tx.update(unit, tx.init(unit))[0]['kernel'][0, 0]:.4g}" == scales[1]


def test_it_prints(capsys):
    optax_nora.summarize({"kernel": jnp.ones((2, 3))})
    assert "nora: 1 leaf, 6 parameters (100.0 %)" in capsys.readouterr().out


def test_an_empty_tree(capsys):
    optax_nora.summarize({})
    assert "nora: 0 leaves, 0 parameters (0.0 %)" in capsys.readouterr().out


def test_it_takes_any_dimension_numbers():
    lines = table({"x": jnp.ones((4, 8))}, MuonDimensionNumbers(1, 0))
    assert " ".join(lines[1].split()) == "x (4, 8) float32 nora (1,) (0,) () 1"


def test_wrong_arguments():
    with pytest.raises(ValueError, match="row_scale='fan' is unknown"):
        optax_nora.summarize({"kernel": jnp.ones((2, 3))}, row_scale="fan")
    with pytest.raises(ValueError, match="row_scale='width' needs base_fan_in"):
        optax_nora.summarize({"kernel": jnp.ones((2, 3))}, row_scale="width")
    with pytest.raises(ValueError, match="says nothing of the leaf kernel"):
        optax_nora.summarize({"kernel": jnp.ones((2, 3))}, {"other": None})

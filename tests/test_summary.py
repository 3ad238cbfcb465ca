"""The table that a careful user reads first."""

import io
import re

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
    with pytest.raises(ValueError, match="this is an optimizer; give the parameters"):
        optax_nora.summarize(optax_nora.nora(0.1))


def words(lines):
    return [" ".join(line.split()) for line in lines]


UNCLEAR = {
    **{f"layer_{i}": {"conv": {"kernel": jnp.ones((3, 3, 4, 8))}} for i in range(12)},
    "embed": {"proj": {"kernel": jnp.ones((4, 8))}},
    "step": jnp.zeros((), jnp.int32),
}


def test_what_init_would_ask_is_a_question_mark_and_code_to_paste():
    lines = words(table(UNCLEAR, None))
    assert lines[:4] == [
        "path shape dtype optimizer reduction output batch row scale",
        "embed/proj/kernel (4, 8) float32 adamw unsure: named as an embedding, perhaps none",
        "layer_*/conv/kernel x12 (3, 3, 4, 8) float32 ? (0, 1, 2) (3,) () "
        "convolution (..., in, out)",
        "step () int32 refused not floating: keep it out of the parameters",
    ]
    assert lines[5].endswith(
        "?: 12 leaves, 3,456 parameters (99.1 %); refused: 1 leaf, 1 parameters (0.0 %)"
    )
    code = "\n".join(table(UNCLEAR, None))
    code = code[code.index("optax_nora.by_path({") : code.index("with `from optax")]
    rule = eval(code, {"optax_nora": optax_nora, "MuonDimensionNumbers": MuonDimensionNumbers})
    assert "?" not in "".join(table(UNCLEAR, rule))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"other": None}, "says nothing of the leaf kernel"),
        ({"kernel": (0, 1)}, "these weight_dimension_numbers are wrong: .* has 0 at kernel/0"),
        (MuonDimensionNumbers(0, 5), r"kernel \(2, 3\) float32: output_axis=5 is out of range"),
        (optax_nora.by_path({"mpl": None}), "names mpl, which matches no leaf"),
        (optax_nora.stacked(axis=7), "has no axis 7 to be stacked along"),
    ],
)
def test_wrong_numbers_are_said_and_not_raised(numbers, message):
    assert re.search(message, "\n".join(table({"kernel": jnp.ones((2, 3))}, numbers)))


def test_what_is_no_array_is_said_and_not_raised():
    lines = table({"act": jax.nn.relu, "kernel": jnp.ones((2, 3))}, None)
    assert "the leaf act is" in lines[-1]
    assert words(lines)[2] == "kernel (2, 3) float32 nora (0,) (1,) () 1.225"


def test_rows_that_are_zero_or_short():
    w = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    params = {
        "good": {"kernel": w},
        "zero": {"kernel": 0 * w},
        "one_zero": {"kernel": w.at[:, 3].set(0)},
        "one_short": {"kernel": w.at[:, 3].multiply(0.01)},
        **{f"policy_{i}": {"w": 0.01 * w} for i in range(2)},
        "residual": {"kernel": 0.1 * w},  # scaled by depth, as in GPT-2
        "bias": 0 * w[0],
    }
    said = [line.split(":")[0] for line in table(params, None) if "Nora turns rows" in line]
    assert said == [
        "one_short/kernel has a row far shorter than its others",
        "one_zero/kernel has rows of zeros",
        "policy_*/w has rows far shorter than those of the other matrices",
        "zero/kernel has rows of zeros",
    ]
    # Shapes have no values, and a trace has none yet.
    shapes = jax.eval_shape(lambda: params)
    assert "Nora turns rows" not in "".join(table(shapes, None))
    jax.eval_shape(lambda: optax_nora.summarize(params, file=io.StringIO()))

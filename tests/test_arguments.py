"""Bad arguments, masks and states: one error, at once, that names what is wrong."""

import contextlib
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import optax_nora
from optax_nora import baselines

PARAMS = {
    "up": {"kernel": jnp.eye(4, 8) + 1, "bias": jnp.ones(8)},
    "out_proj": {"kernel": jnp.eye(8) + 1},
}
GRADS = jax.tree.map(jnp.zeros_like, PARAMS)
with_adamw = functools.partial(optax_nora.with_adamw, baselines.scale_by_rmnp(), 0.1)

NUMBERS = [
    *((functools.partial(optax_nora.nora, 0.1), x) for x in ("beta", "eps", "weight_decay")),
    *((functools.partial(optax_nora.nora, 0.1), f"adam_{x}") for x in ("b1", "b2", "eps")),
    (functools.partial(optax_nora.nora, 0.1), "adam_weight_decay"),
    (optax_nora.nora, "learning_rate"),
    (optax_nora.scale_by_nora, "beta"),
    (optax_nora.scale_by_nora, "eps"),
    (with_adamw, "weight_decay"),
    (with_adamw, "adam_weight_decay"),
    (functools.partial(optax_nora.with_adamw, baselines.scale_by_rmnp()), "learning_rate"),
    (optax_nora.row_normalize, "eps"),
    (functools.partial(optax_nora.row_orthonormalize, 2), "eps"),
    (functools.partial(optax_nora.row_geometry, PARAMS, PARAMS), "eps"),
    (baselines.scale_by_rmnp, "beta"),
    (baselines.scale_by_mano, "beta"),
    (baselines.scale_by_muon, "beta"),
    (baselines.scale_by_muon, "eps"),
    (baselines.scale_by_sso, "beta"),
    (baselines.scale_by_adamp, "b1"),
    (baselines.scale_by_adamp, "weight_decay"),
    (baselines.scale_by_sgdp, "beta"),
]
NONE_TOO = [
    (functools.partial(optax_nora.nora, 0.1), "momentum"),
    (functools.partial(optax_nora.nora, 0.1), "adam_learning_rate"),
    (optax_nora.scale_by_nora, "momentum"),
    (functools.partial(optax_nora.nora, 0.1, row_scale="width"), "base_fan_in"),
    (functools.partial(optax_nora.scale_by_row_shape, "width"), "base_fan_in"),
]


@pytest.mark.parametrize("value", ["0.1", [0.1], np.ones(2), 1j, True, {}, jax.random.key(0)])
@pytest.mark.parametrize(("make", "name"), NUMBERS + NONE_TOO)
def test_what_is_no_number(make, name, value):
    with pytest.raises(TypeError, match=f"(?s)^{name}=.* is not a number"):
        make(**{name: value})


@pytest.mark.parametrize(
    "value", [math.inf, math.nan, -1.0, np.float64(-1), jnp.nan, 1e39, 10**400]
)
@pytest.mark.parametrize(("make", "name"), NUMBERS + NONE_TOO)
def test_what_is_out_of_range(make, name, value):
    with pytest.raises(ValueError, match=f"^{name}=.* is out of range"):
        make(**{name: value})


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_none_where_a_number_belongs(make, name):
    with pytest.raises(TypeError, match=f"^{name}=None is not a number"):
        make(**{name: None})


@pytest.mark.parametrize("dtype", [int, "float8_e4m3fn", bool, np.ones(2), jnp.ones(2), "huge"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (functools.partial(optax_nora.nora, 0.1), "mu_dtype"),
        (with_adamw, "adam_mu_dtype"),
        *((getattr(baselines, f"scale_by_{x}"), "mu_dtype") for x in ("rmnp", "mano", "muon")),
        *((getattr(baselines, f"scale_by_{x}"), "mu_dtype") for x in ("sso", "adamp", "sgdp")),
    ],
)
def test_dtypes_that_hold_no_momentum(make, name, dtype):
    with pytest.raises(ValueError, match=f"^{name}=.* cannot hold a momentum"):
        make(**{name: dtype})


@pytest.mark.parametrize("leaf", ["kernel", "bias"])
def test_a_real_moment_of_a_complex_leaf(leaf):
    params = {leaf: jnp.ones((4, 4) if leaf == "kernel" else 4, complex)}
    with pytest.raises(ValueError, match=f"{leaf} .* would lose the imaginary part"):
        optax_nora.nora(0.1, mu_dtype="float32").init(params)


@pytest.mark.parametrize("name", ["row_scale", "backend"])
@pytest.mark.parametrize("value", [None, 1, np.array(["xla", "unit"])])
def test_names_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.* is unknown; take one of"):
        optax_nora.nora(0.1, **{name: value})


def test_what_is_no_transformation():
    with pytest.raises(TypeError, match=r"^tx=.*; call it"):
        optax_nora.with_adamw(baselines.scale_by_rmnp, 0.1)
    with pytest.raises(TypeError, match=r"^inner=.* is not an optax.GradientTransformation"):
        optax_nora.with_float32_master(None)


# Schedules


def down(step):
    return 0.5 / (1 + step)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize(
    "name", ["learning_rate", "beta", "momentum", "weight_decay", "adam_weight_decay"]
)
def test_schedules_are_numbers_of_the_step(name, backend):
    settings = {"learning_rate": 0.1, "backend": backend}
    tx = optax_nora.nora(**settings | {name: down})
    params, state = PARAMS, tx.init(PARAMS)
    for t in range(2):
        grads = jax.tree.map(lambda x, t=t: jnp.cos(x + t), PARAMS)
        fixed = optax_nora.nora(**settings | {name: down(t)})
        # A schedule of AdamW's own has a count in the state; all else lies in the same order.
        here = dict(jax.tree_util.tree_leaves_with_path(state))
        own = jax.tree_util.tree_map_with_path(
            lambda path, _, here=here: here[path], fixed.init(params)
        )
        expected, _ = fixed.step(grads, own, params)
        params, state = tx.step(grads, state, params)
        jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("name", ["eps", "adam_b1", "adam_b2", "adam_eps", "base_fan_in"])
def test_no_other_argument_takes_a_schedule(name):
    with pytest.raises(TypeError, match=f"{name}=.* a schedule works for learning rates, beta"):
        optax_nora.nora(0.1, **{name: down})


# Masks of weight decay


class Net(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))


def boxed():
    names = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
    vector = nn.with_partitioning(nn.initializers.ones, ("mlp",))
    dense = nn.Dense(8, kernel_init=names, bias_init=vector)
    return {"up": dense.init(jax.random.key(0), jnp.ones((1, 4)))["params"]}


def masks():
    state = nnx.state(Net(), nnx.Param)
    trees = {"linen": boxed(), "nnx": state, "pure": nnx.to_pure_dict(state)}
    return [
        pytest.param(params, other, id=f"{theirs} for {ours}")
        for ours, params in trees.items()
        for theirs, other in trees.items()
    ]


@pytest.mark.parametrize(("params", "other"), masks())
@pytest.mark.parametrize("method", ["update", "step"])
@pytest.mark.parametrize(
    "make",
    [
        lambda mask: optax_nora.nora(
            0.1, weight_decay=1.0, adam_weight_decay=1.0, weight_decay_mask=mask
        ),
        lambda mask: with_adamw(1.0, mask, adam_weight_decay=1.0),
    ],
)
def test_a_mask_by_tree_map_in_any_boxes(make, method, params, other):
    params = jax.tree.map(lambda x: x + 1, params)
    tx = make(jax.tree.map(lambda x: x.ndim == 1, other))
    zeros = jax.tree.map(jnp.zeros_like, params)
    out, _ = getattr(tx, method)(zeros, tx.init(params), params)
    moved = jax.tree.map(lambda new, old: new + old if method == "update" else new, out, params)
    leaves = zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True)
    for new, old in leaves:
        np.testing.assert_allclose(new, old * (0.9 if old.ndim == 1 else 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"up": 1.0, "out_proj": True}, "weight_decay_mask has 1.0 at up, not a bool"),
        ({"up": "no"}, "weight_decay_mask has 'no' at up"),
        (0.9, "weight_decay_mask has 0.9 at .root., not a bool"),
        (False, "one boolean for all leaves, .* name it in static_args"),
    ],
)
def test_masks_that_are_none(mask, message):
    for make in (
        lambda: optax_nora.nora(0.1, weight_decay_mask=mask),
        lambda: with_adamw(0.1, mask),
        lambda: baselines.scale_by_adamp(weight_decay=0.1, weight_decay_mask=mask),
    ):
        with pytest.raises(TypeError, match=message):
            make()


def test_a_mask_that_leaves_one_out():
    tx = optax_nora.nora(0.1, weight_decay=0.1, weight_decay_mask={"up": True})
    with pytest.raises(
        ValueError, match="weight_decay_mask says nothing of the leaf out_proj/kernel"
    ):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_a_function_for_the_mask_is_not_lost_in_inject_hyperparams():
    mask = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
    inject = functools.partial(optax.inject_hyperparams, optax_nora.nora)
    with pytest.raises(TypeError, match="name it in static_args"):
        inject()(0.1, weight_decay_mask=mask).init(PARAMS)
    inject(static_args=("weight_decay_mask",))(0.1, weight_decay_mask=mask).init(PARAMS)


# States of other settings

MADE = {
    "nora": lambda: optax_nora.nora(0.1),
    "a schedule": lambda: optax_nora.nora(down),
    "a schedule of decay": lambda: optax_nora.nora(0.1, adam_weight_decay=down),
    "a mask": lambda: optax_nora.nora(0.1, weight_decay_mask={"up": True, "out_proj": False}),
    "routing": lambda: optax_nora.nora(
        0.1, weight_dimension_numbers=optax_nora.by_path({"out_proj": None})
    ),
    "a peer": lambda: with_adamw(),
    "another peer": lambda: optax_nora.with_adamw(baselines.scale_by_mano(), 0.1),
    "a chain": lambda: optax_nora.with_adamw(
        optax.chain(baselines.scale_by_rmnp(), optax_nora.scale_by_row_shape()), 0.1
    ),
    "masters": lambda: optax_nora.with_float32_master(optax_nora.nora(0.1)),
    "AdamW": lambda: optax.adamw(0.1),
    "masters of AdamW": lambda: optax_nora.with_float32_master(optax.adamw(0.1)),
    "optax's Muon": lambda: optax.contrib.muon(0.1),
}


# These hold all that the other reads.
FIT = {("nora", x) for x in ("a schedule", "a schedule of decay", "a mask")}
FIT |= {("a peer", "another peer")} | {(x, x) for x in MADE}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("used", [x for x in MADE if "AdamW" not in x and "optax" not in x])
def test_a_state_of_other_settings_fits_or_says_so(made, used):
    tx, state = MADE[used](), MADE[made]().init(PARAMS)
    says = contextlib.nullcontext()
    if (used, made) not in FIT:
        message = "under other settings: at .* it has|which was made under another routing"
        says = pytest.raises(ValueError, match=message)
    with says:
        tx.update(GRADS, state, PARAMS)


def test_it_says_where_the_state_differs():
    def use(used, made, method="update"):
        tx = MADE[used]()
        getattr(tx, method)(GRADS, MADE[made]().init(PARAMS), PARAMS)

    for used, made, message in [
        (
            "nora",
            "masters",
            "at its root it has MasterState, and this optimizer has PartitionState",
        ),
        ("a schedule", "nora", "has EmptyState, and this optimizer has ScaleByScheduleState"),
        ("a mask", "nora", "has EmptyState, and this optimizer has MaskedState"),
        ("nora", "routing", "out_proj/kernel .* has no momentum in this state"),
        ("routing", "nora", "'out_proj'.* it has MaskedNode, and this optimizer has an array"),
        ("nora", "a chain", r"'matrix'.*it has tuple, and this optimizer has MomentumState"),
    ]:
        for method in ("update",) if used == "masters" else ("update", "step"):
            with pytest.raises(ValueError, match=message):
                use(used, made, method)


def test_an_error_of_its_own_is_left_alone():
    def broken(updates, state, params=None):
        raise KeyError("my own fault")

    tx = optax_nora.with_adamw(optax.GradientTransformation(optax.init_empty_state, broken), 0.1)
    with pytest.raises(KeyError, match="my own fault"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


# Rules


@pytest.mark.parametrize(
    "maker",
    [
        *(optax_nora.stacked, optax_nora.kernels, optax_nora.by_path, MuonDimensionNumbers),
        *(optax_nora.rules.gemma, optax_nora.rules.maxtext),
    ],
)
def test_rules_that_were_not_called(maker):
    with pytest.raises(ValueError, match=rf"{maker.__name__} itself; call it: {maker.__name__}\("):
        optax_nora.nora(0.1, weight_dimension_numbers=maker).init(PARAMS)


@pytest.mark.parametrize("axis", [None, "0", 0.0, True, (0, None)])
def test_axes_that_are_none(axis):
    with pytest.raises(ValueError, match=r"reduction_axis=.* is no axis: give an int"):
        optax_nora.by_path({"up": MuonDimensionNumbers(axis, 1)})


@pytest.mark.parametrize("specs", ["x", optax_nora.stacked(), {"up": ("x", None)}])
def test_in_shard_map_takes_partition_specs(specs):
    with pytest.raises(ValueError, match=r"is no jax.sharding.PartitionSpec"):
        optax_nora.in_shard_map(specs)


def test_a_string_is_no_tuple_of_axis_names():
    with pytest.raises(TypeError, match="'layers' is a string; give a tuple"):
        optax_nora.from_logical_axes(boxed(), batch_axes="layers")


# Measurements


@pytest.mark.parametrize(
    ("rate", "decay"), [(0.1, 0.0), (0.1, -1.0), (2.0, 1.0), (0.1, np.array([0.1, 0.0]))]
)
def test_norms_that_settle_nowhere(rate, decay):
    with pytest.raises(ValueError, match="balance at no norm"):
        optax_nora.equilibrium_row_norm(rate, decay)


@pytest.mark.parametrize("value", [None, "0.1", down])
def test_an_equilibrium_of_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^weight_decay=.* is not a number"):
        optax_nora.equilibrium_row_norm(0.1, value)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_matrices_without_weights(shape, capsys):
    params = {"kernel": jnp.ones(shape), "up": PARAMS["up"]}
    assert list(optax_nora.row_geometry(params, params)) == ["up/kernel"]
    optax_nora.summarize(params, block_rows=2)
    assert "kernel" in capsys.readouterr().out


@pytest.mark.parametrize("leaf", ["a string", jnp.sin])
@pytest.mark.parametrize(
    "init",
    [
        optax_nora.nora(0.1).init,
        optax_nora.with_float32_master(optax.sgd(0.1)).init,
        optax_nora.keep_row_norms().init,
        baselines.scale_by_muon().init,
        baselines.scale_by_adamp().init,
        optax_nora.matrix_mask,
    ],
)
def test_leaves_that_are_no_arrays(init, leaf):
    with pytest.raises(ValueError, match=r"the leaf odd/one is .*, not an array"):
        init({"odd": {"one": leaf}})

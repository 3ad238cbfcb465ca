"""Whatever form the dimension numbers come in, each leaf ends where it should."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxes import Box
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora
from optax_nora import by_path, infer_dimension_numbers, matrix_mask, stacked
from optax_nora._routing import routes_of

DENSE = MuonDimensionNumbers((0,), (1,))
PARAMS = {
    "embed": {"embedding": jnp.ones((16, 4))},
    "mlp": {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}},
    "lm_head": {"kernel": jnp.ones((4, 16))},
}


def numbers_of(params, given=None):
    tree = infer_dimension_numbers(params, given)
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    )
    return {"/".join(str(k.key) for k in path): numbers for path, numbers in flat}


def test_the_default_is_by_name_and_shape():
    assert numbers_of(PARAMS) == {
        "embed/embedding": None,
        "mlp/up/kernel": DENSE,
        "mlp/up/bias": None,
        "lm_head/kernel": None,
    }


OUT_IN = MuonDimensionNumbers((1,), (0,))
ONE_MATRIX = {"embed": None, "mlp": {"up": {"kernel": OUT_IN, "bias": None}}, "lm_head": None}


@pytest.mark.parametrize(
    "given",
    [
        {
            "embed": {"embedding": None},
            "mlp": {"up": {"kernel": OUT_IN, "bias": None}},
            "lm_head": {"kernel": None},
        },
        ONE_MATRIX,
        by_path({"mlp/up/kernel": OUT_IN}),
        lambda params: ONE_MATRIX,
        lambda params: by_path({"bias": None, **dict.fromkeys(params["mlp"], OUT_IN)}),
    ],
    ids=["tree", "prefix tree", "rule", "function to a tree", "function to a rule"],
)
def test_each_form_of_dimension_numbers(given):
    assert numbers_of(PARAMS, given) == {
        "embed/embedding": None,
        "mlp/up/kernel": OUT_IN,
        "mlp/up/bias": None,
        "lm_head/kernel": None,
    }


def test_a_prefix_speaks_for_all_below_it():
    params = {"a": {"kernel": jnp.ones((4, 8)), "other": jnp.ones((2, 3))}, "b": jnp.ones(3)}
    assert numbers_of(params, {"a": OUT_IN, "b": None}) == {
        "a/kernel": OUT_IN,
        "a/other": OUT_IN,
        "b": None,
    }


def test_one_spec_for_all_leaves():
    params = {"a": jnp.ones((4, 8)), "b": jnp.ones((2, 3, 4))}
    assert numbers_of(params, MuonDimensionNumbers(-1, 0)) == {
        "a": MuonDimensionNumbers((1,), (0,)),
        "b": MuonDimensionNumbers((2,), (0,)),
    }


def test_a_tree_that_does_not_match():
    with pytest.raises(ValueError, match=r"names mlp/down, which matches no leaf; .*mlp/up"):
        infer_dimension_numbers(PARAMS, {"embed": None, "mlp": {"down": DENSE}, "lm_head": None})
    with pytest.raises(ValueError, match=r"says nothing of the leaf lm_head/kernel .*or None"):
        infer_dimension_numbers(PARAMS, {"embed": None, "mlp": None})
    with pytest.raises(ValueError, match=r"has 0 at mlp/up/0; give .*MuonDimensionNumbers"):
        infer_dimension_numbers(PARAMS, {"embed": None, "mlp": {"up": (0, 1)}, "lm_head": None})


def test_a_pattern_that_matches_nothing_is_told():
    with pytest.warns(UserWarning, match="names mpl, which matches no leaf; the leaves are"):
        infer_dimension_numbers(PARAMS, by_path({"mpl": None}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optax_nora.nora(0.1, weight_dimension_numbers=by_path({"mpl": None})).init(PARAMS)
    assert len(told) == 1  # however many transformations route
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_dimension_numbers(PARAMS, by_path({"mlp": None}))


def test_a_stacked_model_needs_one_rule():
    params = {
        "layers": {
            "mlp": {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.ones((3, 8))},
            "norm": {"scale": jnp.ones((3, 4))},
        },
        "out": {"kernel": jnp.ones((4, 8))},
    }
    assert numbers_of(params, by_path({"layers": stacked()})) == {
        "layers/mlp/kernel": MuonDimensionNumbers((1,), (2,)),
        "layers/mlp/bias": None,
        "layers/norm/scale": None,
        "out/kernel": DENSE,
    }


def test_fan_in_of_one_goes_to_adamw():
    # Nothing is orthogonal to a number, whatever the user says.
    params = {"one": {"kernel": jnp.ones((1, 8))}, "two": {"kernel": jnp.ones((2, 8))}}
    expected = {"one": {"kernel": False}, "two": {"kernel": True}}
    assert matrix_mask(params) == expected
    assert matrix_mask(params, DENSE) == expected
    assert matrix_mask(params["one"], OUT_IN) == {"kernel": True}


def test_matrix_mask_is_for_optax_masked():
    tx = optax.masked(optax_nora.row_normalize(), matrix_mask)
    grads = jax.tree.map(lambda x: 3 * x, PARAMS)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(
        np.linalg.norm(updates["mlp"]["up"]["kernel"], axis=0), 1, rtol=tolerance(8)
    )
    np.testing.assert_array_equal(updates["lm_head"]["kernel"], grads["lm_head"]["kernel"])
    np.testing.assert_array_equal(updates["mlp"]["up"]["bias"], grads["mlp"]["up"]["bias"])


@pytest.mark.parametrize(
    "kind", ["shapes", "boxes", "tracers", "numpy", "list", "tuple", "none leaves", "masked"]
)
def test_every_kind_of_tree(kind):
    kernel, bias = jnp.ones((4, 8)), jnp.ones(8)
    tree = {
        "shapes": {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32), "bias": bias},
        "boxes": {"kernel": Box(kernel), "bias": Box(bias)},
        "tracers": {"kernel": kernel, "bias": bias},
        "numpy": {"kernel": np.ones((4, 8), np.float32), "bias": np.ones(8, np.float32)},
        "list": {"layers": [{"kernel": kernel}, {"bias": bias}]},
        "tuple": ({"kernel": kernel}, {"bias": bias}),
        "none leaves": {"kernel": kernel, "bias": bias, "nothing": None},
        "masked": {"kernel": kernel, "bias": bias, "gone": optax.MaskedNode()},
    }[kind]
    seen = []

    def route(tree):
        seen.append(infer_dimension_numbers(tree))
        return 0

    jax.jit(route)(tree) if kind == "tracers" else route(tree)
    found = jax.tree.leaves(seen[0], is_leaf=lambda x: isinstance(x, MuonDimensionNumbers))
    assert found == [DENSE]


def test_empty_trees():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infer_dimension_numbers({}) == {}
        tx = optax_nora.nora(0.1)
        updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (MuonDimensionNumbers(None, 1), r"reduction_axis=None is no axis: give an int"),
        (MuonDimensionNumbers("0", 1), r"reduction_axis='0' is no axis"),
        (MuonDimensionNumbers(0, (1, None)), r"output_axis=\(1, None\) is no axis"),
        ({"up": MuonDimensionNumbers(0.5, 1)}, r"reduction_axis=0.5 is no axis"),
        (stacked, "stacked itself; call it"),
        (jnp.zeros(()), "functions for schedules"),  # what inject_hyperparams makes of a function
    ],
)
def test_what_are_no_dimension_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        infer_dimension_numbers({"up": {"kernel": jnp.ones((4, 8))}}, given)


def test_axes_may_be_numpy_integers():
    numbers = MuonDimensionNumbers(np.int64(0), (np.int32(1),))
    assert infer_dimension_numbers({"up": jnp.ones((4, 8))}, numbers) == {"up": DENSE}
    assert hash(by_path({"up": MuonDimensionNumbers(np.array([0]), [1])}))


class Callable(dict):
    """A tree that can be called, as a module of Equinox."""

    def __call__(self, x):
        raise AssertionError("a tree is no function")


jax.tree_util.register_pytree_with_keys(
    Callable,
    lambda tree: ([(jax.tree_util.GetAttrKey(k), v) for k, v in tree.items()], tuple(tree)),
    lambda keys, values: Callable(zip(keys, values, strict=True)),
)


def test_a_tree_that_can_be_called_is_a_tree():
    params = Callable(weight=jnp.ones((8, 4)), bias=jnp.ones(8))
    specs = jax.tree.map(lambda p: OUT_IN if p.ndim == 2 else None, params)
    by_function = infer_dimension_numbers(params, lambda _: specs)
    inferred = infer_dimension_numbers(params, specs)
    assert inferred == by_function == {"weight": OUT_IN, "bias": None}
    assert infer_dimension_numbers(params, inferred) == inferred


def test_specs_may_be_in_boxes():
    params = {"up": {"kernel": Box(jnp.ones((4, 8))), "bias": Box(jnp.ones(8))}}
    specs = jax.tree.map(lambda p: OUT_IN if p.ndim == 2 else None, params)
    assert isinstance(specs["up"]["kernel"], Box)
    assert infer_dimension_numbers(params, specs) == {"up": {"kernel": OUT_IN, "bias": None}}


def test_specs_may_be_masked():
    params = {"up": optax.MaskedNode(), "down": jnp.ones((4, 8))}
    specs = {"up": optax.MaskedNode(), "down": OUT_IN}
    assert infer_dimension_numbers(params, specs) == specs


def test_keys_with_slashes_are_kept_apart():
    params = {"a": {"b/c": jnp.ones((4, 8))}, "a/b": {"c": jnp.ones((4, 8))}}
    specs = {"a": {"b/c": OUT_IN}, "a/b": {"c": None}}
    assert infer_dimension_numbers(params, specs) == specs
    assert list(routes_of(params, specs)) == [("a", "b/c"), ("a/b", "c")]


@pytest.mark.parametrize("leaf", ["relu", jax.nn.relu, object()])
def test_what_is_no_array_is_named(leaf):
    with pytest.raises(ValueError, match=r"the leaf mlp/odd is .*not an array"):
        infer_dimension_numbers({"mlp": {"odd": leaf, "kernel": jnp.ones((4, 8))}})


def test_an_optimizer_is_no_tree_of_parameters():
    with pytest.raises(ValueError, match="this is an optimizer; give the parameters"):
        infer_dimension_numbers(optax_nora.nora(0.1))


def test_all_that_is_unclear_is_raised_at_once():
    params = {
        "a": {"weight": jnp.ones((4, 8))},
        "b": {"kernel": jnp.ones((3, 4, 8))},
        "c": {"kernel": jnp.ones((4, 8))},
    }
    with pytest.raises(ValueError, match=r"(?s)which axes are a row.*a/weight.*b/kernel") as error:
        routes_of(params, None, whole_model=True)
    assert "c/kernel" not in str(error.value)


def test_a_lone_array_is_a_tree():
    assert infer_dimension_numbers(jnp.ones((4, 8))) == DENSE
    assert infer_dimension_numbers(jnp.ones((4, 8)), OUT_IN) == OUT_IN


def test_zero_size_leaves_pass():
    params = {"empty": jnp.ones((0, 8)), "rows": jnp.ones((8, 0)), "kernel": jnp.ones((4, 8))}
    tx = optax_nora.nora(0.1, weight_dimension_numbers=DENSE)
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_nothing_for_nora_is_told():
    with pytest.warns(UserWarning, match=r"no leaf goes to the matrix optimizer.*summarize"):
        optax_nora.nora(0.1).init({"bias": jnp.ones(3)})

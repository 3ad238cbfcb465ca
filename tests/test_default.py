"""The default routing: right, or asked for, from names, ranks and neighbours."""

import io

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import optax_nora
from optax_nora._default import Default
from optax_nora._routing import as_rule, survey
from optax_nora._rules import ByPath

ASK, UNSURE = "ask", "unsure"
IN_OUT, OUT_IN = ((0,), (1,)), ((1,), (0,))


def tree_of(shapes, dtype=jnp.float32):
    """Nested dicts from a dict of paths to shapes."""
    tree = {}
    for path, shape in shapes.items():
        *above, name = path.split("/")
        node = tree
        for segment in above:
            node = node.setdefault(segment, {})
        node[name] = jax.ShapeDtypeStruct(shape, dtype)
    return tree


def routing(shapes, given=None, **kwargs):
    """Where each leaf goes: (reduction, output), None for AdamW, or `ASK`."""
    tree = tree_of(shapes, **kwargs)
    return {
        one.leaf.slashed: ASK if one.decision.ask else one.rows and tuple(one.rows[:2])
        for one in survey(tree, as_rule(given, Default(), tree))
    }


def unsure(shapes):
    """The paths that `summarize` marks."""
    routed = survey(tree_of(shapes), Default())
    return {one.leaf.slashed for one in routed if not one.decision.sure and not one.decision.ask}


def pasted(shapes, rule=None):
    """The routing after pasting what the error proposes."""
    with pytest.raises(ValueError, match="nothing says which axes are a row") as error:
        optax_nora.nora(0.1, weight_dimension_numbers=rule).init(tree_of(shapes))
    message = str(error.value)
    code = message[message.index("optax_nora.by_path({") : message.index("with `from optax")]
    code = code.replace("'**': ...", "'**': rule")
    names = {"optax_nora": optax_nora, "MuonDimensionNumbers": MuonDimensionNumbers, "rule": rule}
    answer = eval(code, names)
    if isinstance(rule, ByPath):  # "your own patterns follow here"
        answer = ByPath((*answer.patterns, *rule.patterns))
    return routing(shapes, answer)


# Two axes


@pytest.mark.parametrize(
    "path",
    [
        "kernel",
        "mlp/up/kernel",
        "w",
        "layers/0/lora_a",
        "0/1",
        # Words are whole: none of these names a vector, an embedding or a head.
        "embedded_mlp/kernel",
        "reembed/kernel",
        "headroom/kernel",
        "multi_head_attention/kernel",
        "MultiHead/kernel",
        "normal/kernel",
        "scaled",
        "biased/kernel",
        "vocabulary/kernel",
        "wq_b/kernel",
    ],
)
def test_two_axes_are_a_matrix(path):
    assert routing({path: (4, 8)}) == {path: IN_OUT}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64, jnp.complex64])
def test_every_floating_dtype_makes_a_matrix(dtype):
    assert routing({"kernel": (4, 8)}, dtype=dtype) == {"kernel": IN_OUT}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_no_other_dtype_does(dtype):
    assert routing({"kernel": (4, 8), "w": (3, 4, 8)}, dtype=dtype) == {"kernel": None, "w": None}


@pytest.mark.parametrize(
    "path",
    [
        *("bias", "b", "b1", "scale", "gamma", "beta", "offset", "q_bias", "ln_scale", "dt_bias"),
        *("A_log", "D", "ln_1/weight", "norm/weight", "RMSNorm_0/w", "layernorm/kernel"),
        *("attn/sinks", "moe/wi_0_bias", "bias/value", "mlp/bias/0", "qNorm/scale/array"),
        *("log_std", "layer_scale", "layerscale", "q_norm/weight/array"),
    ],
)
@pytest.mark.parametrize("shape", [(12, 64), (64, 12), (12, 6, 64)])
def test_vectors_go_to_adamw_however_many_axes_they_have(path, shape):
    path = f"block/{path}"
    assert routing({path: shape}) == {path: None}
    assert not unsure({path: shape})
    assert routing({path: shape}, optax_nora.stacked(axis=1)) == {path: None}


@pytest.mark.parametrize(
    "path",
    [
        *("embed/kernel", "embedding", "token_embedding/weight", "Embed_0/embedding"),
        *("embedder/input", "embed_tokens/weight", "wte/weight", "transformer/wpe/weight"),
        *("tokenEmbedding/kernel", "TokenEmbed/kernel", "tokens", "cls_token", "pos_emb"),
        *("relative_position_bias_table", "tok_embeddings/weight", "embed/weight/array"),
        *("lm_head/kernel", "LMHead/kernel", "lmHead/kernel", "unembed/kernel", "logits/kernel"),
        *("logits_dense/kernel", "output_head/kernel", "outputHead/kernel", "output-head/kernel"),
        *("head/kernel", "Head/kernel", "decoder.logits/kernel", "logitdense/kernel"),
        *(
            "classifier/kernel",
            "qa_outputs/kernel",
            "score/kernel",
            "value_head/w",
            "head_0/kernel",
        ),
    ],
)
@pytest.mark.parametrize("shape", [(32, 64), (2, 32, 64)])
def test_embeddings_and_output_heads_go_to_adamw(path, shape):
    assert routing({path: shape}) == {path: None}
    assert not unsure({path: shape})


@pytest.mark.parametrize("path", ["lora_b", "kernel_lora_b", "q/lora_b/kernel", "lora_B", "lora/b"])
def test_factors_that_start_at_zero_go_to_adamw(path):
    assert routing({path: (4, 64)}) == {path: None}


@pytest.mark.parametrize(
    "shapes",
    [
        {"output/kernel": (64, 1000), "embed/embedding": (1000, 64)},
        {"output/kernel": (1000, 64), "tok_embed/embedding": (1000, 64)},
        {"output/kernel": (32, 100), "wte": (100, 32), "up/kernel": (32, 128)},
    ],
)
def test_a_matrix_of_the_embeddings_size_is_a_head(shapes):
    assert routing(shapes)["output/kernel"] is None
    assert unsure(shapes) == {"output/kernel"}


def test_many_matrices_of_the_embeddings_size_are_no_heads():
    mlp = {f"{i}/{name}/kernel": (64, 256) for i in range(3) for name in ("up", "gate")}
    routed = routing({**mlp, "embed/embedding": (256, 64)})
    assert [routed[path] for path in mlp] == [IN_OUT] * len(mlp)
    # Positions are no words: an MLP may well be as wide as there are positions.
    assert (
        routing({"up/kernel": (64, 256), "pos_embed/embedding": (256, 64)})["up/kernel"] == IN_OUT
    )


@pytest.mark.parametrize(
    ("path", "shape", "where"),
    [
        ("embedder/mm_input_projection/w", (64, 128), None),
        ("embeddings/projection/kernel", (64, 128), None),
        ("time_embedding/linear_1/kernel", (64, 128), None),
        ("pre_logits/kernel", (64, 128), None),
        ("cls/predictions/transform/dense/kernel", (64, 128), None),
        ("norm1/linear/kernel", (64, 128), None),
        ("embed_to_model/kernel", (64, 128), None),
        ("mix", (4, 4), IN_OUT),
        ("stream_mixing/kernel", (4, 4), IN_OUT),
        ("something", (64, 128), IN_OUT),
    ],
)
def test_what_is_unsure_is_marked(path, shape, where):
    assert routing({path: shape}) == {path: where}
    assert unsure({path: shape}) == {path}


@pytest.mark.parametrize("path", ["linear/weight", "cell/weight_hh", "attn/in_proj_weight"])
@pytest.mark.parametrize("shape", [(128, 64), (64, 64)])
def test_a_weight_is_asked_for(path, shape):
    assert routing({path: shape}) == {path: ASK}
    assert pasted({path: shape}) == {path: OUT_IN}


@pytest.mark.parametrize("name", ["weight", "kernel", "w", "something"])
@pytest.mark.parametrize("bias", ["bias", "b"])
def test_a_bias_tells_which_side_is_out(name, bias):
    assert routing({f"a/{name}": (128, 64), f"a/{bias}": (64,)})[f"a/{name}"] == IN_OUT
    assert routing({f"a/{name}": (128, 64), f"a/{bias}": (128,)})[f"a/{name}"] == OUT_IN
    wrong = {f"a/{name}": (128, 64), f"a/{bias}": (32,)}
    assert routing(wrong)[f"a/{name}"] == (ASK if name == "weight" else IN_OUT)
    same = {f"a/{name}": (128, 64), f"a/{bias}": (128, 64)}
    assert routing(same)[f"a/{name}"] is None  # element by element


def test_a_bias_tells_of_its_own_weight():
    cell = {"weight_ih": (48, 8), "weight_hh": (48, 16), "bias": (48,), "bias_n": (16,)}
    assert routing(cell) == {"weight_ih": OUT_IN, "weight_hh": OUT_IN, "bias": None, "bias_n": None}
    both = {"in_weight": (48, 8), "in_bias": (48,), "out_weight": (8, 48), "out_bias": (48,)}
    assert routing(both)["in_weight"] == OUT_IN
    assert routing(both)["out_weight"] == IN_OUT
    haliax = {"up/weight/array": (48, 8), "up/bias/array": (48,)}
    assert routing(haliax)["up/weight/array"] == OUT_IN


def test_a_square_kernel_beside_others_that_are_out_in():
    gpt2 = {
        **{"attn/c_attn/kernel": (192, 64), "attn/c_attn/bias": (192,)},
        **{"attn/c_proj/kernel": (64, 64), "attn/c_proj/bias": (64,)},
    }
    assert routing(gpt2)["attn/c_attn/kernel"] == OUT_IN
    assert routing(gpt2)["attn/c_proj/kernel"] == ASK
    assert pasted(gpt2)["attn/c_proj/kernel"] == OUT_IN


@pytest.mark.parametrize("path", ["bias_free/kernel", "biases/kernel", "scale/weight"])
def test_a_path_and_a_name_that_disagree_are_asked_for(path):
    assert routing({path: (4, 8)}) == {path: ASK}


def test_an_unknown_name_in_a_stack_is_asked_for():
    stack = {"layers/up/kernel": (3, 8, 16), "layers/norm/scale": (3, 8), "layers/u": (3, 16)}
    assert routing(stack)["layers/u"] == ASK
    assert pasted(stack) == {
        "layers/up/kernel": ((1,), (2,)),
        "layers/norm/scale": None,
        "layers/u": None,
    }


# Three axes and more: never without a question, and what is proposed is right when pasted

CONV, EXPERTS, QKV, OUT = ((0, 1, 2), (3,)), ((1,), (2,)), ((0,), (1, 2)), ((0, 1), (2,))
EINSUM = ((1,), (0, 2))
AMBIGUOUS = {
    "mlp/gating_einsum (2, 128, 64)": ((2,), (0, 1)),
    "moe/wi_0 (8, 64, 128)": EXPERTS,
    "moe/gate_proj (8, 64, 128)": EXPERTS,
    "mlp/linear (6, 128, 64)": EXPERTS,
    "moe/experts/weight (8, 128, 64)": ((2,), (1,)),
    "conv1/kernel (3, 80, 64)": OUT,
    "Conv_0/kernel (3, 3, 8, 16)": CONV,
    "something/kernel (3, 3, 8, 16)": CONV,
    "query/kernel (64, 4, 16)": QKV,
    "attention/key/kernel (64, 4, 16)": QKV,
    "wq (64, 4, 16)": QKV,
    "out/kernel (4, 16, 64)": OUT,
    "o_proj/w (4, 16, 64)": OUT,
    "attn_out_proj/kernel (4, 16, 64)": OUT,
    "attn_vec_einsum/w (4, 16, 64)": OUT,
    "q_einsum/w (4, 64, 16)": EINSUM,
    "kv_einsum/w (2, 2, 64, 16)": ((2,), (0, 1, 3)),
    "qkv_einsum/w (3, 4, 64, 16)": ((2,), (0, 1, 3)),
    "qkv/kernel (64, 3, 4, 16)": ((0,), (1, 2, 3)),
    "fused/kernel (6, 3, 2, 3)": ((0,), (1, 2, 3)),
    "layers/mlp/wi_0/kernel (64, 2, 128)": ((0,), (2,)),
    "layers/mlp/kernel (2, 64, 128)": EXPERTS,
    "conv/weight (8, 3, 3, 3)": ((1, 2, 3), (0,)),
    "conv/weight (16, 8, 3)": ((1, 2), (0,)),
    "layers/weight (3, 16, 8)": ((2,), (1,)),
    "attention_output/kernel (4, 16, 64)": OUT,
    "post_out/w (64, 4, 16)": ((1, 2), (0,)),
    "q_proj/weight (4, 16, 64)": ((2,), (0, 1)),
    "q/w (4, 64, 16)": EINSUM,
    "dwconv/kernel (4, 1, 64)": OUT,
    "mlp/wi/kernel (64, 2, 128)": QKV,
    "qkv_proj/kernel (64, 3, 64)": QKV,
    "MAPHead_0/query/kernel (64, 4, 16)": QKV,
    "head_0/key/kernel (64, 4, 16)": QKV,
    "conv2_d_transpose/w (3, 3, 8, 3)": ((0, 1, 3), (2,)),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_three_axes_or_more_are_asked_for(case):
    path, shape = case.split(" ", 1)
    shapes = {path: eval(shape)}
    assert routing(shapes) == {path: ASK}
    assert pasted(shapes) == {path: AMBIGUOUS[case]}
    assert routing(shapes, optax_nora.stacked()) in (
        {path: ASK},
        routing(shapes, optax_nora.stacked()),
    )


@pytest.mark.parametrize(
    ("shapes", "path", "expected"),
    [
        ({"a/w": (3, 3, 8, 3), "a/b": (8,)}, "a/w", ((0, 1, 3), (2,))),  # a transposed convolution
        ({"a/weight": (8, 3, 5, 5), "a/bias": (8, 1, 1)}, "a/weight", ((1, 2, 3), (0,))),
        ({"a/kernel": (64, 4, 16), "a/bias": (4, 16)}, "a/kernel", QKV),
        ({"a/kernel": (4, 16, 64), "a/bias": (64,)}, "a/kernel", OUT),
        (
            {"mlp/gating_einsum": (2, 64, 128), "mlp/linear": (128, 64)},
            "mlp/gating_einsum",
            ((1,), (0, 2)),
        ),
        (
            {"mlp/gating_einsum/w": (2, 100, 200), "mlp/linear/w": (100, 200)},
            "mlp/gating_einsum/w",
            ((2,), (0, 1)),
        ),
    ],
)
def test_neighbours_tell_what_to_propose(shapes, path, expected):
    assert pasted(shapes)[path] == expected


def test_a_stack_along_axis_1():
    maxtext = {
        "layers/mlp/wi_0/kernel": (64, 12, 128),
        "layers/self_attention/query/kernel": (64, 12, 4, 16),
        "layers/self_attention/out/kernel": (4, 12, 16, 64),
        "layers/norm/scale": (64, 12),
    }
    assert list(pasted(maxtext).values()) == [
        ((0,), (2,)),
        None,
        ((0, 2), (3,)),
        ((0,), (2, 3)),
    ]


@pytest.mark.parametrize("shape", [(1, 1, 768), (1, 8), (8,), ()])
def test_one_long_axis_is_a_vector(shape):
    assert routing({"kernel": shape})["kernel"] in (None, IN_OUT)
    assert optax_nora.matrix_mask(tree_of({"kernel": shape})) == {"kernel": False}


# The question


def test_one_line_for_each_kind_of_leaf():
    shapes = {f"layer_{i}/attn/q_einsum/w": (4, 64, 16) for i in range(26)}
    shapes |= {f"blocks/{i}/conv/kernel": (3, 3, 4 << i, 8 << i) for i in range(3)}
    with pytest.raises(ValueError, match="layer_") as error:
        optax_nora.nora(0.1).init(tree_of(shapes))
    lines = str(error.value).splitlines()
    assert "  layer_*/attn/q_einsum/w (4, 64, 16) float32, 26 of them" in lines
    assert sum("layer_" in line for line in lines) == 2  # listed, and to be pasted
    assert sum("conv" in line and "MuonDimensionNumbers" in line for line in lines) == 1
    assert set(pasted(shapes).values()) == {EINSUM, CONV}


def test_what_is_pasted_speaks_of_no_other_leaf():
    shapes = {
        "out/kernel": (4, 16, 64),
        "deep/out/kernel": (64, 32),  # the pattern out/kernel would match it
        "layer_0/mix/kernel": (3, 8, 16),
        "layer_1/mix/kernel": (8, 16),
        "odd[0]*/kernel": (3, 3, 8, 16),
        "odd0x/kernel": (8, 16),
    }
    assert pasted(shapes) == {
        **{"out/kernel": OUT, "deep/out/kernel": IN_OUT},
        **{"layer_0/mix/kernel": EXPERTS, "layer_1/mix/kernel": IN_OUT},
        **{"odd[0]*/kernel": CONV, "odd0x/kernel": IN_OUT},
    }


def test_what_is_pasted_keeps_the_users_rule():
    shapes = {
        "layers/query/kernel": (3, 64, 4, 16),
        "layers/up/kernel": (3, 64, 128),
        "layers/norm/weight": (3, 64),
    }
    assert pasted(shapes, optax_nora.stacked()) == {
        "layers/query/kernel": ((1,), (2, 3)),
        "layers/up/kernel": EXPERTS,
        "layers/norm/weight": None,
    }


def test_under_a_stack_at_axis_1_too():
    shapes = {"moe/wi_0": (8, 6, 64, 128)}
    assert routing(shapes, optax_nora.stacked(axis=1)) == {"moe/wi_0": ASK}
    assert pasted(shapes, optax_nora.stacked(axis=1)) == {"moe/wi_0": ((2,), (3,))}


# Any tree


SEGMENTS = st.sampled_from(
    [
        *("layers", "blocks", "0", "1", "12", "layer_0", "layer_1", "mlp", "moe", "attention", "q"),
        *("out", "qkv_einsum", "gating_einsum", "linear", "conv1", "norm", "embed", "head", "a[0]"),
    ]
)
LEAVES = st.sampled_from(
    ["kernel", "w", "weight", "bias", "b", "scale", "weight_hh", "lora_a", "wi_0", "A_log", "x*"]
)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 8, 16, 64]), max_size=5).map(tuple)


def is_apart(paths):
    """Whether no path is the beginning of another, so that nested dicts can hold all."""
    return not any(a != b and b.startswith(a + "/") for a in paths for b in paths)


TREES = st.dictionaries(
    st.tuples(st.lists(SEGMENTS, max_size=4), LEAVES).map(lambda p: "/".join([*p[0], p[1]])),
    SHAPES,
    min_size=1,
    max_size=12,
).filter(is_apart)


RULES = [None, optax_nora.rules.equinox(), optax_nora.by_path({"mlp/kernel": None})]


@given(TREES, st.sampled_from(RULES))
@pytest.mark.filterwarnings("ignore:weight_dimension_numbers names")  # mlp/kernel may be missing
@settings(max_examples=200, deadline=None)
def test_what_is_pasted_answers_the_question_and_changes_nothing_else(shapes, rule):
    before = routing(shapes, rule)
    if rule is None:
        optax_nora.summarize(tree_of(shapes), file=io.StringIO())
    if ASK not in before.values():
        return
    after = pasted(shapes, rule)
    assert ASK not in after.values()
    settled = {path for path, where in before.items() if where != ASK}
    assert {path: after[path] for path in settled} == {path: before[path] for path in settled}

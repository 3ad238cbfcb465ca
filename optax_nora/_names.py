"""What names say of a leaf: every list of words that routing knows, and how names split into them.

A name is split where its letters change case and at all that is no letter: ``ln_1`` is (ln),
``A_log`` (a, log), ``LMHead`` (lm, head). Words match as a whole.
"""

import re
from collections.abc import Sequence, Set
from functools import cache


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Own names of matrices in Flax and Haiku. `weight`, of PyTorch, Equinox and Haliax, is (out, in).
MATRIX_NAMES = frozenset({"kernel", "w"})
WEIGHTS = frozenset({"weight", "weights"})

NORMS = frozenset({"ln", "norms", "rms", "bn", "gn", "normalization"})  # and all that ends in norm
BIASES = frozenset({"bias", "biases"})
# Anywhere in a path these speak of vectors; the others do in a leaf's own name only.
VECTORS_IN_PATH = BIASES | {"scale", "scales"}
VECTORS = VECTORS_IN_PATH | _set(
    "gamma beta alpha offset shift gain slope slopes log sink sinks dt decay temperature threshold "
    "delta lambda mean var std variance loc freq freqs frequencies"
)

EMBEDDINGS = frozenset({"wte", "wpe", "vocab", "codebook"})
_EMBEDDING = re.compile(r"(un|pos|tok|patch|rel|time)?emb(s|d|ed|eds|edder|edders|edding|eddings)?")
OWN_EMBEDDINGS = _set("token tokens table tables pos position positions positional latents")
POSITIONS = _set("wpe pos position positions positional type types segment rel relpos")

HEADS = frozenset({"classifier", "readout", "predictions"})  # and all that begins with logit
_HEAD_SEGMENTS = frozenset({"score", "qa_outputs", "seq_relationship"})
_NO_HEADS = _set("multi per attn attention self cross each num")  # ..._head is no head
# In the name of an embedding or a head these cast doubt: a hidden projection beside it.
DOUBTS = _set("pre proj projection projector mapping mlp hidden transform")
EMBEDDING_DOUBTS = DOUBTS | _set("linear dense fc to")
# Low-rank factors that start at zero, in a leaf's own name or its parent's.
ZEROS = (frozenset({"lora", "b"}), frozenset({"lora", "up"}))

ATTENTION_IN = _set("query key value q k v qkv kv wq wk wv")
ATTENTION_OUT = _set("out output o vec wo")
FUSED = _set("qkv kv fused")
STACKS = _set("layer layers block blocks stack stacked scan repeat stages")
MLPS = _set("mlp ffn feedforward")
EXPERTS = _set("moe expert experts exp")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def words(segment: str) -> tuple[str, ...]:
    """The words of a name, in lower case."""
    return tuple(word.lower() for word in _WORD.findall(segment))


def any_word(segments: Sequence[str], known: Set[str]) -> bool:
    """Whether a word of ``segments`` is known."""
    return any(not known.isdisjoint(words(s)) for s in segments)


@cache
def names_weight(segment: str) -> bool:
    """Whether a leaf's own name is PyTorch's, whose layout is (out, in)."""
    return not WEIGHTS.isdisjoint(words(segment))


def names_matrix(segment: str) -> bool:
    """Whether a leaf's own name is a matrix's."""
    return segment in MATRIX_NAMES or names_weight(segment)


@cache
def names_norm(segment: str) -> bool:
    """Whether a segment is that of a normalisation."""
    return any(word in NORMS or word.endswith("norm") for word in words(segment))


@cache
def names_convolution(segment: str) -> bool:
    """Whether a segment is that of a convolution."""
    return any("conv" in word or word == "patch" for word in words(segment))


@cache
def names_vector(segment: str) -> bool:
    """Whether a leaf's own name is a vector's."""
    own = words(segment)
    return (
        names_norm(segment)
        or not VECTORS.isdisjoint(own)
        or any(word.endswith(("bias", "scale")) for word in own)  # layerscale
        or (own[:1] == ("b",) and len(own) < 3)  # b, b1, b_q
        or own in (("d",), ("g",))  # `d` is Mamba's
    )


@cache
def names_embedding(segment: str) -> bool:
    """Whether a segment is that of an embedding."""
    return any(word in EMBEDDINGS or _EMBEDDING.fullmatch(word) for word in words(segment))


@cache
def names_head(segment: str) -> bool:
    """Whether a segment is that of an output head: ``lm_head``, but not ``multi_head``."""
    found = words(segment)
    return (
        segment.lower() in _HEAD_SEGMENTS
        or any(word in HEADS or word.startswith("logit") for word in found)
        or (bool(found) and found[-1] == "head" and _NO_HEADS.isdisjoint(found))
    )

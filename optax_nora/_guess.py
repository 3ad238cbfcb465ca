"""What the axes of a leaf most likely are, from its name, its shape and its neighbours.

Only where a bias tells is a guess ever taken; elsewhere it is shown to the user, who decides.
"""

from functools import lru_cache
from itertools import combinations

from optax.contrib import MuonDimensionNumbers

from optax_nora._leaves import Leaf, Shape, Tree
from optax_nora._names import (
    ATTENTION_IN,
    ATTENTION_OUT,
    BIASES,
    EXPERTS,
    FUSED,
    MATRIX_NAMES,
    MLPS,
    STACKS,
    WEIGHTS,
    any_word,
    names_convolution,
    names_matrix,
    names_vector,
    names_weight,
    words,
)

Guess = tuple[MuonDimensionNumbers | None, str]
_OF_MATRICES = MATRIX_NAMES | WEIGHTS
_OF_BIASES = BIASES | {"b"}


def biases_of(leaf: Leaf) -> list[Shape]:
    """The shapes of the biases beside a leaf: ``bias_hh`` of ``weight_hh``, or else ``bias``."""
    kin = set(words(leaf.name)) - _OF_MATRICES
    beside = leaf.tree.modules.get(leaf.segments[:-1], {})
    found = [(set(words(name)), shape) for name, shape in beside.items() if name != leaf.name]
    biases = [(own - _OF_BIASES, shape) for own, shape in found if own & _OF_BIASES and shape]
    of_kin = [shape for rest, shape in biases if rest == kin]
    return of_kin or [shape for rest, shape in biases if not rest]


def axes_told(leaf: Leaf) -> tuple[int, ...] | None:
    """The output axes, where the biases beside a leaf fit only these."""
    told = set()
    for bias in biases_of(leaf):
        lengths = tuple(n for n in bias if n > 1) or (1,)
        fits = [
            axes
            for axes in combinations(range(leaf.ndim), len(lengths))
            if tuple(leaf.shape[a] for a in axes) == lengths and len(axes) < leaf.ndim
        ]
        if len(fits) != 1:
            return None
        told.add(fits[0])
    return told.pop() if len(told) == 1 else None


def stack_axis(leaf: Leaf) -> int | None:
    """The axis along which layers are stacked: all leaves of a module have it, of one length.

    The module has a stack's name, or a vector in it has two axes.
    """
    if leaf.stacked:
        return None
    heads = leaf.ndim == 3 and axes_told(leaf) == (1, 2)  # a bias (heads, head_dim), as its kernel
    for end, segment in enumerate(("", *leaf.segments[:-1])):
        below = leaf.tree.below.get(leaf.segments[:end], {(leaf.name, leaf.shape)})
        shapes = {shape for _, shape in below}
        named = segment.lower() in STACKS and not leaf.segments[end].isdigit()
        wide = (sum(n > 1 for n in shape) > 1 and names_vector(name) for name, shape in below)
        if len(shapes) > 1 and (named or (not heads and any(wide))):
            for axis in (0, 1):
                lengths = {shape[axis : axis + 1] for shape in shapes}
                if len(lengths) == 1 and () not in lengths:
                    return axis
        elif named and leaf.ndim > 2:
            return int(leaf.ndim == 3 and leaf.shape[1] < leaf.shape[0])
    return None


def outward(numbers: MuonDimensionNumbers, axis: int) -> MuonDimensionNumbers:
    """Numbers of one layer, counted from the front, as those of layers stacked along ``axis``."""
    sides = ((side,) if isinstance(side, int) else side for side in numbers[:2])
    return MuonDimensionNumbers(*(tuple(a + (a >= axis) for a in side) for side in sides))


def guess(leaf: Leaf) -> Guess:
    """Dimension numbers of a leaf of two axes or more, and what its axes are."""
    axis = stack_axis(leaf)
    if axis is not None and leaf.ndim > 2:
        numbers, meaning = guess(leaf.without(axis))
        return numbers and outward(numbers, axis), f"stacked along axis {axis}, {meaning}"
    return _pair(leaf) if leaf.ndim == 2 else _more(leaf)


def _pair(leaf: Leaf) -> Guess:
    if stack_axis(leaf) is not None and not names_matrix(leaf.name):
        return None, "stacked vectors"
    first = names_weight(leaf.name) or leaf.name in out_first(leaf.tree)
    if (told := axes_told(leaf)) is not None:
        first = told == (0,)
    sides, meaning = ((1, 0), "(out, in)") if first else ((0, 1), "(in, out)")
    return MuonDimensionNumbers(*sides), meaning


@lru_cache(maxsize=8)  # the trees of one survey: the whole, and without an axis or two
def out_first(tree: Tree) -> frozenset[str]:
    """The names of leaves in a tree that are (out, in), as a bias of theirs tells."""
    leaves = (Leaf(path, shape, None, tree) for path, shape in tree.shapes.items())
    return frozenset(one.name for one in leaves if one.ndim == 2 and axes_told(one) == (0,))


def _more(leaf: Leaf) -> Guess:
    shape, path, n = leaf.shape, leaf.segments, leaf.ndim
    if n == 3 and any_word(path, {"gating"}):
        wide = gated_width(leaf) or min(shape[1:])
        last = shape[1] != shape[2] == wide
        return MuonDimensionNumbers(1 + last, (0, 2 - last)), "fused gate"
    if any_word(path, EXPERTS):
        last = (n - 1, n - 2) if names_weight(leaf.name) else (n - 2, n - 1)
        return MuonDimensionNumbers(*last), "experts"
    if (out := axes_told(leaf)) is not None:
        rest = tuple(a for a in range(n) if a not in out)
        return MuonDimensionNumbers(rest, out), "its bias has the length of the outputs"
    if any(map(names_convolution, path)):
        return _convolution(leaf)
    if (known := _attention(leaf)) is not None:
        return known
    if n == 3:
        if names_weight(leaf.name):
            conv = shape[2] <= min(12, *shape[:2])
            return _convolution(leaf) if conv else (MuonDimensionNumbers(2, 1), "(..., out, in)")
        if shape[0] >= max(shape) or shape[1] < min(5, shape[0], shape[2]):
            return MuonDimensionNumbers(0, (1, 2)), "(in, ...), the others out"
        return MuonDimensionNumbers(1, 2), "(layers, in, out) or (experts, in, out)"
    return _convolution(leaf)


def _attention(leaf: Leaf) -> Guess | None:
    shape, n = leaf.shape, leaf.ndim
    if any_word(leaf.segments, MLPS):
        return None
    einsum = any_word(leaf.segments, {"einsum"})
    fused = any_word(leaf.segments, FUSED)
    if fused and n == 4 and shape[1] in (2, 3) and not einsum:
        return MuonDimensionNumbers(0, (1, 2, 3)), "(embed, fused, heads, head_dim)"
    if fused and n == 4 and shape[0] in (2, 3):
        return MuonDimensionNumbers(2, (0, 1, 3)), "(fused, heads, embed, head_dim)"
    known = [s for s in leaf.segments if any_word([s], ATTENTION_IN | ATTENTION_OUT)]
    if not known:
        return None
    out = any_word(known[-1:], ATTENTION_OUT)
    stack = int(n == 4)
    axes = range(stack, stack + 3)
    # The longest axis is that of the model's width; in a draw it lies where Flax has it.
    embed = max(axes, key=lambda a: (shape[a], a == axes[2 if out else einsum]))
    heads = tuple(a for a in axes if a != embed)
    meaning = ["heads", "head_dim"]
    meaning.insert(embed - stack, "embed")
    numbers = MuonDimensionNumbers(*((heads, embed) if out else (embed, heads)))
    return numbers, "stacked along axis 0, " * stack + f"({', '.join(meaning)})"


def _convolution(leaf: Leaf) -> Guess:
    *window, before, last = range(leaf.ndim)
    if names_weight(leaf.name):
        return MuonDimensionNumbers((*range(1, leaf.ndim),), 0), "convolution (out, in, ...)"
    if leaf.name == "w" and any_word(leaf.segments, {"transpose"}):
        return MuonDimensionNumbers((*window, last), before), "convolution (..., out, in)"
    return MuonDimensionNumbers((*window, before), last), "convolution (..., in, out)"


def gated_width(leaf: Leaf) -> int | None:
    """The length of a fused gate's input axis: that of the output of ``linear`` beside it."""
    modules = leaf.tree.modules
    for module in (leaf.segments[:-1], leaf.segments[:-2]):
        beside = [
            modules.get(module, {}).get("linear", ()),
            *modules.get((*module, "linear"), {}).values(),
        ]
        if widths := {shape[-1] for shape in beside if len(shape) == 2}:
            return widths.pop()
    return None

"""Ready rules for families of models, each from the names and shapes that the family gives.

Where a family stacks its layers, wrap the rule: ``by_path({'layers': stacked(rules.flax_nnx())})``.
What a rule does not know takes the default routing, so that `nora` asks at ``init``.
"""

import dataclasses
from collections.abc import Mapping

import jax
from optax.contrib import MuonDimensionNumbers

from optax_nora._default import Decision, Default, Rule, ask, by_name
from optax_nora._guess import axes_told, gated_width, stack_axis
from optax_nora._leaves import Leaf, PyTree, path_of
from optax_nora._names import names_convolution, names_weight
from optax_nora._rules import ADAMW, ByPath, kernels, rule_of
from optax_nora._rules import stacked as _stacked


@dataclasses.dataclass(frozen=True)
class _Layer(Rule):
    """What one layer's leaf of so many axes is; others, and stacks, take the default routing."""

    spec: MuonDimensionNumbers | Rule
    ndim: int | None = None

    def decide(self, leaf: Leaf) -> Decision:
        if self.ndim not in (None, leaf.ndim) or stack_axis(leaf) is not None:
            return Default().decide(leaf)
        return rule_of(self.spec, ADAMW).decide(leaf)


@dataclasses.dataclass(frozen=True)
class _FusedGate(Rule):
    """Gate and up projection in one leaf of three axes; ``linear`` beside it tells its layout."""

    def decide(self, leaf: Leaf) -> Decision:
        width = gated_width(leaf)
        if leaf.ndim != 3 or leaf.shape[1:].count(width) != 1:
            return Default().decide(leaf)
        return ask(leaf)._replace(sure=True, ask=False)


@dataclasses.dataclass(frozen=True)
class _OutFirst(Rule):
    """A ``weight`` is (out, in, ...); three axes and more only where it is a convolution."""

    def decide(self, leaf: Leaf) -> Decision:
        known = by_name(leaf)
        if (known is not None and not known.ask) or not names_weight(leaf.name):
            return Default().decide(leaf)
        conv = any(map(names_convolution, leaf.segments)) or axes_told(leaf) == (0,)
        if leaf.ndim > 2 and not conv:
            return ask(leaf)
        return Decision(MuonDimensionNumbers(tuple(range(1, leaf.ndim)), 0))


@dataclasses.dataclass(frozen=True)
class _Unless(Rule):
    """A matrix, unless it is named as an output head or as what starts at zero."""

    spec: MuonDimensionNumbers

    def decide(self, leaf: Leaf) -> Decision:
        known = by_name(leaf)
        return known if known is not None and known.sure else Decision(self.spec)


def _family(patterns: Mapping[str, MuonDimensionNumbers | Rule | None]) -> Rule:
    rules = ((pattern, rule_of(spec, ADAMW)) for pattern, spec in patterns.items())
    return ByPath(tuple(rules), optional=True)


_IN = _Layer(MuonDimensionNumbers(0, (1, 2)), 3)  # (embed, heads, head_dim)
_OUT = _Layer(MuonDimensionNumbers((0, 1), 2), 3)  # (heads, head_dim, embed)
_ATTENTION = {"query/kernel": _IN, "key/kernel": _IN, "value/kernel": _IN, "out/kernel": _OUT}
_DENSE = MuonDimensionNumbers(0, 1)


def flax_nnx() -> Rule:
    """Flax's own layers, NNX or Linen: attention, convolutions with ``conv`` in their names, Dense.

    Returns:
      A rule.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'attention': {'query': {'kernel': jnp.ones((64, 4, 16))}}}
      >>> rule = optax_nora.rules.flax_nnx()
      >>> optax_nora.infer_dimension_numbers(params, rule)['attention']['query']['kernel']
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
    """
    return _family(_ATTENTION | {"*[cC]onv*/kernel": _Layer(kernels())})


def gemma() -> Rule:
    """Gemma 1 to 3 as in the ``gemma`` package and Flax's example.

    Returns:
      A rule.
    """
    fused = _Layer(MuonDimensionNumbers(2, (0, 1, 3)), 4)  # (fused, heads, embed, head_dim)
    return _family(
        {
            "q_einsum/w": _Layer(MuonDimensionNumbers(1, (0, 2)), 3),  # (heads, embed, head_dim)
            "kv_einsum/w": fused,
            "qkv_einsum/w": fused,
            "attn_vec_einsum/w": _OUT,
            "gating_einsum": _FusedGate(),
            "mlp/linear": _Layer(_DENSE, 2),
            "mm_input_projection/w": _Layer(_DENSE, 2),
        }
    )


def maxtext(scan_axis: int | None = 1) -> Rule:
    """MaxText's decoders, dense or with experts.

    Args:
      scan_axis: its ``param_scan_axis``; None where layers are not scanned.

    Returns:
      A rule.
    """
    experts = _Layer(MuonDimensionNumbers(1, 2), 3)
    layer = _family(
        _ATTENTION
        | {
            "qkv_proj/kernel": _Layer(MuonDimensionNumbers(0, (1, 2, 3)), 4),
            "wq_b/kernel": _IN,
            "wkv_b/kernel": _IN,
            "wi_[01]": experts,
            "wo": experts,
            "wi/kernel": _Layer(MuonDimensionNumbers(0, (1, 2)), 3),  # (embed, fused, mlp)
        }
    )
    scanned = {} if scan_axis is None else {"*layers": _stacked(layer, scan_axis)}
    return _family({**scanned, "**": layer})


def equinox() -> Rule:
    """Equinox and ports from PyTorch: ``weight`` is (out, in), and (out, in, ...) in convolutions.

    Returns:
      A rule.
    """
    return _family({"**": _OutFirst()})


torch = equinox


def haliax(model: PyTree) -> Rule:
    """Haliax and Levanter: each ``Linear`` by its ``In`` and ``Out``; heads by their names.

    Args:
      model: the model or its trainable part, whose NamedArrays still have their axes.

    Returns:
      A rule.

    Examples:
      >>> import optax_nora
      >>> tx = optax_nora.nora(  # given as a function it asks the parameters each time
      ...     0.01, weight_dimension_numbers=optax_nora.rules.haliax
      ... )
    """

    def is_layer(node: object) -> bool:
        return hasattr(node, "weight") and (hasattr(node, "In") or hasattr(node, "Vocab"))

    def places(named: object, side: object) -> tuple[int, ...]:
        axes = side if isinstance(side, tuple) else (side,)
        return tuple(named.axes.index(axis) for axis in axes)  # type: ignore[attr-defined]

    patterns = {}
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_layer)[0]:
        if is_layer(node) and node.weight is not None:
            linear = hasattr(node, "In") and places(node.weight, node.In)
            patterns["/" + "/".join((*path_of(path), "weight"))] = (
                _Unless(MuonDimensionNumbers(linear, places(node.weight, node.Out)))
                if linear
                else None
            )
    return _family(patterns)


def huggingface_flax() -> Rule:
    """Flax models of Hugging Face's ``transformers``: GPT-2's kernels are (out, in).

    Returns:
      A rule.
    """
    out_in = _Layer(MuonDimensionNumbers(1, 0), 2)
    return _family(
        {
            **{f"{name}/kernel": out_in for name in ("c_attn", "q_attn", "c_fc", "c_proj")},
            "*conv*/kernel": _Layer(kernels()),
            "transform/dense/kernel": _DENSE,
            "embedding_hidden_mapping_in/kernel": _DENSE,
        }
    )

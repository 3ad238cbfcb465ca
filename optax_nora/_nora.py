"""Nora: for one matrix (`scale_by_nora`) and for a whole model (`nora`)."""

from typing import Any

import jax
import optax

from optax_nora._adamw import AdamW, ScalarOrSchedule, StepTransformation, route_to
from optax_nora._axes import Rows
from optax_nora._backend import check_backend, matrix_step
from optax_nora._blocks import direction_of
from optax_nora._checks import check_learning_rate, check_range
from optax_nora._leaves import Leaf, PyTree, array_of, nodes_with_paths
from optax_nora._masks import decay_mask
from optax_nora._momentum import LeafStep, scale_by_momentum, with_momentum
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import check_row_scale, row_scale_of
from optax_nora._step import Coefficients, one_minus

Array = jax.Array


def scale_by_nora(
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    mu_dtype: Any = None,
    *,
    block_rows: int | None = None,
    project: bool = True,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Momentum, `row_project` and `row_normalize` in one: three passes over memory.

    .. math::
      \mu &\leftarrow \beta \mu + (1 - \beta) g \\
      h &= m \mu + (1 - m) g \\
      u_i &= h_i - \frac{\langle h_i, w_i \rangle}{|w_i|^2} w_i \\
      d_i &= u_i / \max(|u_i|, \epsilon)

    Without learning rate and row scale. A row of which the projection leaves only rounding noise
    gets a zero update.

    Args:
      beta: decay of the momentum, in [0, 1).
      momentum: weight m of the momentum :math:`\mu` against the gradient in the look-ahead, in
        [0, 1]. None: the same as beta, as in the authors' code. 1.0: no look-ahead, as in the
        paper.
      eps: the norm under which a row is no longer made a unit vector.
      mu_dtype: dtype that the momentum is stored in. None: the parameter's.
      block_rows: rows of a matrix that are made orthonormal together, as by `row_orthonormalize`.
        None, or 1: each row by itself, as in the paper.
      project: whether rows lose their part along the weight.
      weight_dimension_numbers: which axes are a row, as for `nora`; a leaf with None passes through
        and has no momentum. Nothing given: every leaf is a kernel ``(in, out)``.

    Returns:
      An `optax.GradientTransformation` whose state is one buffer like the parameters.

    Raises:
      ValueError: if a coefficient is out of range; at ``init`` if the dimension numbers do not fit;
        at ``update`` without params.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_nora
      >>> params = {'kernel': jnp.eye(3)}
      >>> tx = optax.chain(optax_nora.scale_by_nora(), optax.scale_by_learning_rate(0.1))
      >>> updates, state = tx.update({'kernel': jnp.ones((3, 3))}, tx.init(params), params)
      >>> bool(jnp.allclose(jnp.linalg.norm(updates['kernel'], axis=0), 0.1))
      True

    References:
      Nora paper, Algorithm 1; the look-ahead is in the authors' code only.
    """
    return scale_by_momentum(
        direction_of(block_rows, project), beta, momentum, mu_dtype, weight_dimension_numbers, eps
    )


def nora(
    learning_rate: ScalarOrSchedule,
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    block_rows: int | None = None,
    project: bool = True,
    row_scale: str = "fan_ratio",
    base_fan_in: Any = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.95,
    adam_eps: Any = 1e-10,
    adam_weight_decay: Any = 0.0,
    backend: str = "auto",
) -> StepTransformation:
    r"""Nora for a whole model: its matrices by `scale_by_nora`, the rest by `optax.adamw`.

    .. math::
      w \leftarrow w - \eta (s d + \lambda w)

    with the direction d of `scale_by_nora`, the scale s of `scale_by_row_shape` and decoupled
    weight decay :math:`\lambda`. Without decay each step obeys
    :math:`|w'_i|^2 = |w_i|^2 + (\eta s)^2`, whatever the gradient.

    By default a floating leaf of two axes is a matrix ``(in, out)`` and goes to Nora, unless its
    name is that of a vector or its path names an embedding or an output head. Rows of one weight
    (fan-in 1) go to AdamW. `optax_nora.summarize` shows where each leaf goes.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule. Where something else applies rate and
        sign: docs/frameworks.md, under big_vision.
      beta: decay of the momentum, in [0, 1), a number or a schedule.
      momentum: weight of the momentum in the look-ahead, likewise. None: the same as beta, as in
        the authors' code. 1.0: no look-ahead, as in the paper.
      eps: the norm under which a row is no longer made a unit vector.
      weight_decay: :math:`\lambda` for the matrices, multiplied by the learning rate; a number or
        a schedule.
      weight_decay_mask: a tree, a prefix tree or a function of the parameters that gives booleans:
        which leaves decay, in both branches.
      mu_dtype: dtype that first moments are stored in. None: the parameter's for matrices, float32
        at the least for AdamW.
      block_rows: rows of a matrix that are made orthonormal together: see `row_orthonormalize`.
        None, or 1: each row by itself, as in the paper. 128 keeps most of Muon's quality, half of
        the model's width all of it: see docs/blocks.md.
      project: whether rows lose their part along the weight, as in the paper. With blocks and
        weight decay, False trains better.
      row_scale: ``"fan_ratio"``, ``"unit"``, ``"width"`` or ``"rms"``: see `scale_by_row_shape`.
      base_fan_in: for ``row_scale="width"``, the fan-in at which the learning rate was tuned.
      weight_dimension_numbers: which leaves are matrices and which axes are a row:
        `optax.contrib.MuonDimensionNumbers` for all leaves, a tree or a prefix tree of them with
        None for AdamW, a rule (`by_path`, `stacked`, `from_logical_axes`, `in_shard_map`), or a
        function from the parameters to such a tree. None: by name and shape.
      adam_learning_rate: of AdamW, a number or a schedule. None: the same as learning_rate.
      adam_b1: decay of AdamW's first moment.
      adam_b2: decay of AdamW's second moment.
      adam_eps: AdamW's epsilon, added to the root of the second moment.
      adam_weight_decay: decoupled weight decay of AdamW, a number or a schedule.
      backend: ``"auto"``, kernels where they are faster: on NVIDIA's A100, H100, H200 and B200;
        ``"pallas"``, kernels everywhere, on TPUs too, and interpreted on a CPU; ``"xla"``, none.
        Kernels are for float32, bfloat16 and float16 leaves whose reduction axes are neighbours;
        XLA steps all others. Those for TPUs want more: see docs/benchmarks.md.

    Returns:
      An `optax.GradientTransformationExtraArgs` that also has `StepTransformation.step`. Arithmetic
      is in float32 at the least; the updates have the parameters' dtypes.

    Raises:
      TypeError: if a coefficient is not a number, or a schedule where one may be.
      ValueError: if a coefficient is out of range, row_scale or backend unknown; at ``init`` if a
        leaf is not floating, its axes are ambiguous or its dimension numbers do not fit; at
        ``update`` without params, or with a state of another routing.

    Warns:
      UserWarning: at ``init`` if no leaf goes to Nora.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_nora
      >>> params = {'kernel': jnp.eye(4), 'bias': jnp.zeros(4)}
      >>> tx = optax_nora.nora(0.02, adam_learning_rate=1e-3)
      >>> state = tx.init(params)
      >>> loss = lambda p: jnp.sum((p['kernel'][0] + p['bias'] - 1.0) ** 2)
      >>> updates, state = tx.update(jax.grad(loss)(params), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> params, state = tx.step(jax.grad(loss)(params), state, params)  # the same in one call

    References:
      Nora paper, Algorithm 1, and the authors' code at its end; docs/faithfulness.md says where the
      two and this function differ.
    """
    direction = direction_of(block_rows, project)
    ahead = beta if momentum is None else momentum
    check_learning_rate("learning_rate", learning_rate)
    check_range("beta", beta, high=1, below=True, schedule=True)
    check_range("momentum", ahead, high=1, schedule=True)
    check_range("eps", eps)
    check_range("weight_decay", weight_decay, schedule=True)
    check_row_scale(row_scale, base_fan_in)
    check_backend(backend)
    mask = decay_mask(weight_decay_mask)

    def make_step(
        count: Any, params: PyTree, grad_scale: Any = None, write_weights: bool = False, **_: Any
    ) -> LeafStep:
        lr, decay, b, m = (
            x(count) if callable(x) else x for x in (learning_rate, weight_decay, beta, ahead)
        )
        scale = 1.0 if grad_scale is None else grad_scale
        nodes = () if mask is None else nodes_with_paths(mask(params))[0]
        still = {path for path, node in nodes if array_of(node) is False}

        def step(leaf: Leaf, rows: Rows, g: Array, mu: Array, w: Array) -> tuple[Array, Array]:
            fans = rows.fan_in(leaf.shape), rows.fan_out(leaf.shape)
            c = Coefficients(
                grad_scale=scale,
                beta=b,
                one_minus_beta=one_minus(b),
                ahead=m,
                one_minus_ahead=one_minus(m),
                eps=eps,
                row_scale=row_scale_of(row_scale, *fans, base_fan_in),
                weight_decay=0.0 if leaf.path in still else decay,
                learning_rate=lr,
            )
            one = matrix_step(backend, rows, direction, write_weights, g, mu, w)
            return one(c, g, mu, w)

        return step

    matrices = with_momentum(make_step, mu_dtype, weight_dimension_numbers=None, counted=True)
    adamw = AdamW(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        mask=weight_decay_mask,
    )
    return route_to(matrices, weight_dimension_numbers, adamw)

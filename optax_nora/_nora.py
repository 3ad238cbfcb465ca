"""Nora: for one matrix (`scale_by_nora`) and for a whole model (`nora`)."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._backend import check_backend
from optax_nora._checks import check_range, require_params
from optax_nora._deflate import check_rank, deflated
from optax_nora._leaves import Leaf, PyTree, map_leaves
from optax_nora._momentum import one_minus, scale_by_momentum
from optax_nora._radius import turn_and_stretch
from optax_nora._routing import WeightDimensionNumbers, check_matched, whole_model
from optax_nora._rows import (
    Coefficients,
    project_and_normalize,
    row_scale_of,
    scale_by_row_shape,
    widen,
)
from optax_nora._step import StepTransformation, Update

Array = jax.Array
ScalarOrSchedule = Any  # a float, a 0-d array, or a function from the step to one


def scale_by_nora(
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    mu_dtype: Any = None,
    *,
    radial: Any = None,
    deflate: int | None = None,
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
      momentum: weight m of the momentum against the gradient in the look-ahead, in [0, 1]. None:
        the same as beta, as in the authors' code. 1.0: no look-ahead, as in the paper.
      eps: the norm under which a row is no longer made a unit vector.
      mu_dtype: dtype that the momentum is stored in. None: the parameter's.
      radial: the greatest relative change of a row's length, against the learning rate: see
        `scale_by_row_radius`. None: rows only turn, as in the paper.
      deflate: directions that rows share, taken out of h before it is projected: see
        `deflate_rows`. None: none, as in the paper.
      weight_dimension_numbers: which axes are a row, as for `nora`; a leaf with None passes through
        and has no momentum. Nothing given: every leaf is a kernel ``(in, out)``.

    Returns:
      An `optax.GradientTransformation` whose state is one buffer like the parameters.

    Raises:
      ValueError: if a coefficient is out of range or deflate is no int; at ``init`` if the
        dimension numbers do not fit; at ``update`` without params.

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
    check_range("eps", eps, 0)
    check_range("radial", radial, 0)
    rank = 0 if deflate is None else deflate
    check_rank("deflate", rank)

    def direction(h: Array, w: Array, rows: Rows) -> Array:
        h = deflated(h, rows, rank)
        if radial is None:
            return project_and_normalize(h, w, rows, eps)
        return turn_and_stretch(h, w, rows, eps, radial)

    return scale_by_momentum(direction, beta, momentum, mu_dtype, weight_dimension_numbers)


def _in_float32(
    inner: optax.GradientTransformation, wide_state: bool
) -> optax.GradientTransformationExtraArgs:
    """``inner`` on float32 views, so that no step between gradient and update rounds to bf16.

    ``wide_state`` makes its state float32 too: a second moment underflows in float16.
    """
    inner = optax.with_extra_args_support(inner)

    def view(tree: PyTree) -> PyTree:
        return map_leaves(lambda _, x: widen(x), tree)

    def init(params: PyTree) -> PyTree:
        return inner.init(view(params) if wide_state else params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        require_params(params)
        updates, state = inner.update(view(updates), state, view(params), **extra_args)
        return map_leaves(lambda _, u, p: u.astype(jnp.result_type(p)), updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def matrices_and_adamw(
    direction: optax.GradientTransformation,
    learning_rate: ScalarOrSchedule,
    *,
    weight_decay: Any,
    weight_decay_mask: Any,
    mu_dtype: Any,
    row_scale: str,
    base_fan_in: Any,
    rms: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
    adam_learning_rate: ScalarOrSchedule | None,
    adam_b1: Any,
    adam_b2: Any,
    adam_eps: Any,
    adam_weight_decay: Any,
) -> optax.GradientTransformationExtraArgs:
    """A whole model's optimizer: ``direction`` for its matrices, AdamW for the rest.

    What `nora` and the baselines share; the arguments are those of `nora`.
    """
    check_range("learning_rate", learning_rate, 0)
    check_range("adam_learning_rate", adam_learning_rate, 0)
    check_range("weight_decay", weight_decay, 0)
    check_range("adam_weight_decay", adam_weight_decay, 0)
    check_range("adam_b1", adam_b1, 0, 1, below=True)
    check_range("adam_b2", adam_b2, 0, 1, below=True)
    check_range("adam_eps", adam_eps, 0)
    numbers = weight_dimension_numbers
    matrix = optax.chain(
        direction,
        scale_by_row_shape(
            row_scale, base_fan_in=base_fan_in, rms=rms, weight_dimension_numbers=numbers
        ),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        mask=weight_decay_mask,
    )

    def labels(params: PyTree) -> PyTree:
        return whole_model(
            lambda leaf, rows: "adamw" if rows is None else "matrix", params, numbers
        )

    tx = optax.partition(
        {
            "matrix": _in_float32(matrix, wide_state=False),
            "adamw": _in_float32(adamw, wide_state=True),
        },
        labels,
    )

    def init(params: PyTree) -> PyTree:
        map_leaves(_require_floating, params)
        check_matched(params, numbers)
        goes = jax.tree.leaves(labels(params))
        if goes and "matrix" not in goes:
            warnings.warn(
                "no leaf goes to the matrix optimizer, all go to AdamW: look at "
                "optax_nora.summarize(params) and give weight_dimension_numbers",
                stacklevel=2,
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def _require_floating(leaf: Leaf, array: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
            f"{leaf} is no floating leaf and cannot be optimized; keep it out of the parameters, "
            "or wrap the optimizer in optax.masked"
        )
    return array


def nora(
    learning_rate: ScalarOrSchedule,
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    row_scale: str = "fan_ratio",
    base_fan_in: Any = None,
    rms: Any = 0.2,
    radial: Any = None,
    deflate: int | None = None,
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
      learning_rate: :math:`\eta`, a number or a schedule.
      beta: decay of the momentum, in [0, 1).
      momentum: weight of the momentum in the look-ahead. None: the same as beta, as in the authors'
        code. 1.0: no look-ahead, as in the paper.
      eps: the norm under which a row is no longer made a unit vector.
      weight_decay: :math:`\lambda` for the matrices, multiplied by the learning rate.
      weight_decay_mask: a tree, a prefix tree or a function of the parameters that gives booleans:
        which leaves decay, in both branches.
      mu_dtype: dtype that first moments are stored in. None: the parameter's for matrices, float32
        at the least for AdamW.
      row_scale: ``"fan_ratio"``, ``"unit"``, ``"width"`` or ``"rms"``: see `scale_by_row_shape`.
      base_fan_in: for ``row_scale="width"``, the fan-in at which the learning rate was tuned.
      rms: for ``row_scale="rms"``, the root mean square of an update's entries.
      radial: the greatest relative change of a row's length, against the learning rate: see
        `scale_by_row_radius`. None: rows only turn, as in the paper.
      deflate: directions that the rows of a matrix share, taken out of its momentum before it is
        projected: see `deflate_rows`. None: none, as in the paper.
      weight_dimension_numbers: which leaves are matrices and which axes are a row:
        `optax.contrib.MuonDimensionNumbers` for all leaves, a tree or a prefix tree of them with
        None for AdamW, a rule (`by_path`, `stacked`, `from_logical_axes`, `in_shard_map`), or a
        function from the parameters to such a tree. None: by name and shape.
      adam_learning_rate: of AdamW, a number or a schedule. None: the same as learning_rate.
      adam_b1: decay of AdamW's first moment.
      adam_b2: decay of AdamW's second moment.
      adam_eps: AdamW's epsilon, added to the root of the second moment.
      adam_weight_decay: decoupled weight decay of AdamW.
      backend: ``"auto"``, kernels where they are faster: on NVIDIA's A100, H100, H200 and B200;
        ``"pallas"``, kernels everywhere, interpreted where there is no GPU; ``"xla"``, none.
        Kernels are for float32, bfloat16 and float16 whose reduction axes are neighbours, without
        radial and deflate; all else is XLA's.

    Returns:
      An `optax.GradientTransformationExtraArgs` that also has `StepTransformation.step`. Arithmetic
      is in float32 at the least; the updates have the parameters' dtypes.

    Raises:
      ValueError: if a coefficient is out of range, row_scale or backend is unknown or deflate is no
        int; at ``init`` if a leaf is not floating, its axes are ambiguous or its dimension numbers
        do not fit; at ``update`` without params.

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
    check_backend(backend)
    plain = matrices_and_adamw(
        scale_by_nora(
            beta,
            momentum,
            eps,
            mu_dtype,
            radial=radial,
            deflate=deflate,
            weight_dimension_numbers=weight_dimension_numbers,
        ),
        learning_rate,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        mu_dtype=mu_dtype,
        row_scale=row_scale,
        base_fan_in=base_fan_in,
        rms=rms,
        weight_dimension_numbers=weight_dimension_numbers,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
    )

    def coefficients(shape: tuple[int, ...], rows: Rows, decays: Any, count: Any) -> Coefficients:
        ahead = beta if momentum is None else momentum
        fans = rows.fan_in(shape), rows.fan_out(shape)
        return Coefficients(
            grad_scale=1.0,
            beta=beta,
            one_minus_beta=one_minus(beta),
            ahead=ahead,
            one_minus_ahead=one_minus(ahead),
            eps=eps,
            row_scale=row_scale_of(row_scale, *fans, base_fan_in, rms),
            weight_decay=jnp.where(decays, weight_decay, 0.0),
            learning_rate=learning_rate(count) if callable(learning_rate) else learning_rate,
        )

    if radial is not None or deflate:
        backend = "xla"
    return StepTransformation(
        plain.init,
        Update(plain, backend, coefficients, weight_dimension_numbers, weight_decay_mask),
    )

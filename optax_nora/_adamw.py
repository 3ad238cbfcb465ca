"""A whole model: a rule for its matrices, AdamW for the rest."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._checks import (
    check_holds,
    check_learning_rate,
    check_moment_dtype,
    check_range,
    check_transformation,
    require_params,
)
from optax_nora._leaves import Leaf, PyTree, check_paired, map_leaves
from optax_nora._masks import decay_mask
from optax_nora._routing import Routes, WeightDimensionNumbers, check_matched, enclosing, route_tree
from optax_nora._rows import widen
from optax_nora._states import explained
from optax_nora._weak_rows import weak_rows

Array = jax.Array
ScalarOrSchedule = Any  # a float, a 0-d array, or a function from the step to one


class StepTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that can step the parameters itself: what `nora` and `with_adamw` return.

    To optax it is a pair of ``init`` and ``update`` as all others. What wraps it, `optax.chain` for
    instance, has these two and no ``step``.
    """

    @property
    def step(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """``step(grads, state, params, grad_scale=None) -> (params, state)``.

        The parameters that `optax.apply_updates` makes of ``update``, from and to the same state;
        the two may alternate. Nora's kernels read gradient, momentum and weight, and write momentum
        and weight: no updates are stored. Under `jax.jit` with parameters and state donated, in the
        order in which they are returned, both are changed in place. ``grad_scale`` multiplies all
        gradients on their way in: clipping by the global norm then costs no pass over memory.
        """
        return self.update.step  # pyright: ignore[reportAttributeAccessIssue]


def in_float32(
    inner: optax.GradientTransformation, wide_state: bool = False
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
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        grad_scale: Any = None,
        write_weights: bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        updates = view(updates)
        if grad_scale is not None:
            updates = map_leaves(lambda _, g: grad_scale * g, updates)
        updates, state = inner.update(updates, state, view(params), **extra_args)
        updates = map_leaves(lambda _, u, p: u.astype(jnp.result_type(p)), updates, params)
        return optax.apply_updates(params, updates) if write_weights else updates, state

    return optax.GradientTransformationExtraArgs(init, update)


class AdamW(NamedTuple):
    """Arguments of `optax.adamw`, for the leaves that are no matrices."""

    learning_rate: ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    mu_dtype: Any
    weight_decay: ScalarOrSchedule
    mask: Any  # whatever a user gave as weight_decay_mask


def route_to(
    matrix: optax.GradientTransformationExtraArgs,
    weight_dimension_numbers: WeightDimensionNumbers,
    adamw: AdamW,
) -> StepTransformation:
    """``matrix`` for the matrices and AdamW for the other leaves.

    Both are told ``grad_scale``, a factor on the gradients, and ``write_weights``: to give the
    parameters after the step in the place of updates.
    """
    check_learning_rate("adam_learning_rate", adamw.learning_rate)
    check_range("adam_weight_decay", adamw.weight_decay, schedule=True)
    check_range("adam_b1", adamw.b1, high=1, below=True)
    check_range("adam_b2", adamw.b2, high=1, below=True)
    check_range("adam_eps", adamw.eps)
    rest = optax.adamw(**adamw._replace(mask=decay_mask(adamw.mask))._asdict())
    branches: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrix,
        "adamw": in_float32(rest, wide_state=True),
    }

    def routed(params: PyTree) -> tuple[optax.GradientTransformationExtraArgs, Routes]:
        """The partition and the rows by path: once an update, the routing is asked."""
        labels, routes = route_tree(
            lambda rows: "adamw" if rows is None else "matrix", params, weight_dimension_numbers
        )
        return optax.partition(branches, lambda _: labels), routes  # a tree may be callable

    def check(leaf: Leaf, array: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"{leaf} is not a floating-point array and cannot be optimized; keep it out of the "
                "parameters, or wrap the optimizer in optax.masked"
            )
        return check_holds(adamw.mu_dtype, leaf, array)

    def init(params: PyTree) -> PyTree:
        map_leaves(check, params)
        check_matched(params, weight_dimension_numbers)
        tx, routes = routed(params)
        if routes and not any(routes.values()):
            warnings.warn(
                "no leaf goes to the matrix optimizer, all go to AdamW: look at "
                "optax_nora.summarize(params) and give weight_dimension_numbers",
                stacklevel=2,
            )
        for sentence in weak_rows(params, routes):
            warnings.warn(sentence, stacklevel=2)
        with enclosing(routes):
            return tx.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        require_params(params)
        check_paired(params, updates)
        tx, routes = routed(params)
        with enclosing(routes), explained(tx.init, params, state):
            return tx.update(updates, state, params, **extra_args)

    def step(
        grads: PyTree, state: PyTree, params: PyTree, grad_scale: Any = None
    ) -> tuple[PyTree, PyTree]:
        return update(grads, state, params, grad_scale=grad_scale, write_weights=True)

    update.step = step  # pyright: ignore[reportFunctionMemberAccess]
    return StepTransformation(init, update)


def with_adamw(
    tx: optax.GradientTransformation,
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.95,
    adam_eps: Any = 1e-10,
    adam_mu_dtype: Any = None,
    adam_weight_decay: ScalarOrSchedule = 0.0,
) -> StepTransformation:
    r"""Any rule for the matrices of a model, `optax.adamw` for the rest.

    .. math::
      w \leftarrow w - \eta (\mathrm{tx}(g) + \lambda w)

    What `nora` shares with its peers: routing, decay, masks, rates of AdamW, and arithmetic in
    float32 whatever the dtype of the parameters.

    Args:
      tx: the rule, without learning rate and sign, such as `baselines.scale_by_rmnp`. It sees the
        matrices alone. Parts of this package that were given no weight_dimension_numbers take
        these here.
      learning_rate: :math:`\eta`, a number or a schedule.
      weight_decay: :math:`\lambda` for the matrices, a number or a schedule.
      weight_decay_mask: a tree, a prefix tree or a function of the parameters that gives booleans:
        which leaves decay, in both branches.
      weight_dimension_numbers: which leaves are matrices and which axes are a row, as for `nora`.
      adam_learning_rate: of AdamW, a number or a schedule. None: the same as learning_rate.
      adam_b1: decay of AdamW's first moment.
      adam_b2: decay of AdamW's second moment.
      adam_eps: AdamW's epsilon, added to the root of the second moment.
      adam_mu_dtype: dtype of AdamW's first moment. None: float32 at the least.
      adam_weight_decay: decoupled weight decay of AdamW, a number or a schedule.

    Returns:
      An `optax.GradientTransformationExtraArgs` that also has `StepTransformation.step`.

    Raises:
      TypeError: if a coefficient is not a number, or a schedule where one may be.
      ValueError: if a coefficient is out of range; at ``init`` and ``update`` as `nora`.

    Warns:
      UserWarning: at ``init`` if no leaf is a matrix.

    Examples:
      >>> import optax, optax_nora
      >>> rule = optax.chain(
      ...     optax_nora.baselines.scale_by_rmnp(), optax_nora.scale_by_row_shape()
      ... )
      >>> tx = optax_nora.with_adamw(rule, 0.005, weight_decay=0.1, adam_learning_rate=1e-3)
    """
    check_learning_rate("learning_rate", learning_rate)
    check_range("weight_decay", weight_decay, schedule=True)
    check_moment_dtype(adam_mu_dtype, "adam_mu_dtype")
    check_transformation("tx", tx)
    matrix = optax.chain(
        tx,
        optax.add_decayed_weights(weight_decay, decay_mask(weight_decay_mask)),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = AdamW(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        mu_dtype=adam_mu_dtype,
        weight_decay=adam_weight_decay,
        mask=weight_decay_mask,
    )
    return route_to(in_float32(matrix), weight_dimension_numbers, adamw)

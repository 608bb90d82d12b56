"""`accumulate`: the results of a large batch, computed from smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import ScopeError
from replicax._src.context.current import get_replica_context
from replicax._src.functions.control_flow import out_avals, scan
from replicax._src.functions.jaxpr.on_shards import zeros_to_accumulate
from replicax._src.state.levels import is_staging


@dataclass(frozen=True)
class _Weighting:
    """How an `accumulate` combines the results of the parts.

    Attributes:
        kind: ``"by rows"``, ``"by weight"`` or ``"sum"``; empty outside of an `accumulate`.
        share: The weight of this replica divided by that of all replicas; None if replicas have
            equally many rows.
    """

    kind: str = ""
    share: Any = None


# That of the innermost `accumulate` around the running code.
_OUTSIDE = _Weighting()
_reduction: ContextVar[_Weighting] = ContextVar("replicax_accumulate_reduction", default=_OUTSIDE)
_REDUCED_INSIDE = (
    "The function given to rx.accumulate reduces over the replicas, whose parts have different"
    " weights: each would weight the result in its own way. Reduce the result of rx.accumulate,"
    " once: `gradients = rx.accumulate(rx.value_and_grad(loss, w), k)(x)[1]`, then"
    ' `rx.distribute.get_replica_context().all_reduce("SUM", gradients)`.'
)


def accumulate(
    fn: Callable[..., Any],
    k: int,
    *,
    reduction: str = "mean",
    weight: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls ``fn`` with a k-th of the rows at a time and combines results.

    A step then needs the memory of the smaller batches only. Wrap the function that computes the
    gradients, reduce its result over the replicas as usual, and update once: the step equals that
    of the whole batch. Gradients of sharded variables are kept in shards.

    Args:
        fn: Takes arrays that have the same number of rows, or structures of them, and returns
            arrays, such as a loss and gradients. It may assign variables. Replicas may have
            different numbers of rows, as in a short last batch: `jnp.mean` is then the mean of
            this replica's rows, and `rx.nn.mean_loss` its share of the mean of all rows.
        k: The number of parts. If it does not divide the number of rows, the last part is shorter.
        reduction: ``"mean"`` if ``fn`` returns means over its rows, or gradients of means: parts
            are weighted by their rows. ``"sum"`` if it returns sums, or divides by the size of the
            whole global batch.
        weight: For weighted means, such as of the tokens that are not padding: takes the arguments
            of ``fn``, returns the sum of this replica's weights.

    Returns:
        A function of the arguments of ``fn`` that returns a result of the same structure.

    Raises:
        TypeError: If an argument is not an array with rows.
        ValueError: If ``k`` is not positive, there is no such reduction, or rows differ in number.

    Example:
        >>> w = rx.Variable(2.0)
        >>> def loss(x):
        ...     return jnp.mean(w * x**2)
        >>> step = rx.accumulate(rx.value_and_grad(loss, w), 4)
        >>> value, gradient = step(jnp.arange(10.0))
        >>> float(value), float(gradient)
        (57.0, 28.5)
    """
    given: Any = k
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1:
        raise ValueError(f"k must be a positive number of parts, got {k!r}.")
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"There is no reduction {reduction!r}. Use 'mean' if the function returns means over"
            " its rows, or 'sum' if it returns sums."
        )
    if reduction == "sum" and weight is not None:
        raise ValueError("weight is for reduction='mean'; sums are not weighted.")

    @wraps(fn)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        parts = _BatchParts(fn, treedef, weight, is_mean=reduction == "mean")
        rows = _count_rows(leaves)
        replica = get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1 or replica.position is None:
            return parts.on_equal_replicas(leaves, rows, int(k))
        return parts.on_differing_replicas(leaves, rows, int(k))

    return accumulated


def replica_share() -> Any:
    """Return the factor for a mean over this replica's part, inside of `accumulate`.

    `accumulate` weights each part by its rows among those of this replica. The mean over all
    replicas is then the sum of the replicas' means times their shares of all rows.

    Returns:
        The share of this replica; None if the mean over all replicas' parts is to be returned.
    """
    return _reduction.get().share


def check_loss(name: str, *, is_weighted: bool | None, divides_by: str) -> None:
    """Check that a loss fits the `accumulate` that computes it.

    Args:
        name: The function that computes the loss.
        is_weighted: Whether its mean is divided by a sum of weights; None if it cannot be.
        divides_by: The divisor of the loss: the size of the ``"part"``, or ``"another"`` one.

    Raises:
        ScopeError: If the result would differ from that of the whole batch.
    """
    reduction = _reduction.get().kind
    if reduction == "by rows" and is_weighted:
        raise ScopeError(
            f"{name} got weights inside of rx.accumulate, which weights each part by its rows: the"
            " result would differ from that of the whole batch. Write `rx.accumulate(fn, k,"
            " weight=lambda x, y, mask: mask.sum())`, with the arguments of `fn`."
        )
    if reduction == "by weight" and is_weighted is False:
        raise ScopeError(
            f"{name} got no weights inside of an rx.accumulate that weights each part by its"
            " `weight` function: the result would differ from that of the whole batch. Give the"
            f" weights, `{name}(losses, mask)`, or leave out `weight=`, which weights by rows."
        )
    if reduction in ("by rows", "by weight") and divides_by == "another":
        raise ScopeError(
            f"{name} divides by another number than that of the examples, inside of an"
            " rx.accumulate that averages: the result would be too small. Write"
            ' `rx.accumulate(fn, k, reduction="sum")` if it is the size of the whole global batch,'
            " or leave out global_batch_size."
        )
    if reduction == "sum" and divides_by == "part":
        raise ScopeError(
            f"{name} is a mean over a part of the batch, and this rx.accumulate adds them up: the"
            ' result would be too large. Leave out reduction="sum", or divide by the size of the'
            " whole batch: `rx.nn.compute_average_loss(losses, global_batch_size=...)`."
        )


class _BatchParts:
    """Calls a function for parts of its rows; weights and adds up the results."""

    def __init__(
        self,
        fn: Callable[..., Any],
        treedef: Any,
        weight: Callable[..., Any] | None,
        *,
        is_mean: bool,
    ) -> None:
        self._fn, self._treedef, self._weight, self._is_mean = fn, treedef, weight, is_mean
        self._structure: Any = None
        self._dtypes: list[Any] = []
        self._count = 1  # of parts
        self._own_weight: Any = None
        self._share: Any = None

    def on_equal_replicas(self, leaves: list[Any], rows: int, k: int) -> Any:
        """Run in a loop, for replicas that have the same number of rows."""
        size = max(1, -(-rows // k))
        full = rows // size or 1
        split, rest = min(rows, full * size), max(0, rows - full * size)
        looped = [x[:split].reshape(full, split // full, *x.shape[1:]) for x in leaves]
        last = [x[split:] for x in leaves]
        if self._weight is not None:
            weights = _sum_over(looped, self._weigh)
            self._share_weights(_added(weights, self._weigh(last)) if rest else weights)
            self._count = full + bool(rest)
            total = _sum_over(looped, self._weighted)
            return self._finished(_added(total, self._weighted(last)) if rest else total)
        total = _sum_over(looped, self._call)
        # The weights are Python numbers, with which sums over the replicas commute visibly.
        if self._is_mean:
            total = [x * (size / rows) if rest else x / full for x in total]
        if rest:
            scale = rest / rows if self._is_mean else 1
            total = _added(total, [x * scale for x in self._call(last)])
        return self._finished(total)

    def on_differing_replicas(self, leaves: list[Any], rows: int, k: int) -> Any:
        """Run one part after the other, for replicas that may have different numbers of rows.

        All make k calls, also without rows, since a call may contain collectives.
        """
        ends = [rows * (i + 1) // k for i in range(k)]
        parts = [
            [x[start:end] for x in leaves] for start, end in zip([0, *ends], ends, strict=False)
        ]
        if not self._is_mean:
            total: list[Any] = reduce(_added, map(self._call, parts))
            return self._finished(total)
        weights: list[Any] = reduce(_added, map(self._weigh, parts))
        self._share_weights(weights)
        self._count = k
        weighted: list[Any] = reduce(_added, map(self._weighted, parts))
        return self._finished(weighted)

    def _share_weights(self, weights: list[Any]) -> None:
        """Store the weight of this replica's rows, and its fraction of all replicas' weight."""
        (self._own_weight,) = (total,) = weights
        replica = get_replica_context()
        if replica is not None:
            total = replica.all_reduce("SUM", total)
        self._share = self._own_weight / jnp.where(total == 0, 1, total)

    def _weigh(self, leaves: list[Any]) -> list[Any]:
        """Return the weight of one part on this replica, in a list."""
        args, kwargs = jax.tree.unflatten(self._treedef, leaves)
        rows = leaves[0].shape[0]
        weight = rows if self._weight is None else self._weight(*args, **kwargs)
        return [jnp.asarray(weight, jnp.result_type(float))]

    def _call(self, leaves: list[Any]) -> list[Any]:
        """Return the results of one part, in types that are precise enough to add many up."""
        args, kwargs = jax.tree.unflatten(self._treedef, leaves)
        by_rows = "by rows" if self._weight is None else "by weight"
        token = _reduction.set(_Weighting(by_rows if self._is_mean else "sum", self._share))
        replica = get_replica_context()
        guard: AbstractContextManager[None] = nullcontext()
        if replica is not None and self._share is not None and self._count > 1:
            guard = replica.refuse_all_reduce(_REDUCED_INSIDE)
        try:
            with guard:
                result = self._fn(*args, **kwargs)
        finally:
            _reduction.reset(token)
        outs, self._structure = jax.tree.flatten(result)
        outs = [jnp.asarray(x) for x in outs]
        self._dtypes = [x.dtype for x in outs]
        return [x.astype(_wide(x.dtype, is_mean=self._is_mean)) for x in outs]

    def _weighted(self, leaves: list[Any]) -> list[Any]:
        """Return the results of one part times its share of the weight of this replica."""
        outs, (weight,) = self._call(leaves), self._weigh(leaves)
        # Without any weight, all parts count: each has the terms that do not depend on rows.
        is_empty = self._own_weight == 0
        share = jnp.where(
            is_empty, 1 / self._count, weight / jnp.where(is_empty, 1, self._own_weight)
        )
        # The mean of a part without rows is not a number, and must not count.
        return [jnp.where(share == 0, 0, x * share.astype(x.dtype)) for x in outs]

    def _finished(self, results: Sequence[Any]) -> Any:
        pairs = zip(results, self._dtypes, strict=True)
        kept = [x.astype(d) if jnp.issubdtype(d, jnp.inexact) else x for x, d in pairs]
        return jax.tree.unflatten(self._structure, kept)


def _sum_over(looped: list[Any], part: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return the sum of the results of all parts; compiled code computes it in a loop."""
    count = looped[0].shape[0]
    if count == 1 or not is_staging():
        return reduce(_added, (part([x[i] for x in looped]) for i in range(count)))
    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in looped]
    avals = out_avals(lambda *xs: part(list(xs)), slices)
    zeros = [zeros_to_accumulate(a.shape, a.dtype) for a in avals]

    def step(total: list[Any], xs: list[Any]) -> tuple[list[Any], None]:
        return _added(total, part(xs)), None

    total: list[Any] = scan(step, zeros, looped)[0]
    return total


def _added(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _wide(dtype: Any, *, is_mean: bool) -> Any:
    """Return the type in which to add up results: at least float32, as bfloat16 has few digits."""
    if jnp.issubdtype(dtype, jnp.inexact) or is_mean:
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)


def _count_rows(leaves: Sequence[Any]) -> int:
    """Return the number of rows that all arrays have.

    Raises:
        TypeError: If there is no array, or something else.
        ValueError: If the numbers differ.
    """
    shapes = [np.shape(x) for x in leaves if isinstance(x, jax.Array | np.ndarray)]
    if not leaves or len(shapes) < len(leaves) or () in shapes:
        raise TypeError(
            "The arguments of a function of rx.accumulate are arrays with rows, which are divided"
            f" into parts, got {[type(x).__name__ for x in leaves]} of shapes {shapes}. Let the"
            " function close over everything else: models, optimizers, numbers."
        )
    if len({s[0] for s in shapes}) > 1:
        raise ValueError(
            f"The arguments of a function of rx.accumulate differ in their numbers of rows, the"
            f" size of the first axis: shapes {shapes}."
        )
    return int(shapes[0][0])

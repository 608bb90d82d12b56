"""The `Metric` base class, and the metrics `Sum` and `Mean`.

A metric accumulates sums in on-read variables: every replica adds to its own copy, and the copies
are summed when the metric is read. So updating a metric needs no communication, and replicas with
fewer rows are weighted accordingly.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.ops import canonical_dtype
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import VariableAggregation, VariableSynchronization
from replicax._src.context.current import get_replica_context
from replicax._src.state.variable import Variable


class Metric:
    """A value accumulated over many steps; create it in the strategy's scope.

    To write a metric, call `add_weight` and implement `update_state` and `result`.

    Example:
        >>> class Rows(rx.metrics.Metric):
        ...     def __init__(self):
        ...         super().__init__(name="rows")
        ...         self.rows = self.add_weight("rows")
        ...     def update_state(self, x, sample_weight=None):
        ...         self.add(self.rows, len(x))
        ...     def result(self):
        ...         return self.total_of(self.rows)[0]
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     rows = Rows()
        >>> _ = strategy.run(lambda: rows.update_state(jnp.ones(3)))
        >>> float(rows.result())
        6.0
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        self.name = name or _snake(type(self).__name__)
        self.dtype = jnp.dtype(canonical_dtype(dtype or jnp.float32))
        self.variables: list[Variable] = []

    def add_weight(self, name: str, shape: Any = ()) -> Variable:
        """Create an accumulator that starts at zero, with a separate copy on every replica."""
        variable: Variable = Variable(
            jnp.zeros(shape, self.dtype),
            name=f"{self.name}/{name}",
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self.variables.append(variable)
        return variable

    @abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Accumulate the values of a step."""

    @abstractmethod
    def result(self) -> Any:
        """Return the metric of all values so far, over all replicas."""

    def reset_state(self) -> None:
        """Reset all accumulators to zero.

        Example:
            >>> mean = rx.metrics.Mean()
            >>> mean.update_state(3.0)
            >>> mean.reset_state()
            >>> float(mean.result())
            0.0
        """
        for variable in self.variables:
            variable.assign(jnp.zeros(variable.shape, self.dtype))

    def reset_states(self) -> None:
        """Call `reset_state`; this is its name in older versions of TensorFlow."""
        self.reset_state()

    def add(self, variable: Variable, amount: Any) -> None:
        """Add to an accumulator: in replica context to the replica's copy, else to the total."""
        more = jnp.asarray(amount, self.dtype)
        if get_replica_context() is not None:
            variable.assign_add(more)
        else:
            variable.assign(variable.read_value() + more)

    def total_of(self, *variables: Variable) -> list[jax.Array]:
        """Return the sums over all replicas, in replica context too."""
        values = [v.read_value() for v in variables]
        replica = get_replica_context()
        is_partial = replica is not None and all(v.cell.per_replica for v in variables)
        return replica.all_reduce("SUM", values) if is_partial and replica else values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `update_state`, and return `result`."""
        self.update_state(*args, **kwargs)
        return self.result()

    def __repr__(self) -> str:
        return f"<rx.metrics.{type(self).__name__} {self.name!r}>"


class Sum(Metric):
    """The sum of values.

    Example:
        >>> metric = rx.metrics.Sum()
        >>> metric.update_state([1.0, 3.0], sample_weight=[1.0, 0.5])
        >>> float(metric.result())
        2.5
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each multiplied by its weight."""
        rows, _ = _by_row(values, sample_weight, jnp.sum, self.dtype)
        self.add(self.total, rows.sum())

    def result(self) -> jax.Array:
        """Return the sum over all steps and replicas."""
        return self.total_of(self.total)[0]


class Averaged(Metric):
    """A weighted mean over the rows of all replicas."""

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")
        self.count = self.add_weight("count")

    def add_rows(self, values: Any, sample_weight: Any) -> None:
        """Add values, each with its weight."""
        rows, weights = _by_row(values, sample_weight, jnp.mean, self.dtype)
        self.add(self.total, rows.sum())
        self.add(self.count, rows.size if weights is None else weights.sum())

    def result(self) -> jax.Array:
        """Return the mean over all steps and replicas; 0 before the first update."""
        total, count = self.total_of(self.total, self.count)
        return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


class Mean(Averaged):
    """The weighted mean of values over the rows of all replicas, however many each has.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     loss = rx.metrics.Mean(name="loss")
        >>> batch = rx.distribute.PerReplica([jnp.array([1.0, 2.0]), jnp.array([6.0])])
        >>> _ = strategy.run(loss.update_state, args=(batch,))
        >>> float(loss.result())
        3.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight."""
        self.add_rows(values, sample_weight)


def same_rank(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both arrays with the same rank, if one has a trailing axis of size 1 in excess."""
    if a.ndim == b.ndim + 1 and a.shape[-1] == 1:
        return (a, b[..., None]) if b.ndim == 1 else (a[..., 0], b)
    if b.ndim == a.ndim + 1 and b.shape[-1] == 1:
        return (a[..., None], b) if a.ndim == 1 else (a, b[..., 0])
    return a, b


def _by_row(values: Any, weights: Any, over: Any, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Reduce ``values`` to one weighted value per row.

    Args:
        values: The values.
        weights: Weights that broadcast to the values, or None.
        over: The reduction over all axes but the first: `jnp.sum` or `jnp.mean`.
        dtype: The dtype of the results.

    Returns:
        The value of each row, and its weight, or None without ``weights``.
    """
    x = jnp.asarray(values, dtype)
    if weights is None:
        return over(x, axis=tuple(range(1, x.ndim))), None
    x, w = same_rank(x, jnp.asarray(weights, dtype))
    if x.ndim > w.ndim:
        x = over(x, axis=tuple(range(w.ndim, x.ndim)))
    try:
        w = jnp.broadcast_to(w, x.shape)
    except ValueError:
        raise InvalidArgumentError(
            f"sample_weight of shape {np.shape(weights)} does not fit values of shape"
            f" {np.shape(values)}: give one weight for each row, or for each value."
        ) from None
    rest = tuple(range(1, x.ndim))
    return over(x * w, axis=rest), over(w, axis=rest)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

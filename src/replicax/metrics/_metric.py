"""Metrics: sums in variables that every replica adds to by itself, and that are added up when read.

So a step needs no communication for them, and a replica with fewer rows counts for fewer.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._basics import kept_dtype
from replicax._types import VariableAggregation, VariableSynchronization
from replicax.context._current import get_replica_context
from replicax.data._errors import InvalidArgumentError
from replicax.state._variable import Variable


class Metric:
    """Something that is counted over many steps; made in the scope of the strategy that counts.

    Write your own with `add_weight`, `update_state` and `result`.

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
        self.dtype = jnp.dtype(kept_dtype(dtype or jnp.float32))
        self.variables: list[Variable] = []

    def add_weight(self, name: str, shape: Any = ()) -> Variable:
        """A sum that begins at zero, of its own on every replica."""
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
        """Count what a step saw."""

    @abstractmethod
    def result(self) -> Any:
        """What was counted so far, over all replicas."""

    def reset_state(self) -> None:
        """Begin anew.

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
        """The older name of `reset_state`."""
        self.reset_state()

    def add(self, variable: Variable, amount: Any) -> None:
        """Add to one of the sums: in a replica to its own, elsewhere to that of all."""
        more = jnp.asarray(amount, self.dtype)
        if get_replica_context() is not None:
            variable.assign_add(more)
        else:
            variable.assign(variable.read_value() + more)

    def total_of(self, *variables: Variable) -> list[jax.Array]:
        """The sums over all replicas, also in a replica."""
        values = [v.read_value() for v in variables]
        replica = get_replica_context()
        own = replica is not None and all(v.cell.per_replica for v in variables)
        return replica.all_reduce("SUM", values) if own and replica else values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count, and give the result."""
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
        """Add values, each times its weight."""
        rows, _ = _by_row(values, sample_weight, jnp.sum, self.dtype)
        self.add(self.total, rows.sum())

    def result(self) -> jax.Array:
        """The sum over all steps and replicas."""
        return self.total_of(self.total)[0]


class Averaged(Metric):
    """The mean of something, weighted: of all rows that all replicas saw."""

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
        """The mean over all steps and replicas; 0 if there was nothing."""
        total, count = self.total_of(self.total, self.count)
        return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


class Mean(Averaged):
    """The mean of values, weighted: of all rows that all replicas saw, however many each had.

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
    """Two arrays of which one may have a last axis of one entry that the other has not."""
    if a.ndim == b.ndim + 1 and a.shape[-1] == 1:
        return (a, b[..., None]) if b.ndim == 1 else (a[..., 0], b)
    if b.ndim == a.ndim + 1 and b.shape[-1] == 1:
        return (a[..., None], b) if a.ndim == 1 else (a, b[..., 0])
    return a, b


def _by_row(values: Any, weights: Any, over: Any, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """One value for each row, times its weight, and the weights of the rows if there are any."""
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

"""Updates of a variable at some indices: slices, scatter and sparse reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import VariableAggregation
from replicax._src.compat.jax import give_assign
from replicax._src.context.current import current
from replicax._src.state.declaration import check_dtype
from replicax._src.state.update import Update
from replicax._src.values.per_replica import Distributed, PerReplica
from replicax._src.values.placement import is_traced, private
from replicax._src.values.reduce import IndexedSlices

if TYPE_CHECKING:
    from typing import Generic, Self, TypeVar

    from replicax._src.state.policy import Policy

    _V = TypeVar("_V")

    class VariableSlice(jax.Array, Generic[_V]):
        """A slice of a variable, for type checkers: an array with a method `assign`."""

        def assign(self, value: Any, name: Any = None) -> _V: ...

    # Type checkers see a variable as an array: it is accepted as `jax.typing.ArrayLike` and has
    # an array's operators and methods. At run time it is no instance of `jax.Array`.
    _ArrayToCheckers = jax.Array
else:
    _ArrayToCheckers = object


def _at(verb: str) -> Callable[..., Any]:
    return lambda old, indices, values: getattr(old.at[indices], verb)(values)


def _divided(old: Any, indices: Any, values: Any) -> Any:
    """Divide rows as TensorFlow does."""
    if not jnp.issubdtype(old.dtype, jnp.integer):
        return old.at[indices].divide(values)
    # Integers are divided as in TensorFlow, towards zero and one update after the other: the
    # product of two divisors of one row may overflow.
    rows = jnp.broadcast_to(values, (*indices.shape, *old.shape[1:]))

    def one(value: Any, update: Any) -> Any:
        index, divisor = update
        return value.at[index].set(jax.lax.div(value[index], divisor)), None

    return jax.lax.scan(one, old, (indices.ravel(), rows.reshape(-1, *old.shape[1:])))[0]


def _nd_at(verb: str) -> Callable[..., Any]:
    return lambda old, indices, values: getattr(old.at[tuple(jnp.moveaxis(indices, -1, 0))], verb)(
        values
    )


def _batched(old: Any, indices: Any, values: Any) -> Any:
    rows = jnp.arange(indices.shape[0]).reshape((-1,) + (1,) * (indices.ndim - 1))
    return old.at[rows, indices].set(values)


class SparseUpdates(_ArrayToCheckers):
    """Methods that change a variable only at some indices.

    In a replica, the indices and values of all replicas are concatenated (SUM and MEAN), taken
    from the first replica (ONLY_FIRST_REPLICA), or must be equal (NONE).
    """

    if TYPE_CHECKING:
        _policy: Policy
        _aggregation: VariableAggregation

        @property
        def name(self) -> str: ...

        def read_value(self) -> Any: ...

        def _after_write(self) -> Self: ...

        # JAX 0.12 types these as `Self`, but the result of an operation on a variable is an array.
        def __neg__(self) -> jax.Array: ...  # type: ignore[override]
        def __pos__(self) -> jax.Array: ...  # type: ignore[override]
        def __abs__(self) -> jax.Array: ...  # type: ignore[override]
        def __invert__(self) -> jax.Array: ...  # type: ignore[override]
        def __round__(self, ndigits: Any = None) -> jax.Array: ...  # type: ignore[override]
        def __iter__(self) -> Iterator[jax.Array]: ...  # type: ignore[override]
        def __reversed__(self) -> Iterator[jax.Array]: ...  # type: ignore[override]
        def conj(self) -> jax.Array: ...  # type: ignore[override]
        def copy(self) -> jax.Array: ...  # type: ignore[override]
        def flatten(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def ravel(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def reshape(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def repeat(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def round(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def squeeze(self, axis: Any = None) -> jax.Array: ...  # type: ignore[override]
        def swapaxes(self, axis1: int, axis2: int) -> jax.Array: ...  # type: ignore[override]
        def take(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        def transpose(self, *args: Any) -> jax.Array: ...  # type: ignore[override]
        def view(self, *args: Any, **kwargs: Any) -> jax.Array: ...  # type: ignore[override]
        @property
        def T(self) -> jax.Array: ...  # type: ignore[override]  # noqa: N802
        @property
        def mT(self) -> jax.Array: ...  # type: ignore[override]  # noqa: N802
        @property
        def real(self) -> jax.Array: ...  # type: ignore[override]
        @property
        def imag(self) -> jax.Array: ...  # type: ignore[override]

    def __getitem__(self, key: Any) -> VariableSlice[Self]:  # type: ignore[override]
        """Return a slice of the value, an array whose method ``assign`` writes to the variable.

        Across replicas ``assign`` changes all copies. In a replica the values of all replicas are
        combined by the variable's aggregation.

        Raises:
            InvalidArgumentError: An index is out of bounds.

        Example:
            >>> v = rx.Variable([[1.0, 2.0], [3.0, 4.0]])
            >>> v[0].assign([8.0, 9.0])[:, 1].assign(0.0).numpy()
            array([[8., 0.],
                   [3., 0.]], dtype=float32)
        """
        _check_bounds(key, self.shape)
        whole = self.read_value()
        part = whole[key]
        if part is whole and not is_traced(part):
            part = jnp.copy(part)  # the stored array must not get an `assign` that refers to self
        give_assign(part, partial(self._assign_part, key, part.shape))
        return cast("VariableSlice[Self]", part)

    def _assign_part(self, key: Any, shape: tuple[int, ...], value: Any, name: Any = None) -> Self:
        """Replace the slice `self[key]`, of shape `shape`, by `value`."""
        if isinstance(value, Distributed) and current().replica is not None:
            value = value.component
        if not isinstance(value, PerReplica):
            array = jnp.asarray(private(value))
            check_dtype(self, array, "assign", exact=False)
            if not _fits(array.shape, shape):
                raise InvalidArgumentError(
                    f"assign of a value of shape {array.shape} to a part of shape {shape} of"
                    f" variable {self.name!r}: it must be what `jnp.broadcast_to(value, {shape})`"
                    " takes."
                )
            is_number = isinstance(value, bool | int | float | complex)
            value = value if is_number else array.astype(self.dtype)
        dtype = self.dtype
        replace = lambda old, new: old.at[key].set(jnp.asarray(private(new), dtype))  # noqa: E731
        self._policy.update((value,), Update("assign of a part", "part", replace, part=key))
        return self._after_write()

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Add to some rows; updates of repeated rows accumulate."""
        return self._scatter(sparse_delta, "scatter_add", _at("add"))

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Subtract from some rows."""
        return self._scatter(sparse_delta, "scatter_sub", _at("subtract"))

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Multiply some rows."""
        return self._scatter(sparse_delta, "scatter_mul", _at("multiply"))

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Divide some rows; integers are truncated towards zero."""
        return self._scatter(sparse_delta, "scatter_div", _divided)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Keep the larger of a row and its new value."""
        return self._scatter(sparse_delta, "scatter_max", _at("max"), linear=False)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Keep the smaller of a row and its new value."""
        return self._scatter(sparse_delta, "scatter_min", _at("min"), linear=False)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Replace some rows."""
        return self._scatter(sparse_delta, "scatter_update", _at("set"), linear=False)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: Any = False, name: Any = None
    ) -> Self:
        """Replace some rows in each entry along the first axis."""
        return self._scatter(sparse_delta, "batch_scatter_update", _batched, linear=False)

    def scatter_nd_add(self, indices: Any, updates: Any, name: Any = None) -> Self:
        """Add to the entries at index tuples."""
        return self._scatter(IndexedSlices(updates, indices), "scatter_nd_add", _nd_at("add"))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Any = None) -> Self:
        """Subtract from the entries at index tuples."""
        return self._scatter(IndexedSlices(updates, indices), "scatter_nd_sub", _nd_at("subtract"))

    def scatter_nd_update(self, indices: Any, updates: Any, name: Any = None) -> Self:
        """Replace the entries at index tuples."""
        return self._scatter(
            IndexedSlices(updates, indices), "scatter_nd_update", _nd_at("set"), linear=False
        )

    def sparse_read(self, indices: Any, name: Any = None) -> Any:
        """Return some rows of the value."""
        return self.read_value()[jnp.asarray(indices)]

    def gather_nd(self, indices: Any, name: Any = None) -> Any:
        """Return the entries at index tuples."""
        return self.read_value()[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]

    def _scatter(
        self,
        delta: IndexedSlices,
        verb: str,
        combine: Callable[..., Any],
        *,
        linear: bool = True,
    ) -> Self:
        cell = self._policy.cell
        if not isinstance(delta, IndexedSlices):
            raise TypeError(
                f"A scatter update of variable {cell.name!r} needs rx.IndexedSlices(values,"
                f" indices), got {delta!r}."
            )
        adds_up = (VariableAggregation.SUM, VariableAggregation.MEAN)
        if not linear and self._aggregation in adds_up:
            raise NotImplementedError(
                f"Variable {cell.name!r} has aggregation {self._aggregation.name}, and rows that"
                " are replaced, or kept by size, cannot be added up over replicas. Use aggregation"
                " NONE or ONLY_FIRST_REPLICA."
            )
        parts = (
            jnp.asarray(private(delta.indices)),
            jnp.asarray(private(delta.values), cell.dtype),
        )
        self._policy.update(parts, Update(verb, "sparse", combine))
        return self._after_write()


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        return bool(jnp.broadcast_shapes(shape, wanted) == wanted)
    except ValueError:
        return False


def _check_bounds(key: Any, shape: tuple[int, ...]) -> None:
    """Raise if an integer index is out of bounds, which JAX would clamp."""
    keys = [k for k in (key if isinstance(key, tuple) else (key,)) if k is not None]
    if Ellipsis in [k for k in keys if not hasattr(k, "shape")]:
        where = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[where : where + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    for axis, (index, size) in enumerate(zip(keys, shape, strict=False)):
        if isinstance(index, int) and not isinstance(index, bool) and not -size <= index < size:
            raise InvalidArgumentError(
                f"Index {index} is out of bounds for axis {axis}, which has {size} entries."
            )

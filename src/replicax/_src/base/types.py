"""Type specifications and enumerations.

This is the lowest layer: it depends on NumPy only, and imports nothing from replicax.
"""

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, Self

import numpy as np
from numpy.typing import DTypeLike

Shape = tuple[int | None, ...]


class TypeSpec(ABC):
    """The static description of a value.

    `TensorSpec` is the usual one; `rx.data.DatasetSpec` describes a nested dataset.

    Example:
        >>> isinstance(rx.TensorSpec(shape=(None, 3), dtype=np.float32), rx.TypeSpec)
        True
    """

    @abstractmethod
    def is_compatible_with(self, spec_or_value: Any, /) -> bool:
        """Whether a value, or every value of another spec, matches this spec.

        Args:
            spec_or_value: A `TypeSpec` or a value.

        Returns:
            True if dtypes are equal and no known dimension differs.

        Example:
            >>> spec = rx.TensorSpec(shape=(None, 3), dtype=np.float32)
            >>> spec.is_compatible_with(np.zeros((8, 3), np.float32))
            True
            >>> spec.is_compatible_with(np.zeros((8, 4), np.float32))
            False
        """


class TensorSpec(TypeSpec):
    """Shape and dtype of an array; immutable, and equal by value.

    Args:
        shape: Sizes, with ``None`` for an unknown size; ``None`` for an unknown rank.
        dtype: Anything NumPy accepts as a dtype. Strings and bytes become ``object``, the dtype
            that they have in NumPy arrays on the host.
        name: A name for messages.

    Example:
        >>> rx.TensorSpec(shape=(None, 3), dtype=np.float32)
        TensorSpec(shape=(None, 3), dtype=dtype('float32'), name=None)
    """

    __slots__ = ("_dtype", "_name", "_shape")

    def __init__(
        self,
        shape: Iterable[int | None] | int | None,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> None:
        self._shape = _to_shape(shape)
        self._dtype = _to_dtype(dtype)
        self._name = name

    @classmethod
    def from_tensor(cls, tensor: Any, name: str | None = None) -> Self:
        """Return the spec of an array.

        Args:
            tensor: An array, or something that NumPy converts to one.
            name: A name for messages.

        Returns:
            A spec with every size known.

        Example:
            >>> rx.TensorSpec.from_tensor(np.zeros((2, 3), np.int32))
            TensorSpec(shape=(2, 3), dtype=dtype('int32'), name=None)
        """
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            tensor = np.asarray(tensor)
        return cls(tensor.shape, tensor.dtype, name)

    @property
    def shape(self) -> Any:
        """A tuple of sizes with ``None`` where unknown, or ``None`` for an unknown rank.

        Example:
            >>> rx.TensorSpec([None, 3]).shape
            (None, 3)
        """
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype.

        Example:
            >>> rx.TensorSpec([3], jnp.bfloat16).dtype
            dtype(bfloat16)
        """
        return self._dtype

    @property
    def name(self) -> str | None:
        """The name for messages, if any.

        Example:
            >>> rx.TensorSpec([3], name="x").name
            'x'
        """
        return self._name

    @classmethod
    def from_spec(cls, spec: Any, name: str | None = None) -> Self:
        """Return the spec with the shape and dtype of another.

        Args:
            spec: An object with a shape and a dtype.
            name: A name for messages; by default that of ``spec``.

        Example:
            >>> rx.TensorSpec.from_spec(rx.TensorSpec([3], np.int32), name="x")
            TensorSpec(shape=(3,), dtype=dtype('int32'), name='x')
        """
        return cls(spec.shape, spec.dtype, name or getattr(spec, "name", None))

    def is_compatible_with(self, spec_or_tensor: Any) -> bool:
        """Whether a value, or every value of another spec, matches this spec.

        Args:
            spec_or_tensor: A `TensorSpec`, an array, or something that NumPy converts to one.

        Returns:
            True if dtypes are equal and no known dimension differs.

        Example:
            >>> rx.TensorSpec([None]).is_compatible_with(rx.TensorSpec([5]))
            True
        """
        if isinstance(spec_or_tensor, TypeSpec) and not isinstance(spec_or_tensor, TensorSpec):
            return False
        if isinstance(spec_or_tensor, TensorSpec):
            other = spec_or_tensor
        else:
            try:
                other = TensorSpec.from_tensor(spec_or_tensor)
            except (TypeError, ValueError):
                return False
        return self._dtype == other.dtype and _shapes_agree(self._shape, other.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self._shape}, dtype={self._dtype!r}, name={self._name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._shape, self._dtype, self._name)

    def _key(self) -> tuple[Any, ...]:
        return self._shape, self._dtype, self._name


def _to_shape(shape: Iterable[int | None] | int | None) -> Shape | None:
    if shape is None:
        return None
    if isinstance(shape, (int, np.integer)):
        return (int(shape),)
    return tuple(None if size is None or _is_open(size) else int(size) for size in shape)


def _is_open(size: Any) -> bool:
    """Whether a size is a symbolic dimension of `jax.export`, which is not imported for this."""
    export = sys.modules.get("jax.export")
    return export is not None and bool(export.is_symbolic_dim(size))


def _to_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    if getattr(dtype, "name", "").startswith("key<"):  # JAX's dtype of random keys
        return dtype  # type: ignore[return-value]
    result = np.dtype(object) if dtype in (str, bytes) else np.dtype(dtype)
    # NumPy's fixed-width strings drop trailing zero bytes, so strings are objects.
    return np.dtype(object) if result.kind in "SU" else result


def _shapes_agree(left: Shape | None, right: Shape | None) -> bool:
    if left is None or right is None:
        return True
    if len(left) != len(right):
        return False
    return all(a is None or b is None or a == b for a, b in zip(left, right, strict=True))


class VariableSynchronization(enum.Enum):
    """When the copies of a distributed variable are made equal.

    ``AUTO`` means ``ON_WRITE``. ``ON_READ`` keeps a separate copy on each replica, and aggregates
    them when the variable is read in cross-replica context. Strategies reject ``NONE``.

    Example:
        >>> rx.VariableSynchronization.ON_READ.name
        'ON_READ'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values of several replicas are combined into one.

    Example:
        >>> rx.VariableAggregation.SUM.name
        'SUM'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class UnconnectedGradients(enum.Enum):
    """What `GradientTape.gradient` returns for a source that the target does not depend on.

    Example:
        >>> rx.UnconnectedGradients("zero").name
        'ZERO'
    """

    NONE = "none"
    ZERO = "zero"

    @staticmethod
    def parse(value: Any) -> "UnconnectedGradients":
        """Convert ``value`` to a member of the enumeration.

        Raises:
            ValueError: ``value`` names no member.
        """
        try:
            return UnconnectedGradients(value)
        except ValueError:
            raise ValueError(f"Unknown value for unconnected_gradients: {value!r}") from None


class _ReduceOpType(enum.EnumType):
    """The class of `ReduceOp`, which explains reductions that do not exist."""

    def __getattr__(cls, name: str) -> NoReturn:
        others = {"MAX": "max", "MIN": "min", "PROD": "prod", "PRODUCT": "prod"}
        advice = ""
        if name.upper() in others:
            advice = (
                f" Gather the values and reduce them: `jnp.{others[name.upper()]}("
                "strategy.gather(value, axis=0))`, or in a replica function `get_replica_context()"
                f".all_gather(x[None], axis=0).{others[name.upper()]}(axis=0)`."
            )
        text = f"There is no ReduceOp.{name}, only SUM and MEAN, as in TensorFlow.{advice}"
        raise AttributeError(text, name=name, obj=cls if not advice else None)


class ReduceOp(enum.Enum, metaclass=_ReduceOpType):
    """How `Strategy.reduce` and `ReplicaContext.all_reduce` combine values.

    Example:
        >>> rx.distribute.ReduceOp("SUM").name
        'SUM'
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> "ReduceOp":
        """Return the op that corresponds to a variable's aggregation.

        Raises:
            ValueError: The aggregation is not a reduction.
        """
        ops = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}
        if aggregation not in ops:
            raise ValueError(
                f"{aggregation} is not a reduction; only VariableAggregation.SUM and"
                " VariableAggregation.MEAN have a ReduceOp."
            )
        return ops[aggregation]

    @staticmethod
    def parse(op: Any) -> "ReduceOp":
        """Convert ``op``, a member or its name in any case, to a member of the enumeration.

        Raises:
            ValueError: ``op`` names no member.
        """
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str) and op.upper() in ReduceOp.__members__:
            return ReduceOp[op.upper()]
        named = repr(op) if isinstance(op, str) else f"of type {type(op).__name__}"
        raise ValueError(
            f"There is no reduce op {named}; use rx.distribute.ReduceOp.SUM or MEAN,"
            ' or the text "SUM" or "MEAN", as the first argument, before the value.'
        )


AnyReduceOp = ReduceOp | Literal["SUM", "MEAN", "sum", "mean"]
VariablePolicy = Literal["mirrored", "sharded"]

"""Leaves of elements: conversion of user values to NumPy, specs, and stacking.

As in TensorFlow, Python floats become float32 and ints int32 (int64 if they do not fit); NumPy
arrays keep their dtype. Strings are ``bytes``, in arrays of dtype ``object``. A leaf may also be a
nested dataset, whose spec is `DatasetSpec`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import Shape, TensorSpec, TypeSpec


class DatasetSpec(TypeSpec):
    """The spec of a nested dataset, such as a window.

    Args:
        element_spec: The spec of its elements.
        dataset_shape: Accepted for compatibility with TensorFlow and ignored.

    Example:
        >>> rx.data.Dataset.range(7).window(3).element_spec
        DatasetSpec(TensorSpec(shape=(), dtype=dtype('int64'), name=None))
    """

    __slots__ = ("_element_spec",)

    def __init__(self, element_spec: Any, dataset_shape: Any = ()) -> None:
        self._element_spec = element_spec

    @property
    def element_spec(self) -> Any:
        """The spec of the nested dataset's elements.

        Example:
            >>> rx.data.Dataset.range(7).window(3).element_spec.element_spec.dtype
            dtype('int64')
        """
        return self._element_spec

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether a nested dataset or its spec matches this spec.

        Args:
            spec_or_value: A `DatasetSpec` or a dataset.

        Returns:
            True if the specs of the elements are equal.

        Example:
            >>> spec = rx.data.DatasetSpec(rx.TensorSpec([], np.int64))
            >>> spec.is_compatible_with(rx.data.Dataset.range(3))
            True
        """
        return bool(getattr(spec_or_value, "element_spec", None) == self._element_spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DatasetSpec):
            return NotImplemented
        return bool(self._element_spec == other.element_spec)

    def __hash__(self) -> int:
        return hash(repr(self._element_spec))

    def __repr__(self) -> str:
        return f"DatasetSpec({self._element_spec!r})"


Array = np.ndarray[Any, np.dtype[Any]]

_OBJECT = np.dtype(object)
_INT32 = np.iinfo(np.int32)


def to_leaf(value: Any) -> Any:
    """Convert `value` to a leaf: an array, a NumPy scalar, ``bytes`` or a nested dataset."""
    if type(value) is np.ndarray and value.ndim and value.dtype.kind not in "OSU":
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "SU" or value.dtype.kind == "O":
            value = _to_bytes_array(value)
        return value if value.ndim else value[()]
    if isinstance(value, (np.bool_, np.number, bytes)):
        return bytes(value) if isinstance(value, bytes) else value
    if isinstance(value, str):
        return value.encode()
    if hasattr(value, "node"):
        return value
    return _convert(value)


def private_copy(leaf: Any) -> Any:
    """Return a private copy of `leaf`, because generators often reuse one buffer."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def unshared(value: Any) -> Array:
    """Convert `value` to an array that the user cannot write to: copied unless read-only."""
    array = to_array(value)
    if isinstance(value, (list, tuple, str, bytes, int, float)):
        return array  # newly allocated by the conversion
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return array.copy()
        owner = owner.base
    return array


def to_array(value: Any) -> Array:
    """Convert `value` like `to_leaf`, but always to an array, also for scalars and strings."""
    leaf = to_leaf(value)
    if isinstance(leaf, bytes):
        result = np.empty((), _OBJECT)
        result[()] = leaf
        return result
    return np.asarray(leaf)


def leaf_spec(leaf: Any) -> TypeSpec:
    """Return the spec of a leaf that `to_leaf` returned."""
    if isinstance(leaf, bytes):
        return TensorSpec((), _OBJECT)
    if hasattr(leaf, "node"):
        return DatasetSpec(leaf.node.element_spec)
    return TensorSpec(leaf.shape, leaf.dtype)


def stack(leaves: Sequence[Any], what: str = "batch") -> Array:
    """Stack leaves of equal shape and dtype into one array with a leading axis.

    Raises:
        InvalidArgumentError: If they differ or are datasets; `what` names the operation.
    """
    first = leaves[0]
    if isinstance(first, bytes):
        column = np.empty(len(leaves), _OBJECT)
        column[:] = leaves
        return column
    if hasattr(first, "node"):
        raise InvalidArgumentError(
            f"Cannot {what} nested datasets. Turn each into arrays first, for example with"
            " `flat_map(lambda window: window.batch(n))`."
        )
    if not is_stackable(leaves):
        raise _stack_error(leaves, what)
    shape: tuple[int, ...] = first.shape
    if not shape:
        return np.array(leaves, first.dtype)
    return np.concatenate(leaves).reshape(len(leaves), *shape)


def is_stackable(leaves: Sequence[Any]) -> bool:
    """Whether the leaves can be stacked: equal shapes and dtypes, no datasets."""
    first = leaves[0]
    if hasattr(first, "node"):
        return False
    if isinstance(first, bytes):
        return all(isinstance(leaf, bytes) for leaf in leaves)
    shape, dtype = first.shape, first.dtype
    try:
        return all([leaf.shape == shape and leaf.dtype == dtype for leaf in leaves])  # noqa: C419
    except AttributeError:  # bytes among arrays
        return False


def common_shape(left: Any, right: Any) -> Shape | None:
    """Return the most specific shape compatible with both; None if their ranks differ."""
    if left is None or right is None or len(left) != len(right):
        return None
    return tuple(a if a == b else None for a, b in zip(left, right, strict=True))


def _convert(value: Any) -> Any:
    """Convert a value that is not a NumPy array, scalar or string."""
    try:
        array = np.asarray(value)
    except ValueError:
        _as_object(value)  # raises a clearer error for lists of different lengths
        raise
    if array.dtype.kind in "SUO":
        array = _to_bytes_array(_as_object(value))
    elif not hasattr(value, "dtype") and _is_python_number(value):
        array = _narrow(array)
    return array if array.ndim else array[()]


def _as_object(value: Any) -> Array:
    """Convert strings, or nested lists of them, to an object array; raise for ragged lists."""
    # Not through NumPy's fixed-width strings, which drop trailing zero bytes.
    array: Array | None = None
    with suppress(ValueError):  # raised for some ragged nestings; reported below
        array = np.asarray(value, _OBJECT)
    if array is None or any(isinstance(x, (list, tuple, np.ndarray)) for x in array.flat):
        raise InvalidArgumentError(
            f"A list of parts with different lengths is not an array: {_short(value)}."
            " Pad the parts to one length, or make each part an element of its own, with"
            " `from_generator` or `rx.data.experimental.from_list`, and use `padded_batch`."
        )
    return array


def _to_bytes_array(array: Array) -> Array:
    if array.dtype == _OBJECT and {bytes}.issuperset(map(type, array.flat)):
        return array
    result = np.empty(array.shape, _OBJECT)
    flat = result.reshape(-1)
    for position, item in enumerate(array.flat):
        flat[position] = _to_bytes(item)
    return result


def _to_bytes(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return bytes(item)
    raise InvalidArgumentError(
        f"A dataset element cannot hold {_short(item)} of type {type(item).__name__}."
        " Elements are numbers, booleans, strings, bytes and arrays of these, in tuples,"
        " named tuples or dicts."
    )


def _is_python_number(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (bool, int, float, list, tuple))


def _narrow(array: Array) -> Array:
    """Convert float64 to float32 and int64 to int32 where values fit."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (
        not array.size or (array.min() >= _INT32.min and array.max() <= _INT32.max)
    ):
        return array.astype(np.int32)
    return array


def _stack_error(leaves: Sequence[Any], what: str) -> InvalidArgumentError:
    first = leaves[0]
    differs = (k for k in range(len(leaves)) if not is_stackable((first, leaves[k])))
    position = next(differs)
    other = leaves[position]
    return InvalidArgumentError(
        f"Cannot {what} elements of different shape or dtype: the first is {_describe(first)},"
        f" element {position} of this {what} is {_describe(other)}."
        " Use `padded_batch` for parts of different length, or bring them to one shape in a `map`."
    )


def _describe(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', 'bytes')}{list(getattr(leaf, 'shape', ()))}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

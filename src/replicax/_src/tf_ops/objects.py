"""Classes of `tf`: shapes, modules and lists of arrays."""

import functools
import re
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.state.variable import Variable
from replicax._src.tf_ops.control import name_scope as _name_scope
from replicax._src.tf_ops.core import as_tensor, result_dtype


class TensorShape(tuple[Any, ...]):
    """A shape; unknown sizes are None.

    Example:
        >>> tf.TensorShape([None, 3]).as_list()
        [None, 3]
    """

    is_known: bool

    def __new__(cls, dims: Any = None) -> Any:
        """Create a shape from sizes or another shape; None stands for an unknown rank."""
        result = super().__new__(cls, () if dims is None else cls._sizes(dims))
        result.is_known = dims is not None and getattr(dims, "is_known", True)
        return result

    @staticmethod
    def _sizes(dims: Any) -> Any:
        if isinstance(dims, (int, np.integer)):
            return (int(dims),)
        return tuple(None if d is None or (isinstance(d, int) and d < 0) else int(d) for d in dims)

    @property
    def rank(self) -> Any:
        """The number of dimensions; None if it is unknown."""
        return len(self) if self.is_known else None

    ndims = rank

    @property
    def dims(self) -> Any:
        """The sizes; None if the rank is unknown."""
        return list(self) if self.is_known else None

    def as_list(self) -> Any:
        """Return the sizes in a list."""
        if not self.is_known:
            raise ValueError("as_list() is not defined on an unknown TensorShape.")
        return list(self)

    def num_elements(self) -> Any:
        """Return the number of entries; None if it is unknown."""
        return int(np.prod(self, dtype=np.int64)) if self.is_fully_defined() else None

    def is_fully_defined(self) -> Any:
        """Whether all sizes are known."""
        return self.is_known and None not in self

    def assert_is_fully_defined(self) -> None:
        """Raise a ValueError if a size is unknown."""
        if not self.is_fully_defined():
            raise ValueError(f"Shape {self} is not fully defined")

    def is_compatible_with(self, other: Any) -> Any:
        """Whether one array may have both shapes."""
        shape = TensorShape(other)
        if not (self.is_known and shape.is_known):
            return True
        return len(self) == len(shape) and all(
            None in (a, b) or a == b for a, b in zip(self, shape, strict=True)
        )

    def assert_is_compatible_with(self, other: Any) -> None:
        """Raise a ValueError if no array has both shapes."""
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {tuple(self)} and {tuple(other)} are incompatible")

    def merge_with(self, other: Any) -> Any:
        """Merge two partially known shapes."""
        self.assert_is_compatible_with(other)
        shape = TensorShape(other)
        if not (self.is_known and shape.is_known):
            return self if self.is_known else shape
        return TensorShape([b if a is None else a for a, b in zip(self, shape, strict=True)])

    def with_rank(self, rank: Any) -> Any:
        """Return the shape; raise a ValueError if it has another rank."""
        if not self.is_known:
            return TensorShape([None] * rank)
        self.assert_has_rank(rank)
        return self

    def assert_has_rank(self, rank: Any) -> None:
        """Raise a ValueError if the rank does not match."""
        if self.rank not in (None, rank):
            raise ValueError(f"Shape {tuple(self)} must have rank {rank}")

    def concatenate(self, other: Any) -> Any:
        """Concatenate two shapes."""
        shape = TensorShape(other)
        if not (self.is_known and shape.is_known):
            return TensorShape(None)
        return TensorShape([*self, *shape])

    def __add__(self, other: Any) -> Any:
        return self.concatenate(other)

    def __radd__(self, other: Any) -> Any:
        return TensorShape(other).concatenate(self)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return TensorShape(part) if isinstance(key, slice) else part


class Module:
    """A base class that tracks the variables and modules in its attributes.

    Example:
        >>> class Dense(tf.Module):
        ...     def __init__(self):
        ...         super().__init__(name="dense")
        ...         self.w = rx.Variable(1.0)
        >>> len(Dense().trainable_variables)
        1
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            words = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", type(self).__name__)
            name = re.sub("([a-z])([A-Z])", r"\1_\2", words).lower()
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(
                f"{name!r} is not a valid module name. Module names must be valid Python identifiers."
            )
        self._name = name

    @property
    def name(self) -> Any:
        """The name."""
        return getattr(self, "_name", type(self).__name__)

    @property
    def name_scope(self) -> Any:
        """A `tf.name_scope` with the name."""
        return _name_scope(self.name)

    @property
    def variables(self) -> Any:
        """All variables in attributes, in the order of the attributes' names."""
        return tuple(v for v in _found(self, {}) if _is_variable(v))

    @property
    def trainable_variables(self) -> Any:
        """The variables that are trained."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def non_trainable_variables(self) -> Any:
        """The variables that are not trained."""
        return tuple(v for v in self.variables if not v.trainable)

    @property
    def submodules(self) -> Any:
        """The modules among the attributes."""
        return tuple(m for m in _found(self, {}) if isinstance(m, Module) and m is not self)

    @classmethod
    def with_name_scope(cls, method: Any) -> Any:
        """Decorate a method to run in the name scope of its module."""

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return call


def _is_variable(value: Any) -> bool:
    return isinstance(value, Variable) or (hasattr(value, "trainable") and hasattr(value, "assign"))


def _found(value: Any, seen: Any) -> Any:
    """Return variables and modules in the attributes of a module, each once."""
    if id(value) in seen:
        return []
    seen[id(value)] = value  # also keeps it alive, so that its id stays its own
    if _is_variable(value):
        return [value]
    if isinstance(value, Module):
        inner = [v for k, v in sorted(vars(value).items()) if k != "_name"]
        return [value, *(f for v in inner for f in _found(v, seen))]
    if isinstance(value, (list, tuple)):
        return [f for v in value for f in _found(v, seen)]
    if isinstance(value, dict):
        return [f for _, v in sorted(value.items(), key=str) for f in _found(v, seen)]
    return _found(list(value.variables), seen) if _has_variables(value) else []


def _has_variables(value: Any) -> bool:
    return not isinstance(value, type) and isinstance(
        getattr(value, "variables", None), (list, tuple)
    )


class TensorArray:
    """A list of arrays of one shape, which loops in compiled functions may write to.

    Example:
        >>> values = tf.TensorArray(jnp.float32, size=2).write(0, 1.0).write(1, 2.0)
        >>> values.stack()
        Array([1., 2.], dtype=float32)
    """

    def __init__(
        self,
        dtype: Any,
        size: Any = None,
        dynamic_size: Any = None,
        clear_after_read: Any = None,
        tensor_array_name: Any = None,
        handle: Any = None,
        flow: Any = None,
        infer_shape: Any = True,
        element_shape: Any = None,
        colocate_with_first_write_call: Any = True,
        name: str | None = None,
    ) -> None:
        self.dtype = np.dtype(dtype) if dtype not in (bytes, str) else np.dtype(object)
        self.dynamic_size = bool(dynamic_size)
        self._size = 0 if size is None else int(size)
        self._array: Any = None
        if element_shape is not None and None not in tuple(element_shape) and self._size:
            self._array = jnp.zeros((self._size, *element_shape), result_dtype(self.dtype))

    @property
    def element_shape(self) -> Any:
        """The shape of the arrays; unknown before the first is written."""
        return TensorShape(None if self._array is None else self._array.shape[1:])

    def _with(self, array: Any) -> Any:
        result = object.__new__(TensorArray)
        result.dtype, result.dynamic_size = self.dtype, self.dynamic_size
        result._array, result._size = array, self._size if array is None else array.shape[0]
        return result

    def size(self, name: str | None = None) -> Any:
        """Return the number of arrays."""
        return self._size

    def write(self, index: Any, value: Any, name: str | None = None) -> Any:
        """Return the TensorArray with one array replaced; as in TensorFlow, use the result."""
        new = as_tensor(value, self.dtype)
        array, size = self._array, self._size
        if not isinstance(index, jax.core.Tracer) and int(index) >= size:
            if not self.dynamic_size:
                raise InvalidArgumentError(
                    f"TensorArray: index {int(index)} is out of range for size {size}."
                )
            size = int(index) + 1
        if array is None:
            array = jnp.zeros((size, *new.shape), new.dtype)
        elif size > array.shape[0]:
            array = jnp.pad(array, [(0, size - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])
        result = self._with(array.at[index].set(new))
        self._array, self._size = result._array, result._size
        return result

    def read(self, index: Any, name: str | None = None) -> Any:
        """Return the array at an index."""
        return self.stack()[index]

    def stack(self, name: str | None = None) -> Any:
        """Stack all arrays along a new first axis."""
        if self._array is None:
            return jnp.zeros((self._size,), result_dtype(self.dtype))
        return self._array

    def gather(self, indices: Any, name: str | None = None) -> Any:
        """Stack the arrays at some indices along a new first axis."""
        return self.stack()[as_tensor(indices)]

    def concat(self, name: str | None = None) -> Any:
        """Concatenate all arrays along their first axis."""
        x = self.stack()
        return x.reshape(-1, *x.shape[2:])

    def unstack(self, value: Any, name: str | None = None) -> Any:
        """Return a TensorArray of the slices of an array along its first axis."""
        return self._with(as_tensor(value, self.dtype))

    def scatter(self, indices: Any, value: Any, name: str | None = None) -> Any:
        """Return the TensorArray with the arrays at several indices replaced."""
        result = self
        for i, each in zip(np.asarray(indices), as_tensor(value), strict=True):
            result = result.write(int(i), each)
        return result

    def split(self, value: Any, lengths: Any, name: str | None = None) -> Any:
        """Return a TensorArray of equally long parts of an array."""
        sizes = {int(n) for n in np.asarray(lengths)}
        if len(sizes) != 1:
            raise InvalidArgumentError(
                f"TensorArray: parts of different lengths {sorted(sizes)} need padding first."
            )
        x = as_tensor(value, self.dtype)
        return self._with(x.reshape(-1, sizes.pop(), *x.shape[1:]))

    def identity(self) -> Any:
        """Return the TensorArray."""
        return self

    def close(self, name: str | None = None) -> None:
        """Do nothing: memory is freed automatically."""

    def __len__(self) -> int:
        return self._size


def _flatten(array: Any) -> Any:
    return (array._array,), (array.dtype, array.dynamic_size, array._size)


def _unflatten(facts: Any, leaves: Any) -> Any:
    result = object.__new__(TensorArray)
    result.dtype, result.dynamic_size, result._size = facts
    [result._array] = leaves
    return result


jax.tree_util.register_pytree_node(TensorArray, _flatten, _unflatten)


def dimension_value(dimension: Any) -> Any:
    """Return a dimension as an integer.

    Example:
        >>> tf.compat.dimension_value(3)
        3
    """
    return dimension


def dimension_at_index(shape: Any, index: Any) -> Any:
    """Return one dimension of a shape.

    Example:
        >>> tf.compat.dimension_at_index((2, 3), 1)
        3
    """
    return shape[index]


def as_dtype(type_value: Any) -> Any:
    """Return a dtype.

    Example:
        >>> tf.as_dtype("float32")
        dtype('float32')
    """
    return np.dtype(type_value)


DType = np.dtype

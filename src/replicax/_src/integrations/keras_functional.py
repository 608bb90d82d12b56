"""TensorFlow's functions as operations of Keras's functional models.

A `KerasTensor` stands for an input or a result of a layer while a functional model is built. JAX's
functions reject it, TensorFlow's accept it.
"""

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from replicax._src.state.levels import inferring_shapes

_HOME = "replicax.compat.tf"
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "floordiv", "mul", "neg", "sub")
}
# Texts that stand for values in the arguments of an operation.
_SIZE, _TENSOR = "replicax size ", "replicax tensor "
# Sizes that stand for unknown ones: those of a result that differ are unknown too. They have many
# divisors, so that they can be split.
_TRIED = (240, 480)


class SymbolicSize:
    """A size that a functional model only knows when it runs, such as that of its batches.

    Args:
        expression: A list ``["size", tensor, axis]``, or the name of an operator and its operands.
    """

    def __init__(self, expression: list[Any]) -> None:
        self.expression = expression

    def __repr__(self) -> str:
        """Return a description of the unknown size."""
        return f"<unknown size {self.expression}>"

    def _with(self, name: str, *operands: Any) -> "SymbolicSize":
        parts = [x.expression if isinstance(x, SymbolicSize) else int(x) for x in operands]
        return SymbolicSize([name, *parts])

    def __neg__(self) -> "SymbolicSize":
        """Return the negated size."""
        return self._with("neg", self)

    def __add__(self, other: Any) -> "SymbolicSize":
        """Return the sum with another size or a number."""
        return self._with("add", self, other)

    def __radd__(self, other: Any) -> "SymbolicSize":
        """Return the sum with a number."""
        return self._with("add", other, self)

    def __sub__(self, other: Any) -> "SymbolicSize":
        """Return the difference."""
        return self._with("sub", self, other)

    def __rsub__(self, other: Any) -> "SymbolicSize":
        """Return the difference."""
        return self._with("sub", other, self)

    def __mul__(self, other: Any) -> "SymbolicSize":
        """Return the product."""
        return self._with("mul", self, other)

    def __rmul__(self, other: Any) -> "SymbolicSize":
        """Return the product."""
        return self._with("mul", other, self)

    def __floordiv__(self, other: Any) -> "SymbolicSize":
        """Return the rounded-down quotient."""
        return self._with("floordiv", self, other)


@keras.saving.register_keras_serializable("replicax")
class TensorFlowFunction(keras.Operation):  # type: ignore[misc]
    """A function of `replicax.compat.tf` in a functional model, called on a list of tensors.

    Keras replaces every number in the arguments of a call by a tensor. Arguments that must stay
    Python values, such as shapes, are therefore attributes of the operation.

    Args:
        function: The name of the function, such as ``"nn.relu"``.
        args: Its positional arguments, with placeholder strings for tensors and unknown sizes.
        kwargs: Its keyword arguments, likewise.
        sizes: The expressions of the unknown sizes.
        name: The name of the operation.
    """

    def __init__(
        self, function: str, args: list[Any], kwargs: Any, sizes: list[Any], name: Any = None
    ) -> None:
        super().__init__(name=name)
        self.function = function
        self.args, self.kwargs, self.sizes = args, kwargs, sizes

    def call(self, tensors: Any) -> Any:
        """Call the function."""
        found: Any = importlib.import_module(_HOME)
        for part in self.function.split("."):
            found = getattr(found, part)
        values = {f"{_SIZE}{i}": _size(each, tensors) for i, each in enumerate(self.sizes)}
        values |= {f"{_TENSOR}{i}": tensor for i, tensor in enumerate(tensors)}
        return found(*_filled(self.args, values), **_filled(self.kwargs, values))

    def compute_output_spec(self, tensors: Any) -> Any:
        """Return the shapes and dtypes of the results."""

        def results(size: int) -> Any:
            return jax.eval_shape(self.call, [_spec(tensor, size) for tensor in tensors])

        return jax.tree.map(_symbolic, results(_TRIED[0]), results(_TRIED[1]))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        names = ("function", "args", "kwargs", "sizes", "name")
        return {name: getattr(self, name) for name in names}


def _spec(tensor: Any, size: int) -> jax.ShapeDtypeStruct:
    shape = tuple(size if each is None else each for each in tensor.shape)
    return jax.ShapeDtypeStruct(shape, tensor.dtype)


def _symbolic(one: Any, other: Any) -> Any:
    sizes = zip(one.shape, other.shape, strict=True)
    shape = tuple(a if a == b else None for a, b in sizes)
    return keras.KerasTensor(shape, getattr(one.dtype, "name", one.dtype))


def inferring(original: Any) -> Any:
    """Wrap `keras.Operation.compute_output_spec` for layers that are written for TensorFlow.

    Such a layer may read and write variables: to draw random numbers, for example. And it may use
    the size of a batch as a number (``tf.random.normal([tf.shape(x)[0], 8])``), while Keras traces
    it with sizes that are only names. Then it is traced with two numbers in their place, and the
    sizes that differ are the unknown ones.
    """

    @functools.wraps(original)
    def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        with inferring_shapes():
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                if not _has_unknown_sizes((args, kwargs)):
                    raise
                found = error
            try:
                one, other = (
                    original(self, *tried, **named)
                    for size in _TRIED
                    for tried, named in [_with_sizes((args, kwargs), size)]
                )
                return keras.tree.map_structure(_merged, one, other)
            except Exception:  # its error is about numbers that the program does not have
                raise found from None

    return compute_output_spec


def _has_unknown_sizes(tree: Any) -> bool:
    leaves = keras.tree.flatten(tree)
    return any(isinstance(x, keras.KerasTensor) and None in x.shape for x in leaves)


def _with_sizes(tree: Any, size: int) -> Any:
    def known(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        return keras.KerasTensor(_spec(x, size).shape, x.dtype, sparse=x.sparse)

    return keras.tree.map_structure(known, tree)


def _merged(one: Any, other: Any) -> Any:
    return _symbolic(one, other) if isinstance(one, keras.KerasTensor) else one


def apply(function: str, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of `replicax.compat.tf` in a functional model.

    Args:
        function: Its name below the namespace.
        args: The positional arguments, some of which are symbolic.
        kwargs: The keyword arguments.
    """
    tensors: list[Any] = []
    sizes: list[Any] = []
    places = _without_tensors(list(args), tensors, sizes)
    named = _without_tensors(kwargs, tensors, sizes)
    return TensorFlowFunction(function, places, named, sizes)(tensors)


def shape_of(tensor: Any) -> list[Any]:
    """Return the sizes of a symbolic tensor's axes."""
    return [
        SymbolicSize(["size", tensor, axis]) if size is None else size
        for axis, size in enumerate(tensor.shape)
    ]


def _without_tensors(value: Any, tensors: list[Any], sizes: list[Any]) -> Any:
    """Return a nest with placeholders for symbolic tensors and sizes; append these to lists."""
    if isinstance(value, SymbolicSize):
        sizes.append(_numbered(value.expression, tensors))
        return f"{_SIZE}{len(sizes) - 1}"
    if isinstance(value, keras.KerasTensor):
        return f"{_TENSOR}{_place(value, tensors)}"
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_without_tensors(x, tensors, sizes) for x in value]
    if isinstance(value, dict):
        return {name: _without_tensors(x, tensors, sizes) for name, x in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    is_dtype = isinstance(value, np.dtype) or (hasattr(value, "dtype") and callable(value))
    dtype: Any = value
    return np.dtype(dtype).name if is_dtype else value


def _place(tensor: Any, tensors: list[Any]) -> int:
    """Return the index of a tensor in a list; append it if it is missing."""
    for place, other in enumerate(tensors):
        if other is tensor:
            return place
    tensors.append(tensor)
    return len(tensors) - 1


def _numbered(expression: Any, tensors: list[Any]) -> Any:
    """Return an expression of sizes with each tensor replaced by its index in ``tensors``."""
    if not isinstance(expression, list):
        return expression
    name, *parts = expression
    if name != "size":
        return [name, *(_numbered(part, tensors) for part in parts)]
    tensor, axis = parts
    return [name, _place(tensor, tensors), axis]


def _size(expression: Any, tensors: Any) -> int:
    """Return the value of an expression of sizes."""
    if not isinstance(expression, list | tuple):
        return int(expression)
    name, *parts = expression
    if name == "size":
        return int(tensors[parts[0]].shape[parts[1]])
    return int(_ARITHMETIC[name](*(_size(part, tensors) for part in parts)))


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """Return a nest with each placeholder replaced by its value."""
    if isinstance(value, str):
        return values.get(value, value)
    if isinstance(value, list | tuple):
        return [_filled(x, values) for x in value]
    if isinstance(value, dict):
        return {name: _filled(x, values) for name, x in value.items()}
    return value

"""An array that notices when a function mixes its rows.

Used while a map function is probed: whether it may be given whole blocks instead of elements.
"""

from typing import Any, NoReturn

import numpy as np

from replicax.data._leaves import Array


class MixesRowsError(BaseException):
    """The function looks across elements; not an Exception, so that user code does not catch it."""


class Watched(np.ndarray[Any, np.dtype[Any]]):
    """A block of elements that refuses what has another meaning for a single element."""

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: Any, *inputs: Any, out: Any = None, **kwargs: Any
    ) -> Any:
        if method != "__call__" and not _is_negative(kwargs.get("axis")):
            raise MixesRowsError
        if out is not None:
            kwargs["out"] = tuple(plain(array) for array in out)
        result = getattr(ufunc, method)(*(plain(value) for value in inputs), **kwargs)
        if isinstance(result, np.ndarray):
            return watch(result)
        return result


def _refuse(*_: Any) -> NoReturn:
    raise MixesRowsError


for _name in ("bool", "len", "iter", "int", "float", "index", "contains"):
    setattr(Watched, f"__{_name}__", _refuse)
for _name in ("item", "tolist"):
    setattr(Watched, _name, _refuse)


def watch(array: Array) -> Array:
    """A view that watches."""
    return array.view(Watched)


def plain(value: Any) -> Any:
    """The array behind a watched view; anything else as it is."""
    return value.view(np.ndarray) if isinstance(value, Watched) else value


def _is_negative(axis: Any) -> bool:
    if isinstance(axis, tuple):
        return all(number < 0 for number in axis)
    return axis is not None and axis < 0

"""Small programs that use one name of tf.data, tf.io or tf.train each, for TensorFlow and replicax.

Each is given the library, `tf` or `rx`; what it returns is recorded, with the dtypes, or the type
of the error that it raises.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

Program = Callable[[Any], Any]


def told(value: Any) -> Any:  # noqa: C901 - one case for each kind of value
    """A value as JSON has it: leaves with their dtypes, specs with their shapes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        kind = [] if type(value) is dict else [type(value).__name__]
        return kind + [[key, told(part)] for key, part in value.items()]
    if isinstance(value, (tuple, list)):
        return [told(part) for part in value]
    if hasattr(value, "dense_shape"):
        return ["sparse", told(value.indices), told(value.values), told(value.dense_shape)]
    if hasattr(value, "row_splits"):
        return ["ragged", told(value.values), told(value.row_splits)]
    if hasattr(value, "as_numpy_iterator"):
        return [told(element) for element in value.as_numpy_iterator()]
    if hasattr(value, "is_compatible_with"):
        return _spec(value)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return _array(value)


def _spec(spec: Any) -> Any:
    shape = getattr(spec, "shape", None)
    sizes = None if shape is None or getattr(shape, "rank", 0) is None else list(shape)
    dtype = getattr(spec.dtype, "as_numpy_dtype", spec.dtype)
    return [sizes, np.dtype(dtype).name]


def _array(value: Any) -> Any:
    array = value.numpy() if hasattr(value, "numpy") else value
    array = np.asarray(array, object) if isinstance(array, bytes) else np.asarray(array)
    if array.dtype.kind == "O":
        items = [item.decode("latin-1") for item in array.reshape(-1)]
        return ["string", list(array.shape), items]
    return [array.dtype.name, array.tolist()]


def outcome(program: Program, library: Any) -> Any:
    """What a program returns, or which error it raises."""
    try:
        return told(program(library))
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        names = names[: names.index("Exception")]
        return {"raises": names}


def agrees(found: Any, expected: Any) -> bool:
    """Whether an outcome is the recorded one; an error may be a subtype of the recorded."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and expected["raises"][0] in found["raises"]
    return bool(found == expected)


def _pairs(t: Any) -> Any:
    signature = (t.TensorSpec([None], np.int32), t.TensorSpec([None], np.float32))
    items = [([1, 2], [1.0]), ([3], [2.0, 3.0])]
    return t.data.Dataset.from_generator(lambda: iter(items), output_signature=signature)


def _dicts(t: Any) -> Any:
    return _pairs(t).map(lambda a, b: {"a": a, "b": b})


def _range(t: Any, *numbers: int) -> Any:
    return t.data.Dataset.range(*numbers)


def _slices(t: Any, values: Any) -> Any:
    return t.data.Dataset.from_tensor_slices(values)


def _sampled(t: Any, weights: Any) -> Any:
    datasets = [_range(t, 10), _range(t, 100, 110)]
    return t.data.Dataset.sample_from_datasets(datasets, weights=weights)


def _nested(t: Any, types: Any, shapes: Any, element: Any) -> Any:
    return t.data.Dataset.from_generator(lambda: iter([element]), types, shapes)


def _files(lines: int = 3, count: int = 3) -> list[str]:
    folder = Path(tempfile.mkdtemp())
    for k in range(count):
        (folder / str(k)).write_text("".join(f"{k}{j}\n" for j in range(lines)))
    return [str(folder / str(k)) for k in range(count)]


def _ordered(x: Any) -> Any:
    return collections.OrderedDict([("b", x), ("a", x)])


@dataclasses.dataclass
class Point:
    """An element of one's own type."""

    x: Any
    y: Any


FORMS: dict[str, Program] = {
    "padding values, one left out": lambda t: _pairs(t).padded_batch(2, padding_values=(-1, None)),
    "padding values by key": lambda t: _dicts(t).padded_batch(
        2, padding_values={"b": None, "a": -1}
    ),
    "padding values, too many": lambda t: list(
        _pairs(t).padded_batch(2, padding_values=(1, 1.0, 1))
    ),
    "padding values, a key left out": lambda t: list(
        _dicts(t).padded_batch(2, padding_values={"a": -1})
    ),
    "padding values that are none": lambda t: list(
        _pairs(t).padded_batch(2, padding_values=(1.5, None))
    ),
    "padding with a string": lambda t: list(_pairs(t).padded_batch(2, padding_values=("a", None))),
    "prefetch of None": lambda t: _range(t, 3).prefetch(None),
    "prefetch of less": lambda t: list(_range(t, 3).prefetch(-3)),
    "shapes by key": lambda t: (
        _nested(
            t,
            {"a": np.float32, "b": np.int32},
            {"b": [], "a": [None]},
            {"b": 1, "a": [2.0]},
        ).element_spec
    ),
    "shapes, nested": lambda t: (
        _nested(
            t, (np.int32, {"a": np.float32}), ([], {"a": [None]}), (1, {"a": [2.0]})
        ).element_spec
    ),
    "shapes, too few": lambda t: _nested(t, (np.int32, np.int32), ([],), (1, 2)),
    "shapes, another key": lambda t: _nested(t, {"a": np.int32}, {"b": []}, {"a": 1}),
    "ordered slices": lambda t: _slices(t, collections.OrderedDict([("b", [1]), ("a", [2])])),
    "ordered results": lambda t: _range(t, 1).map(_ordered),
    "ordered batches": lambda t: _range(t, 2).map(_ordered).batch(2),
    "default dicts": lambda t: _range(t, 1).map(lambda x: collections.defaultdict(int, {"b": x})),
    "weights as a dataset": lambda t: _sampled(
        t, _slices(t, np.array([[1, 0], [0, 1], [1, 0]], np.float32))
    ),
    "weights of any sum": lambda t: _sampled(t, _slices(t, np.array([[2, 0], [0, 3]], np.float32))),
    "weights, too few": lambda t: _sampled(t, [1.0]),
    "names, two at once": lambda t: t.data.TextLineDataset(
        _slices(t, _files()), num_parallel_reads=2
    ).map(lambda line: line),
    "names, one at once": lambda t: t.data.TextLineDataset(
        _slices(t, _files()), num_parallel_reads=1
    ),
    "names in batches": lambda t: t.data.TextLineDataset(_slices(t, _files()).batch(2)),
    "names that are numbers": lambda t: t.data.TextLineDataset(_range(t, 3)),
    "many concatenations": lambda t: reduce(
        lambda a, b: a.concatenate(b), [_range(t, k % 3) for k in range(12)]
    ),
}


ALL = FORMS

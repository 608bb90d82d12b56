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


def _grouped(t: Any, count: int, **how: Any) -> Any:
    return _range(t, count).group_by_window(lambda x: x % 2, lambda key, d: d.batch(5), **how)


ROWS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def _rows(t: Any, rows: Any = ROWS) -> Any:
    spec = t.TensorSpec([None], np.int64)
    return t.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)


def _length(row: Any, *_: Any) -> Any:
    return row.shape[0] if isinstance(row, np.ndarray) else _size(row)


def _size(row: Any) -> Any:  # a symbolic tensor of TensorFlow
    import tensorflow as tf  # noqa: PLC0415

    return tf.shape(row)[0]


def _buckets(t: Any, **how: Any) -> Any:
    return _rows(t).bucket_by_sequence_length(_length, [3, 5], [2, 2, 2], **how)


def _labelled(t: Any) -> Any:
    spec = (t.TensorSpec([None], np.int64), t.TensorSpec([], np.int64))
    items = [([1], 1), ([1, 2], 2), ([1, 2, 3], 3)]
    return t.data.Dataset.from_generator(lambda: iter(items), output_signature=spec)


def _saved(dataset: Any, **how: Any) -> str:
    path = str(Path(tempfile.mkdtemp()) / "saved")
    dataset.save(path, **how)
    return path


def _scan(t: Any, state: Any, function: Any) -> Any:
    return _range(t, 4).scan(state, function)


def _promised(t: Any, count: int, promise: int) -> Any:
    dataset = _range(t, count).filter(lambda x: x >= 0)
    return dataset.apply(t.data.experimental.assert_cardinality(promise))


def _written(t: Any, dataset: Any) -> Any:
    path = str(Path(tempfile.mkdtemp()) / "a.tfrecord")
    t.data.experimental.TFRecordWriter(path).write(dataset)
    return t.data.TFRecordDataset(path)


DATASETS: dict[str, Program] = {
    "group_by_window": lambda t: _grouped(t, 10, window_size=5),
    "group_by_window, a rest": lambda t: _grouped(t, 10, window_size=3),
    "group_by_window, sizes by key": lambda t: _grouped(
        t, 10, window_size_func=lambda key: (key + 1) * 2
    ),
    "group_by_window, both sizes": lambda t: _grouped(
        t, 10, window_size=2, window_size_func=lambda key: key
    ),
    "group_by_window, no size": lambda t: _grouped(t, 10),
    "group_by_window, size 0": lambda t: list(_grouped(t, 10, window_size=0)),
    "group_by_window of nothing": lambda t: _grouped(t, 0, window_size=5),
    "group_by_window, size": lambda t: _grouped(t, 10, window_size=5).cardinality(),
    "group_by_window, spec": lambda t: _grouped(t, 10, window_size=5).element_spec,
    "group_by_window, a float": lambda t: list(
        _range(t, 4).group_by_window(lambda x: 1.5, lambda k, d: d, window_size=2)
    ),
    "group_by_window, no dataset": lambda t: list(
        _range(t, 4).group_by_window(lambda x: x, lambda k, d: k, window_size=2)
    ),
    "group_by_window with its key": lambda t: _range(t, 6).group_by_window(
        lambda x: x % 2,
        lambda k, d: t.data.Dataset.zip(d, t.data.Dataset.from_tensors(k).repeat()),
        window_size=2,
    ),
    "group_by_window of pairs": lambda t: t.data.Dataset.zip(
        _range(t, 6), _range(t, 6)
    ).group_by_window(lambda x, y: x % 2, lambda k, d: d.batch(2), window_size=2),
    "buckets": lambda t: _buckets(t),
    "buckets, no rest": lambda t: _buckets(t, drop_remainder=True),
    "buckets filled with -1": lambda t: _buckets(t, padding_values=np.int64(-1)),
    "buckets of one shape": lambda t: _buckets(t, padded_shapes=[7]),
    "buckets without padding": lambda t: list(_buckets(t, no_padding=True)),
    "buckets, spec": lambda t: _buckets(t).element_spec,
    "buckets of pairs": lambda t: _labelled(t).bucket_by_sequence_length(_length, [3], [2, 2]),
    "buckets to their boundary": lambda t: _rows(t, [[1], [1, 2, 3]]).bucket_by_sequence_length(
        _length, [3, 6], [2, 2, 2], pad_to_bucket_boundary=True
    ),
    "buckets, sizes too few": lambda t: _rows(t).bucket_by_sequence_length(_length, [3], [2]),
    "bucket, one": lambda t: _range(t, 3).bucket_by_sequence_length(lambda e: 1, [], [2]),
    "scan": lambda t: _scan(t, np.int64(0), lambda s, x: (s + x, s + x)),
    "scan with a pair": lambda t: t.data.Dataset.zip(_range(t, 4), _range(t, 4)).scan(
        np.int64(0), lambda s, x: (s + x[0], (s, x[1]))
    ),
    "scan, nested state": lambda t: _scan(
        t, (np.int64(0), np.int64(1)), lambda s, x: ((s[1], s[0] + s[1]), s[0])
    ),
    "scan, a list": lambda t: _scan(t, np.int64(0), lambda s, x: [s + 1, s]),
    "scan, no pair": lambda t: list(_scan(t, np.int64(0), lambda s, x: s)),
    "scan, another dtype": lambda t: list(_scan(t, np.int64(0), lambda s, x: (s == x, s))),
    "scan, size": lambda t: _scan(t, np.int64(0), lambda s, x: (s, x)).cardinality(),
    "scan, spec": lambda t: _scan(t, np.int64(0), lambda s, x: (s, x)).element_spec,
    "unique": lambda t: _slices(t, np.array([1, 37, 2, 37, 2, 1], np.int32)).unique(),
    "unique strings": lambda t: _slices(t, ["a", "b", "a"]).unique(),
    "unique rows": lambda t: _slices(t, np.array([[1, 1], [1, 2], [1, 1]], np.int64)).unique(),
    "unique floats": lambda t: list(_slices(t, np.ones(2, np.float32)).unique()),
    "unique bools": lambda t: list(_slices(t, np.array([True])).unique()),
    "unique pairs": lambda t: list(_slices(t, (np.arange(2), np.arange(2))).unique()),
    "unique, size": lambda t: _range(t, 3).unique().cardinality(),
    "random": lambda t: [
        t.data.Dataset.random().element_spec,
        t.data.Dataset.random().cardinality(),
    ],
    "random, again": lambda t: told(d := t.data.Dataset.random(seed=3).take(4)) == told(d),
    "random, other": lambda t: (
        told(d := t.data.Dataset.random(seed=3, rerandomize_each_iteration=True).take(4)) == told(d)
    ),
    "save": lambda t: t.data.Dataset.load(_saved(_range(t, 4))),
    "save, spec": lambda t: t.data.Dataset.load(_saved(_range(t, 4))).element_spec,
    "save, size": lambda t: t.data.Dataset.load(_saved(_range(t, 4))).cardinality(),
    "save pairs": lambda t: t.data.Dataset.load(_saved(_labelled(t))),
    "save dicts": lambda t: t.data.Dataset.load(_saved(_dicts(t))),
    "save, spec of rows": lambda t: t.data.Dataset.load(_saved(_rows(t))).element_spec,
    "save strings": lambda t: t.data.Dataset.load(_saved(_slices(t, ["a", "", "b"]))),
    "save in files": lambda t: t.data.Dataset.load(
        _saved(_range(t, 6), shard_func=lambda x: x % 3),
        reader_func=lambda files: files.flat_map(lambda file: file),
    ),
    "save, no number": lambda t: _saved(_range(t, 4), shard_func=lambda x: 1.5),
    "load nothing": lambda t: t.data.Dataset.load("/no/such/dataset"),
    "load another dtype": lambda t: list(
        t.data.Dataset.load(_saved(_range(t, 4)), element_spec=t.TensorSpec([], np.float32))
    ),
    "snapshot": lambda t: told(d := _range(t, 4).snapshot(tempfile.mkdtemp())) + told(d),
    "snapshot, size": lambda t: _range(t, 4).snapshot(tempfile.mkdtemp()).cardinality(),
    "fingerprint": lambda t: (
        int(_range(t, 3).fingerprint()) == int(_range(t, 3).fingerprint()),
        int(_range(t, 3).fingerprint()) == int(_range(t, 4).fingerprint()),
    ),
    "cardinality": lambda t: t.data.experimental.cardinality(_range(t, 3)),
    "at": lambda t: t.data.experimental.at(_range(t, 3).map(lambda x: x * 2), 1),
    "at, beyond": lambda t: t.data.experimental.at(_range(t, 3), 5),
    "at, before": lambda t: t.data.experimental.at(_range(t, 3), -1),
    "at of a filter": lambda t: t.data.experimental.at(_range(t, 3).filter(lambda x: x > 0), 1),
    "from_list": lambda t: t.data.experimental.from_list([(1, "a"), (2, "b")]),
    "from_list, dicts": lambda t: t.data.experimental.from_list([{"a": 1}, {"a": 2}]),
    "from_list, spec": lambda t: t.data.experimental.from_list([(1, "a"), (2, "b")]).element_spec,
    "from_list, rows": lambda t: t.data.experimental.from_list([[1], [2, 3]]),
    "from_list of nothing": lambda t: t.data.experimental.from_list([]),
    "from_list of a number": lambda t: t.data.experimental.from_list(3),
    "from_list, built otherwise": lambda t: t.data.experimental.from_list([1, (2, 3)]),
    "promised": lambda t: [len(_promised(t, 5, 5)), told(_promised(t, 5, 5))],
    "promised more": lambda t: list(_promised(t, 3, 5)),
    "promised less": lambda t: list(_promised(t, 7, 5)),
    "promised without end": lambda t: list(_promised(t, 7, -1)),
    "written": lambda t: _written(t, _slices(t, ["a", "bc"])),
    "written numbers": lambda t: _written(t, _range(t, 3)),
}

ALL = FORMS | DATASETS

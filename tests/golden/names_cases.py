"""Small programs that use one name of tf.data, tf.io or tf.train each, for TensorFlow and replicax.

Each is given the library, `tf` or `rx`; what it returns is recorded, with the dtypes, or the type
of the error that it raises.
"""

import base64
import collections
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

Program = Callable[[Any], Any]


def told(value: Any) -> Any:
    """A value as JSON has it: leaves with their dtypes, specs with their shapes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        kind = [] if type(value) is dict else [type(value).__name__]
        return kind + [[key, told(part)] for key, part in value.items()]
    if hasattr(value, "dense_shape"):
        return ["sparse", told(value.indices), told(value.values), told(value.dense_shape)]
    if isinstance(value, (tuple, list)):
        return [told(part) for part in value]
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
    if isinstance(array, bytes):
        return array.decode("latin-1")
    array = np.asarray(array)
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
    "save dicts": lambda t: [
        sorted(told(element)) for element in t.data.Dataset.load(_saved(_dicts(t)))
    ],
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


def _feature(t: Any, kind: str, values: Any) -> Any:
    types = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
    return t.train.Feature(**{kind: getattr(t.train, types[kind])(value=values)})


def _example(t: Any) -> Any:
    example = t.train.Example()
    example.features.feature["a"].int64_list.value.extend([1, -2])
    example.features.feature["b"].bytes_list.value.append(b"x")
    example.features.feature["c"].float_list.value[:] = [0.5]
    return example


def _sequence(t: Any) -> Any:
    numbers = [_feature(t, "int64_list", [1, 2]), _feature(t, "int64_list", [3, 4])]
    words = [_feature(t, "bytes_list", [b"a"]), _feature(t, "bytes_list", [b"b", b"c"])]
    lists = {
        "x": t.train.FeatureList(feature=numbers),
        "v": t.train.FeatureList(feature=words),
    }
    return t.train.SequenceExample(
        context=t.train.Features(feature={"k": _feature(t, "int64_list", [7])}),
        feature_lists=t.train.FeatureLists(feature_list=lists),
    )


def _parsed(t: Any, context: Any, steps: Any) -> Any:
    return t.io.parse_single_sequence_example(_sequence(t).SerializeToString(), context, steps)


def _batch_parsed(t: Any, context: Any, steps: Any, **how: Any) -> Any:
    short = _sequence(t)
    del short.feature_lists.feature_list["x"].feature[1:]
    del short.feature_lists.feature_list["v"].feature[0]
    data = [m.SerializeToString() for m in (_sequence(t), short, t.train.SequenceExample())]
    return t.io.parse_sequence_example(data[: how.pop("count", 2)], context, steps, **how)


def _words(t: Any) -> Any:
    return getattr(t, "string", bytes)


def _refilled(t: Any) -> Any:
    feature = _feature(t, "int64_list", [1])
    feature.float_list.value.append(1.0)
    return [feature.WhichOneof("kind"), list(feature.int64_list.value)]


MESSAGES: dict[str, Program] = {
    "Example": lambda t: _example(t).SerializeToString(deterministic=True),
    "Example, empty": lambda t: t.train.Example().SerializeToString(),
    "Example of no features": lambda t: t.train.Example(
        features=t.train.Features()
    ).SerializeToString(),
    "Example, read": lambda t: (
        t.train.Example.FromString(_example(t).SerializeToString()) == _example(t)
    ),
    "Example, parsed": lambda t: t.train.Example().ParseFromString(_example(t).SerializeToString()),
    "Example, a missing feature": lambda t: [
        "z" in (example := _example(t)).features.feature,
        example.features.feature["z"].WhichOneof("kind"),
        sorted(example.features.feature),
    ],
    "Example, another field": lambda t: t.train.Example(foo=1),
    "Example, another attribute": lambda t: setattr(t.train.Example(), "foo", 1),
    "Feature, empty list": lambda t: t.train.Feature(
        int64_list=t.train.Int64List()
    ).SerializeToString(),
    "Feature, which": lambda t: [
        t.train.Feature().WhichOneof("kind"),
        _feature(t, "float_list", [1]).WhichOneof("kind"),
        t.train.Feature(int64_list=t.train.Int64List()).WhichOneof("kind"),
        t.train.Feature().HasField("int64_list"),
    ],
    "Feature, filled again": _refilled,
    "Int64List": lambda t: t.train.Int64List(value=[1, -1, 300]).SerializeToString(),
    "Int64List of an array": lambda t: list(t.train.Int64List(value=np.arange(3)).value),
    "Int64List of floats": lambda t: t.train.Int64List(value=[1.5]),
    "Int64List, too large": lambda t: t.train.Int64List(value=[2**64]),
    "Int64List of bools": lambda t: t.train.Int64List(value=np.array([True])),
    "Int64List, assigned": lambda t: setattr(t.train.Int64List(), "value", [1]),
    "Int64List, by place": lambda t: t.train.Int64List([1]),
    "FloatList": lambda t: t.train.FloatList(value=[1, 2]).SerializeToString(),
    "FloatList, rounded": lambda t: t.train.FloatList(value=[0.1]).value[0],
    "FloatList of strings": lambda t: t.train.FloatList(value=["a"]),
    "BytesList": lambda t: t.train.BytesList(value=[b"a", b""]).SerializeToString(),
    "BytesList of strings": lambda t: t.train.BytesList(value=["a"]),
    "SequenceExample": lambda t: _sequence(t).SerializeToString(deterministic=True),
    "SequenceExample, read": lambda t: (
        t.train.SequenceExample.FromString(_sequence(t).SerializeToString()) == _sequence(t)
    ),
    "sequence": lambda t: _parsed(
        t,
        {"k": t.io.FixedLenFeature([], np.int64)},
        {"x": t.io.FixedLenSequenceFeature([2], np.int64)},
    ),
    "sequence, sparse": lambda t: _parsed(
        t, {"k": t.io.VarLenFeature(np.int64)}, {"v": t.io.VarLenFeature(_words(t))}
    ),
    "sequence, missing": lambda t: _parsed(
        t, None, {"z": t.io.FixedLenSequenceFeature([2], np.int64)}
    ),
    "sequence, missing and allowed": lambda t: _parsed(
        t, None, {"z": t.io.FixedLenSequenceFeature([2], np.int64, allow_missing=True)}
    ),
    "sequence, missing context": lambda t: _parsed(
        t, {"z": t.io.FixedLenFeature([], np.int64)}, None
    ),
    "sequence, default": lambda t: _parsed(
        t, {"z": t.io.FixedLenFeature([], np.int64, default_value=5)}, None
    ),
    "sequence, dtype": lambda t: _parsed(
        t, None, {"x": t.io.FixedLenSequenceFeature([2], np.float32)}
    ),
    "sequence, shape": lambda t: _parsed(
        t, None, {"x": t.io.FixedLenSequenceFeature([3], np.int64)}
    ),
    "sequence of nothing": lambda t: _parsed(t, None, None),
    "sequence, a fixed one": lambda t: _parsed(t, None, {"x": t.io.FixedLenFeature([2], np.int64)}),
    "sequence, damaged": lambda t: t.io.parse_single_sequence_example(
        b"\xff", {"k": t.io.FixedLenFeature([], np.int64)}
    ),
}

MESSAGES |= {
    "sequences": lambda t: _batch_parsed(
        t,
        {"k": t.io.FixedLenFeature([], np.int64)},
        {"x": t.io.FixedLenSequenceFeature([2], np.int64)},
    ),
    "sequences, sparse": lambda t: _batch_parsed(
        t,
        {"k": t.io.VarLenFeature(np.int64)},
        {"v": t.io.VarLenFeature(_words(t)), "x": t.io.VarLenFeature(np.int64)},
    ),
    "sequences, named": lambda t: _batch_parsed(
        t, {"k": t.io.FixedLenFeature([], np.int64)}, None, example_names=["p", "q"]
    ),
    "sequences, missing": lambda t: _batch_parsed(
        t, {"k": t.io.FixedLenFeature([], np.int64)}, None, count=3
    ),
    "sequences, missing with a default": lambda t: _batch_parsed(
        t, {"k": t.io.FixedLenFeature([], np.int64, default_value=-1)}, None, count=3
    ),
    "sequences, missing steps": lambda t: _batch_parsed(
        t, None, {"x": t.io.FixedLenSequenceFeature([2], np.int64)}, count=3
    ),
    "sequences, steps that may be missing": lambda t: _batch_parsed(
        t, None, {"x": t.io.FixedLenSequenceFeature([2], np.int64, allow_missing=True)}, count=3
    ),
    "sequences, sparse and missing": lambda t: _batch_parsed(
        t, None, {"x": t.io.VarLenFeature(np.int64)}, count=3
    ),
    "sequences, shape": lambda t: _batch_parsed(
        t, None, {"x": t.io.FixedLenSequenceFeature([3], np.int64)}
    ),
    "sequences of nothing": lambda t: _batch_parsed(t, None, None),
    "sequences, one": lambda t: t.io.parse_sequence_example(
        _sequence(t).SerializeToString(),
        {"k": t.io.FixedLenFeature([], np.int64)},
        {"x": t.io.FixedLenSequenceFeature([2], np.int64)},
    ),
    "sequences, a table": lambda t: t.io.parse_sequence_example(
        [[b""]], {"k": t.io.VarLenFeature(np.int64)}
    ),
    "sequences, damaged": lambda t: t.io.parse_sequence_example(
        [b"\xff"], {"k": t.io.VarLenFeature(np.int64)}
    ),
}

TENSORS = (
    1,
    1.5,
    [1, 2],
    [[1.0, 2.0]],
    True,
    "ab",
    ["a", ""],
    np.zeros((0, 3), np.int64),
    np.float64(2),
    np.array([1, 255], np.uint8),
    np.array(3, np.int8),
    np.float16(1.5),
    np.array([2**40], np.uint64),
)


def _folder() -> str:
    folder = Path(tempfile.mkdtemp())
    for name in ("a.txt", "b.txt", "c.csv"):
        (folder / name).write_text(name)
    (folder / "sub").mkdir()
    return f"{folder}/"


def _in_folder(program: Callable[[Any, str], Any]) -> Program:
    def run(t: Any) -> Any:
        folder = _folder()
        found = told(program(t, folder))
        return found if not isinstance(found, str) else found.replace(folder, "")

    return run


def _matches(t: Any, folder: str, *patterns: str) -> Any:
    found = t.io.matching_files([folder + pattern for pattern in patterns])
    names = found.numpy() if hasattr(found, "numpy") else found
    return [name.decode().replace(folder, "") for name in names]


def _lines(t: Any, folder: str) -> Any:
    with t.io.gfile.GFile(folder + "g", "w") as file:
        file.write("one\ntwo\n")
    with t.io.gfile.GFile(folder + "g", "a") as file:
        file.write("x")
    with t.io.gfile.GFile(folder + "g") as file:
        first = [file.read(3), file.tell(), file.readline(), file.readlines(), file.size()]
    with t.io.gfile.GFile(folder + "g", "rb") as file:
        return [*first, told(file.read()), list(t.io.gfile.GFile(folder + "g"))]


FILES: dict[str, Program] = {
    **{
        f"serialize_tensor {k}": lambda t, value=value: t.io.serialize_tensor(value)
        for k, value in enumerate(TENSORS)
    },
    "parse_tensor": lambda t: t.io.parse_tensor(t.io.serialize_tensor([[1, 2]]), np.int32),
    "parse_tensor, strings": lambda t: t.io.parse_tensor(
        t.io.serialize_tensor(["a", ""]), _words(t)
    ),
    "parse_tensor, values": lambda t: t.io.parse_tensor(
        b"\x08\x03\x12\x04\x12\x02\x08\x03\x3a\x01\x05", np.int32
    ),
    "parse_tensor, no values": lambda t: t.io.parse_tensor(
        b"\x08\x03\x12\x04\x12\x02\x08\x03", np.int32
    ),
    "parse_tensor, half": lambda t: t.io.parse_tensor(
        b"\x08\x13\x12\x04\x12\x02\x08\x01\x6a\x02\x80\x7c", np.float16
    ),
    "parse_tensor, dtype": lambda t: t.io.parse_tensor(t.io.serialize_tensor([1]), np.int64),
    "parse_tensor, damaged": lambda t: t.io.parse_tensor(b"\xff\xffxx", np.int64),
    "parse_tensor of nothing": lambda t: t.io.parse_tensor(b"", np.int64),
    "parse_tensor of several": lambda t: t.io.parse_tensor([b"\x08\x03"], np.int64),
    "decode_raw": lambda t: t.io.decode_raw(b"\x01\x00\x02\x00", np.int16),
    "decode_raw, big": lambda t: t.io.decode_raw(b"\x01\x00", np.int16, little_endian=False),
    "decode_raw, odd": lambda t: t.io.decode_raw(b"abc", np.int16),
    "decode_raw, uneven": lambda t: t.io.decode_raw([b"ab", b"abcd"], np.int16),
    "decode_raw, cut": lambda t: t.io.decode_raw([b"ab", b"abcdef"], np.int16, fixed_length=4),
    "decode_raw, cut oddly": lambda t: t.io.decode_raw([b"ab"], np.int16, fixed_length=3),
    "decode_raw, cut to nothing": lambda t: t.io.decode_raw([b"ab"], np.int16, fixed_length=0),
    "decode_raw, bools": lambda t: t.io.decode_raw(b"\x01\x00", np.bool_),
    "decode_raw of nothing": lambda t: t.io.decode_raw([b"", b""], np.int16),
    "read_file": _in_folder(lambda t, d: t.io.read_file(d + "a.txt")),
    "read_file, missing": _in_folder(lambda t, d: t.io.read_file(d + "no")),
    "read_file, a folder": _in_folder(lambda t, d: t.io.read_file(d)),
    "read_file, several": _in_folder(lambda t, d: t.io.read_file([d + "a.txt"])),
    "write_file": _in_folder(
        lambda t, d: [t.io.write_file(d + "x/y", "hi"), t.io.read_file(d + "x/y")][1]
    ),
    "write_file, a folder": _in_folder(lambda t, d: t.io.write_file(d, "x")),
    "write_file, a number": _in_folder(lambda t, d: t.io.write_file(d + "n", 3)),
    "matching_files": _in_folder(lambda t, d: _matches(t, d, "*.txt")),
    "matching_files, several": _in_folder(lambda t, d: _matches(t, d, "*.csv", "?.txt", "[ab].*")),
    "matching_files, none": _in_folder(lambda t, d: _matches(t, d, "*.zip")),
    "exists": _in_folder(
        lambda t, d: [
            f(d + name)
            for f in (t.io.gfile.exists, t.io.gfile.isdir)
            for name in ("", "a.txt", "no")
        ]
    ),
    "listdir": _in_folder(lambda t, d: sorted(t.io.gfile.listdir(d))),
    "listdir, missing": _in_folder(lambda t, d: t.io.gfile.listdir(d + "no")),
    "glob": _in_folder(lambda t, d: sorted(x.replace(d, "") for x in t.io.gfile.glob(d + "*.txt"))),
    "mkdir, twice": _in_folder(lambda t, d: [t.io.gfile.mkdir(d + "m"), t.io.gfile.mkdir(d + "m")]),
    "mkdir, deep": _in_folder(lambda t, d: t.io.gfile.mkdir(d + "m/n/o")),
    "makedirs": _in_folder(lambda t, d: [t.io.gfile.makedirs(d + "m/n") for _ in range(2)]),
    "makedirs, a file": _in_folder(lambda t, d: t.io.gfile.makedirs(d + "a.txt")),
    "remove": _in_folder(
        lambda t, d: [t.io.gfile.remove(d + "a.txt"), t.io.gfile.exists(d + "a.txt")]
    ),
    "remove, missing": _in_folder(lambda t, d: t.io.gfile.remove(d + "no")),
    "remove, a folder": _in_folder(lambda t, d: t.io.gfile.remove(d + "sub")),
    "rmtree": _in_folder(lambda t, d: [t.io.gfile.rmtree(d), t.io.gfile.exists(d)]),
    "rmtree, missing": _in_folder(lambda t, d: t.io.gfile.rmtree(d + "no")),
    "rmtree, a file": _in_folder(lambda t, d: t.io.gfile.rmtree(d + "a.txt")),
    "copy": _in_folder(
        lambda t, d: [t.io.gfile.copy(d + "a.txt", d + "z"), t.io.read_file(d + "z")]
    ),
    "copy, over": _in_folder(lambda t, d: t.io.gfile.copy(d + "a.txt", d + "b.txt")),
    "copy, allowed": _in_folder(lambda t, d: t.io.gfile.copy(d + "a.txt", d + "b.txt", True)),
    "copy, missing": _in_folder(lambda t, d: t.io.gfile.copy(d + "no", d + "z")),
    "rename, over": _in_folder(lambda t, d: t.io.gfile.rename(d + "a.txt", d + "b.txt")),
    "rename, allowed": _in_folder(lambda t, d: t.io.gfile.rename(d + "a.txt", d + "b.txt", True)),
    "rename, missing": _in_folder(lambda t, d: t.io.gfile.rename(d + "no", d + "z")),
    "stat": _in_folder(
        lambda t, d: [t.io.gfile.stat(d + "a.txt").length, t.io.gfile.stat(d).is_directory]
    ),
    "stat, missing": _in_folder(lambda t, d: t.io.gfile.stat(d + "no")),
    "walk": _in_folder(
        lambda t, d: [
            [a.replace(d.rstrip("/"), ""), sorted(b), sorted(c)]
            for a, b, c in t.io.gfile.walk(d.rstrip("/"))
        ]
    ),
    "walk, missing": _in_folder(lambda t, d: list(t.io.gfile.walk(d + "no"))),
    "join": lambda t: [t.io.gfile.join("a", "b", "/c"), t.io.gfile.join("a/", "b")],
    "GFile": _in_folder(_lines),
    "GFile, missing": _in_folder(lambda t, d: t.io.gfile.GFile(d + "no").read()),
    "GFile, mode": _in_folder(lambda t, d: t.io.gfile.GFile(d + "a.txt", "q")),
    "GFile, not for reading": _in_folder(lambda t, d: t.io.gfile.GFile(d + "g", "w").read()),
    "GFile, not for writing": _in_folder(lambda t, d: t.io.gfile.GFile(d + "a.txt").write("x")),
}


def _csv(t: Any, records: Any, defaults: Any, **how: Any) -> Any:
    return list(t.io.decode_csv(records, defaults, **how))


def _csv_files() -> list[str]:
    folder = Path(tempfile.mkdtemp())
    (folder / "a.csv").write_text('x,y,name\n1,2.5,a\n2,3.5,"b,c"\n3,,d\n')
    (folder / "b.csv").write_text("x,y,name\n4,4.5,e\n")
    (folder / "q.csv").write_bytes(b'"a\nb",1\r\n"c""d",2')
    (folder / "e.csv").write_text("a,1\nb,x\nc,3\n")
    return [str(folder / f"{name}.csv") for name in "abqe"]


def _csv_dataset(t: Any, file: int | slice, defaults: Any, **how: Any) -> Any:
    return t.data.experimental.CsvDataset(_csv_files()[file], defaults, **how)


def _made_csv(t: Any, file: int | slice = 0, size: int = 3, **how: Any) -> Any:
    how = {"num_epochs": 1, "shuffle": False, **how}
    return t.data.experimental.make_csv_dataset(_csv_files()[file], size, **how)


NONE = {kind: np.zeros(0, kind) for kind in (np.int32, np.float32)}

CSV: dict[str, Program] = {
    "decode_csv": lambda t: _csv(t, "1,2.5,a", [[0], [0.0], [""]]),
    "decode_csv, several": lambda t: _csv(t, ["1,2.5,a", "3,4,b"], [[0], [0.0], [""]]),
    "decode_csv, a table": lambda t: _csv(t, [["1,2"], ["3,4"]], [[0], [0]]),
    "decode_csv, defaults": lambda t: _csv(t, ",,", [[7], [0.5], ["z"]]),
    "decode_csv, required": lambda t: _csv(t, ",1", [NONE[np.int32], [0]]),
    "decode_csv, too few": lambda t: _csv(t, "1", [[0], [0]]),
    "decode_csv, too many": lambda t: _csv(t, "1,2,3", [[0], [0]]),
    "decode_csv, no int": lambda t: _csv(t, "x", [[0]]),
    "decode_csv, a float for an int": lambda t: _csv(t, "1.5", [[0]]),
    "decode_csv, too large": lambda t: _csv(t, "3000000000", [[0]]),
    "decode_csv, hexadecimal": lambda t: _csv(t, "0x10", [[0]]),
    "decode_csv, spaces and signs": lambda t: _csv(t, " 1 ,+2,-3", [[0], [0], [0]]),
    "decode_csv, floats": lambda t: _csv(t, "inf,1e3,-.5", [[0.0]] * 3),
    "decode_csv, quotes": lambda t: _csv(t, '"a,b","c""d",e,""', [[""]] * 4),
    "decode_csv, lines in quotes": lambda t: _csv(t, '"a\nb",c', [[""], [""]]),
    "decode_csv, a quote inside": lambda t: _csv(t, 'a"b,c', [[""], [""]]),
    "decode_csv, more after a quote": lambda t: _csv(t, '"ab"c,d', [[""], [""]]),
    "decode_csv, no last quote": lambda t: _csv(t, '"ab', [[""]]),
    "decode_csv, quotes as they are": lambda t: _csv(
        t, '"a","b"', [[""], [""]], use_quote_delim=False
    ),
    "decode_csv, none": lambda t: _csv(t, "NA,,2", [[7], [8], [0]], na_value="NA"),
    "decode_csv, semicolons": lambda t: _csv(t, "1;2", [[0], [0]], field_delim=";"),
    "decode_csv, two signs": lambda t: _csv(t, "1;2", [[0], [0]], field_delim=";;"),
    "decode_csv, chosen": lambda t: _csv(t, "1,2,3", [[0], [0]], select_cols=[0, 2]),
    "decode_csv, chosen in disorder": lambda t: _csv(t, "1,2,3", [[0], [0]], select_cols=[2, 0]),
    "decode_csv, chosen beyond": lambda t: _csv(t, "1,2,3", [[0]], select_cols=[5]),
    "decode_csv, bools": lambda t: _csv(t, "1", [[True]]),
    "decode_csv, carriage return": lambda t: _csv(t, "1,2\r", [[0], [0]]),
    "decode_csv of nothing": lambda t: _csv(t, "", [[3]]),
    "CsvDataset": lambda t: _csv_dataset(t, 0, [np.int32, [9.0], _words(t)], header=True),
    "CsvDataset, several": lambda t: _csv_dataset(
        t, slice(2), [np.int32, [9.0], _words(t)], header=True
    ),
    "CsvDataset, required": lambda t: list(
        _csv_dataset(t, 0, [np.int32, np.float32, _words(t)], header=True)
    ),
    "CsvDataset, chosen": lambda t: _csv_dataset(
        t, 0, [np.int32, _words(t)], header=True, select_cols=[0, 2]
    ),
    "CsvDataset, left out": lambda t: _csv_dataset(
        t, 0, [np.int32, _words(t)], header=True, exclude_cols=[1]
    ),
    "CsvDataset, spec": lambda t: _csv_dataset(t, 0, [np.int32, [9.0], _words(t)]).element_spec,
    "CsvDataset, both": lambda t: _csv_dataset(t, 0, [np.int32], select_cols=[0], exclude_cols=[1]),
    "CsvDataset, too few": lambda t: list(_csv_dataset(t, 0, [np.int32, np.float32], header=True)),
    "CsvDataset, missing": lambda t: list(
        t.data.experimental.CsvDataset("/no/such/file", [np.int32])
    ),
    "CsvDataset, quotes": lambda t: _csv_dataset(t, 2, [_words(t), np.int32]),
    "CsvDataset, a bad record": lambda t: _csv_dataset(t, 3, [_words(t), np.int32]).ignore_errors(),
    "make_csv_dataset": lambda t: _made_csv(t, size=2),
    "make_csv_dataset, label": lambda t: _made_csv(t, slice(2), label_name="name"),
    "make_csv_dataset, spec": lambda t: _made_csv(t).element_spec,
    "make_csv_dataset, endless": lambda t: _made_csv(t, num_epochs=None).element_spec,
    "make_csv_dataset, chosen": lambda t: _made_csv(t, select_columns=["name", "x"]),
    "make_csv_dataset, told": lambda t: _made_csv(
        t, select_columns=["x"], column_defaults=[np.float32]
    ),
    "make_csv_dataset, names": lambda t: _made_csv(t, column_names=["p", "q", "r"]),
    "make_csv_dataset, no names": lambda t: _made_csv(t, header=False),
    "make_csv_dataset, another label": lambda t: _made_csv(t, label_name="z"),
    "make_csv_dataset, another column": lambda t: _made_csv(t, select_columns=["z"]),
    "make_csv_dataset, no file": lambda t: t.data.experimental.make_csv_dataset("/no/such/*", 3),
    "make_csv_dataset, in turn": lambda t: _made_csv(
        t, slice(2), 4, select_columns=["x"], num_parallel_reads=2
    ),
    "make_csv_dataset, errors": lambda t: _made_csv(
        t,
        3,
        column_names=["a", "b"],
        header=False,
        column_defaults=[_words(t), np.int32],
        ignore_errors=True,
    ),
}


IMAGES_OF = Path(__file__).with_name("images.json")  # files that TensorFlow has written


def _image(name: str) -> bytes:
    found: bytes = base64.b64decode(json.loads(IMAGES_OF.read_text())[name])
    return found


IMAGES: dict[str, Program] = {
    **{
        f"decode_png, {name}, {channels} channels": lambda t, name=name, n=channels: (
            t.io.decode_png(_image(name), channels=n)
        )
        for name in ("gray", "gray and clear", "colours", "colours and clear", "gray of 16 bits")
        for channels in (0, 1, 3, 4)
    },
    "decode_png, 16 bits": lambda t: t.io.decode_png(_image("gray of 16 bits"), dtype=np.uint16),
    "decode_png, 8 bits in 16": lambda t: t.io.decode_png(_image("colours"), dtype=np.uint16),
    "decode_png, 2 channels": lambda t: t.io.decode_png(_image("colours"), channels=2),
    "decode_png of a JPEG": lambda t: t.io.decode_png(_image("jpeg")).shape[2],
    "decode_png, nonsense": lambda t: t.io.decode_png(b"nonsense"),
    "decode_png, cut off": lambda t: t.io.decode_png(_image("colours")[:-30]),
    "decode_png, several": lambda t: t.io.decode_png([_image("colours")]),
    "decode_jpeg": lambda t: t.io.decode_jpeg(_image("jpeg"), dct_method="INTEGER_ACCURATE"),
    "decode_jpeg, gray": lambda t: t.io.decode_jpeg(
        _image("jpeg"), channels=1, dct_method="INTEGER_ACCURATE"
    ),
    "decode_jpeg, clear": lambda t: t.io.decode_jpeg(_image("jpeg"), channels=4),
    "decode_jpeg, cut off": lambda t: t.io.decode_jpeg(_image("jpeg")[:-30]),
    "decode_image": lambda t: t.io.decode_image(_image("colours")),
    "decode_image, floats": lambda t: t.io.decode_image(_image("gray"), dtype=np.float32),
    "decode_image, 16 bits": lambda t: t.io.decode_image(_image("gray"), dtype=np.uint16),
    "decode_image, nothing": lambda t: t.io.decode_image(b""),
}


def _drawn(x: Any) -> Any:
    return [np.dtype(getattr(x.dtype, "as_numpy_dtype", x.dtype)).name, [int(n) for n in x.shape]]


def _same(draw: Callable[[], Any]) -> Any:
    one, other = np.asarray(draw()), np.asarray(draw())
    return [*_drawn(one), bool((one == other).all())]


LOGITS = [[0.0, 0.0, 0.0], [0.0, 50.0, 0.0]]

RANDOM: dict[str, Program] = {
    "truncated_normal": lambda t: _drawn(t.random.truncated_normal([2, 3])),
    "truncated_normal, bounds": lambda t: bool(
        (abs(np.asarray(t.random.truncated_normal([999], 0.0, 0.5))) <= 1).all()
    ),
    "categorical": lambda t: _drawn(t.random.categorical(LOGITS, 5, dtype=np.int32)),
    "categorical, certain": lambda t: np.asarray(
        t.random.categorical([[0.0, 500.0]], 3, dtype=np.int32)
    ),
    "categorical, one row": lambda t: t.random.categorical([0.0, 1.0], 3, dtype=np.int32),
    "gamma": lambda t: _drawn(t.random.gamma([4], [0.5, 1.5])),
    "gamma, beta": lambda t: _drawn(t.random.gamma([4, 2], [[0.5], [1.5]], [1.0, 2.0, 3.0])),
    "gamma, integers": lambda t: t.random.gamma([4], 2, dtype=np.int32),
    "poisson": lambda t: _drawn(t.random.poisson([4], [0.5, 1.5])),
    "poisson, integers": lambda t: _drawn(t.random.poisson([4], 2.5, dtype=np.int32)),
    "shuffle": lambda t: np.sort(np.asarray(t.random.shuffle([[1, 2], [3, 4], [5, 6]])), axis=0),
    "shuffle, with a seed": lambda t: _drawn(t.random.shuffle([1, 2, 3], seed=1)),
    "split": lambda t: _drawn(t.random.split([1, 2])),
    "split, five": lambda t: _drawn(t.random.split([1, 2], num=5)),
    "split, distinct": lambda t: len({*map(tuple, np.asarray(t.random.split([1, 2], 9)).tolist())}),
    "fold_in": lambda t: _drawn(t.random.fold_in([1, 2], 3)),
    "fold_in, distinct": lambda t: bool(
        (np.asarray(t.random.fold_in([1, 2], 3)) != np.asarray(t.random.fold_in([1, 2], 4))).any()
    ),
    "stateless_uniform": lambda t: _same(lambda: t.random.stateless_uniform([3], [1, 2])),
    "stateless_uniform, integers": lambda t: _same(
        lambda: t.random.stateless_uniform([3], [1, 2], 0, 9, dtype=np.int32)
    ),
    "stateless_uniform, all integers": lambda t: _drawn(
        t.random.stateless_uniform([3], [1, 2], None, None, dtype=np.uint32)
    ),
    "stateless_uniform, one bound": lambda t: t.random.stateless_uniform(
        [3], [1, 2], 1, None, dtype=np.int32
    ),
    "stateless_uniform, no bound": lambda t: t.random.stateless_uniform(
        [3], [1, 2], dtype=np.int32
    ),
    "stateless_uniform, large seeds": lambda t: bool(
        (
            np.asarray(t.random.stateless_uniform([9], np.array([2**40, 0])))
            != np.asarray(t.random.stateless_uniform([9], np.array([2**41, 0])))
        ).any()
    ),
    "stateless_uniform, one seed": lambda t: t.random.stateless_uniform([3], 1),
    "stateless_uniform, three seeds": lambda t: t.random.stateless_uniform([3], [1, 2, 3]),
    "stateless_uniform, half a seed": lambda t: t.random.stateless_uniform([3], [1.0, 2.0]),
    "stateless_uniform, philox": lambda t: _drawn(
        t.random.stateless_uniform([3], [1, 2], alg="philox")
    ),
    "stateless_uniform, algorithm": lambda t: t.random.stateless_uniform(
        [3], [1, 2], alg="nothing"
    ),
    "stateless_normal": lambda t: _same(lambda: t.random.stateless_normal([3], [1, 2], 5.0, 2.0)),
    "stateless_truncated_normal": lambda t: _same(
        lambda: t.random.stateless_truncated_normal([3], [1, 2])
    ),
    "stateless_categorical": lambda t: _same(
        lambda: t.random.stateless_categorical(LOGITS, 4, [1, 2], dtype=np.int32)
    ),
    "stateless_gamma": lambda t: _same(
        lambda: t.random.stateless_gamma([5, 2], [1, 2], [0.5, 1.5], 2.0)
    ),
    "stateless_gamma, shape": lambda t: t.random.stateless_gamma([5, 3], [1, 2], [0.5, 1.5]),
    "stateless_poisson": lambda t: _same(
        lambda: t.random.stateless_poisson([5, 2], [1, 2], [0.5, 1.5])
    ),
    "stateless_poisson, shape": lambda t: t.random.stateless_poisson([5, 3], [1, 2], [0.5, 1.5]),
    "stateless_binomial": lambda t: _same(
        lambda: t.random.stateless_binomial([5, 2], [1, 2], [10.0, 20.0], [0.5, 0.1])
    ),
    "stateless_parameterized_truncated_normal": lambda t: _same(
        lambda: t.random.stateless_parameterized_truncated_normal(
            [5, 2], [1, 2], [0.0, 5.0], 1.0, [-1.0, 4.0], [1.0, 6.0]
        )
    ),
    "stateless_parameterized_truncated_normal, bounds": lambda t: [
        float(np.asarray(x).min()) >= 3.0 and float(np.asarray(x).max()) <= 4.0
        for x in [
            t.random.stateless_parameterized_truncated_normal([99], [1, 2], 0.0, 1.0, 3.0, 4.0)
        ]
    ],
    "stateless_shuffle": lambda t: _same(
        lambda: t.random.experimental.stateless_shuffle([3, 1, 2], [1, 2])
    ),
    "stateless_split": lambda t: _drawn(t.random.experimental.stateless_split([1, 2], 3)),
    "stateless_fold_in": lambda t: _drawn(t.random.experimental.stateless_fold_in([1, 2], 3)),
    "get_global_generator": lambda t: (
        t.random.get_global_generator() is t.random.experimental.get_global_generator()
    ),
    "set_global_generator": lambda t: [
        t.random.set_global_generator(one) or t.random.get_global_generator() is one
        for one in [t.random.Generator.from_seed(1)]
    ],
    "create_rng_state": lambda t: [
        bool((np.asarray(one.normal([3])) == np.asarray(other.normal([3]))).all())
        for one in [t.random.Generator.from_seed(7, "philox")]
        for other in [
            t.random.Generator(state=t.random.create_rng_state(7, "philox"), alg="philox")
        ]
    ],
    "Algorithm": lambda t: [
        [a.name, a.value]
        for a in sorted(t.random.Algorithm, key=lambda a: a.value)
        if t.random.experimental.Algorithm is t.random.Algorithm
    ],
    "Generator, an algorithm": lambda t: _drawn(
        t.random.Generator.from_seed(1, t.random.Algorithm.PHILOX).normal([2])
    ),
}


def _cpu(t: Any) -> Any:
    return t.config.list_physical_devices("CPU")[0]


def _gpu(t: Any) -> Any:
    return t.config.PhysicalDevice("/physical_device:GPU:0", "GPU")


CONFIG: dict[str, Program] = {
    "get_visible_devices": lambda t: [
        [d.name, d.device_type] for d in t.config.get_visible_devices()
    ],
    "get_visible_devices, of a type": lambda t: t.config.get_visible_devices("GPU"),
    "set_visible_devices, hidden": lambda t: t.config.set_visible_devices([], "GPU"),
    "set_visible_devices, the same": lambda t: t.config.set_visible_devices(_cpu(t)),
    "set_visible_devices, another": lambda t: t.config.set_visible_devices(_gpu(t)),
    "set_visible_devices, of another type": lambda t: t.config.set_visible_devices(_cpu(t), "GPU"),
    "set_visible_devices, a name": lambda t: t.config.set_visible_devices("CPU:0"),
    "soft_device_placement": lambda t: [
        t.config.get_soft_device_placement(),
        t.config.set_soft_device_placement(False),
        t.config.get_soft_device_placement(),
        t.config.set_soft_device_placement(True),
    ],
    "get_device_details": lambda t: t.config.experimental.get_device_details(_cpu(t)),
    "get_device_details of a name": lambda t: t.config.experimental.get_device_details("CPU:0"),
    "set_memory_growth": lambda t: t.config.experimental.set_memory_growth(_cpu(t), True),
    "set_memory_growth, no GPU": lambda t: t.config.experimental.set_memory_growth(_gpu(t), True),
    "get_memory_growth, no GPU": lambda t: t.config.experimental.get_memory_growth(_gpu(t)),
    "get_memory_info": lambda t: t.config.experimental.get_memory_info("CPU:0"),
    "get_memory_info, no GPU": lambda t: t.config.experimental.get_memory_info("GPU:0"),
    "get_memory_info, no device": lambda t: t.config.experimental.get_memory_info("nothing"),
    "get_memory_usage": lambda t: t.config.experimental.get_memory_usage("CPU:0"),
    "tensor_float_32": lambda t: [
        t.config.experimental.tensor_float_32_execution_enabled(),
        t.config.experimental.enable_tensor_float_32_execution(False),
        t.config.experimental.tensor_float_32_execution_enabled(),
        t.config.experimental.enable_tensor_float_32_execution(True),
    ],
    "tensor_float_32, a word": lambda t: t.config.experimental.enable_tensor_float_32_execution(
        "x"
    ),
    "virtual devices": lambda t: [
        t.config.experimental.VirtualDeviceConfiguration is t.config.LogicalDeviceConfiguration,
        repr(t.config.LogicalDeviceConfiguration()),
    ],
}


def _part(key: Any, value: Any) -> Program:
    return lambda t: t.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))[key].assign(value)


PARTS: dict[str, Program] = {
    "part, a row": _part(0, [9.0, 9.0, 9.0]),
    "part, a column": _part((slice(1, 3), 0), [5.0, 6.0]),
    "part, one number": _part((slice(1, 3), 0), 7.0),
    "part, too many": _part((slice(1, 3), 0), [1.0, 2.0, 3.0]),
    "part, of another dtype": _part(0, np.array([1, 2, 3])),
    "part, with steps": _part(slice(None, None, 2), np.zeros((2, 3), np.float32)),
    "part, backwards": _part(slice(None, None, -1), np.arange(12.0).reshape(4, 3)),
    "part, the last": _part(-1, [0.0, 0.0, 0.0]),
    "part, an ellipsis": _part((..., 1), [1.0, 2.0, 3.0, 4.0]),
    "part, a new axis": _part(None, np.ones((1, 4, 3), np.float32)),
    "part, nothing": _part(slice(0, 0), np.ones((0, 3), np.float32)),
    "part, all": _part(slice(None), 0.0),
    "part, out of bounds": _part(7, [1.0, 2.0, 3.0]),
    "part, read out of bounds": lambda t: t.Variable([1.0, 2.0])[2],
}


def _applied(make: Program, size: int = 6) -> Program:
    return lambda t: t.data.Dataset.range(size).apply(make(t.data.experimental))


def _two_of(t: Any) -> Any:
    choices = t.data.Dataset.from_tensor_slices(np.array([1, 0, 1, 1, 0, 0]))
    return [t.data.Dataset.range(2), t.data.Dataset.range(10, 13)], choices


def _older_saved(t: Any) -> Any:
    folder = tempfile.mkdtemp() + "/d"
    t.data.experimental.save(t.data.Dataset.range(3), folder)
    return t.data.experimental.load(folder)


OLDER: dict[str, Program] = {
    "older unbatch": lambda t: (
        t.data.Dataset.range(4).batch(3).apply(t.data.experimental.unbatch())
    ),
    "older unique": lambda t: t.data.Dataset.range(3).repeat(2).apply(t.data.experimental.unique()),
    "older take_while": _applied(lambda e: e.take_while(lambda x: x < 3)),
    "older scan": _applied(lambda e: e.scan(np.int64(1), lambda s, x: (s + x, s * x))),
    "older enumerate": _applied(lambda e: e.enumerate_dataset(7), 3),
    "older group_by_window": _applied(
        lambda e: e.group_by_window(lambda x: x % 2, lambda _, w: w.batch(2), window_size=2)
    ),
    "older map_and_batch": _applied(lambda e: e.map_and_batch(lambda x: x * 2, 4)),
    "older map_and_batch, whole": _applied(
        lambda e: e.map_and_batch(lambda x: x * 2, 4, drop_remainder=True)
    ),
    "older shuffle_and_repeat": lambda t: sorted(
        int(x)
        for x in t.data.Dataset.range(3)
        .apply(t.data.experimental.shuffle_and_repeat(2, 2, seed=1))
        .as_numpy_iterator()
    ),
    "older choose": lambda t: t.data.experimental.choose_from_datasets(*_two_of(t)),
    "older choose, until one ends": lambda t: t.data.experimental.choose_from_datasets(
        *_two_of(t), stop_on_empty_dataset=True
    ),
    "older get_single_element": lambda t: t.data.experimental.get_single_element(
        t.data.Dataset.range(1)
    ),
    "older get_single_element of two": lambda t: t.data.experimental.get_single_element(
        t.data.Dataset.range(2)
    ),
    "older get_structure": lambda t: t.data.experimental.get_structure(
        t.data.Dataset.range(2).batch(2)
    ),
    "older get_next_as_optional": lambda t: [
        bool(t.data.experimental.get_next_as_optional(iterator).has_value())
        for iterator in [iter(t.data.Dataset.range(1))]
        for _ in range(2)
    ],
    "older Counter": lambda t: t.data.experimental.Counter(3, 2).take(3),
    "older save": _older_saved,
}

ALL = FORMS | DATASETS | MESSAGES | FILES | CSV | IMAGES | RANDOM | CONFIG | PARTS | OLDER

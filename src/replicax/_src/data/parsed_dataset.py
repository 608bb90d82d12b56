"""Datasets of parsed `Example` messages, whose spec is derived from the declared features."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.graph_facts import Known
from replicax._src.data.node import AUTOTUNE, node_of, to_int
from replicax._src.data.nodes.map import MapNode
from replicax._src.data.readers import TFRecordDataset
from replicax._src.data.records.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    RaggedTensor,
    SparseTensor,
)
from replicax._src.data.records.parse import parse_example
from replicax._src.data.user_functions import ElementFunction

_PARSERS = 2  # threads, as in TensorFlow


def parse_example_dataset(
    features: Mapping[str, Any] | None,
    num_parallel_calls: int | None = 1,
    deterministic: bool | None = None,  # noqa: FBT001
) -> Callable[[Dataset], Dataset]:
    """Parse batches of serialized examples.

    Args:
        features: How to parse each feature, as for `rx.io.parse_example`.
        num_parallel_calls: Number of parsing threads.
        deterministic: Ignored: the order is always that of the input.

    Returns:
        A function for `Dataset.apply`. It takes a dataset of batches of strings and returns one of
        dicts, whose ``element_spec`` is known without reading.

    Example:
        >>> records = [rx.io.serialize_example({"x": [k]}) for k in (1, 2)]
        >>> batches = rx.data.Dataset.from_tensor_slices(records).batch(2)
        >>> features = {"x": rx.io.FixedLenFeature([], np.int64)}
        >>> list(batches.apply(rx.data.experimental.parse_example_dataset(features)))
        [{'x': array([1, 2])}]
    """
    del deterministic
    if features is None:
        raise InvalidArgumentError(
            "parse_example_dataset() needs features: a dict of names and how to parse each, such as"
            ' {"x": rx.io.FixedLenFeature([], np.int64)}.'
        )
    wanted = dict(features)
    calls = num_parallel_calls
    if calls is not None and calls != AUTOTUNE:
        calls = to_int(calls, "parse_example_dataset", "num_parallel_calls", least=1)

    def apply(dataset: Dataset) -> Dataset:
        node = node_of(dataset, "parse_example_dataset")
        spec = None
        if node.is_spec_known:
            spec = _parsed_spec(node.element_spec, wanted)
        function = ElementFunction(
            lambda serialized: parse_example(serialized, wanted), "parse_example_dataset"
        )
        return Dataset(MapNode(node, function, calls, known_spec=Known(spec)))

    return apply


def _parsed_spec(spec: Any, features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of parsed batches; raise if `spec` is not one of batches of strings."""
    is_batch = isinstance(spec, TensorSpec) and spec.dtype == object
    if not is_batch or (spec.shape is not None and len(spec.shape) != 1):
        raise StructureError(
            f"parse_example_dataset() needs a dataset of batches of strings, and the elements of"
            f" this one are {spec}. Call `batch` first."
        )
    size = None if spec.shape is None else spec.shape[0]
    return {key: _feature_spec(feature, size) for key, feature in features.items()}


def _feature_spec(feature: Any, size: int | None) -> Any:
    """Return the spec of one parsed feature in batches of `size`."""
    if isinstance(feature, FixedLenFeature):
        return TensorSpec((size, *feature.shape), feature.dtype)
    if isinstance(feature, FixedLenSequenceFeature):
        return TensorSpec((size, None, *feature.shape), feature.dtype)
    values: Any = TensorSpec((None,), feature.dtype)
    if isinstance(feature, RaggedFeature):
        splits: Any = TensorSpec((None if size is None else size + 1,), np.int64)
        return RaggedTensor(values, splits)
    indices: Any = TensorSpec((None, 2), np.int64)
    dense: Any = TensorSpec((2,), np.int64)
    return SparseTensor(indices, values, dense)


def make_batched_features_dataset(  # noqa: PLR0913
    file_pattern: str | Sequence[str],
    batch_size: int,
    features: Mapping[str, Any],
    reader: Callable[..., Dataset] | None = None,
    label_key: str | None = None,
    reader_args: Sequence[Any] | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,  # noqa: FBT001, FBT002
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    reader_num_threads: int | None = None,
    parser_num_threads: int | None = None,
    sloppy_ordering: bool = False,  # noqa: FBT001, FBT002
    drop_final_batch: bool = False,  # noqa: FBT001, FBT002
) -> Dataset:
    """Read files of examples as shuffled, repeated, parsed batches.

    Args:
        file_pattern: File names or patterns.
        batch_size: Examples per batch.
        features: How to parse each feature, as for `rx.io.parse_example`.
        reader: Takes a file name, returns a dataset of strings; `rx.data.TFRecordDataset` if None.
        label_key: The feature to use as the label; elements are then pairs of a dict and a label.
        reader_args: Further arguments for ``reader``.
        num_epochs: Number of passes over the files; infinite if None.
        shuffle: Whether to shuffle files and examples.
        shuffle_buffer_size: Size of the shuffle buffer, in examples.
        shuffle_seed: The seed of the order.
        prefetch_buffer_size: Batches to prefetch; ``rx.data.AUTOTUNE`` if None.
        reader_num_threads: Files to read in parallel; 1 if None.
        parser_num_threads: Number of parsing threads; 2 if None.
        sloppy_ordering: Ignored: the order depends only on the seed.
        drop_final_batch: Whether to drop a partial last batch.

    Returns:
        A dataset of dicts, or of pairs of a dict and a label.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> with rx.io.TFRecordWriter(path) as writer:
        ...     for k in range(3):
        ...         writer.write(rx.io.serialize_example({"x": [k], "y": [k % 2]}))
        >>> kind = rx.io.FixedLenFeature([], np.int64)
        >>> dataset = rx.data.experimental.make_batched_features_dataset(
        ...     path, 2, {"x": kind, "y": kind}, label_key="y", num_epochs=1, shuffle=False
        ... )
        >>> list(dataset)
        [({'x': array([0, 1])}, array([0, 1])), ({'x': array([2])}, array([0]))]
    """
    del sloppy_ordering
    if label_key is not None and label_key not in features:
        raise InvalidArgumentError(
            f"make_batched_features_dataset(label_key={label_key!r}): there is no such feature;"
            f" features has {sorted(features)}."
        )
    read, arguments = reader or TFRecordDataset, tuple(reader_args or ())
    files = Dataset.list_files(file_pattern, shuffle=shuffle, seed=shuffle_seed)
    threads = 1 if reader_num_threads is None else reader_num_threads
    records: Dataset = files.interleave(
        lambda name: read(name, *arguments),
        cycle_length=threads,
        num_parallel_calls=None if threads == 1 else threads,
    )
    if records.node.is_spec_known and isinstance(records.element_spec, tuple):
        records = records.map(lambda _, value: value)  # the reader yields (key, value) pairs
    if shuffle:
        records = records.shuffle(shuffle_buffer_size, shuffle_seed)
    if num_epochs != 1:
        records = records.repeat(num_epochs)
    # In an infinite dataset all batches are full, so their static size can be known.
    batches = records.batch(batch_size, drop_remainder=drop_final_batch or num_epochs is None)
    parsers = _PARSERS if parser_num_threads is None else parser_num_threads
    parsed = batches.apply(parse_example_dataset(features, parsers))
    if label_key is not None:
        parsed = parsed.apply(lambda dataset: _with_label(dataset, label_key))
    return parsed.prefetch(AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size)


def _with_label(dataset: Dataset, label_key: str) -> Dataset:
    """Split each dict of a dataset into a pair of the other features and the label."""

    def split(parsed: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        rest = {key: value for key, value in parsed.items() if key != label_key}
        return rest, parsed[label_key]

    node = dataset.node
    spec = split(node.element_spec) if node.is_spec_known else None
    return Dataset(MapNode(node, ElementFunction(split, "map"), known_spec=Known(spec)))

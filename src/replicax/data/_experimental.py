"""Functions of tf.data.experimental; many are older forms of methods, for `Dataset.apply`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicax._types import TensorSpec
from replicax.data._blocks import RowBlock
from replicax.data._dataset import Dataset
from replicax.data._errors import (
    InvalidArgumentError,
    OutOfRangeError,
    StructureError,
    UnimplementedError,
)
from replicax.data._leaves import leaf_spec, own, to_leaf
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, node_of, to_int
from replicax.data._nodes._combine import joined, require_alike
from replicax.data._nodes._promised import PromisedNode
from replicax.data._nodes._window import BlockNode
from replicax.data._records._writer import TFRecordWriter as RecordWriter
from replicax.data._seeds import Run
from replicax.data._structure import flatten


def cardinality(dataset: Dataset) -> np.int64:
    """The number of elements, as far as it is known without reading.

    Args:
        dataset: A dataset.

    Returns:
        The number, ``rx.data.INFINITE_CARDINALITY`` or ``rx.data.UNKNOWN_CARDINALITY``.

    Example:
        >>> int(rx.data.experimental.cardinality(rx.data.Dataset.range(5)))
        5
    """
    return np.int64(node_of(dataset, "cardinality").cardinality)


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """A promise of how many elements there are, which is checked while they are read.

    Args:
        expected_cardinality: The number, or ``rx.data.INFINITE_CARDINALITY``.

    Returns:
        What `Dataset.apply` takes.

    Example:
        >>> odd = rx.data.Dataset.range(6).filter(lambda x: x % 2 == 1)
        >>> len(odd.apply(rx.data.experimental.assert_cardinality(3)))
        3
    """
    count = to_int(
        expected_cardinality,
        "assert_cardinality",
        "expected_cardinality",
        least=INFINITE_CARDINALITY,
    )
    return lambda dataset: Dataset(PromisedNode(node_of(dataset, "assert_cardinality"), count))


def at(dataset: Dataset, index: int) -> Any:
    """One element by its number.

    Args:
        dataset: A dataset of known size.
        index: The number of the element, from 0 on.

    Returns:
        The element; of a shuffled dataset, the one at that place of its first pass.

    Raises:
        OutOfRangeError: There is no such element.
        UnimplementedError: The size is not known, so that elements have no numbers.

    Example:
        >>> int(rx.data.experimental.at(rx.data.Dataset.range(5).map(lambda x: x * x), 3))
        9
    """
    node = node_of(dataset, "at")
    number, count = to_int(index, "at", "index"), node.cardinality
    if count == UNKNOWN_CARDINALITY:
        raise UnimplementedError(
            "at() needs a dataset of known size, and that of this one shows only when it is read."
            f" Take the element with `next(iter(dataset.skip({number})))`."
        )
    if number < 0 or (count != INFINITE_CARDINALITY and number >= count):
        raise OutOfRangeError(
            f"at(index={number}): the dataset has {count} elements, numbered from 0 on."
        )
    stream = node.open(Run())
    try:
        stream.skip(number)
        block = stream.pull(1)
    finally:
        stream.close()
    if block is None:
        raise OutOfRangeError(f"at(index={number}): the dataset ends before.")
    return block.elements()[0]


def from_list(elements: Sequence[Any], name: str | None = None) -> Dataset:
    """A dataset of the elements of a list, which may differ in shape.

    Args:
        elements: A list of elements that are built alike.
        name: Ignored.

    Returns:
        A dataset with one element for each.

    Example:
        >>> list(rx.data.experimental.from_list([(1, "a"), (2, "b")]))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
    """
    del name
    if not isinstance(elements, list) or not elements:
        raise InvalidArgumentError(
            f"from_list() needs a list of at least one element, got {elements!r:.60}. Use"
            " `Dataset.range(0)` for a dataset of none."
        )
    structure, _ = flatten(elements[0])
    rows = []
    specs: list[Any] | None = None
    for place, element in enumerate(elements):
        try:
            leaves = [own(to_leaf(leaf)) for leaf in structure.leaves_of(element)]
        except StructureError as error:
            raise StructureError(
                f"from_list() needs elements that are built alike, and element {place} is not:"
                f" {error}."
            ) from None
        found = [leaf_spec(leaf) for leaf in leaves]
        require_alike(structure.unflatten(specs or found), structure.unflatten(found), "from_list")
        specs = [joined(a, b) for a, b in zip(specs or found, found, strict=True)]
        rows.append(tuple(leaves))
    return Dataset(BlockNode(RowBlock(structure, rows), structure.unflatten(specs or [])))


class TFRecordWriter:
    """Writes a dataset of strings to a TFRecord file.

    Args:
        filename: The file, which is replaced if it exists.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> dataset = rx.data.Dataset.from_tensor_slices([b"one", b"two"])
        >>> rx.data.experimental.TFRecordWriter(path).write(dataset)
        >>> list(rx.data.TFRecordDataset(path))
        [b'one', b'two']
    """

    def __init__(self, filename: str, compression_type: str | None = None) -> None:
        self._filename = filename
        self._compression_type = compression_type

    def write(self, dataset: Dataset) -> None:
        """Write all elements.

        Args:
            dataset: A dataset whose elements are strings.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
            >>> writer = rx.data.experimental.TFRecordWriter(path)
            >>> writer.write(rx.data.Dataset.from_tensors("text"))
        """
        node = node_of(dataset, "TFRecordWriter.write")
        if node.is_spec_known:
            _require_strings(flatten(node.element_spec)[1])
        with RecordWriter(self._filename, self._compression_type) as writer:
            for element in _strings(dataset):
                writer.write(element)


def _strings(dataset: Dataset) -> Iterator[bytes]:
    for element in dataset:
        if not isinstance(element, bytes):
            _require_strings([element])
        yield element


def _require_strings(leaves: Sequence[Any]) -> None:
    if list(leaves) != [TensorSpec((), object)]:
        raise StructureError(
            f"TFRecordWriter.write() needs a dataset whose elements are strings, got {leaves}."
            " Serialize them in a `map` first, for example with `rx.io.serialize_example`."
        )


# Older forms of methods. Those that return a function are for `Dataset.apply`.

Counter = Dataset.counter
load = Dataset.load
sample_from_datasets = Dataset.sample_from_datasets
Applied = Callable[[Dataset], Dataset]


def choose_from_datasets(
    datasets: Sequence[Dataset],
    choice_dataset: Dataset,
    stop_on_empty_dataset: bool = False,  # noqa: FBT001, FBT002
) -> Dataset:
    """`Dataset.choose_from_datasets`, which by default goes on when a dataset has ended.

    Example:
        >>> halves = [rx.data.Dataset.range(2), rx.data.Dataset.range(10, 12)]
        >>> choices = rx.data.Dataset.from_tensor_slices(np.array([1, 0, 1, 1, 0]))
        >>> list(map(int, rx.data.experimental.choose_from_datasets(halves, choices)))
        [10, 0, 11, 1]
    """
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def get_single_element(dataset: Dataset) -> Any:
    """`Dataset.get_single_element`.

    Example:
        >>> int(rx.data.experimental.get_single_element(rx.data.Dataset.range(1)))
        0
    """
    return dataset.get_single_element()


def get_structure(dataset_or_iterator: Any) -> Any:
    """The ``element_spec`` of a dataset or an iterator.

    Example:
        >>> rx.data.experimental.get_structure(rx.data.Dataset.range(1)).dtype
        dtype('int64')
    """
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: Any) -> Any:
    """``iterator.get_next_as_optional()``.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(0))
        >>> bool(rx.data.experimental.get_next_as_optional(iterator).has_value())
        False
    """
    return iterator.get_next_as_optional()


def save(
    dataset: Dataset,
    path: str,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
    checkpoint_args: Any = None,
) -> None:
    """`Dataset.save`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rx.data.experimental.save(rx.data.Dataset.range(2), folder)
        >>> list(map(int, rx.data.experimental.load(folder)))
        [0, 1]
    """
    dataset.save(path, compression, shard_func, checkpoint_args)


def enumerate_dataset(start: int = 0) -> Applied:
    """`Dataset.enumerate`.

    Example:
        >>> [int(i) for i, _ in rx.data.Dataset.range(2).apply(
        ...     rx.data.experimental.enumerate_dataset(5))]
        [5, 6]
    """
    return lambda dataset: dataset.enumerate(start)


def group_by_window(
    key_func: Callable[..., Any],
    reduce_func: Callable[..., Any],
    window_size: int | None = None,
    window_size_func: Callable[[Any], Any] | None = None,
) -> Applied:
    """`Dataset.group_by_window`.

    Example:
        >>> by_rest = rx.data.experimental.group_by_window(
        ...     lambda x: x % 2, lambda _, window: window.batch(2), window_size=2
        ... )
        >>> [x.tolist() for x in rx.data.Dataset.range(4).apply(by_rest)]
        [[0, 2], [1, 3]]
    """
    return lambda d: d.group_by_window(key_func, reduce_func, window_size, window_size_func)


def ignore_errors(log_warning: bool = False) -> Applied:  # noqa: FBT001, FBT002
    """`Dataset.ignore_errors`.

    Example:
        >>> halves = rx.data.Dataset.range(3).map(lambda x: 6 // int(x))
        >>> list(map(int, halves.apply(rx.data.experimental.ignore_errors())))
        [6, 3]
    """
    return lambda dataset: dataset.ignore_errors(log_warning)


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,  # noqa: FBT001, FBT002
    num_parallel_calls: int | None = None,
) -> Applied:
    """`Dataset.map`, then `Dataset.batch`.

    Example:
        >>> doubled = rx.data.experimental.map_and_batch(lambda x: 2 * x, 2)
        >>> [x.tolist() for x in rx.data.Dataset.range(3).apply(doubled)]
        [[0, 2], [4]]
    """
    del num_parallel_batches
    return lambda d: d.map(map_func, num_parallel_calls).batch(batch_size, drop_remainder)


def scan(initial_state: Any, scan_func: Callable[..., Any]) -> Applied:
    """`Dataset.scan`.

    Example:
        >>> sums = rx.data.experimental.scan(np.int64(0), lambda s, x: (s + x, s + x))
        >>> list(map(int, rx.data.Dataset.range(4).apply(sums)))
        [0, 1, 3, 6]
    """
    return lambda dataset: dataset.scan(initial_state, scan_func)


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Applied:
    """`Dataset.shuffle`, then `Dataset.repeat`.

    Example:
        >>> twice = rx.data.Dataset.range(3).apply(rx.data.experimental.shuffle_and_repeat(3, 2))
        >>> sorted(map(int, twice))
        [0, 0, 1, 1, 2, 2]
    """
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def take_while(predicate: Callable[..., Any]) -> Applied:
    """`Dataset.take_while`.

    Example:
        >>> small = rx.data.experimental.take_while(lambda x: x < 2)
        >>> list(map(int, rx.data.Dataset.range(5).apply(small)))
        [0, 1]
    """
    return lambda dataset: dataset.take_while(predicate)


def unbatch() -> Applied:
    """`Dataset.unbatch`.

    Example:
        >>> rows = rx.data.Dataset.range(3).batch(2).apply(rx.data.experimental.unbatch())
        >>> list(map(int, rows))
        [0, 1, 2]
    """
    return lambda dataset: dataset.unbatch()


def unique() -> Applied:
    """`Dataset.unique`.

    Example:
        >>> twice = rx.data.Dataset.range(2).repeat(2)
        >>> list(map(int, twice.apply(rx.data.experimental.unique())))
        [0, 1]
    """
    return lambda dataset: dataset.unique()

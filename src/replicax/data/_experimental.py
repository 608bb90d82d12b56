"""Functions of tf.data.experimental: datasets by number, from lists, with a promised size."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import RowBlock
from replicax.data._dataset import Dataset
from replicax.data._errors import (
    InvalidArgumentError,
    OutOfRangeError,
    StructureError,
    UnimplementedError,
)
from replicax.data._leaves import leaf_spec, own, to_leaf
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._nodes._combine import joined
from replicax.data._nodes._in_turn import PromisedNode
from replicax.data._nodes._window import BlockNode
from replicax.data._records._writer import TFRecordWriter as RecordWriter
from replicax.data._seeds import Run
from replicax.data._structure import flatten
from replicax.data._surface._root import node_of, to_int


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
    count = to_int(expected_cardinality, "assert_cardinality", "expected_cardinality")
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

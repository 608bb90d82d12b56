"""Functions of tf.data.experimental that have no counterpart among the methods of `Dataset`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    OutOfRangeError,
    StructureError,
    UnimplementedError,
)
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.element_blocks import RowBlock
from replicax._src.data.leaves import leaf_spec, private_copy, to_leaf
from replicax._src.data.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, node_of, to_int
from replicax._src.data.nodes.assert_cardinality import PromisedNode
from replicax._src.data.nodes.combine import joined, require_alike
from replicax._src.data.nodes.group_by_reducer import Folding, GroupByReducerNode
from replicax._src.data.nodes.window import BlockNode
from replicax._src.data.records.writer import TFRecordWriter as RecordWriter
from replicax._src.data.seeds import Run
from replicax._src.data.structure import flatten, map_leaves
from replicax._src.data.user_functions import ElementFunction

Applied = Callable[[Dataset], Dataset]


def cardinality(dataset: Dataset) -> np.int64:
    """Return the number of elements, if it is known without reading.

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
    """Declare the number of elements, which is checked while they are read.

    Args:
        expected_cardinality: The number, or ``rx.data.INFINITE_CARDINALITY``.

    Returns:
        A function for `Dataset.apply`.

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
    """Return one element by its index.

    Args:
        dataset: A dataset of known size.
        index: The index of the element, from 0.

    Returns:
        The element; for a shuffled dataset, the one at that index in its first pass.

    Raises:
        OutOfRangeError: There is no such element.
        UnimplementedError: The size is unknown.

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
    """Return a dataset of the elements of a list, which may differ in shape.

    Args:
        elements: A list of elements of the same structure.
        name: Ignored.

    Returns:
        A dataset with one element per list item.

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
            leaves = [private_copy(to_leaf(leaf)) for leaf in structure.leaves_of(element)]
        except StructureError as error:
            raise StructureError(
                f"from_list() needs elements of the same structure, and that of element {place}"
                f" differs: {error}."
            ) from None
        found = [leaf_spec(leaf) for leaf in leaves]
        require_alike(structure.unflatten(specs or found), structure.unflatten(found), "from_list")
        specs = [joined(a, b) for a, b in zip(specs or found, found, strict=True)]
        rows.append(tuple(leaves))
    return Dataset(BlockNode(RowBlock(structure, rows), structure.unflatten(specs or [])))


class TFRecordWriter:
    """Writes a dataset of strings to a TFRecord file.

    Args:
        filename: The file, which is overwritten if it exists.
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


class Reducer:
    """The functions with which `group_by_reducer` reduces the elements of a key to one.

    Args:
        init_func: Takes a key, an int64; returns the initial state.
        reduce_func: Takes a state and an element; returns the next state.
        finalize_func: Takes the final state; returns an element.

    Example:
        >>> mean = rx.data.experimental.Reducer(
        ...     lambda key: (np.int64(0), np.int64(0)),
        ...     lambda state, x: (state[0] + x, state[1] + 1),
        ...     lambda total, count: total / count,
        ... )
        >>> by_parity = rx.data.experimental.group_by_reducer(lambda x: x % 2, mean)
        >>> [float(x) for x in rx.data.Dataset.range(5).apply(by_parity)]
        [2.0, 2.0]
    """

    def __init__(
        self,
        init_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        finalize_func: Callable[..., Any],
    ) -> None:
        self._functions = (init_func, reduce_func, finalize_func)

    @property
    def init_func(self) -> Callable[..., Any]:
        """The function that maps a key to the initial state.

        Example:
            >>> rx.data.experimental.Reducer(len, max, min).init_func is len
            True
        """
        return self._functions[0]

    @property
    def reduce_func(self) -> Callable[..., Any]:
        """The function that maps a state and an element to the next state.

        Example:
            >>> rx.data.experimental.Reducer(len, max, min).reduce_func is max
            True
        """
        return self._functions[1]

    @property
    def finalize_func(self) -> Callable[..., Any]:
        """The function that maps the final state to an element.

        Example:
            >>> rx.data.experimental.Reducer(len, max, min).finalize_func is min
            True
        """
        return self._functions[2]


def group_by_reducer(key_func: Callable[..., Any], reducer: Reducer) -> Applied:
    """Reduce the elements of each key to one.

    Args:
        key_func: Takes an element, returns its key: an int.
        reducer: The functions of the reduction.

    Returns:
        A function for `Dataset.apply`. Results are sorted by key and come after all elements have
        been read.

    Example:
        >>> sums = rx.data.experimental.Reducer(
        ...     lambda key: np.int64(0), lambda state, x: state + x, lambda state: state
        ... )
        >>> by_rest = rx.data.experimental.group_by_reducer(lambda x: x % 3, sums)
        >>> [int(x) for x in rx.data.Dataset.range(10).apply(by_rest)]
        [18, 12, 15]
    """
    if not isinstance(reducer, Reducer):
        raise ArgumentTypeError(
            f"group_by_reducer() needs an rx.data.experimental.Reducer, got {reducer!r:.60} of type"
            f" {type(reducer).__name__}."
        )
    key = ElementFunction(key_func, "group_by_reducer")
    parts = (reducer.init_func, reducer.reduce_func, reducer.finalize_func)
    folding = Folding(*(ElementFunction(part, "group_by_reducer") for part in parts))

    def apply(dataset: Dataset) -> Dataset:
        node = GroupByReducerNode(node_of(dataset, "group_by_reducer"), key, folding)
        _ = node.outcome  # raises if the dtypes of the state change
        return Dataset(node)

    return apply


def pad_to_cardinality(cardinality: int, mask_key: str = "valid") -> Applied:
    """Append elements of zeros until the dataset has a given size.

    Args:
        cardinality: The number of elements of the result.
        mask_key: The key that is added to elements: True for elements of the dataset, False for
            padding.

    Returns:
        A function for `Dataset.apply`. It takes a dataset of dicts whose size is known.

    Example:
        >>> dataset = rx.data.Dataset.from_tensor_slices({"a": [1, 2]})
        >>> padded = dataset.apply(rx.data.experimental.pad_to_cardinality(3))
        >>> [(int(x["a"]), bool(x["valid"])) for x in padded]
        [(1, True), (2, True), (0, False)]
    """
    wanted = to_int(cardinality, "pad_to_cardinality", "cardinality", least=0)

    def apply(dataset: Dataset) -> Dataset:
        node = node_of(dataset, "pad_to_cardinality")
        if node.cardinality < 0 or node.cardinality > wanted:
            size = {INFINITE_CARDINALITY: "no end", UNKNOWN_CARDINALITY: "an unknown size"}
            found = size.get(node.cardinality, f"{node.cardinality} elements")
            raise InvalidArgumentError(
                f"pad_to_cardinality({wanted}) needs a dataset of a known size of at most {wanted},"
                f" and this one has {found}. `assert_cardinality` declares a size."
            )
        spec = node.element_spec
        if not isinstance(spec, Mapping):
            raise InvalidArgumentError(
                f"pad_to_cardinality() needs elements that are dicts, and these are {spec}. Make"
                ' them in a `map`: `lambda x: {"x": x}`.'
            )
        filler = {**map_leaves(_zeros, dict(spec)), mask_key: False}
        fillers = Dataset.from_tensors(filler).repeat(wanted - node.cardinality)
        return dataset.map(lambda element: {**element, mask_key: True}).concatenate(fillers)

    return apply


def _zeros(spec: Any) -> Any:
    if not isinstance(spec, TensorSpec) or spec.shape is None or None in spec.shape:
        raise InvalidArgumentError(
            f"pad_to_cardinality() adds elements of zeros, which need fixed sizes, and a part is"
            f" {spec}. Bring it to one size first, with `batch(n, drop_remainder=True)` or a `map`."
        )
    if spec.dtype == object:
        return np.full(spec.shape, b"", object)
    return np.zeros(spec.shape, spec.dtype)

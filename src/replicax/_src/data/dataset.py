"""`Dataset`, the public class that combines all dataset methods and iteration on the host."""

import copy
from types import FunctionType
from typing import Any, Generic

import numpy as np

from replicax._src.base.lazy import LeavesOut
from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import ArgumentTypeError, InvalidArgumentError
from replicax._src.data.iterator import DatasetIterator
from replicax._src.data.methods.batches import Batches
from replicax._src.data.methods.caching import Caching
from replicax._src.data.methods.elements import Elements
from replicax._src.data.methods.order import Order
from replicax._src.data.methods.sources import Sources
from replicax._src.data.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, walk
from replicax._src.data.nodes.select import OptionsNode
from replicax._src.data.optional import begin_loop
from replicax._src.data.options import Options


class Dataset(
    Sources[T_co],
    Elements[T_co],
    Batches[T_co],
    Order[T_co],
    Caching[T_co],
    LeavesOut,
    Generic[T_co],
):
    """A stream of elements, described by an immutable graph of transformations.

    Nothing is read or computed before the dataset is iterated; each ``iter(dataset)`` is a new
    pass. Elements are NumPy values on the host: arrays, scalars, ``bytes`` for strings, in tuples,
    named tuples and dicts.

    For type checkers a ``Dataset[T]`` has elements of type ``T``, taken from the argument of
    `from_tensor_slices` or the return type of the function passed to `map`. Checkers then know that
    elements are arrays, or tuples or dicts of arrays, also in a distributed dataset.

    Args:
        node: The last node of the graph. Create datasets with `from_tensor_slices` and the other
            constructors instead.

    Example:
        >>> x = np.arange(6, dtype=np.float32)
        >>> dataset = rx.data.Dataset.from_tensor_slices(x).map(lambda v: v / 2).batch(4)
        >>> list(dataset)
        [array([0. , 0.5, 1. , 1.5], dtype=float32), array([2. , 2.5], dtype=float32)]
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise InvalidArgumentError(
                f"Dataset({type(node).__name__}) is not how datasets are made. Use"
                " `Dataset.from_tensor_slices(arrays)`, `Dataset.from_generator(function)`,"
                " `Dataset.range(n)` or `rx.data.TFRecordDataset(files)`."
            )
        self._node = node

    @staticmethod
    def _wrap(node: Node) -> "Dataset[Any]":
        return Dataset(node)

    @property
    def node(self) -> Node:
        """The last node of the graph, for tools that walk it (`inputs`) or rewrite it.

        Example:
            >>> type(rx.data.Dataset.range(3).batch(2).node).__name__
            'BatchNode'
        """
        return self._node

    def __iter__(self) -> DatasetIterator[T_co]:
        begin_loop()
        return DatasetIterator(self._node)

    def __len__(self) -> int:
        count = self._node.cardinality
        if count == INFINITE_CARDINALITY:
            raise TypeError(
                "The dataset is infinite: it has a `repeat()` without a count. Use `take(n)`."
            )
        if count == UNKNOWN_CARDINALITY:
            raise TypeError(
                "The dataset length is unknown before it is read (files, generators, `filter`,"
                " `flat_map`). Count with `dataset.reduce(0, lambda n, _: n + 1)`."
            )
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        parts = " < ".join(type(part).__name__.removesuffix("Node") for part in walk(self._node))
        # The spec is left out if it were to be learned from an element: `repr` reads nothing.
        spec = f", element_spec={self.element_spec}" if self._node.is_spec_known else ""
        return f"<{type(self).__name__} {parts}{spec}>"

    @property
    def element_spec(self) -> Any:
        """The nested structure of elements, with a `rx.TensorSpec` for each leaf.

        Nothing is read if the source declares its spec and the functions of `map` and `flat_map`
        can be traced, that is, use only operators, indexing and common NumPy functions. For other
        functions, and for a generator without a signature, each dataset produces its first element
        once, in the order before any shuffle.

        Example:
            >>> rx.data.Dataset.range(5).batch(2).element_spec
            TensorSpec(shape=(None,), dtype=dtype('int64'), name=None)
        """
        return self._node.element_spec

    def cardinality(self, name: str | None = None) -> np.int64:
        """Return the number of elements, if it is known without reading.

        Args:
            name: Ignored.

        Returns:
            The number, ``rx.data.INFINITE_CARDINALITY`` or ``rx.data.UNKNOWN_CARDINALITY``.

        Example:
            >>> int(rx.data.Dataset.range(5).batch(2).cardinality())
            3
        """
        del name
        return np.int64(self._node.cardinality)

    def options(self) -> Options:
        """Return the options attached to this dataset and its inputs.

        Returns:
            New options; options attached later take precedence.

        Example:
            >>> rx.data.Dataset.range(5).options().deterministic is None
            True
        """
        merged = Options()
        for node in reversed(list(walk(self._node))):
            if isinstance(node, OptionsNode):
                merged = merged.merge(node.options)
        return merged

    def with_options(self, options: Options, name: str | None = None) -> "Dataset[T_co]":
        """Return this dataset with options attached.

        Args:
            options: The options, which are copied.
            name: Ignored.

        Returns:
            A dataset of the same elements.

        Example:
            >>> options = rx.data.Options()
            >>> options.deterministic = True
            >>> rx.data.Dataset.range(5).with_options(options).options().deterministic
            True
        """
        del name
        if not isinstance(options, Options):
            raise ArgumentTypeError(
                f"with_options() needs rx.data.Options, got {type(options).__name__}."
            )
        return Dataset(OptionsNode(self._node, copy.deepcopy(options)))

    def as_numpy_iterator(self) -> DatasetIterator[T_co]:
        """Return an iterator over the elements, which are NumPy values already.

        Returns:
            The same as ``iter(dataset)``.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(3).as_numpy_iterator()]
            [0, 1, 2]
        """
        return iter(self)

    def get_single_element(self, name: str | None = None) -> Any:
        """Return the only element of a dataset that has exactly one.

        Args:
            name: Ignored.

        Returns:
            The element.

        Raises:
            InvalidArgumentError: The dataset is empty or has more than one element.

        Example:
            >>> rx.data.Dataset.range(3).batch(3).get_single_element()
            array([0, 1, 2])
        """
        del name
        found = list(self.take(2))
        if len(found) != 1:
            raise InvalidArgumentError(
                f"get_single_element() needs exactly one element; the dataset has"
                f" {'none' if not found else 'more than one'}."
            )
        return found[0]


# Errors of Python, such as those of missing arguments, name the class that users know.
for _part in (Sources, Elements, Batches, Order, Caching):
    for _member in vars(_part).values():
        _function = getattr(_member, "__func__", _member)
        if isinstance(_function, FunctionType):
            _function.__qualname__ = f"Dataset.{_function.__name__}"

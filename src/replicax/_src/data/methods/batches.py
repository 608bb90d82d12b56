"""`Dataset` methods: batch, unbatch, window and group."""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.node import AUTOTUNE, Root, to_int
from replicax._src.data.nodes.batch import BatchNode, PaddedBatchNode
from replicax._src.data.nodes.group_by_window import Buckets, GroupByWindowNode
from replicax._src.data.nodes.ragged_batch import RaggedBatchNode, SparseBatchNode
from replicax._src.data.nodes.window import RebatchNode, UnbatchNode, WindowNode
from replicax._src.data.seeds import Seeds, is_in_function
from replicax._src.data.user_functions import ElementFunction

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset

U = TypeVar("U")


class Batches(Root[T_co]):
    """The methods of `Dataset` that combine elements into batches or split batches."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: FBT001
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Combine consecutive elements into batches with a leading axis.

        Args:
            batch_size: The number of elements in a batch; at least 1.
            drop_remainder: Whether to drop a smaller last batch.
            num_parallel_calls: Ignored: a batch is one copy.
            deterministic: Ignored.
            name: Ignored.

        Returns:
            A dataset of batches.

        Example:
            >>> list(rx.data.Dataset.range(5).batch(3))
            [array([0, 1, 2]), array([3, 4])]
        """
        del deterministic, name
        if num_parallel_calls is not None:
            to_int(num_parallel_calls, "batch", "num_parallel_calls", least=AUTOTUNE)
        size = to_int(batch_size, "batch", "batch_size", least=1)
        return self._wrap(BatchNode(self.node, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Combine elements of different lengths into batches, padded at the end of each axis.

        Args:
            batch_size: The number of elements in a batch; at least 1.
            padded_shapes: One shape for each component, in the structure of elements. None (or -1)
                for an axis pads it to the longest element of each batch; None instead of the
                structure does so for all axes.
            padding_values: The padding values, in the structure of elements; zeros and empty
                strings if None.
            drop_remainder: Whether to drop a smaller last batch.
            name: Ignored.

        Returns:
            A dataset of batches.

        Example:
            >>> dataset = rx.data.Dataset.range(1, 4).map(lambda n: np.full(n, n))
            >>> next(iter(dataset.padded_batch(3)))
            array([[1, 0, 0],
                   [2, 2, 0],
                   [3, 3, 3]])
        """
        del name
        size = to_int(batch_size, "padded_batch", "batch_size", least=1)
        shapes, values = copy.deepcopy((padded_shapes, padding_values))
        node = PaddedBatchNode(self.node, size, bool(drop_remainder), shapes, values)
        if self.node.is_spec_known:
            node.check()
        return self._wrap(node)

    def ragged_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        row_splits_dtype: DTypeLike = np.int64,
        name: str | None = None,
    ) -> "Dataset[Any]":
        """Combine elements of different lengths into batches of ragged tensors, without padding.

        Args:
            batch_size: The number of elements in a batch; at least 1.
            drop_remainder: Whether to drop a smaller last batch.
            row_splits_dtype: The dtype of ``row_splits``: int32 or int64.
            name: Ignored.

        Returns:
            A dataset with an `rx.io.RaggedTensor` for each component of varying length; scalars and
            components of fixed size are stacked as in `batch`.

        Example:
            >>> dataset = rx.data.Dataset.range(1, 4).map(lambda n: np.full(n, n))
            >>> [batch.to_list() for batch in dataset.ragged_batch(2)]
            [[[1], [2, 2]], [[3, 3, 3]]]
        """
        del name
        size = to_int(batch_size, "ragged_batch", "batch_size", least=1)
        dtype = np.dtype(row_splits_dtype)
        if dtype not in (np.int32, np.int64):
            raise InvalidArgumentError(
                f"ragged_batch(row_splits_dtype={row_splits_dtype!r}): must be int32 or int64."
            )
        node = RaggedBatchNode(self.node, size, bool(drop_remainder), dtype)
        if self.node.is_spec_known:
            node.are_ragged()
        return self._wrap(node)

    def sparse_batch(
        self, batch_size: int, row_shape: Sequence[int | None], name: str | None = None
    ) -> "Dataset[Any]":
        """Combine elements of different lengths into batches of sparse tensors, without padding.

        Args:
            batch_size: The number of elements in a batch; at least 1.
            row_shape: The dense shape of each element; None for an axis takes the longest element
                of each batch.
            name: Ignored.

        Returns:
            A dataset of `rx.io.SparseTensor` that store every value of the elements.

        Example:
            >>> dataset = rx.data.Dataset.range(1, 3).map(lambda n: np.full(n, n))
            >>> next(iter(dataset.sparse_batch(2, [3]))).to_dense()
            array([[1, 0, 0],
                   [2, 2, 0]])
        """
        del name
        size = to_int(batch_size, "sparse_batch", "batch_size", least=1)
        shape = tuple(
            None if each is None else to_int(each, "sparse_batch", "row_shape", least=0)
            for each in row_shape
        )
        node = SparseBatchNode(self.node, size, False, shape)
        if self.node.is_spec_known:
            node.check()
        return self._wrap(node)

    def unbatch(self, name: str | None = None) -> "Dataset[T_co]":
        """Split batches into elements along their first axis.

        Args:
            name: Ignored.

        Returns:
            A dataset of the elements of all batches.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(5).batch(3).unbatch()]
            [0, 1, 2, 3, 4]
        """
        del name
        node = UnbatchNode(self.node)
        if self.node.is_spec_known:
            _ = node.element_spec  # raises if a component is a scalar
        return self._wrap(node)

    def rebatch(
        self,
        batch_size: int | Sequence[int],
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Regroup batches into batches of other sizes.

        Args:
            batch_size: The new size, or several sizes to use cyclically.
            drop_remainder: Whether to drop an incomplete last batch.
            name: Ignored.

        Returns:
            A dataset of batches.

        Example:
            >>> list(rx.data.Dataset.range(6).batch(4).rebatch([2, 1]))
            [array([0, 1]), array([2]), array([3, 4]), array([5])]
        """
        del name
        sizes = [batch_size] if not isinstance(batch_size, Sequence) else list(batch_size)
        numbers = [to_int(size, "rebatch", "batch_size", least=1) for size in sizes]
        if not numbers:
            raise InvalidArgumentError("rebatch(batch_size=[]): give at least one size.")
        return self._wrap(RebatchNode(self.node, tuple(numbers), bool(drop_remainder)))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., "Dataset[U]"],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> "Dataset[U]":
        """Group elements by key, and flatten the datasets that a function returns for each group.

        Args:
            key_func: Takes an element, returns its key: an int.
            reduce_func: Takes a key and the dataset of a group, returns a `Dataset`.
            window_size: The number of elements in a group. At the end of the input, smaller groups
                follow in the order of their keys.
            window_size_func: Takes a key, returns the number of elements in its groups; pass it
                instead of ``window_size``.
            name: Ignored.

        Returns:
            A dataset of the elements of the returned datasets.

        Example:
            >>> dataset = rx.data.Dataset.range(6)
            >>> list(dataset.group_by_window(lambda x: x % 2, lambda key, d: d.batch(2), 2))
            [array([0, 2]), array([1, 3]), array([4]), array([5])]
        """
        del name
        if (window_size is None) == (window_size_func is None):
            raise InvalidArgumentError(
                f"group_by_window(window_size={window_size}, window_size_func={window_size_func}):"
                " give one of the two."
            )
        if window_size is not None:
            to_int(window_size, "group_by_window", "window_size", least=1)
        node = GroupByWindowNode(
            self.node,
            ElementFunction(key_func, "group_by_window"),
            ElementFunction(reduce_func, "group_by_window"),
            ElementFunction(window_size_func or (lambda _: window_size), "group_by_window"),
            Seeds(None),
            self._wrap,
        )
        if not is_in_function():
            node.check()
        return self._wrap(node)

    def bucket_by_sequence_length(  # noqa: PLR0913
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,  # noqa: FBT001, FBT002
        no_padding: bool = False,  # noqa: FBT001, FBT002
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Combine elements of similar length into padded batches.

        Args:
            element_length_func: Takes an element, returns its length.
            bucket_boundaries: The lengths at which buckets start: ``[10, 20]`` makes buckets for
                lengths below 10, from 10 to 19, and from 20.
            bucket_batch_sizes: The batch size of each bucket: one more than boundaries.
            padded_shapes: As for `padded_batch`.
            padding_values: As for `padded_batch`.
            pad_to_bucket_boundary: Whether to pad axes of unknown size to the longest length of the
                bucket; an element in the last bucket then raises an error.
            no_padding: Whether to batch elements without padding.
            drop_remainder: Whether to drop smaller batches at the end.
            name: Ignored.

        Returns:
            A dataset of batches.

        Example:
            >>> rows = [[1], [2, 2, 2], [3, 3], [4, 4, 4]]
            >>> spec = rx.TensorSpec([None], np.int64)
            >>> dataset = rx.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
            >>> list(dataset.bucket_by_sequence_length(len, [3], [2, 2]))
            [array([[1, 0], [3, 3]]), array([[2, 2, 2], [4, 4, 4]])]
        """
        del name
        buckets = Buckets.of(bucket_boundaries, bucket_batch_sizes)
        length = ElementFunction(element_length_func, "bucket_by_sequence_length")
        if pad_to_bucket_boundary and padded_shapes is None and not self.node.is_spec_sure:
            raise InvalidArgumentError(
                "bucket_by_sequence_length(pad_to_bucket_boundary=True) pads the axes of"
                " unknown size, and the results of a function do not show which these are. Give"
                " padded_shapes, for example [None] for a row, with None where to pad."
            )

        def make_batches(bucket: Any, group: "Dataset") -> "Dataset[T_co]":
            size = buckets.sizes[int(bucket)]
            if no_padding:
                return group.batch(size, drop_remainder)
            shapes = padded_shapes
            if pad_to_bucket_boundary:
                shapes = buckets.filled(int(bucket), padded_shapes, group.element_spec)
            return group.padded_batch(size, shapes, padding_values, drop_remainder)

        return self.group_by_window(
            lambda *element: buckets.number(length.function(*element)),
            make_batches,
            window_size_func=lambda bucket: buckets.sizes[int(bucket)],
        )

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[Any]":
        """Combine consecutive elements into windows, which are datasets and may overlap.

        Args:
            size: The number of elements in a window.
            shift: The distance between the starts of consecutive windows; ``size`` if None.
            stride: The distance between consecutive elements of a window.
            drop_remainder: Whether to drop incomplete windows at the end.
            name: Ignored.

        Returns:
            A dataset whose elements have a dataset for each component.

        Example:
            >>> windows = rx.data.Dataset.range(5).window(3, shift=1, drop_remainder=True)
            >>> [[int(x) for x in window] for window in windows]
            [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        del name
        node = WindowNode(
            self.node,
            to_int(size, "window", "size", least=1),
            to_int(size if shift is None else shift, "window", "shift", least=1),
            to_int(stride, "window", "stride", least=1),
            bool(drop_remainder),
            self._wrap,
        )
        return self._wrap(node)

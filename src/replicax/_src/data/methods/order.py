"""`Dataset` methods that select, reorder, repeat or prefetch elements without changing them."""

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.node import AUTOTUNE, UNKNOWN_CARDINALITY, Root, node_of, to_int
from replicax._src.data.nodes.combine import ConcatenateNode
from replicax._src.data.nodes.prefetch import PrefetchNode
from replicax._src.data.nodes.select import (
    SHARD_HINT,
    EnumerateNode,
    IgnoreErrorsNode,
    RepeatNode,
    ShardNode,
    SkipNode,
    TakeNode,
)
from replicax._src.data.nodes.sequential import UniqueNode, require_comparable
from replicax._src.data.nodes.shuffle import ShuffleNode
from replicax._src.data.seeds import Seeds
from replicax._src.data.structure import flatten

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset

U = TypeVar("U")


class Order(Root[T_co]):
    """The methods of `Dataset` that return elements unchanged."""

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Shuffle elements through a buffer.

        Args:
            buffer_size: The number of elements to draw from; ``rx.data.UNKNOWN_CARDINALITY`` for
                the whole dataset. A uniform shuffle needs a buffer as large as the dataset.
            seed: The seed; drawn once if None (see `rx.data.set_seed_source`).
            reshuffle_each_iteration: Whether to use a new order in each pass.
            name: Ignored.

        Returns:
            A dataset of the same elements.

        Example:
            >>> sorted(int(x) for x in rx.data.Dataset.range(5).shuffle(5, seed=3))
            [0, 1, 2, 3, 4]
        """
        del name
        size = to_int(buffer_size, "shuffle", "buffer_size")
        if size < 1 and size != UNKNOWN_CARDINALITY:
            raise InvalidArgumentError(
                f"shuffle(buffer_size={size}): buffer_size must be at least 1, or"
                " rx.data.UNKNOWN_CARDINALITY to hold the whole dataset."
            )
        seeds = Seeds(seed, reshuffle=reshuffle_each_iteration is not False)
        return self._wrap(ShuffleNode(self.node, size, seeds))

    def repeat(self, count: int | None = None, name: str | None = None) -> "Dataset[T_co]":
        """Repeat the dataset.

        Args:
            count: The number of passes; infinite if None or -1.
            name: Ignored.

        Returns:
            A dataset of the elements of all passes.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(2).repeat(2)]
            [0, 1, 0, 1]
        """
        del name
        number = -1 if count is None else to_int(count, "repeat", "count")
        return self._wrap(RepeatNode(self.node, max(number, -1)))

    def take(self, count: int, name: str | None = None) -> "Dataset[T_co]":
        """Keep the first elements only.

        Args:
            count: The number of elements; all if -1.
            name: Ignored.

        Returns:
            A dataset of at most ``count`` elements.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(9).take(2)]
            [0, 1]
        """
        del name
        return self._wrap(TakeNode(self.node, to_int(count, "take", "count")))

    def skip(self, count: int, name: str | None = None) -> "Dataset[T_co]":
        """Skip the first elements.

        Args:
            count: The number of elements to skip; all if -1.
            name: Ignored.

        Returns:
            A dataset of the remaining elements.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(5).skip(3)]
            [3, 4]
        """
        del name
        return self._wrap(SkipNode(self.node, to_int(count, "skip", "count")))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> "Dataset[T_co]":
        """Keep every ``num_shards``-th element, starting at ``index``.

        Args:
            num_shards: The number of shards, or `rx.data.experimental.SHARD_HINT` to mark where a
                strategy with policy HINT shards.
            index: The index of the shard.
            name: Ignored.

        Returns:
            A dataset of one shard.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(7).shard(3, 1)]
            [1, 4]
        """
        del name
        parts, place = to_int(num_shards, "shard", "num_shards"), to_int(index, "shard", "index")
        if parts != SHARD_HINT and not 0 <= place < parts:
            raise InvalidArgumentError(
                f"shard(num_shards={parts}, index={place}): num_shards must be at least 1, and"
                " index at least 0 and less than num_shards."
            )
        return self._wrap(ShardNode(self.node, parts, place))

    def concatenate(self, dataset: "Dataset[U]", name: str | None = None) -> "Dataset[T_co | U]":
        """Append another dataset.

        Args:
            dataset: A dataset whose elements have the same structure and dtypes.
            name: Ignored.

        Returns:
            A dataset of the elements of both.

        Example:
            >>> a, b = rx.data.Dataset.range(2), rx.data.Dataset.range(10, 12)
            >>> [int(x) for x in a.concatenate(b)]
            [0, 1, 10, 11]
        """
        del name
        return self._wrap(ConcatenateNode.of(self.node, node_of(dataset, "concatenate")))

    def enumerate(
        self, start: int = 0, name: str | None = None
    ) -> "Dataset[tuple[np.int64, T_co]]":
        """Pair each element with its index.

        Args:
            start: The first index.
            name: Ignored.

        Returns:
            A dataset of pairs of an index and an element.

        Example:
            >>> [(int(i), int(x)) for i, x in rx.data.Dataset.range(5, 7).enumerate()]
            [(0, 5), (1, 6)]
        """
        del name
        return self._wrap(EnumerateNode(self.node, to_int(start, "enumerate", "start")))

    def unique(self, name: str | None = None) -> "Dataset[T_co]":
        """Drop repeated elements.

        Args:
            name: Ignored.

        Returns:
            A dataset of distinct elements, each at its first occurrence. Elements must be a single
            int32, int64 or string component.

        Example:
            >>> dataset = rx.data.Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1])
            >>> [int(x) for x in dataset.unique()]
            [1, 37, 2]
        """
        del name
        if self.node.is_spec_known:
            require_comparable(*flatten(self.node.element_spec))
        return self._wrap(UniqueNode(self.node))

    def ignore_errors(
        self,
        log_warning: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Drop elements that raise an error.

        Args:
            log_warning: Whether to log each dropped element.
            name: Ignored.

        Returns:
            A dataset of the remaining elements.

        Example:
            >>> dataset = rx.data.Dataset.range(-1, 2).map(lambda x: 6 // int(x))
            >>> [int(x) for x in dataset.ignore_errors()]
            [-6, 6]
        """
        del name
        return self._wrap(IgnoreErrorsNode(self.node, bool(log_warning)))

    def prefetch(self, buffer_size: int | None, name: str | None = None) -> "Dataset[T_co]":
        """Produce elements ahead in a thread, which ends with its iterator.

        Args:
            buffer_size: The number of elements to buffer; ``rx.data.AUTOTUNE`` or None to choose
                it automatically.
            name: Ignored.

        Returns:
            A dataset of the same elements.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(3).prefetch(2)]
            [0, 1, 2]
        """
        del name
        capacity = AUTOTUNE if buffer_size is None else buffer_size
        size = to_int(capacity, "prefetch", "buffer_size", least=AUTOTUNE)
        return self._wrap(PrefetchNode(self.node, size))

"""Functions of tf.data.experimental that predate `Dataset` methods.

Most return a transformation for `Dataset.apply`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.data.dataset import Dataset
from replicax._src.data.experimental_functions import Applied
from replicax._src.data.node import to_int

Counter = Dataset.counter
load = Dataset.load
sample_from_datasets = Dataset.sample_from_datasets


def choose_from_datasets(
    datasets: Sequence[Dataset],
    choice_dataset: Dataset,
    stop_on_empty_dataset: bool = False,  # noqa: FBT001, FBT002
) -> Dataset:
    """`Dataset.choose_from_datasets`, which by default continues after a dataset has ended.

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
    """Return the ``element_spec`` of a dataset or an iterator.

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


def parallel_interleave(  # noqa: PLR0913
    map_func: Callable[..., Dataset],
    cycle_length: int,
    block_length: int = 1,
    sloppy: bool | None = False,  # noqa: FBT001, FBT002
    buffer_output_elements: int | None = None,
    prefetch_input_elements: int | None = None,
) -> Applied:
    """`Dataset.interleave`, with one thread per open dataset.

    Args:
        map_func: Takes an element, returns a `Dataset`.
        cycle_length: Number of datasets open at a time.
        block_length: Consecutive elements to take from each.
        sloppy: Ignored: the order is always the same.
        buffer_output_elements: Ignored.
        prefetch_input_elements: Ignored.

    Returns:
        A function for `Dataset.apply`.

    Example:
        >>> tens = rx.data.experimental.parallel_interleave(
        ...     lambda k: rx.data.Dataset.range(10 * k, 10 * k + 2), cycle_length=2
        ... )
        >>> [int(x) for x in rx.data.Dataset.range(2).apply(tens)]
        [0, 10, 1, 11]
    """
    del sloppy
    for name, value in (
        ("buffer_output_elements", buffer_output_elements),
        ("prefetch_input_elements", prefetch_input_elements),
    ):
        if value is not None:
            to_int(value, "parallel_interleave", name, least=0)
    return lambda dataset: dataset.interleave(
        map_func, cycle_length, block_length, num_parallel_calls=cycle_length
    )


def dense_to_ragged_batch(
    batch_size: int,
    drop_remainder: bool = False,  # noqa: FBT001, FBT002
    row_splits_dtype: DTypeLike = np.int64,
) -> Applied:
    """`Dataset.ragged_batch`.

    Example:
        >>> rows = rx.data.Dataset.range(1, 3).map(lambda n: np.full(n, n))
        >>> ragged = rx.data.experimental.dense_to_ragged_batch(2)
        >>> next(iter(rows.apply(ragged))).to_list()
        [[1], [2, 2]]
    """
    return lambda dataset: dataset.ragged_batch(batch_size, drop_remainder, row_splits_dtype)


def dense_to_sparse_batch(batch_size: int, row_shape: Sequence[int | None]) -> Applied:
    """`Dataset.sparse_batch`.

    Example:
        >>> rows = rx.data.Dataset.range(1, 3).map(lambda n: np.full(n, n))
        >>> sparse = rx.data.experimental.dense_to_sparse_batch(2, [2])
        >>> next(iter(rows.apply(sparse))).to_dense().tolist()
        [[1, 0], [2, 2]]
    """
    return lambda dataset: dataset.sparse_batch(batch_size, row_shape)


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

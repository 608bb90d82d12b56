"""Random pipelines for laws that hold for every dataset."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from replicax.data import Dataset

Step = Callable[[Dataset], Dataset]


def scramble(x):
    return (x * 31 - 1) % 1000


def is_not_seventh(x):
    return x % 7 != 0


def parity_first(x):
    return 1 if x % 2 else 0  # not for blocks: the truth of an array is ambiguous


def up_to(x):
    return Dataset.range(x % 4)


def shuffled_triple(x):
    return Dataset.range(x, x + 3).shuffle(3)


_SCALAR_STEPS: dict[str, Step] = {
    "map": lambda d: d.map(scramble),
    "map one by one": lambda d: d.map(lambda x: x + parity_first(x)),
    "map in threads": lambda d: d.map(lambda x: x + parity_first(x), num_parallel_calls=3),
    "filter": lambda d: d.filter(is_not_seventh),
    "flat_map": lambda d: d.flat_map(up_to),
    "flat_map shuffled": lambda d: d.flat_map(shuffled_triple),
    "interleave": lambda d: d.interleave(up_to, cycle_length=3, block_length=2),
    "shuffle": lambda d: d.shuffle(4),
    "shuffle all": lambda d: d.shuffle(1000),
    "shuffle alike": lambda d: d.shuffle(5, reshuffle_each_iteration=False),
    "repeat": lambda d: d.repeat(2),
    "take": lambda d: d.take(9),
    "skip": lambda d: d.skip(2),
    "shard": lambda d: d.shard(2, 1),
    "concatenate": lambda d: d.concatenate(d),
    "enumerate": lambda d: d.enumerate(3).map(lambda i, x: i * 100 + x),
    "zip": lambda d: Dataset.zip((d, d.skip(1))).map(lambda a, b: a - b),
    "sample": lambda d: Dataset.sample_from_datasets([d, d.map(lambda x: -x)]),
    "batch": lambda d: d.batch(3).unbatch(),
    "rebatch": lambda d: d.batch(4).rebatch([2, 1]).unbatch(),
    "window": lambda d: d.window(3, shift=2).flat_map(lambda w: w),
    "cache": lambda d: d.cache(),
    "prefetch": lambda d: d.prefetch(2),
    "scan": lambda d: d.scan(np.int64(1), lambda s, x: ((s + x) % 1000, s - x)),
    "unique": lambda d: d.unique(),
    "ignore_errors": lambda d: d.ignore_errors(),
    "group_by_window": lambda d: d.group_by_window(
        lambda x: x % 3, lambda key, group: group.shuffle(2).batch(2).unbatch(), window_size=4
    ),
    "resample": lambda d: d.rejection_resample(lambda x: x % 2, [0.8, 0.2]).map(lambda c, x: x),
    "weights": lambda d: Dataset.sample_from_datasets(
        [d, d.map(lambda x: -x)], weights=Dataset.from_tensors(np.array([0.3, 0.7])).repeat()
    ),
    "random": lambda d: Dataset.zip(d, Dataset.random()).map(lambda x, r: x + r % 5),
}


def sources() -> st.SearchStrategy[Dataset]:
    return st.one_of(
        st.integers(0, 25).map(Dataset.range),
        st.integers(0, 25).map(lambda n: Dataset.from_tensor_slices(np.arange(n) * 3)),
        st.integers(0, 25).map(lambda n: Dataset.from_generator(_counter(n), np.int64)),
    )


def pipelines(steps: int = 4) -> st.SearchStrategy[Dataset]:
    """Datasets of int64 scalars with up to ``steps`` transformations."""
    names = st.lists(st.sampled_from(sorted(_SCALAR_STEPS)), max_size=steps)
    return st.builds(_build, sources(), names)


def _build(dataset: Dataset, names: list[str]) -> Dataset:
    for name in names:
        dataset = _SCALAR_STEPS[name](dataset)
    # Long streams say no more than short ones.
    return dataset.take(60)


def _counter(count: int) -> Callable[[], object]:
    return lambda: iter(range(count))


def ints(dataset) -> list[int]:
    return [int(x) for x in dataset]

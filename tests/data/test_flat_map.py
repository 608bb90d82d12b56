"""flat_map and interleave: the order is TensorFlow's, observed on version 2.21."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax.data import Dataset
from tests.data.pipelines import ints


def inner(lengths):
    table = np.array(lengths)
    return lambda i: Dataset.range(i * 100, i * 100 + table[int(i)])


# Observed: the streams of tf.data for the same arguments.
OBSERVED = [
    ([3, 5, 2, 4], 2, 1, [0, 100, 1, 101, 2, 102, 103, 200, 104, 201, 300, 301, 302, 303]),
    ([3, 0, 2, 4, 5], 3, 2, [0, 1, 200, 201, 2, 300, 301, 400, 401, 302, 303, 402, 403, 404]),
    (
        [3, 6, 2, 4, 5],
        2,
        3,
        [*range(3), *range(100, 106), 200, 201, 300, 301, 302, 400, 401, 402, 303, 403, 404],
    ),
]


@pytest.mark.parametrize(("lengths", "cycle", "block", "expected"), OBSERVED)
@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("size", [1, 5])
def test_interleave_has_tensorflows_order(lengths, cycle, block, expected, workers, size):
    dataset = Dataset.range(len(lengths)).interleave(
        inner(lengths), cycle_length=cycle, block_length=block, num_parallel_calls=workers
    )

    assert np.concatenate(list(dataset.batch(size))).tolist() == expected


@given(lengths=st.lists(st.integers(0, 6), max_size=6), cycle=st.integers(1, 4))
def test_interleave_keeps_each_inner_order(lengths, cycle):
    dataset = Dataset.range(len(lengths)).interleave(inner(lengths), cycle_length=cycle)
    got = ints(dataset)

    for k, length in enumerate(lengths):
        assert [x for x in got if x // 100 == k] == list(range(k * 100, k * 100 + length))
    assert len(got) == sum(lengths)


@given(lengths=st.lists(st.integers(0, 6), max_size=6))
def test_flat_map_is_one_after_the_other(lengths):
    got = ints(Dataset.range(len(lengths)).flat_map(inner(lengths)))

    assert got == [k * 100 + j for k, length in enumerate(lengths) for j in range(length)]


@pytest.mark.parametrize("verb", ["flat_map", "interleave"])
def test_the_function_must_return_a_dataset(verb):
    with pytest.raises(StructureError, match=rf"{verb}\(\) must return a Dataset, but it returns"):
        getattr(Dataset.range(3), verb)(lambda x: x)
    untraced = getattr(Dataset.range(3), verb)(lambda x: [print, x][1])
    with pytest.raises(
        StructureError, match=rf"{verb}\(\) must return a Dataset, but for element 0"
    ):
        list(untraced)


def test_an_error_in_the_function_names_the_element():
    def fail(x):
        if x == 2:
            raise ValueError("no")
        return Dataset.range(2)

    with pytest.raises(InvalidArgumentError, match=r"ValueError: no, on element 2"):
        list(Dataset.range(3).flat_map(fail))


@pytest.mark.parametrize("options", [{"cycle_length": 0}, {"block_length": -2}])
def test_cycles_and_blocks_are_positive(options):
    with pytest.raises(InvalidArgumentError, match="must be at least 1"):
        Dataset.range(3).interleave(Dataset.range, **options)


def test_the_spec_is_that_of_the_inner_datasets():
    dataset = Dataset.range(3).flat_map(lambda x: Dataset.range(x).batch(2))

    assert dataset.element_spec.shape == (None,)


def test_the_spec_after_windows_leaves_the_last_window_room():
    windows = Dataset.range(5).batch(2).window(2).flat_map(lambda w: w)

    assert windows.element_spec.shape == (None,)
    mapped = Dataset.range(5).batch(2).map(lambda x: x + 1).window(2).flat_map(lambda w: w)
    assert mapped.element_spec.shape == (None,)


@pytest.mark.parametrize(
    "join",
    [
        lambda d: d.concatenate(d),
        lambda d: d.concatenate(d.map(lambda x: x)),
        lambda d: Dataset.choose_from_datasets([d, d.skip(0)], Dataset.range(2)),
    ],
    ids=["concatenated", "concatenated with a function", "chosen"],
)
def test_a_dataset_joined_with_itself_many_times_is_asked_once(join, two):
    dataset = Dataset.range(3)
    for _ in range(40):  # 2**40 ways to the source
        dataset = join(dataset)

    assert isinstance(int(dataset.cardinality()), int)
    assert dataset.element_spec.dtype == np.int64
    assert dataset.fingerprint() == dataset.fingerprint()
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.experimental.AutoShardPolicy.HINT
    two.experimental_distribute_dataset(dataset.batch(2).with_options(options))
    two.experimental_distribute_dataset(dataset.batch(2))

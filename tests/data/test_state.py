"""Iterators continue exactly where a saved state stands."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.data import Dataset
from replicax.data._errors import InvalidArgumentError
from tests.data.pipelines import ints, pipelines


@settings(max_examples=150)
@given(dataset=pipelines(), data=st.data())
def test_a_restored_iterator_continues_the_same_stream(dataset, data):
    iterator = iter(dataset)
    stop = data.draw(st.integers(0, 30))
    for _ in zip(range(stop), iterator, strict=False):
        pass
    state = json.loads(json.dumps(iterator.save_state()))
    rest = ints(iterator)

    again = iter(dataset)
    again.restore_state(state)

    assert ints(again) == rest


@given(dataset=pipelines())
def test_an_iterator_can_be_rewound(dataset):
    iterator = iter(dataset)
    start = iterator.save_state()
    first = ints(iterator)

    iterator.restore_state(start)

    assert ints(iterator) == first


def build_shuffled():
    return Dataset.range(20).shuffle(7).repeat(3).batch(4).map(lambda x: x + 1).prefetch(2)


def test_drawn_seeds_travel_with_the_state_to_another_process():
    iterator = iter(build_shuffled())
    for _ in range(7):
        next(iterator)
    state = iterator.save_state()
    rest = [batch.tolist() for batch in iterator]

    other = iter(build_shuffled())  # draws other seeds
    other.restore_state(state)

    assert [batch.tolist() for batch in other] == rest


def test_the_state_is_small_and_plain():
    dataset = Dataset.from_tensor_slices(np.zeros((10_000, 8))).shuffle(10_000).repeat().batch(32)
    iterator = iter(dataset)
    for _ in range(400):
        next(iterator)

    assert len(json.dumps(iterator.save_state())) < 300


def test_restoring_far_into_an_endless_dataset_skips_whole_epochs():
    dataset = Dataset.range(1000).shuffle(1000, seed=5).repeat()
    iterator = iter(dataset)
    state = {**iterator.save_state(), "position": 10**9 + 3}

    iterator.restore_state(state)

    assert 0 <= int(next(iterator)) < 1000


def test_restoring_calls_no_map_function_for_what_is_passed():
    calls = []

    def remember(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(100).map(remember)
    iterator = iter(dataset)
    iterator.restore_state({**iterator.save_state(), "position": 98})

    assert ints(iterator) == [98, 99]
    assert calls == [98, 99]


def test_a_generator_is_replayed():
    starts = []

    def count():
        starts.append(1)
        yield from range(5)

    dataset = Dataset.from_generator(count, output_types=np.int64)
    iterator = iter(dataset)
    next(iterator), next(iterator)
    state = iterator.save_state()
    again = iter(dataset)
    again.restore_state(state)

    assert ints(again) == [2, 3, 4]
    assert len(starts) == 2


def test_the_state_of_another_pipeline_is_refused():
    state = iter(Dataset.range(10).batch(2)).save_state()

    with pytest.raises(InvalidArgumentError, match=r"saved by the pipeline 'Batch < Range'"):
        iter(Dataset.range(10)).restore_state(state)


def test_a_dataset_that_shrank_is_refused():
    state = {**iter(Dataset.range(10)).save_state(), "position": 8}

    with pytest.raises(InvalidArgumentError, match="after 8 elements, but the dataset has only 5"):
        iter(Dataset.range(5)).restore_state(state)


def test_a_shuffled_cache_is_filled_alike_after_a_restart():
    def build():
        return Dataset.range(12).shuffle(12, seed=3).cache().repeat(3)

    whole = ints(build())
    dataset = build()
    list(dataset)
    iterator = iter(dataset)
    for _ in range(17):
        next(iterator)
    state = iterator.save_state()

    fresh = iter(build())
    fresh.restore_state(state)

    assert ints(fresh) == whole[17:]

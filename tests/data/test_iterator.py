"""Iterators continue exactly where a saved state stands."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax.data import Dataset
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


PASSES = {
    "shuffle": lambda: Dataset.range(20).shuffle(7),
    "repeat": lambda: Dataset.range(20).shuffle(7).repeat(2).batch(3),
    "flat_map": lambda: Dataset.range(5).flat_map(lambda x: Dataset.range(9).shuffle(9)),
    "interleave": lambda: Dataset.range(5).interleave(lambda x: Dataset.range(9).shuffle(9), 3),
    "sampled": lambda: Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(9, 18)]),
}


@pytest.mark.parametrize("build", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("passes", [1, 3])
def test_the_passes_after_a_restored_one_are_those_that_would_have_followed(build, passes):
    dataset = build()
    for _ in range(passes):
        iterator = iter(dataset)
        next(iterator)
    state = iterator.save_state()
    expected = [[np.asarray(x).tolist() for x in one] for one in (iterator, dataset, dataset)]

    other = build()  # draws other seeds
    again = iter(other)
    again.restore_state(state)

    assert [[np.asarray(x).tolist() for x in one] for one in (again, other, other)] == expected


def test_the_state_is_small_and_plain():
    dataset = Dataset.from_tensor_slices(np.zeros((10_000, 8))).shuffle(10_000).repeat().batch(32)
    iterator = iter(dataset)
    for _ in range(400):
        next(iterator)

    assert len(json.dumps(iterator.save_state())) < 300


def test_restoring_far_into_an_infinite_dataset_skips_whole_epochs():
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

    with pytest.raises(InvalidArgumentError, match=r"had Batch\(size=2, .*this one has Range"):
        iter(Dataset.range(10)).restore_state(state)


def test_the_state_of_another_version_is_refused():
    state = {**iter(Dataset.range(10)).save_state(), "version": 1}

    with pytest.raises(InvalidArgumentError, match="This state is of version 1"):
        iter(Dataset.range(10)).restore_state(state)


_SIZED = {
    "batch": lambda d, n: d.batch(n),
    "full batches": lambda d, n: d.batch(2, drop_remainder=n > 3),
    "padded_batch": lambda d, n: d.padded_batch(n),
    "rebatch": lambda d, n: d.batch(4).rebatch([n, 1]),
    "window": lambda d, n: d.window(n).flat_map(lambda w: w.batch(9)),
    "shift": lambda d, n: d.window(3, shift=n).flat_map(lambda w: w.batch(9)),
    "stride": lambda d, n: d.window(3, stride=n).flat_map(lambda w: w.batch(9)),
    "shard": lambda d, n: d.shard(n, 0),
    "cycle": lambda d, n: d.interleave(lambda x: Dataset.range(x, x + 5), cycle_length=n),
    "block": lambda d, n: d.interleave(
        lambda x: Dataset.range(x, x + 5), cycle_length=2, block_length=n
    ),
    "prefetch": lambda d, n: d.prefetch(n),
    "threads": lambda d, n: d.map(lambda x: x + 1, num_parallel_calls=n),
}


@given(
    kind=st.sampled_from(sorted(_SIZED)),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    taken=st.integers(0, 9),
)
def test_a_state_that_is_taken_stands_behind_the_same_elements(kind, sizes, taken):
    def build(size):
        return _SIZED[kind](Dataset.range(23).shuffle(23, seed=3), size)

    def elements(iterator):
        return [np.asarray(x).tolist() for x in iterator]

    iterator = iter(build(sizes[0]))
    behind = [np.asarray(x).tolist() for _, x in zip(range(taken), iterator, strict=False)]
    state = iterator.save_state()
    others, again = iter(build(sizes[1])), iter(build(sizes[1]))
    for each in (others, again):
        each.restore_state({**each.save_state(), "seeds": state["seeds"]})
    whole = elements(others)

    try:
        again.restore_state(state)
    except InvalidArgumentError:
        assert sizes[0] != sizes[1]
        assert elements(again) == whole
        return
    assert behind + elements(again) == whole


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


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places_in(state, place=()):
    """Where something stands in a nested state, the whole of it too."""
    yield place
    if isinstance(state, (dict, list)):
        for key, part in state.items() if isinstance(state, dict) else enumerate(state):
            yield from places_in(part, (*place, key))


def changed(state, place, how):
    """The state with something else at a place; with nothing there if ``how`` is ``...``."""
    if not place:
        return None if how is ... else how
    result = json.loads(json.dumps(state))
    part = result
    for key in place[:-1]:
        part = part[key]
    if how is ...:
        del part[place[-1]]
    else:
        part[place[-1]] = how
    return result


def is_meant(place, how):
    """Whether a changed state says in its own way where to go on: other numbers, other seeds."""
    return bool(place) and (type(how) is int or (isinstance(how, list) and "seeds" in place))


@settings(max_examples=150)
@given(data=st.data())
def test_a_state_that_was_tampered_with_is_refused_or_says_where_to_continue(data):
    def make():
        dataset = Dataset.range(12).shuffle(5).repeat(2).batch(3)
        if is_distributed:
            return iter(rx.distribute.get_strategy().experimental_distribute_dataset(dataset))
        return iter(dataset)

    is_distributed = data.draw(st.booleans())
    iterator = make()
    for _ in range(data.draw(st.integers(0, 8))):
        next(iterator)
    state = json.loads(json.dumps(iterator.save_state()))
    rest = [np.asarray(x).tolist() for x in iterator]
    place = data.draw(st.sampled_from(sorted(places_in(state), key=str)))
    how = data.draw(st.one_of(st.just(...), _JUNK))
    again = make()
    before = again.save_state()

    try:
        again.restore_state(changed(state, place, how))
    except InvalidArgumentError:
        again.restore_state(before)  # it is as good as new
        assert len(list(again)) == 8
        return
    found = [np.asarray(x).tolist() for x in again]
    assert found == rest or is_meant(place, how)

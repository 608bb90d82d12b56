"""An iterator goes on after an element that fails: as TensorFlow's does, node by node."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax.data import Dataset
from replicax.data.experimental import assert_cardinality
from tests.golden.pipeline_cases import ERRORS, Library, errors, outcomes

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "pipelines.json").read_text())


def fails(*at):
    def function(x):
        if int(x) in at:
            raise ValueError(int(x))
        return x

    return function


def asks(*at):
    return lambda x: fails(*at)(x) == x


LIBRARY = Library(rx.data, rx.io, rx.random.set_seed, fails, asks, rx.TensorSpec([], np.int64))


@pytest.mark.parametrize("name", ERRORS)
def test_an_iterator_continues_as_tensorflows_does(name):
    found, expected = errors(LIBRARY, name), ANSWERS[name]

    if name.startswith("shuffle"):  # ours reads one element further ahead
        found, expected = sorted(found, key=str), sorted(expected, key=str)
    assert found == expected


@st.composite
def failing(draw):
    """A pipeline in which some elements fail, at random places."""
    bad = draw(st.sets(st.integers(0, 23), max_size=6))
    dataset = Dataset.range(24).map(fails(*bad))
    steps = {
        "batch": lambda d: d.batch(3).unbatch(),
        "filter": lambda d: d.filter(asks(*draw(st.sets(st.integers(0, 23), max_size=2)))),
        "prefetch": lambda d: d.prefetch(draw(st.integers(1, 3))),
        "shuffle": lambda d: d.shuffle(
            draw(st.integers(1, 9)), seed=1, reshuffle_each_iteration=False
        ),
        "repeat": lambda d: d.repeat(2),
        "shard": lambda d: d.shard(2, draw(st.integers(0, 1))),
        "skip": lambda d: d.skip(draw(st.integers(0, 5))),
        "map": lambda d: d.map(lambda x: x, num_parallel_calls=draw(st.sampled_from([None, 2]))),
        "flat_map": lambda d: d.flat_map(lambda x: Dataset.range(x, x + 2).map(fails(*bad))),
        "interleave": lambda d: d.interleave(
            lambda x: Dataset.range(x, x + 2).map(fails(*bad)),
            cycle_length=3,
            num_parallel_calls=draw(st.sampled_from([None, 2])),
        ),
        "window": lambda d: d.window(2, shift=draw(st.integers(1, 3))).flat_map(
            lambda w: w.batch(2).unbatch()
        ),
        "zip": lambda d: Dataset.zip(d, d).map(lambda x, y: x),
        "scan": lambda d: d.scan(np.int64(0), lambda s, x: (s + fails(*bad)(x), s)),
        "unique": lambda d: d.unique(),
        "ignore_errors": lambda d: d.ignore_errors(),
        "group_by_window": lambda d: d.group_by_window(
            lambda x: fails(*bad)(x) % 2, lambda _, group: group, window_size=3
        ),
    }
    for name in draw(st.lists(st.sampled_from(sorted(steps)), max_size=3)):
        dataset = steps[name](dataset)
    return dataset


@given(dataset=failing())
def test_elements_come_one_by_one_as_in_any_other_way(dataset):
    """However many rows travel together, and whichever thread makes them."""
    alone = outcomes(iter(dataset), most=400)

    assert outcomes(iter(dataset.prefetch(4)), most=400) == alone
    strategy = rx.distribute.get_strategy()
    distributed = iter(strategy.experimental_distribute_dataset(dataset))
    assert outcomes(distributed, most=400) == alone
    assert alone[-1] == "end"


def quiet_range(start, size):
    """A range that fails at its end if it is odd, and calls no function on its way."""
    return Dataset.range(start, start + size).apply(assert_cardinality(size + size % 2))


@st.composite
def in_turn(draw):
    """Datasets in turn, some of which fail, called in threads or not."""
    lengths = draw(st.lists(st.sampled_from([6, 4, 2, 7, 5, 0]), min_size=3, max_size=6))
    bad = draw(st.sets(st.integers(0, 60), max_size=8))
    is_quiet = draw(st.sampled_from([lambda k: True, lambda k: k % 2, lambda k: False]))

    def inner(k):
        quiet = quiet_range(10 * k, lengths[k])
        return quiet if is_quiet(k) else quiet.map(fails(*bad))

    return Dataset.range(len(lengths)).interleave(
        inner,
        cycle_length=draw(st.sampled_from([4, 3, 2, 1])),
        block_length=draw(st.sampled_from([1, 2, 3])),
        num_parallel_calls=draw(st.sampled_from([None, 2])),
    )


@pytest.mark.parametrize("datasets", [in_turn, failing])
@given(data=st.data())
def test_rows_that_are_asked_for_together_are_those_that_come_alone(datasets, data):
    dataset = data.draw(datasets())
    limits = data.draw(st.lists(st.sampled_from([4, 2, 7, 9, 1]), min_size=1, max_size=3))
    iterator = iter(dataset)
    sizes, found = itertools.cycle(limits), []
    while not found or found[-1] != "end":
        iterator._limit = next(sizes)
        found += outcomes(iterator, most=1)

    assert found == outcomes(iter(dataset), most=400)


@given(dataset=failing(), count=st.integers(0, 40))
def test_a_state_that_is_saved_after_errors_is_restored_exactly(dataset, count):
    for make in (iter, distributed_iterator):
        iterator = make(dataset)
        outcomes(iterator, most=count)
        state = json.loads(json.dumps(iterator.save_state()))
        rest = outcomes(iterator, most=400)
        again = make(dataset)
        again.restore_state(state)

        assert outcomes(again, most=400) == rest


def distributed_iterator(dataset):
    return iter(rx.distribute.get_strategy().experimental_distribute_dataset(dataset))


def interrupts_at(*calls):
    """A function of numbers that a signal's handler interrupts at some of its calls."""
    count = 0

    def function(x):
        nonlocal count
        count += 1
        if count in calls:
            raise KeyboardInterrupt
        return fails(9)(x)

    return function


@given(calls=st.sets(st.integers(1, 30), max_size=4), size=st.integers(1, 4))
def test_an_interrupted_iterator_continues_with_the_element_that_was_interrupted(calls, size):
    dataset = Dataset.range(20).map(interrupts_at(*calls)).batch(size)
    expected = outcomes(iter(Dataset.range(20).map(fails(9)).batch(size)))
    iterator, found = iter(dataset), []
    while "end" not in found:
        try:
            found += outcomes(iterator, most=1)
        except KeyboardInterrupt:
            continue

    assert found == expected


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
def test_a_step_that_fails_is_raised_and_the_next_follows(num_replicas, policy, tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("\n".join(map(str, range(16))))
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        rx.data.experimental.AutoShardPolicy, policy
    )
    lines = rx.data.TextLineDataset(str(path)).with_options(options)
    dataset = lines.map(lambda line: fails(5)(np.int64(line))).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    found = outcomes(
        iterator, lambda x: np.concatenate(strategy.experimental_local_results(x)).tolist()
    )

    assert found == [[0, 1, 2, 3], "error", [8, 9, 10, 11], [12, 13, 14, 15], "end"]


def test_a_dataset_function_continues_too():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.distribute_datasets_from_function(
        lambda _: Dataset.range(8).map(fails(2, 5)).batch(1)
    )

    found = outcomes(
        iter(dataset), lambda x: [int(y[0]) for y in strategy.experimental_local_results(x)]
    )

    assert found == [[0, 1], "error", [3, 4], "error", [6, 7], "end"]


def test_another_librarys_loader_continues_too():
    class Loader:
        def __iter__(self):
            return map(fails(1), [np.int64(k) for k in range(3)])

    iterator = distributed_iterator(Loader())

    assert outcomes(iterator) == [0, "error", 2, "end"]

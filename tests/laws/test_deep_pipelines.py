"""A pipeline of thousands of transformations does what one of a few does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.data import deep_pipelines
from replicax.data import AUTOTUNE, Dataset, Options
from replicax.data.experimental import assert_cardinality
from tests.data.pipelines import ints
from tests.replicas import mirrored


def same(x):
    return x


def true(x):
    return True


# Every transformation, with arguments by which it gives the elements that it gets.
STEPS = {
    "map": lambda d: d.map(same),
    "map of blocks": lambda d: d.map(same, vectorize=True),
    "filter": lambda d: d.filter(true),
    "take": lambda d: d.take(100),
    "take all": lambda d: d.take(-1),
    "skip": lambda d: d.skip(0),
    "shuffle": lambda d: d.shuffle(1),
    "repeat": lambda d: d.repeat(1),
    "shard": lambda d: d.shard(1, 0),
    "batch": lambda d: d.batch(2).unbatch(),
    "padded_batch": lambda d: d.padded_batch(2).unbatch(),
    "rebatch": lambda d: d.batch(2).rebatch(1).unbatch(),
    "enumerate": lambda d: d.enumerate().map(lambda i, x: x),
    "cache": lambda d: d.cache(),
    "prefetch": lambda d: d.prefetch(1),
    "with_options": lambda d: d.with_options(Options()),
    "flat_map": lambda d: d.flat_map(Dataset.from_tensors),
    "interleave": lambda d: d.interleave(Dataset.from_tensors, cycle_length=1),
    "window": lambda d: d.window(2).flat_map(same),
    "scan": lambda d: d.scan(np.int64(0), lambda s, x: (s, x)),
    "take_while": lambda d: d.take_while(true),
    "ignore_errors": lambda d: d.ignore_errors(),
    "unique": lambda d: d.unique(),
    "zip": lambda d: Dataset.zip(d, Dataset.range(9)).map(lambda a, b: a),
    "concatenate": lambda d: d.concatenate(Dataset.range(0)),
    "group_by_window": lambda d: d.group_by_window(
        lambda x: 0, lambda key, group: group, window_size=1
    ),
    "sample_from_datasets": lambda d: Dataset.sample_from_datasets([d]),
    "choose_from_datasets": lambda d: Dataset.choose_from_datasets(
        [d], Dataset.from_tensors(np.int64(0)).repeat()
    ),
    "assert_cardinality": lambda d: d.apply(assert_cardinality(3)),
}
# Their element_spec calls functions of the pipeline, for every transformation from the start.
LEARNING = {"map", "enumerate", "flat_map", "interleave", "window", "scan", "zip"}
DEEPEST = ["map", "take", "batch"]


def deep(names, depth):
    dataset = Dataset.range(3)
    for place in range(depth):
        dataset = STEPS[names[place % len(names)]](dataset)
    return dataset


def check(dataset):
    iterator = iter(dataset)
    first = int(next(iterator))
    state = iterator.save_state()
    rest = ints(iterator)
    assert [first, *rest] == [0, 1, 2]

    again = iter(dataset)
    again.restore_state(state)
    assert ints(again) == rest

    assert dataset.cardinality() in (3, rx.data.UNKNOWN_CARDINALITY)
    assert repr(dataset).count("<") > 100
    assert dataset.options() is not None
    assert dataset.fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize("step", [name for name in STEPS if name not in DEEPEST])
def test_hundreds_of_one_transformation(step):
    check(deep([step], 400))


@settings(max_examples=4, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=12))
def test_hundreds_of_any_transformations(names):
    check(deep(names, 500))


@pytest.mark.parametrize("step", DEEPEST)
def test_five_thousand_of_one_transformation(step):
    check(deep([step], 5000))


@pytest.mark.parametrize("step", sorted(set(STEPS) - {"group_by_window"}))
def test_the_spec_of_deep_pipelines(step):
    dataset = deep([step], 60 if step in LEARNING or step.startswith("map") else 600)
    assert dataset.element_spec.dtype == np.int64


@pytest.mark.parametrize("step", ["filter", "take_while"])
def test_each_further_predicate_takes_no_longer_than_the_one_before(step, monkeypatch):
    on_new_stack, calls = deep_pipelines.on_new_stack, []

    def counted(call):
        calls.append(call)
        return on_new_stack(call)

    monkeypatch.setattr(deep_pipelines, "on_new_stack", counted)

    dataset = deep([step], 400)

    assert len(calls) <= 40  # 40 nodes share a stack
    assert ints(dataset) == [0, 1, 2]


def test_a_deep_pipeline_is_distributed():
    strategy = mirrored(2)
    dataset = deep(["map", "take", "shuffle"], 1500).batch(2).prefetch(AUTOTUNE)
    batches = strategy.experimental_distribute_dataset(dataset)

    found = [x for b in batches for part in strategy.experimental_local_results(b) for x in part]

    assert sorted(map(int, found)) == [0, 1, 2]


def test_an_element_that_fails_at_the_start_of_a_deep_pipeline_is_raised_at_its_end():
    def fail_at_one(x):
        if x == 1:
            raise KeyError("one")
        return x

    dataset = Dataset.range(3).map(fail_at_one)
    for _ in range(1000):
        dataset = dataset.map(same).take(5)
    iterator = iter(dataset)

    assert int(next(iterator)) == 0
    with pytest.raises(rx.errors.InvalidArgumentError, match="KeyError"):
        next(iterator)
    assert ints(iterator) == [2]

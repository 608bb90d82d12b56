"""Distributed datasets and their iterators, on the devices."""

import gc
import itertools
import json
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import local, mirrored


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"{n}replicas")
def strategy(request):
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def flat(parts):
    return [x for part in parts for x in part]


def feeding_threads():
    return [t for t in threading.enumerate() if t.name == "replicax-feed" and t.is_alive()]


def test_every_element_reaches_exactly_one_replica(strategy):
    dataset = rx.data.Dataset.range(23).batch(8)

    seen = [
        x
        for batch in strategy.experimental_distribute_dataset(dataset)
        for part in local(strategy, batch)
        for x in part
    ]

    assert seen == list(range(23))


def test_components_sit_on_their_replicas_devices(strategy):
    dataset = rx.data.Dataset.range(8).batch(8)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    devices = [next(iter(x.devices())) for x in strategy.experimental_local_results(batch)]

    assert devices == jax.devices()[: strategy.num_replicas_in_sync]


@pytest.mark.parametrize(
    "empty",
    [
        lambda d: d.window(9, drop_remainder=True).flat_map(lambda w: w.batch(9)),
        lambda d: d.batch(2).filter(lambda x: False).map(lambda x: x + 1),
        lambda d: d.take(0).interleave(lambda x: rx.data.Dataset.range(x)).batch(2),
    ],
    ids=["flat_map", "map", "interleave"],
)
def test_a_dataset_without_elements_gives_no_steps(strategy, empty):
    dataset = empty(rx.data.Dataset.range(8))

    assert list(strategy.experimental_distribute_dataset(dataset)) == []
    assert list(strategy.distribute_datasets_from_function(lambda _: dataset)) == []


def test_a_distributed_dataset_can_be_iterated_again(two):
    dist = two.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2))

    assert [local(two, b) for b in dist] == [local(two, b) for b in dist]


def test_a_shuffled_dataset_has_another_order_in_each_pass(two):
    dataset = rx.data.Dataset.range(64).shuffle(64, seed=3).batch(64)
    dist = two.experimental_distribute_dataset(dataset)

    first, second = local(two, next(iter(dist))), local(two, next(iter(dist)))

    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(64))


def test_strings_stay_on_the_host(two):
    dataset = rx.data.Dataset.from_tensor_slices([b"a", b"b", b"c"]).batch(4)
    batch = next(iter(two.experimental_distribute_dataset(dataset)))

    parts = two.experimental_local_results(batch)

    assert [p.tolist() for p in parts] == [[b"a", b"b"], [b"c"]]
    assert all(isinstance(p, np.ndarray) for p in parts)


def test_an_array_that_the_user_changes_later_does_not_change_the_batches(two):
    memory = np.zeros(8 * 16, np.float32)
    offset = (-memory.ctypes.data % 64) // 4  # aligned memory is what JAX would alias
    source = memory[offset : offset + 16]
    batch = next(iter(two.experimental_distribute_dataset([source])))

    source[:] = 7

    assert all(not np.asarray(x).any() for x in two.experimental_local_results(batch))


def test_a_view_of_an_in_memory_dataset_is_not_aliased(two):
    memory = np.zeros((64, 16), np.float32)
    dataset = rx.data.Dataset.from_tensor_slices(memory).batch(64)
    batch = next(iter(two.experimental_distribute_dataset(dataset)))

    memory[:] = 7

    assert all(not np.asarray(x).any() for x in two.experimental_local_results(batch))


def test_a_distributed_dataset_has_no_transformations(two):
    dist = two.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2))

    with pytest.raises(AttributeError, match="Transform the dataset first"):
        dist.map(lambda x: x)


def test_the_end_is_stop_iteration_for_next_and_out_of_range_for_get_next(two):
    iterator = iter(two.experimental_distribute_dataset(rx.data.Dataset.range(2).batch(2)))
    next(iterator)

    for end in (StopIteration, rx.errors.OutOfRangeError):
        with pytest.raises(end, match="all its 1 elements"):
            next(iterator)
    with pytest.raises(rx.errors.OutOfRangeError, match="all its 1 elements"):
        iterator.get_next()
    assert not iterator.get_next_as_optional().has_value()


def test_an_exception_in_a_map_function_reaches_the_loop(two):
    def bad(x):
        if x == 5:
            raise KeyError("five")
        return x

    dataset = rx.data.Dataset.range(8).map(bad).batch(2)
    seen = []

    with pytest.raises(Exception, match="five"):
        seen.extend(local(two, b) for b in two.experimental_distribute_dataset(dataset))
    assert seen == [[[0], [1]], [[2], [3]]]


def exhausted(iterator):
    for _ in iterator:
        pass


def broken_off(iterator):
    for _ in iterator:
        break


def closed(iterator):
    next(iterator)
    iterator.close()


def raised(iterator):
    with pytest.raises(Exception, match="zero"):
        list(iterator)


@pytest.mark.parametrize("ending", [exhausted, broken_off, next, closed, raised])
def test_the_thread_that_feeds_ends_with_its_iterator(two, ending):
    dataset = rx.data.Dataset.range(100).batch(2)
    if ending is raised:
        dataset = dataset.map(lambda x: x + [1 // (40 - v) for v in x.tolist()])
    iterator = iter(two.experimental_distribute_dataset(dataset))
    ending(iterator)
    del iterator
    gc.collect()

    for thread in feeding_threads():
        thread.join(timeout=5)
    assert not feeding_threads()


def test_next_in_a_replica_function_is_refused_with_what_to_write(two):
    iterator = iter(two.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2)))

    with pytest.raises(ValueError, match=r"args=\(next\(iterator\),\)"):
        two.run(lambda: next(iterator))
    iterator.close()


def test_the_specs_say_what_elements_look_like(two):
    x = np.zeros((12, 3), np.float64)
    loose = two.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices({"x": x}).batch(4)
    )
    fixed = two.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices({"x": x}).batch(4, drop_remainder=True)
    )

    assert [s.shape for s in loose.element_spec["x"].value_specs] == [(None, 3)] * 2
    assert [s.shape for s in fixed.element_spec["x"].value_specs] == [(2, 3)] * 2
    assert fixed.element_spec["x"].value_specs[0].dtype == np.float32  # as it is on the device


@settings(max_examples=25)
@given(st.integers(0, 9), st.booleans())
def test_a_saved_iterator_continues_exactly_where_it_stood(taken, by_file):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    options = rx.data.Options()
    policy = rx.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policy.OFF if by_file else policy.AUTO
    dataset = rx.data.Dataset.range(11).shuffle(7).repeat(3).batch(4).with_options(options)
    dist = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(dist)
    for _ in range(taken):
        next(iterator, None)
    state = json.loads(json.dumps(iterator.save_state()))
    rest = [local(strategy, b) for b in iterator]

    again = iter(dist)
    again.restore_state(state)

    assert [local(strategy, b) for b in again] == rest


def test_a_state_continues_with_another_number_of_replicas(two):
    four = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    dataset = rx.data.Dataset.range(32).shuffle(32, seed=1).batch(8)
    iterator = iter(two.experimental_distribute_dataset(dataset))
    next(iterator)
    state = iterator.save_state()
    rest = [flat(local(two, b)) for b in iterator]

    again = iter(four.experimental_distribute_dataset(dataset))
    again.restore_state(state)

    assert [flat(local(four, b)) for b in again] == rest


def test_a_state_of_a_function_s_dataset_is_refused_with_another_number_of_replicas(two):
    def distributed(strategy):
        return strategy.distribute_datasets_from_function(
            lambda _: rx.data.Dataset.range(32).batch(2)
        )

    four = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    iterator = iter(distributed(two))
    next(iterator)
    again = iter(distributed(four))

    with pytest.raises(ValueError, match=r"gave 2 element\(s\) of each .* gave 4 element\(s\)"):
        again.restore_state(iterator.save_state())

    assert flat(local(four, next(again))) == [0, 1, 2, 3, 4, 5, 6, 7]


@given(st.data(), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=30)
def test_batches_per_replica_are_each_used_once_by_any_numbers_of_replicas(data, rows, size):
    """Law: however the replicas change between steps, the rows come in the dataset's order."""
    dataset = rx.data.Dataset.range(rows).shuffle(7, seed=3).batch(size)
    seen, state = [], None
    while len(seen) < rows:
        count = data.draw(st.sampled_from([1, 2, 3, 4]))
        strategy = mirrored(count)
        batches = strategy.experimental_distribute_dataset(dataset, batch="per_replica")
        iterator = iter(batches)
        if state is not None:
            iterator.restore_state(json.loads(json.dumps(state)))
        for batch in itertools.islice(iterator, data.draw(st.integers(1, 3))):
            before = len(seen)
            parts = local(strategy, batch)
            seen += flat(parts)
            if len(seen) < rows:
                assert [len(part) for part in parts] == [size] * count
            assert len(seen) == min(rows, before + size * count)
        state = iterator.save_state()

    assert seen == [int(x) for x in rx.data.Dataset.range(rows).shuffle(7, seed=3)]


def test_batches_per_replica_count_steps_and_keep_their_state_apart(two):
    dataset = rx.data.Dataset.range(10).batch(2)
    each = two.experimental_distribute_dataset(dataset, batch="per_replica")

    assert len(each) == 3
    with pytest.raises(ValueError, match=r"A step took a batch for each replica \(batch="):
        iter(two.experimental_distribute_dataset(dataset)).restore_state(iter(each).save_state())
    with pytest.raises(ValueError, match='pass batch="global"'):
        two.experimental_distribute_dataset(dataset, batch="local")


def test_a_batch_per_replica_that_fails_is_left_out_and_cannot_be_saved(two):
    def bad(x):
        if x == 2:
            raise KeyError("two")
        return x

    dataset = rx.data.Dataset.range(6).map(bad).batch(1)
    iterator = iter(two.experimental_distribute_dataset(dataset, batch="per_replica"))
    seen = flat(local(two, next(iterator)))
    with pytest.raises(Exception, match="two"):
        next(iterator)
    seen += [x for batch in iterator for x in flat(local(two, batch))]

    assert seen == [0, 1, 3, 4, 5]
    with pytest.raises(ValueError, match="its position cannot be saved"):
        iterator.save_state()


def test_a_state_of_something_else_is_refused(two):
    iterator = iter(two.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2)))

    with pytest.raises(ValueError, match="not a state of such a distributed iterator"):
        iterator.restore_state({"position": 3})


def test_the_default_strategy_gives_the_dataset_itself():
    dataset = rx.data.Dataset.range(4).batch(2)
    default = rx.distribute.get_strategy()

    assert default.experimental_distribute_dataset(dataset) is dataset
    assert default.distribute_datasets_from_function(
        lambda context: (context.num_input_pipelines, context.input_pipeline_id)
    ) == (1, 0)


def test_the_optional_of_a_distributed_iterator_knows_its_spec():
    strategy = mirrored(2)
    dataset = rx.data.Dataset.range(8).batch(4)

    optional = iter(strategy.experimental_distribute_dataset(dataset)).get_next_as_optional()

    spec = optional.element_spec
    assert isinstance(spec, rx.distribute.PerReplicaSpec)
    assert [s.shape for s in spec.value_specs] == [(2,), (2,)]


def test_an_input_context_prints_its_pipeline():
    text = str(rx.distribute.InputContext(3, 1, 6))
    assert text == "rx.distribute.InputContext(input pipeline id 1, total: 3)"

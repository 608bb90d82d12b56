"""Input contexts and options."""

import pytest

import replicax as rx


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_a_batch_that_cannot_be_divided_evenly_is_refused_with_sizes_that_can():
    context = rx.distribute.InputContext(num_replicas_in_sync=6)

    with pytest.raises(ValueError, match=r"25 .* 6 replicas; 24 or 30"):
        context.get_per_replica_batch_size(25)


def test_elements_are_fetched_to_the_devices_unless_told_otherwise():
    assert rx.distribute.InputOptions().experimental_fetch_to_device is True
    assert not rx.distribute.InputOptions(False).experimental_fetch_to_device


def test_a_buffer_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        rx.distribute.InputOptions(experimental_per_replica_buffer_size=0)


def test_one_dataset_for_each_replica_is_made_by_a_function(strategy):
    mode = rx.distribute.InputReplicationMode.PER_REPLICA
    options = rx.distribute.InputOptions(experimental_replication_mode=mode)

    def make(context):
        assert context.num_input_pipelines == 2
        return rx.data.Dataset.range(4).shard(2, context.input_pipeline_id).batch(1)

    dist = strategy.distribute_datasets_from_function(make, options)

    steps = [[x.tolist() for x in strategy.experimental_local_results(b)] for b in dist]
    assert steps == [[[0], [1]], [[2], [3]]]


def test_one_dataset_for_each_replica_cannot_be_made_of_one_dataset(strategy):
    mode = rx.distribute.InputReplicationMode.PER_REPLICA
    options = rx.distribute.InputOptions(experimental_replication_mode=mode)

    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2), options)


def test_placing_a_dataset_on_the_device_contradicts_fetching_it(strategy):
    options = rx.distribute.InputOptions(experimental_place_dataset_on_device=True)

    with pytest.raises(ValueError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda c: rx.data.Dataset.range(4), options)


def test_several_datasets_for_one_replica_are_refused():
    one = rx.distribute.OneDeviceStrategy("CPU:0")
    mode = rx.distribute.InputReplicationMode.PER_REPLICA
    options = rx.distribute.InputOptions(experimental_replication_mode=mode)

    with pytest.raises(NotImplementedError, match="PER_WORKER is the same"):
        one.distribute_datasets_from_function(lambda c: rx.data.Dataset.range(4), options)

"""Which variables are distributed values, as TensorFlow 2.21 has it."""

import jax.numpy as jnp
import pytest

import replicax as rx

STRATEGIES = {
    "two replicas": (lambda: rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), 2),
    "one replica": (lambda: rx.distribute.MirroredStrategy(["CPU:0"]), 1),
    "TPU": (rx.distribute.TPUStrategy, None),
    "one device": (lambda: rx.distribute.OneDeviceStrategy("CPU:0"), 0),
    "default": (rx.distribute.get_strategy, 0),
}


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_variable_is_distributed_as_in_tensorflow(name, synchronization):
    make, count = STRATEGIES[name]
    strategy = make()
    with strategy.scope():
        v = rx.Variable(
            1.0,
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=rx.VariableAggregation.SUM,
        )
    count = strategy.num_replicas_in_sync if count is None else count
    results = strategy.experimental_local_results(v)

    assert isinstance(v, rx.Variable)
    assert isinstance(v, rx.distribute.DistributedValues) is bool(count)
    assert not any(isinstance(c, rx.distribute.DistributedValues) for c in results)
    assert all(isinstance(c, rx.Variable) for c in results)
    if count:
        assert v.values == results
        assert len(v.values) == count
    else:
        assert not hasattr(v, "values")
        assert results == (v,)


def test_variable_is_distributed_in_replicas_and_functions():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    seen = []

    def replica():
        seen.append(isinstance(v, rx.distribute.DistributedValues))
        return v.assign_add([1.0, 1.0])

    strategy.run(replica)
    rx.function(lambda: strategy.run(replica))()

    assert set(seen) == {True}
    assert [c.numpy().tolist() for c in v.values] == [[3.0, 4.0]] * 2
    assert jnp.dot(v, v) == 25


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_component_of_an_on_read_variable_is_the_copy(devices):
    strategy = rx.distribute.MirroredStrategy(devices)
    with strategy.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    for number, component in enumerate(v.values, start=1):
        component.assign(float(number))

    assert [float(c) for c in v.values] == [1.0, 2.0][: len(devices)]
    assert float(v) == sum(range(len(devices) + 1))


def test_plain_variable_is_none():
    assert not isinstance(rx.Variable(1.0), rx.distribute.DistributedValues)

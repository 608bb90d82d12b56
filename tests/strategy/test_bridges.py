"""Bridges to hand-written JAX: nothing is copied on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from tests.replicas import mirrored, replica_id

ON_READ, SUM = rx.VariableSynchronization.ON_READ, rx.VariableAggregation.SUM


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.fixture(params=[1, 2, 4])
def strategy(request):
    return mirrored(request.param)


def test_shard_map_code_takes_per_replica_values_and_gives_them_back(strategy):
    count = strategy.num_replicas_in_sync
    value = rx.function(lambda: strategy.run(lambda: jnp.ones(3) * replica_id()))()
    doubled = jax.jit(
        jax.shard_map(
            lambda x: x * 2 + jax.lax.psum(x, "replica"),
            mesh=strategy.mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec("replica"),
        )
    )
    if count == 1:  # one replica's result is bare
        value = strategy.per_replica(value[None])

    back = strategy.per_replica(doubled(strategy.array(value)))
    total = rx.function(lambda x: strategy.reduce("SUM", x, axis=0))(back)

    assert float(total) == 3 * (2 + count) * sum(range(count))


def test_a_round_trip_copies_nothing(strategy):
    rows = jax.device_put(
        np.ones((strategy.num_replicas_in_sync, 4), np.float32),
        NamedSharding(strategy.mesh, PartitionSpec("replica")),
    )

    assert pointers(strategy.array(strategy.per_replica(rows))) == pointers(rows)


def test_a_variable_gives_its_own_array_which_later_steps_leave_alone(strategy):
    with strategy.scope():
        v = rx.Variable(jnp.arange(3.0))
    add = rx.function(lambda: v.assign_add(jnp.ones(3)))
    add()

    array = strategy.array(v)
    add()

    assert array.tolist() == [1, 2, 3]
    assert strategy.array(v).tolist() == [2, 3, 4]
    assert array.sharding.mesh == strategy.mesh
    assert float(jax.jit(jnp.sum)(array)) == 6


def test_an_on_read_variable_gives_a_row_for_each_replica():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda: v.assign(replica_id()))

    assert strategy.array(v).tolist() == [0, 1]
    assert rx.function(lambda: strategy.array(v) * 2)().tolist() == [0, 2]


def test_what_is_no_distributed_value_is_refused_with_what_to_write():
    strategy = mirrored(2)

    with pytest.raises(TypeError, match=r"NamedSharding\(strategy\.mesh"):
        strategy.array(jnp.ones(2))
    with pytest.raises(ValueError, match=r"\(3,\).*2 replicas.*reshape"):
        strategy.per_replica(jnp.ones(3))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._src.topology.mesh import REPLICA_AXIS
from replicax._src.values.per_replica import stacked
from replicax._src.values.placement import per_replica_map, stack
from replicax._src.values.replica_functions import apply_in_body, local_piece, stacked_array
from tests.replicas import components, mirrored, per_replica


@pytest.fixture
def strategy():
    return mirrored(4)


def plus_all(leaves):
    return [jax.lax.psum(x, REPLICA_AXIS) for x in leaves]


def test_a_function_of_the_pieces_gives_the_same_everywhere(strategy):
    topology = strategy.topology
    rows = [jnp.float32(i) for i in range(4)]
    pieces = per_replica(strategy, rows)
    whole = stacked(stack(rows, topology), topology)

    (of_pieces,) = apply_in_body(plus_all, [pieces], topology)
    (of_stacked,) = apply_in_body(plus_all, [whole], topology)
    traced = jax.jit(
        lambda rows: apply_in_body(plus_all, [stacked(rows, topology)], topology)[0].form.array
    )(stack(rows, topology))

    assert components(of_pieces) == components(of_stacked) == [6.0] * 4
    assert float(traced) == 6.0
    assert isinstance(of_pieces, rx.distribute.Mirrored)


def test_a_stacked_array_is_used_as_it_is(strategy):
    rows = stack([jnp.float32(i) for i in range(4)], strategy.topology)

    assert stacked_array(stacked(rows, strategy.topology), strategy.topology) is rows


def test_arrays_are_put_together_once(strategy):
    value = per_replica(strategy, [jnp.full(3, i) for i in range(4)])

    made = stacked_array(value, strategy.topology)

    assert stacked_array(value, strategy.topology) is made
    assert made.tolist() == [[i] * 3 for i in range(4)]


def test_arrays_that_may_change_are_put_together_each_time(strategy):
    rows = [np.full(3, i, np.float32) for i in range(4)]
    value = strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    step = rx.function(lambda v: strategy.reduce("SUM", v, axis=None))

    before = step(value).tolist()
    for row in rows:
        row += 10

    assert before == [6.0] * 3
    assert step(value).tolist() == [46.0] * 3


def test_arrays_of_one_strategy_are_assembled_again_for_another(strategy):
    other = rx.distribute.MirroredStrategy(["CPU:7", "CPU:6", "CPU:5", "CPU:4"])
    value = per_replica(strategy, [jnp.float32(i) for i in range(4)])

    made = [stacked_array(value, s.topology) for s in (strategy, other, strategy)]

    assert [x.sharding for x in made] == [s.topology.stacked for s in (strategy, other, strategy)]
    assert [x.tolist() for x in made] == [[0.0, 1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize(
    "make",
    [
        rx.distribute.PerReplica,
        lambda rows: rx.distribute.PerReplica([int(r) for r in rows]),
    ],
)
def test_each_replica_finds_its_own_component_of_a_list(strategy, make):
    value = make([jnp.int32(10 * i) for i in range(4)])
    spec = PartitionSpec(REPLICA_AXIS)
    body = per_replica_map(lambda x: x + local_piece(value), strategy.topology, spec, spec)

    assert jax.jit(body)(jnp.zeros(4, jnp.int32)).tolist() == [0, 10, 20, 30]


def test_a_component_that_all_share_needs_no_choice():
    assert local_piece(rx.distribute.PerReplica(["same", "same"])) == "same"
    assert local_piece(rx.distribute.Mirrored([3, 3])) == 3
    assert local_piece("no distributed value") == "no distributed value"

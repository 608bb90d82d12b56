import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.topology.mesh import Topology
from replicax._src.values.placement import (
    first,
    fresh_copy,
    join,
    on_device,
    replicate,
    split,
    stack,
    unstack,
)

ORDERS = [[0, 1], [1, 0], [3, 1, 2, 0], [7, 6, 5, 4, 3, 2, 1, 0], [5]]


def topology_of(order):
    return Topology(tuple(jax.devices()[i] for i in order))


@pytest.mark.parametrize("order", ORDERS)
def test_shards_come_in_the_order_of_the_replicas(order):
    topology = topology_of(order)

    back = split(join([jnp.float32(10 * i) for i in order], topology), topology)

    assert [float(x) for x in back] == [10.0 * i for i in order]
    assert [next(iter(x.devices())).id for x in back] == order


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_a_stacked_array_lie_on_their_replicas(order):
    topology = topology_of(order)
    rows = [jnp.full(3, float(i)) for i in order]

    stacked = stack(rows, topology)
    back = unstack(stacked, topology)

    assert stacked.shape == (len(order), 3)
    assert np.asarray(stacked).tolist() == [[float(i)] * 3 for i in order]
    assert [x.tolist() for x in back] == [x.tolist() for x in rows]
    assert [next(iter(x.devices())).id for x in back] == order


@pytest.mark.parametrize("order", [[1, 0], [3, 1, 2, 0], [5]])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (17, 5)])
def test_pieces_are_stacked_alike_wherever_they_come_from(order, dtype, shape):
    topology = topology_of(order)
    pieces = [np.full(shape, i % 2 + 1).astype(jnp.dtype(dtype)) for i in order]
    placed = [jax.device_put(p, d) for p, d in zip(pieces, topology.primary_devices, strict=True)]

    stacks = [
        stack(pieces, topology),
        stack(placed, topology),
        stack([p + jnp.zeros_like(p) for p in placed], topology),  # perhaps not computed yet
        stack(placed[::-1], topology)[::-1],
        stack([*placed[:-1], pieces[-1]], topology),
    ]

    want = np.stack([np.asarray(p) for p in placed])
    assert {x.dtype for x in stacks} == {want.dtype}
    assert len({x.sharding for x in stacks[1:3]}) == 1  # or steps would compile again
    for found in stacks:
        np.testing.assert_array_equal(np.asarray(found), want)


def test_a_stack_keeps_its_numbers_whatever_becomes_of_the_pieces():
    topology = topology_of([1, 0])
    host = [np.full((64, 8), float(i), np.float32) for i in range(2)]
    placed = [jax.device_put(p, d) + 0 for p, d in zip(host, topology.primary_devices, strict=True)]
    jax.block_until_ready(placed)
    of_host, of_placed = stack(host, topology), stack(placed, topology)
    eat = jax.jit(lambda x: x + 100, donate_argnums=0)

    host[0][:] = 7
    eaten = [eat(p) for p in placed]

    assert np.asarray(of_host)[:, 0, 0].tolist() == [0, 1]
    assert np.asarray(of_placed)[:, 0, 0].tolist() == [0, 1]
    assert [float(x[0, 0]) for x in eaten] == [100, 101]
    again = [jnp.asarray(p) for p in stack(eaten, topology)]
    donated = eat(stack(eaten, topology))
    assert np.asarray(donated)[:, 0, 0].tolist() == [200, 201]
    assert [float(x[0, 0]) for x in (*again, *eaten)] == [100, 101] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_every_array_that_is_handed_out_is_free_to_move(order):
    topology = topology_of(order)
    rows = [jnp.ones(2)] * len(order)

    handed_out = [
        *split(join(rows, topology), topology),
        *unstack(stack(rows, topology), topology),
        first(replicate(jnp.ones(2), topology)),
        on_device(jnp.ones(2), topology.devices[-1]),
    ]

    assert not any(x.committed for x in handed_out)


def test_a_replicated_array_owns_its_memory():
    mine = np.ones(64, np.float32)
    placed = replicate(mine, topology_of([0, 1]))

    mine[:] = 7

    assert np.asarray(placed).tolist() == [1.0] * 64


@pytest.mark.parametrize("make", [lambda: jnp.arange(6.0), lambda: jax.random.key(3)])
def test_a_copy_stays_where_it_was_in_memory_of_its_own(make):
    topology = topology_of([0, 1])
    placed = replicate(make(), topology)

    copied = fresh_copy(placed)

    assert copied.sharding == placed.sharding
    assert copied.dtype == placed.dtype
    numbers = [x if x.dtype == jnp.float32 else jax.random.key_data(x) for x in (placed, copied)]
    np.testing.assert_array_equal(*numbers)
    before, after = (
        {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards} for x in numbers
    )
    assert not before & after


def test_rows_of_different_types_become_one_type():
    stacked = stack([jnp.int32(1), jnp.float32(2.5)], topology_of([0, 1]))

    assert stacked.dtype == jnp.float32
    assert stacked.tolist() == [1.0, 2.5]


@pytest.mark.parametrize("make", [join, stack])
def test_another_number_of_components_than_replicas_is_refused(make):
    with pytest.raises(ValueError, match="3 components was used with 2 replicas") as error:
        make([1.0, 2.0, 3.0], topology_of([0, 1]))

    assert "experimental_distribute_values_from_function" in str(error.value)


@settings(max_examples=15)
@given(
    order=st.permutations(range(4)),
    rows=st.lists(st.integers(-100, 100), min_size=4, max_size=4),
)
def test_stack_then_unstack_is_the_identity(order, rows):
    topology = topology_of(order)

    back = unstack(stack([np.int32(r) for r in rows], topology), topology)

    assert [int(x) for x in back] == rows


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_rows_of_numpy_lie_on_their_replicas_too(order, dtype):
    topology = topology_of(order)
    rows = [np.full(3, i, dtype) for i in order]

    made = stack(rows, topology)

    assert made.sharding == topology.stacked
    assert made.dtype == jnp.asarray(rows[0]).dtype
    for row, back in zip(rows, unstack(made, topology), strict=True):
        np.testing.assert_array_equal(row, back)

"""Collectives of eager replicas under every transformation of JAX, against compiled ones."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.collectives.eager import Seat, open_rendezvous
from tests.replicas import WAYS, compiled, components, context, eagerly, mirrored, replica_id


@pytest.fixture
def strategy():
    return mirrored(2)


def total(x):
    return context().all_reduce("SUM", x)


def mean(x):
    return context().all_reduce("MEAN", x)


# Each is a replica function, and what it gives on replica i of 2.
PROGRAMS = {
    "plain": (lambda: total(replica_id()), lambda i: 1.0),
    "twice": (lambda: total(total(replica_id())), lambda i: 2.0),
    "jit": (lambda: jax.jit(total)(replica_id()), lambda i: 1.0),
    "jit of two": (lambda: jax.jit(lambda x: total(x) - mean(x))(replica_id()), lambda i: 0.5),
    "scan": (
        lambda: jax.lax.scan(lambda c, x: (total(c) / 2 + x, c), replica_id(), jnp.ones(3))[0],
        lambda i: 3.5,
    ),
    "fori_loop": (
        lambda: jax.lax.fori_loop(0, 3, lambda _, c: total(c), replica_id()),
        lambda i: 4.0,
    ),
    "cond": (
        lambda: jax.lax.cond(jnp.float32(1) > 0, total, lambda x: x, replica_id()),
        lambda i: 1.0,
    ),
    "vmap": (
        lambda: jax.vmap(total)(replica_id() * jnp.arange(2.0)).sum(),
        lambda i: 1.0,
    ),
    "vmap of an inner axis": (
        lambda: jax.vmap(total, in_axes=1, out_axes=1)(replica_id() * jnp.ones((2, 3)))[0, 2],
        lambda i: 1.0,
    ),
    "vmap of one of two": (
        lambda: jax.vmap(lambda x: sum(total([x, replica_id()])))(jnp.arange(2.0))[1],
        lambda i: 3.0,
    ),
    "jit of vmap": (lambda: jax.jit(jax.vmap(total))(replica_id() * jnp.ones(2))[0], lambda i: 1.0),
    "checkpoint": (
        lambda: jax.grad(jax.checkpoint(lambda x: total(x * x) * (replica_id() + 1)))(
            replica_id() + 1.0
        ),
        lambda i: 6.0 * (i + 1),
    ),
    "grad": (
        lambda: jax.grad(lambda x: total(x) * (replica_id() + 1))(1.0),
        lambda i: 3.0,
    ),
    "grad of the mean": (
        lambda: jax.grad(lambda x: mean(x) * (replica_id() + 1))(1.0),
        lambda i: 1.5,
    ),
    "value_and_grad": (
        lambda: sum(jax.value_and_grad(lambda x: total(x * x))(replica_id())),
        lambda i: 1.0 + 4.0 * i,
    ),
    "grad of grad": (
        lambda: jax.grad(jax.grad(lambda x: total(x**3)))(replica_id() + 1.0),
        lambda i: 12.0 * (i + 1),
    ),
    "grad of jit": (
        lambda: jax.grad(jax.jit(lambda x: total(x * x)))(replica_id() + 1.0),
        lambda i: 4.0 * (i + 1),
    ),
    "jit of grad": (
        lambda: jax.jit(jax.grad(lambda x: total(x * x)))(replica_id() + 1.0),
        lambda i: 4.0 * (i + 1),
    ),
    "grad of scan": (
        lambda: jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (total(c), None), x, None, length=2)[0]
        )(replica_id()),
        lambda i: 4.0,
    ),
    "grad beside an integer": (
        lambda: jax.grad(lambda x: total([x, jnp.int32(1)])[0])(2.0),
        lambda i: 2.0,
    ),
    "grad of one of two": (
        lambda: jax.grad(lambda x: sum(total([x * x, replica_id()])))(replica_id() + 1.0),
        lambda i: 4.0 * (i + 1),
    ),
    "jvp": (
        lambda: jax.jvp(total, (replica_id(),), (replica_id() + 1.0,))[1],
        lambda i: 3.0,
    ),
    "vjp": (
        lambda: jax.vjp(total, replica_id())[1](replica_id() + 1.0)[0],
        lambda i: 3.0,
    ),
    "vmap of grad": (
        lambda: jax.vmap(jax.grad(lambda x: total(x * x)))(jnp.arange(2.0))[1],
        lambda i: 4.0,
    ),
    "jacobian": (
        lambda: jax.jacrev(lambda x: total(x * x))(jnp.arange(1.0, 3.0))[1, 1],
        lambda i: 8.0,
    ),
    "gather": (
        lambda: context().all_gather(replica_id()[None], axis=0)[::-1][0],
        lambda i: 1.0,
    ),
    "gather in jit": (
        lambda: jax.jit(lambda x: context().all_gather(x, axis=0))(replica_id()[None])[1],
        lambda i: 1.0,
    ),
    "gather in vmap": (
        lambda: jax.vmap(lambda x: context().all_gather(x, axis=0))(
            replica_id() * jnp.ones((2, 1))
        )[1, 1],
        lambda i: 1.0,
    ),
    "gather in scan": (
        lambda: jax.lax.scan(
            lambda c, x: (c, context().all_gather(x, axis=0)), 0.0, replica_id() * jnp.ones((2, 1))
        )[1][1, 1],
        lambda i: 1.0,
    ),
    "grad of gather": (
        lambda: jax.grad(
            lambda x: (context().all_gather(x, axis=0) * jnp.arange(2.0)).sum() * (replica_id() + 1)
        )(jnp.ones(1))[0],
        lambda i: 3.0 * i,
    ),
    "grad of grad of gather": (
        lambda: jax.grad(
            lambda y: jax.grad(lambda x: (context().all_gather(x, axis=0) ** 3).sum())(y).sum()
        )(replica_id()[None] + 1.0)[0],
        lambda i: 12.0 * (i + 1),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_work_under_every_transformation(strategy, name, way):
    step, expected = PROGRAMS[name]

    result = way(strategy, step)

    np.testing.assert_allclose(components(result), [expected(i) for i in range(2)], rtol=1e-6)


@pytest.mark.parametrize("name", ["jit", "scan", "grad", "gather in jit"])
def test_a_second_run_gives_the_same(strategy, name):
    step, expected = PROGRAMS[name]

    runs = [components(strategy.run(step)) for _ in range(3)]

    assert runs == [[expected(i) for i in range(2)]] * 3


def test_a_function_that_jax_keeps_does_not_mix_up_replicas(strategy):
    kept = jax.jit(lambda x: x * context().replica_id_in_sync_group)

    for factor in (1.0, 2.0):
        result = strategy.run(lambda f=factor: kept(jnp.float32(f)))

        assert components(result) == [factor * i for i in range(2)]


def test_many_independent_collectives_of_one_jit_stay_apart(strategy):
    @jax.jit
    def many(x):
        return jnp.stack([total(jnp.full(3, 1.0 * k) * x) for k in range(20)])

    for _ in range(3):
        result = strategy.run(lambda: many(replica_id()))

        for value in result.values:
            assert value.tolist() == [[1.0 * k] * 3 for k in range(20)]


@pytest.mark.parametrize("way", WAYS)
def test_several_integers_travel_in_one_call(strategy, way):
    def step():
        i = context().replica_id_in_sync_group
        return context().all_reduce("SUM", [i + 1, i + 2, jnp.float32(1) * i])

    one, two, three = way(strategy, step)

    assert components(one) == [3] * 2
    assert components(two) == [5] * 2
    assert components(three) == [1.0] * 2
    assert one.values[0].dtype == jnp.int32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "expected"), [("SUM", 2), ("MEAN", 0.5)])
@pytest.mark.parametrize("ops", [rx.distribute.NcclAllReduce, rx.distribute.ReductionToOneDevice])
def test_truth_values_are_counted(way, op, expected, ops):
    strategy = mirrored(4, cross_device_ops=ops())

    result = way(strategy, lambda: context().all_reduce(op, replica_id() > 1))

    assert components(result) == [expected] * 4


@pytest.mark.parametrize("staged", [False, True])
def test_uneven_rows_are_gathered_and_their_gradients_cut(staged):
    strategy = mirrored(3)

    def step():
        i = int(context().replica_id_in_sync_group)
        rows = jnp.full((i, 2), 1.0 * i)
        gather = lambda x: context().all_gather(x, axis=0)  # noqa: E731
        loss = lambda x: (gather(x) * jnp.asarray([[1.0], [2.0], [3.0]])).sum()  # noqa: E731
        wrap = jax.jit if staged else lambda f: f
        return wrap(gather)(rows), wrap(jax.grad(loss))(rows)

    gathered, gradient = strategy.run(step)

    assert components(gathered) == [[[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]] * 3
    assert components(gradient) == [[], [[3.0, 3.0]], [[6.0, 6.0], [9.0, 9.0]]]


def test_rows_that_change_under_a_jit_of_the_users_are_refused_with_advice():
    strategy = mirrored(2)
    gather = jax.jit(lambda x: context().all_gather(x, axis=0))

    def step(sizes):
        return gather(jnp.ones(sizes[int(context().replica_id_in_sync_group)]))

    assert components(strategy.run(step, args=([2, 2],))) == [[1.0] * 4] * 2
    with pytest.raises(Exception, match=r"all_gather|different things"):
        strategy.run(step, args=([2, 1],))

    outside = strategy.run(
        lambda: context().all_gather(jnp.ones(int(context().replica_id_in_sync_group) + 1), axis=0)
    )
    assert components(outside) == [[1.0] * 3] * 2


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("way", WAYS)
def test_gather_joins_along_any_axis(strategy, way, axis):
    result = way(
        strategy, lambda: context().all_gather(replica_id() * jnp.ones((2, 1, 3)), axis=axis)
    )

    expected = np.concatenate([np.full((2, 1, 3), i) for i in range(2)], axis)
    for value in result.values:
        np.testing.assert_array_equal(value, expected)


def test_values_that_lie_on_a_strange_device_are_combined(strategy):
    def step():
        far = jax.device_put(replica_id(), jax.devices()[7])
        return context().all_reduce("SUM", far), context().all_gather(far[None], axis=0)

    total_of_all, rows = strategy.run(step)

    assert components(total_of_all) == [1.0] * 2
    assert components(rows) == [[0.0, 1.0]] * 2
    assert [v.devices() for v in total_of_all.values] == [{d} for d in jax.devices()[:2]]


def test_eager_and_compiled_agree_to_the_bit(strategy):
    def step():
        key = jax.random.fold_in(jax.random.key(1), context().replica_id_in_sync_group)
        x = jax.random.normal(key, (7,))
        return context().all_reduce("MEAN", x)

    assert components(eagerly(strategy, step)) == components(compiled(strategy, step))


def test_a_collective_on_a_thread_of_no_run_finds_the_only_run(strategy):
    topology = strategy.topology
    found, errors = [], []

    def look():
        try:
            found.append(Seat(topology, 0, rx.distribute.NcclAllReduce()).rendezvous)
        except rx.errors.ReplicaError as error:
            errors.append(str(error))

    def elsewhere():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    elsewhere()
    with open_rendezvous(topology) as one:
        elsewhere()
        with open_rendezvous(topology):
            elsewhere()

    assert found == [one]
    assert "after its `strategy.run` had ended" in errors[0]
    assert "2 eager runs are under way on the same devices" in errors[1]


def test_a_run_that_ended_leaves_no_rendezvous_open(strategy):
    kept = []
    strategy.run(lambda: kept.append(context()))

    with pytest.raises(rx.errors.ScopeError, match="not the current one"):
        kept[0].all_reduce("SUM", jnp.ones(2))

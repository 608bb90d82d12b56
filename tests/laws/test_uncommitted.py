"""Arrays of any origin meet: JAX alone refuses arrays that are committed to different devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import components, context, mirrored, per_replica

STRATEGY = mirrored(3, first=1)  # not the default device
with STRATEGY.scope():
    VARIABLE = rx.Variable([1.0, 1.0])
    ON_READ = rx.Variable(
        [1.0, 1.0],
        synchronization=rx.VariableSynchronization.ON_READ,
        aggregation=rx.VariableAggregation.MEAN,
    )
PLAIN = rx.Variable([1.0, 1.0])
VALUE = STRATEGY.run(lambda: jnp.ones(2))
COMPILED = rx.function(lambda: STRATEGY.run(lambda: jnp.ones(2)))()

# Each gives two ones, from another place.
SOURCES = {
    "local result of eager code": lambda: STRATEGY.experimental_local_results(VALUE)[1],
    "local result of compiled code": lambda: STRATEGY.experimental_local_results(COMPILED)[2],
    "copy of a variable": lambda: VARIABLE.components[1].read_value(),
    "mirrored variable": lambda: VARIABLE.read_value(),
    "on-read variable": lambda: ON_READ.read_value(),
    "plain variable": lambda: PLAIN.read_value(),
    "reduce": lambda: STRATEGY.reduce("MEAN", VALUE, axis=None),
    "reduce of compiled code": lambda: STRATEGY.reduce("MEAN", COMPILED, axis=None),
    "gather": lambda: STRATEGY.gather(VALUE, axis=0)[:2],
    "output of a function": lambda: rx.function(lambda: VARIABLE + 0.0)(),
    "output of a reduction in a function": lambda: rx.function(
        lambda: STRATEGY.reduce("MEAN", STRATEGY.run(lambda: jnp.ones(2)), axis=None)
    )(),
    "made under rx.device": lambda: made_under_device(),
    "new array": lambda: jnp.ones(2),
    "NumPy": lambda: np.ones(2, np.float32),
}


def made_under_device():
    with rx.device("CPU:5"):
        return jnp.ones(2)


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations_with_replacement(sorted(SOURCES), 2))
)
def test_arrays_of_any_two_origins_are_added(one, other):
    assert np.asarray(jnp.add(SOURCES[one](), SOURCES[other]())).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_an_array_of_any_origin_meets_a_committed_one(name):
    committed = jax.device_put(jnp.ones(2), jax.devices()[6])

    total = jnp.add(committed, SOURCES[name]())

    assert total.tolist() == [2.0, 2.0]
    assert total.devices() == {jax.devices()[6]}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_an_array_of_any_origin_is_an_argument_of_eager_replicas(name):
    def step(x):
        local = context().replica_id_in_sync_group * jnp.ones(2)
        assert not isinstance(x, jax.Array) or x.devices() == local.devices()
        return x + local + VARIABLE

    assert components(STRATEGY.run(step, args=(SOURCES[name](),))) == [[i, i] for i in (2, 3, 4)]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_an_array_of_any_origin_is_captured_by_eager_replicas(name):
    x = SOURCES[name]()

    result = STRATEGY.run(lambda: x + context().replica_id_in_sync_group + VARIABLE)

    assert components(result) == [[i, i] for i in (2, 3, 4)]
    assert [v.devices() for v in result.values] == [{d} for d in jax.devices()[1:4]]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_an_array_of_any_origin_is_an_argument_of_compiled_replicas(name):
    result = STEP(SOURCES[name](), VALUE)

    assert components(result) == [[i, i] for i in (3, 4, 5)]


@rx.function
def STEP(x, own):  # noqa: N802
    def replica(x, own):
        return x + own + context().replica_id_in_sync_group + VARIABLE

    return STRATEGY.run(replica, args=(x, own))


@pytest.mark.parametrize("where", [0, 2, 7])
def test_committed_arguments_are_moved_to_the_replicas(where):
    here = jax.device_put(jnp.ones(2), jax.devices()[where])
    there = jax.device_put(jnp.ones(2), jax.devices()[5])
    both = lambda a, b: a + b  # noqa: E731

    eager = STRATEGY.run(both, args=(here, there))
    compiled = rx.function(lambda a, b: STRATEGY.run(both, args=(a, b)))(here, there)

    assert components(eager) == components(compiled) == [[2.0, 2.0]] * 3


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_variable_is_assigned_an_array_of_any_origin(name):
    for variable in (VARIABLE, PLAIN):
        variable.assign(SOURCES[name]())

        assert variable.numpy().tolist() == [1.0, 1.0]
        assert len({c.device for c in variable.components}) == len(variable.components)


def test_local_results_add_up_in_plain_python():
    value = per_replica(STRATEGY, [jnp.float32(i) for i in range(3)])
    eager = STRATEGY.run(lambda x: x * 2, args=(value,))
    compiled = rx.function(lambda v: STRATEGY.run(lambda x: x * 2, args=(v,)))(value)

    for result in (eager, compiled):
        assert float(sum(STRATEGY.experimental_local_results(result))) == 6.0


def test_values_of_one_strategy_are_used_by_another():
    other = mirrored(3, first=5)
    backwards = rx.distribute.MirroredStrategy(list(reversed(jax.devices()[1:4])))
    value = rx.function(lambda: STRATEGY.run(lambda: context().replica_id_in_sync_group + 1))()
    double = lambda x: x * 2  # noqa: E731

    for strategy in (other, backwards):
        eager = strategy.run(double, args=(value,))
        compiled = rx.function(lambda v, s=strategy: s.run(double, args=(v,)))(value)

        assert components(eager) == components(compiled) == [2, 4, 6]
        assert int(strategy.reduce("SUM", value, axis=None)) == 6


def test_a_value_made_by_hand_may_lie_anywhere():
    pile = [jax.device_put(jnp.float32(i), jax.devices()[7]) for i in range(3)]
    spread = [jax.device_put(jnp.float32(i), jax.devices()[7 - i]) for i in range(3)]

    for parts in (pile, spread, [np.float32(i) for i in range(3)]):
        value = rx.distribute.PerReplica(parts)
        step = rx.function(lambda v: STRATEGY.run(lambda x: x + 1, args=(v,)))

        assert components(step(value)) == [1.0, 2.0, 3.0]
        assert components(STRATEGY.run(lambda x: x + 1, args=(value,))) == [1.0, 2.0, 3.0]

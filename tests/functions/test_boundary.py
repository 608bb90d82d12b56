"""What a traced function may return, and that it comes back as it was."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.base.errors import TracingError


@jax.tree_util.register_dataclass
@dataclass
class Point:
    """A pytree."""

    x: object
    y: object


class Thing:
    """Something that JAX knows nothing about."""


THING = Thing()


@pytest.mark.parametrize(
    "result",
    [None, "text", b"bytes", THING, (), [], {}, {"a": None, "b": ["text", (THING,)]}],
    ids=["None", "text", "bytes", "an object", "()", "[]", "{}", "a structure"],
)
def test_what_is_not_an_array_comes_back_as_it_is(result):
    f = rx.function(lambda x: result)

    assert f(jnp.ones(2)) == result
    assert f(jnp.ones(2)) == result


def test_structures_come_back_with_new_arrays_in_them():
    f = rx.function(lambda x: {"p": Point(x + 1, "label"), "n": (None, [x * 2])})

    for x in (1.0, 5.0):
        seen = f(jnp.float32(x))
        assert isinstance(seen["p"], Point)
        assert (float(seen["p"].x), seen["p"].y) == (x + 1, "label")
        assert (seen["n"][0], float(seen["n"][1][0])) == (None, x * 2)


@pytest.mark.parametrize("number", [3, 0.5, True, np.float32(2), np.arange(3)], ids=repr)
def test_numbers_become_arrays_as_in_tensorflow(number):
    seen = rx.function(lambda: number)()

    assert isinstance(seen, jax.Array)
    np.testing.assert_array_equal(seen, number)


def test_variables_come_back_as_what_they_hold_at_that_time(two):
    with two.scope():
        v = rx.Variable(1.0)
    w = rx.Variable(5.0)
    f = rx.function(lambda: (v.assign_add(1.0), [w]))

    first, (second,) = f()
    f()
    w.assign(0.0)

    assert (float(first), float(second)) == (2.0, 5.0)
    assert all(isinstance(x, jax.Array) for x in (first, second))


def test_per_replica_values_come_back_distributed(two):
    def replica():
        i = rx.distribute.get_replica_context().replica_id_in_sync_group
        return {"i": i, "same": "text", "pair": (i * 2, None)}

    seen = rx.function(lambda: two.run(replica))()

    assert isinstance(seen["i"], rx.distribute.PerReplica)
    assert [int(x) for x in seen["i"].values] == [0, 1]
    assert seen["same"] == "text"
    assert [int(x) for x in seen["pair"][0].values] == [0, 2]


def test_per_replica_arguments_pass_through(two):
    ids = two.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )

    seen = rx.function(lambda x: x)(ids)

    assert [float(x) for x in two.experimental_local_results(seen)] == [0.0, 1.0]


def test_a_per_replica_value_without_its_strategy_is_refused(two):
    with pytest.raises(TracingError, match="2 components without using a strategy"):
        rx.function(lambda x: rx.distribute.PerReplica([x, x]))(jnp.ones(()))


def test_results_are_on_one_device_and_meet_others(two, four):
    with two.scope():
        v = rx.Variable(2.0)
    with four.scope():
        w = rx.Variable(3.0)

    a, b = rx.function(lambda: v * 1)(), rx.function(lambda: w * 1)()

    assert (len(a.devices()), len(b.devices())) == (1, 1)
    assert float(a + b) == 5.0
    assert float(rx.function(lambda x, y: x * y)(a, b)) == 6.0

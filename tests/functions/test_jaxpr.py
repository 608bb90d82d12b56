"""Jaxprs: what is asked of them, and which values of a replica function can differ.

The oracle is the function itself, run on two replicas: what is said to be equal must be.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._errors import ReplicaError
from replicax.functions._jaxpr._lift import calls_host
from replicax.functions._jaxpr._replicas import _EQUALISING, varying_outputs
from replicax.topology._mesh import REPLICA_AXIS, Topology
from replicax.values._placement import per_replica_map
from tests.replicas import per_replica

AXIS = REPLICA_AXIS


# What is asked of the equations of JAX, by the walks of `_jaxpr` and by `_lift`.
CONTRACT = {
    "scan": (
        lambda x: lax.scan(lambda c, y: (c + y, y), x[0], x)[0],
        {"jaxpr", "num_consts", "num_carry"},
    ),
    "while": (
        lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x),
        {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"},
    ),
    "cond": (lambda x: lax.cond(x[0] > 0, lambda: x, lambda: -x), {"branches"}),
    "jit": (lambda x: jax.jit(lambda y: y + 1)(x), {"jaxpr"}),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_equations_that_hold_jaxprs_have_the_parameters_that_are_asked_for(name):
    fn, parameters = CONTRACT[name]

    equations = jax.make_jaxpr(fn)(jnp.arange(3.0)).jaxpr.eqns

    (found,) = [e for e in equations if e.primitive.name == name]
    assert parameters <= set(found.params)
    assert list(jaxprs_in_params(found.params))


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, o: lax.psum(o, AXIS),
        lambda s, o: lax.pmax(o, AXIS),
        lambda s, o: lax.all_gather(o, AXIS).sum(),
    ],
    ids=["psum", "pmax", "all_gather"],
)
def test_collectives_have_the_names_by_which_they_are_known(fn):
    names = {e.primitive.name for e in body_of(fn).eqns}

    assert names & _EQUALISING


def test_a_jaxpr_can_be_cut_and_put_together_again():
    closed = jax.make_jaxpr(lambda x: (x + 1, x * 2))(1.0)
    first, second = closed.jaxpr.eqns

    half = closed.jaxpr.replace(
        eqns=[second.replace(invars=second.invars)],
        outvars=closed.jaxpr.outvars[1:],
        debug_info=closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )

    assert first.primitive.name == "add"
    assert jaxpr_as_fun(ClosedJaxpr(half, closed.consts))(jnp.float32(3)) == [6.0]


def body_of(fn) -> Jaxpr:
    """The jaxpr of ``fn(same, own)`` as one replica runs it."""
    topology = Topology.local(["CPU:0", "CPU:1"])
    own = PartitionSpec(AXIS)
    mapped = per_replica_map(
        lambda same, mine: fn(same, mine[0])[None], topology, (PartitionSpec(), own), own
    )
    closed = jax.make_jaxpr(mapped)(jnp.float32(2), jnp.array([1.0, 3.0]))
    (equation,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]
    return equation.params["jaxpr"]


def outcomes(fn):
    topology = Topology.local(["CPU:0", "CPU:1"])
    own = PartitionSpec(AXIS)
    mapped = per_replica_map(
        lambda same, mine: fn(same, mine[0])[None], topology, (PartitionSpec(), own), own
    )
    return np.asarray(jax.jit(mapped)(jnp.float32(2), jnp.array([1.0, 3.0])))


def swap(x):
    return lax.ppermute(x, AXIS, [(0, 1), (1, 0)])


@jax.custom_jvp
def with_jvp(x):
    return x * 2


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0]))

VARYING = {
    "own": lambda s, o: o,
    "mixed": lambda s, o: s + o,
    "index": lambda s, o: s * lax.axis_index(AXIS),
    "swap": lambda s, o: swap(o),
    "jit": lambda s, o: jax.jit(lambda x: x + 1)(o),
    "scan carry": lambda s, o: lax.scan(lambda c, _: (c + o, None), s, None, length=2)[0],
    "late in a scan": lambda s, o: lax.scan(
        lambda c, _: ((c[1], c[2], o), None), (s, s, s), None, length=3
    )[0][0],
    "cond": lambda s, o: lax.cond(o > 2, lambda: s, lambda: s * 2),
    "cond branch": lambda s, o: lax.cond(s > 1, lambda: o, lambda: s),
    "while turns": lambda s, o: lax.while_loop(lambda x: x < o * 2, lambda x: x + 1, s * 0),
    "custom_jvp": lambda s, o: with_jvp(o),
    "checkpoint": lambda s, o: jax.checkpoint(jnp.sin)(o),
    "vmap": lambda s, o: jax.vmap(lambda x: x * o)(jnp.ones(2)).sum(),
}
EQUAL = {
    "same": lambda s, o: s,
    "constant": lambda s, o: jnp.float32(7),
    "psum": lambda s, o: lax.psum(o, AXIS),
    "pmean": lambda s, o: lax.pmean(o, AXIS),
    "pmax": lambda s, o: lax.pmax(o, AXIS),
    "all_gather": lambda s, o: lax.all_gather(o, AXIS).sum(),
    "through a scan": lambda s, o: lax.scan(
        lambda c, _: (c + lax.psum(o, AXIS), None), s, None, length=2
    )[0],
    "uniform cond": lambda s, o: lax.cond(s > 1, lambda: s, lambda: lax.psum(o, AXIS)),
    "uniform while": lambda s, o: lax.while_loop(lambda x: x < 9, lambda x: x * 2, s),
    "custom_jvp": lambda s, o: with_jvp(s),
    "jit": lambda s, o: jax.jit(lambda x, y: x)(s, o),
}


@pytest.mark.parametrize("fn", VARYING.values(), ids=VARYING)
def test_what_differs_is_said_to_vary(fn):
    assert varying_outputs(body_of(fn), [False, True]) == [True]
    first, second = outcomes(fn)
    assert first != second


@pytest.mark.parametrize("fn", EQUAL.values(), ids=EQUAL)
def test_what_is_said_to_be_equal_is(fn):
    assert varying_outputs(body_of(fn), [False, True]) == [False]
    first, second = outcomes(fn)
    assert first == second


def test_a_callback_counts_as_varying():
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    jaxpr = body_of(lambda s, o: jax.pure_callback(lambda x: x, shape, s))

    assert varying_outputs(jaxpr, [False, True]) == [True]
    assert calls_host(jaxpr)
    assert not calls_host(body_of(lambda s, o: s))


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, o: lax.cond(o > 2, lambda: lax.psum(s, AXIS), lambda: s),
        lambda s, o: lax.cond(o > 2, lambda: jax.jit(lambda x: lax.pmax(x, AXIS))(s), lambda: s),
        lambda s, o: lax.while_loop(lambda x: x < o, lambda x: x + lax.psum(s, AXIS), s),
        lambda s, o: lax.while_loop(lambda x: lax.psum(x, AXIS) < o, lambda x: x + 1, s),
        lambda s, o: lax.cond(o > 2, lambda: swap(s), lambda: s),
    ],
    ids=["cond", "jit in cond", "while", "condition", "ppermute"],
)
def test_a_collective_that_some_do_not_reach_is_refused(fn):
    with pytest.raises(ReplicaError, match=r"wait for others that never come.*all_reduce"):
        varying_outputs(body_of(fn), [False, True])


@pytest.mark.parametrize("distributed", [True, False], ids=["mirrored", "plain"])
def test_a_write_of_a_number_under_a_condition_that_differs_is_refused(distributed, two, mode):
    with two.scope() if distributed else nullcontext():
        v = rx.Variable(0.0, name="steps")

    def step(loss):
        rx.cond(jnp.isfinite(loss), lambda: v.assign_add(1.0).value(), lambda: v.value())

    one_bad = per_replica(two, [np.float32(1), np.float32(np.nan)])
    with pytest.raises((rx.errors.DivergenceError, rx.errors.ReplicaError), match="steps"):
        mode(lambda x: two.run(step, args=(x,)))(one_bad)
    assert float(v) == 0.0

    mode(lambda x: two.run(step, args=(x,)))(per_replica(two, [np.float32(1), np.float32(2)]))
    assert float(v) == (1.0 if distributed else 2.0)


def test_writes_in_a_loop_whose_length_differs_are_refused(two):
    with two.scope():
        v = rx.Variable(0.0, name="turns")

    def step(n):
        def turn(i):
            v.assign_add(1.0)
            return i + 1

        rx.while_loop(lambda i: i < n, turn, 0)

    run = rx.function(lambda n: two.run(step, args=(n,)))
    with pytest.raises(rx.errors.DivergenceError, match="turns"):
        run(per_replica(two, [np.int32(1), np.int32(2)]))
    run(per_replica(two, [np.int32(2), np.int32(2)]))
    assert [float(c) for c in v.components] == [2.0, 2.0]

"""Jaxprs: what is asked of them, and which values of a replica function can differ.

The oracle is the function itself, run on two replicas: what is said to be equal must be.
"""

from contextlib import nullcontext

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Var, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._src.base.errors import ReplicaError
from replicax._src.compat.jax import scan_counts
from replicax._src.functions.jaxpr.lift import host_calls, taking_consts
from replicax._src.functions.jaxpr.on_shards import _CHECKPOINTS, _INLINED, _has_effects, _is_sum
from replicax._src.functions.jaxpr.replica_variance import (
    _DETERMINISTIC,
    _EQUALISING,
    ELEMENTWISE,
    varying_outputs,
)
from replicax._src.topology.mesh import REPLICA_AXIS, Topology
from replicax._src.values.placement import per_replica_map
from tests.replicas import per_replica

AXIS = REPLICA_AXIS


# The contract with JAX: what `_jaxpr` asks of jaxprs and their equations. It runs with the oldest
# and the newest JAX that is supported; a JAX that breaks it fails here first, by name.
CONTRACT = {
    "scan": (lambda x: lax.scan(lambda c, y: (c + y, y), x[0], x)[0], {"jaxpr"}),
    "while": (
        lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x),
        {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"},
    ),
    "cond": (lambda x: lax.cond(x[0] > 0, lambda: x, lambda: -x), {"branches"}),
    "jit": (lambda x: jax.jit(lambda y: y + 1)(x), {"jaxpr", "in_shardings", "out_shardings"}),
}


def test_a_checkpoint_is_an_equation_with_a_jaxpr():
    (found,) = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).jaxpr.eqns

    assert found.primitive.name in _CHECKPOINTS
    assert len(found.params["jaxpr"].invars) == 1


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


def test_the_constants_and_carries_of_a_scan_are_known():
    def fn(a, x):
        return lax.scan(lambda c, y: ((c[0] * a, c[1] + y), c[0] - y), (x[0], x[1]), x)

    equations = jax.make_jaxpr(fn)(2.0, jnp.arange(3.0)).eqns

    (found,) = [e for e in equations if e.primitive.name == "scan"]
    assert scan_counts(found.params) == (1, 2), f"JAX {jax.__version__}"


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


def test_an_equation_can_be_given_other_names_and_parameters():
    closed = jax.make_jaxpr(lambda x: jnp.sort(x, stable=True))(jnp.arange(3.0))
    equation = closed.eqns[-1]
    names = {v: Var(v.aval) for v in (*closed.jaxpr.invars, *equation.outvars)}

    again = closed.jaxpr.replace(
        invars=[names[v] for v in closed.jaxpr.invars],
        outvars=[names[v] for v in closed.jaxpr.outvars],
        eqns=[
            equation.replace(
                invars=[names[v] for v in equation.invars],
                outvars=[names[v] for v in equation.outvars],
                params=dict(equation.params),
            )
        ],
        debug_info=closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )

    (result,) = jaxpr_as_fun(ClosedJaxpr(again, ()))(jnp.array([2.0, 3.0, 1.0]))
    assert result.tolist() == [1.0, 2.0, 3.0]


def test_a_result_that_nobody_wants_is_known_by_its_kind():
    assert issubclass(DropVar, Var)  # such a variable has no name to give to what replaces it


def test_a_function_takes_what_it_had_closed_over():
    closed = jax.make_jaxpr(lambda x: x * np.arange(3.0, dtype=np.float32))(2.0)

    call = taking_consts(closed)

    assert jax.grad(lambda c: call(3.0, c)[0].sum())(jnp.ones(3)).tolist() == [3.0] * 3


def test_a_map_over_replicas_is_one_equation_with_an_open_jaxpr_and_its_specs():
    closed = mapped_jaxpr(lambda s, o: s * o)

    (equation,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]
    assert isinstance(equation.params["jaxpr"], Jaxpr)
    assert not equation.params["jaxpr"].constvars
    assert [AXIS in spec for spec in equation.params["in_specs"]] == [False, True]
    assert len(equation.invars) == 2


def test_a_sum_over_the_replicas_is_known_and_has_no_effect_that_counts():
    (equation,) = [
        e for e in body_of(lambda s, o: lax.psum(o, AXIS)).eqns if "psum" in e.primitive.name
    ]

    assert _is_sum(equation)
    assert not _has_effects(equation)
    assert len(equation.invars) == len(equation.outvars)


def test_a_call_back_to_python_has_an_effect_that_counts_and_a_known_name():
    jaxpr = body_of(lambda s, o: jax.debug.callback(print, o) or o)

    assert [e.primitive.name for e in jaxpr.eqns if _has_effects(e)] == ["debug_callback"]


def test_a_jitted_function_is_a_call_of_its_name():
    def some_name(x):
        return x + 1

    (equation,) = jax.make_jaxpr(jax.jit(some_name))(1.0).eqns

    assert equation.params["name"] == "some_name"
    inner = equation.params[_INLINED[equation.primitive.name]]
    assert isinstance(inner, ClosedJaxpr)


def test_what_works_number_by_number_is_what_jax_calls_so():
    elsewhere = {"add_any", "copy_p"}  # of automatic differentiation, and an older name

    assert [name for name in ELEMENTWISE - elsewhere if not hasattr(lax, f"{name}_p")] == []


def mapped_jaxpr(fn) -> ClosedJaxpr:
    topology = Topology.local(["CPU:0", "CPU:1"])
    own = PartitionSpec(AXIS)
    mapped = per_replica_map(
        lambda same, mine: fn(same, mine[0])[None], topology, (PartitionSpec(), own), own
    )
    return jax.make_jaxpr(mapped)(jnp.float32(2), jnp.array([1.0, 3.0]))


def body_of(fn) -> Jaxpr:
    """The jaxpr of ``fn(same, own)`` as one replica runs it."""
    (equation,) = [e for e in mapped_jaxpr(fn).jaxpr.eqns if e.primitive.name == "shard_map"]
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


def unknown(name):
    """Return a primitive of the user's own that gives each replica something else."""
    primitive = jax.extend.core.Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    plus_index = lambda x: x + lax.axis_index(AXIS).astype(x.dtype)  # noqa: E731
    mlir.register_lowering(primitive, mlir.lower_fun(plus_index, multiple_results=False))
    return primitive.bind


# Primitives of the user's, also under names that JAX has.
UNKNOWN = {name: unknown(name) for name in ("mine", "add", "psum", "jit", "scan", "axis_index")}
UNARY = {
    "sin": jnp.sin,
    "sum": lambda x: lax.psum(x, AXIS),
    "max": lambda x: lax.pmax(x, AXIS),
    "swap": swap,
    "gather": lambda x: lax.all_gather(x, AXIS).sum(),
    "groups": lambda x: lax.psum(x, AXIS, axis_index_groups=[[0], [1]]),
    "index": lambda x: x + lax.axis_index(AXIS),
    "random": lambda x: x + jax.random.normal(jax.random.key(x.astype("int32")), ()),
    "sort": lambda x: jnp.sort(jnp.stack([x, -x]))[0],
    "ref": lambda x: through_ref(x),
    **UNKNOWN,
}


def through_ref(x):
    ref = jax.new_ref(jnp.float32(0))
    ref[...] = x + lax.axis_index(AXIS)
    return ref[...]


def in_loop(fn, n):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, None, length=n)[0]


def in_branch(fn):
    return lambda x: lax.cond(jnp.sin(1.0) > 0, fn, lambda y: y, x)


WRAPPED = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "scan": lambda fn: in_loop(fn, 2),
    "cond": in_branch,
    "checkpoint": jax.checkpoint,
}
STEPS = st.tuples(
    st.sampled_from(sorted(UNARY)),
    st.sampled_from(sorted(WRAPPED)),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(st.lists(STEPS, min_size=1, max_size=4))
@settings(max_examples=25)
def test_random_programs_are_equal_where_they_are_said_to_be(steps):
    def fn(same, own):
        values = [same, own]
        for name, wrapper, a, b in steps:
            done = WRAPPED[wrapper](UNARY[name])(values[a % len(values)])
            values.append(done + values[b % len(values)])
        return values

    topology = Topology.local(["CPU:0", "CPU:1"])
    own = PartitionSpec(AXIS)
    mapped = per_replica_map(
        lambda s, mine: tuple(x[None] for x in fn(s, mine[0])),
        topology,
        (PartitionSpec(), own),
        own,
    )
    args = jnp.float32(2), jnp.array([1.0, 3.0])
    (equation,) = [e for e in jax.make_jaxpr(mapped)(*args).eqns if e.primitive.name == "shard_map"]
    try:
        ins = [AXIS in spec for spec in equation.params["in_specs"]]
        varies = varying_outputs(equation.params["jaxpr"], ins)
    except ReplicaError:  # a collective in a branch that differs: refused
        return

    for x, may_differ in zip(jax.jit(mapped)(*args), varies, strict=True):
        assert may_differ or x[0] == x[1], steps


def test_a_ragged_all_to_all_varies():
    # XLA cannot run it on CPUs.
    def fn(same, own):
        rows, at, size = jnp.stack([same, same]), jnp.array([0, 1]), jnp.array([1, 1])
        return lax.ragged_all_to_all(rows, rows, at, size, at, size, axis_name=AXIS).sum()

    jaxpr = body_of(fn)

    assert varying_outputs(jaxpr, [False] * len(jaxpr.invars)) == [True]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_assignment_of_an_unknown_primitives_result_is_checked(name, two):
    with two.scope():
        v = rx.Variable(0.0)

    with pytest.raises(rx.errors.DivergenceError):
        rx.function(lambda: two.run(lambda: v.assign(UNKNOWN[name](jnp.float32(1)))))()

    assert [float(c) for c in v.components] == [0.0, 0.0]


def test_what_is_known_is_known_in_this_jax():
    # What no result of a usual program may be called unknown for: a check for each assignment.
    programs = [jnp.linalg.svd, jnp.linalg.inv, jnp.linalg.eigh, jnp.fft.fft, jnp.cumsum, jnp.sort]
    programs += [jnp.var, jax.nn.softmax, jax.nn.gelu, jax.nn.relu, jax.nn.logsumexp, jnp.median]
    programs += [jnp.linalg.qr, jnp.linalg.cholesky, jax.scipy.special.gammaln, jnp.triu]
    programs += [lambda x: jax.random.normal(jax.random.key(0), x.shape)]
    programs += [lambda x: jax.random.categorical(jax.random.PRNGKey(0), x)]
    programs += [lambda x: jax.random.permutation(jax.random.key(0), x)]
    programs += [
        lambda x: jnp.split(x, 2),
        lambda x: x.at[0].add(1),
        lambda x: x[jnp.array([1, 0])],
    ]
    programs += [lambda x: jax.nn.one_hot(x[0].astype("int32"), 3), lambda x: jnp.argmax(x, 0)]
    programs += [lambda x: jax.lax.top_k(x, 2), lambda x: jnp.einsum("ij,kj->ik", x, x)]
    programs += [lambda x: jax.image.resize(x, (8, 8), "linear"), lambda x: jnp.pad(x, 1)]
    programs += [lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3)]
    programs += [lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")]
    unknown = {}

    for fn in programs:
        for g in (fn, lambda x, fn=fn: jax.grad(lambda y: total(fn(y)))(x)):
            jaxpr = jax.make_jaxpr(g)(jnp.eye(4) + 1).jaxpr
            if any(varying_outputs(jaxpr, [False])):
                unknown[getattr(fn, "__name__", "?")] = str(jaxpr)

    assert unknown == {}, f"JAX {jax.__version__}: name them in _jaxpr._replicas"
    assert "add" in _DETERMINISTIC


def total(x):
    leaves = [y for y in jax.tree.leaves(x) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.sum(y) for y in leaves), jnp.float32(0))


def test_a_callback_counts_as_varying():
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    jaxpr = body_of(lambda s, o: jax.pure_callback(lambda x: x, shape, s))

    assert varying_outputs(jaxpr, [False, True]) == [True]
    assert host_calls(jaxpr) == {"pure_callback"}
    assert host_calls(body_of(lambda s, o: s)) == set()


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

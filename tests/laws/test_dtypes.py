"""The law of dtypes: a replica's value has the same dtype eager and compiled, whatever made it.

JAX has weak arrays, made of Python's numbers, whose dtype gives way to what they meet. What crosses
the border of a replica as an array has its dtype for good; a Python number stays one. (What NumPy
computes in an eager replica is NumPy's.)
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import context, mirrored

MADE = {
    "a Python float": lambda i: i + 1.5,
    "a Python int": lambda i: i + 1,
    "the same Python float": lambda _: 1.5,
    "a weak float": lambda i: jnp.asarray(i + 1.5),
    "a weak int": lambda i: jnp.asarray(i + 1),
    "a weak vector": lambda i: jnp.broadcast_to(i + 1.5, (2,)),
    "int8": lambda i: jnp.int8(i + 1),
    "float16": lambda i: jnp.float16(i + 1.5),
    "bfloat16": lambda i: jnp.bfloat16(i + 1.5),
    "int32": lambda i: jnp.int32(i + 1),
}
MET = ("float16", "bfloat16", "float32", "int8", "int32")
WAYS = ("argument", "closed over", "made there")
VERBS = {
    "nothing": lambda x: x,
    "all_reduce": lambda x: context().all_reduce("SUM", x),
    "merge_call": lambda x: context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None), (x,)),
    "merged copy": lambda x: context().merge_call(lambda s, v: v, (x,)),
}
_values = st.sampled_from(sorted(MADE))


def _step(strategy, kind, way, verb, met):
    """What a step returns: the value after the verb, and what it makes of one of another dtype."""
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: MADE[kind](ctx.replica_id_in_sync_group)
    )

    def replica(*given):
        made = given[0] if given else value
        if way == "made there":
            made = jnp.asarray(MADE[kind](0))
        x = VERBS[verb](made)
        return [jnp.asarray(y) for y in (x, x * jnp.ones((), met), x * 2, x + 0.5)]

    args = (value,) if way == "argument" else ()
    return lambda *args: strategy.run(replica, args=args), args


def _seen(strategy, results):
    """Dtypes and numbers of the components, and of what they make of others afterwards."""
    seen = []
    for result in results:
        for x in strategy.experimental_local_results(result):
            later = x * jnp.ones((), "float16")
            seen += [(y.dtype, np.asarray(y, np.float64).tolist()) for y in (x, later)]
    return seen


@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=40, deadline=None)
@given(
    kind=_values,
    way=st.sampled_from(WAYS),
    verb=st.sampled_from(sorted(VERBS)),
    met=st.sampled_from(MET),
)
def test_a_value_has_the_same_dtype_eager_and_compiled(replicas, kind, way, verb, met):
    # Compiled code has arrays for numbers that differ, so that merge_call sees those.
    assume("Python" not in kind or "merge" not in verb)
    strategy = mirrored(replicas)
    step, args = _step(strategy, kind, way, verb, met)
    assert _seen(strategy, step(*args)) == _seen(strategy, rx.function(step)(*args))


@settings(max_examples=40, deadline=None)
@given(kind=_values, met=st.sampled_from(MET))
def test_a_reduced_value_has_the_same_dtype_eager_and_compiled(kind, met):
    strategy = mirrored(2)

    def total():
        made = strategy.run(lambda: jnp.asarray(MADE[kind](0)))
        return strategy.reduce("SUM", made, axis=None) * jnp.ones((), met)

    eager, compiled = total(), rx.function(total)()
    assert eager.dtype == compiled.dtype
    np.testing.assert_array_equal(eager, compiled)


def test_an_array_of_a_replica_made_of_a_python_number_keeps_its_dtype():
    strategy = mirrored(2)
    ones = strategy.run(lambda: jnp.asarray(1.0))
    assert [x.weak_type for x in ones.values] == [False, False]
    halves = strategy.run(lambda x: x * jnp.float16(0.5), args=(ones,))
    assert [x.dtype for x in halves.values] == [jnp.float32, jnp.float32]


def test_python_numbers_of_replicas_give_way_to_what_they_meet():
    strategy = mirrored(2)
    numbers = strategy.experimental_distribute_values_from_function(
        lambda ctx: 1.5 + ctx.replica_id_in_sync_group
    )
    double = lambda x: strategy.run(lambda v: v * jnp.float16(2), args=(x,))  # noqa: E731
    for doubled in (double(numbers), rx.function(double)(numbers)):
        assert [(x.dtype, float(x)) for x in doubled.values] == [
            (jnp.float16, 3.0),
            (jnp.float16, 5.0),
        ]


NARROW = {
    "uint8": [200, 100, 77],
    "int8": [100, 101, -3],
    "uint16": [60000, 10001, 7],
    "int16": [30000, 10001, -5],
    "int32": [2_000_000_000, 2_000_000_000, 5],
    "uint32": [4_000_000_000, 4_000_000_000, 5],
    "bool": [True, True, False],
    "float16": [60000.0, 20000.0, 1.0],
    "bfloat16": [3.0, 4.0, 1.0],
}


def _reduced(strategy, op, value):
    """The sum or mean by every way to reduce: of one element, and along an axis of one entry."""
    reduce = lambda s, v: s.reduce(op, v, axis=None)  # noqa: E731

    def replica(x):
        return {
            "all_reduce": context().all_reduce(op, x),
            "all_reduce of a structure": context().all_reduce(op, {"x": [x, x[None]]})["x"][0],
            "merge_call": context().merge_call(reduce, (x,)),
            "merged reduce_to": context().merge_call(
                lambda s, v: s.extended.reduce_to(op, v, v), (x,)
            ),
        }

    rows = lambda x: x[None]  # noqa: E731
    return {
        **strategy.run(replica, args=(value,)),
        "reduce": strategy.reduce(op, value, axis=None),
        "reduce along an axis": strategy.reduce(op, strategy.run(rows, args=(value,)), axis=0),
        "reduce_to": strategy.extended.reduce_to(op, value, value),
    }


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_every_way_to_reduce_gives_the_same_dtype_and_numbers(dtype, op):
    strategy = mirrored(3)
    given = np.asarray(NARROW[dtype], jnp.dtype(dtype))
    value = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(given[c.replica_id_in_sync_group])
    )
    is_float = dtype in ("float16", "bfloat16")
    if op == "SUM":
        kind = "int32" if dtype == "bool" else dtype
        with np.errstate(over="ignore"):
            wanted = np.sum(given, dtype=jnp.dtype(kind))
    else:
        kind = dtype if is_float else "float32"
        wanted = np.mean(given.astype(np.float64)).astype(jnp.dtype(kind))

    for way in (_reduced, rx.function(_reduced)):
        for name, result in way(strategy, op, value).items():
            for x in strategy.experimental_local_results(result):
                assert (name, x.dtype) == (name, kind)
                np.testing.assert_allclose(
                    np.asarray(x, np.float64),
                    np.asarray(wanted, np.float64),
                    1e-2 * is_float + 1e-6,
                )


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("dtype", [d for d in NARROW if d != "bool"])
def test_variables_aggregate_as_reductions_do(synchronization, dtype):
    strategy = mirrored(2)
    given = np.asarray(NARROW[dtype][:2], jnp.dtype(dtype))
    with strategy.scope():
        v = rx.Variable(
            np.zeros((), jnp.dtype(dtype)),
            synchronization=getattr(rx.VariableSynchronization, synchronization),
            aggregation=rx.VariableAggregation.SUM,
        )
    value = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(given[c.replica_id_in_sync_group])
    )

    def replica(x):
        v.assign(x)

    def step():
        strategy.run(replica, args=(value,))
        return v.read_value()

    for way in (step, rx.function(step)):
        assert way().dtype == dtype
        assert np.asarray(v.read_value()) == np.asarray(strategy.reduce("SUM", value, axis=None))


def _in_scope(make):
    with mirrored(2).scope():
        return make()


_generator = rx.random.Generator.from_seed(1)
WIDE = {
    "constant": lambda: rx.constant(1.5, dtype="float64"),
    "variable of a number": lambda: rx.Variable(1.5, dtype="float64"),
    "variable of a NumPy array": lambda: rx.Variable(np.zeros(2), dtype=np.float64),
    "variable of an array": lambda: rx.Variable(jnp.zeros(2), dtype="float64"),
    "variable of integers": lambda: rx.Variable(np.zeros(2, "int32"), dtype="int64"),
    "variable of a function": lambda: rx.Variable(lambda: jnp.zeros(2), dtype="float64"),
    "variable in a scope": lambda: _in_scope(lambda: rx.Variable(np.zeros(2), dtype="float64")),
    "random": lambda: rx.random.normal((2,), dtype="float64"),
    "stateless": lambda: rx.random.stateless_uniform((2,), seed=(1, 2), dtype="float64"),
    "generator": lambda: _generator.normal((2,), dtype="float64"),
    "metric": lambda: rx.metrics.Mean(dtype="float64").variables[0],
}


@pytest.mark.parametrize("kind", WIDE)
def test_a_wide_dtype_that_is_narrowed_is_one_warning(kind):
    with pytest.warns(UserWarning, match="64 was asked for, and .*32 is what you get") as warned:
        made = WIDE[kind]()

    assert jnp.dtype(made.dtype).itemsize == 4
    assert [w.filename for w in warned] == [__file__]


def test_a_wide_variable_of_a_traced_value_is_one_warning():
    held = []

    def step(x):
        if not held:
            held.append(rx.Variable(jnp.ones(2) * 2, dtype="float64"))
        return held[0] + x

    with pytest.warns(UserWarning, match="float64 was asked for") as warned:
        rx.function(step)(jnp.ones(2))

    assert {w.filename for w in warned} == {__file__}

"""The law of agreement: replicas that bring different things to one rendezvous are refused.

Each replica runs a program of its own, drawn at random: verbs on variables, collectives of
structures, merge_calls of functions. If all replicas run the same program, a run does what one
program means. If two differ, the run is refused with both lines, and no variable has changed.
Variables of which each replica writes its own copy (ON_READ) are the exception: there each
replica's program counts for its copy, as in TensorFlow.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import DivergenceError, ReplicaError
from tests.replicas import context, local, mirrored

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA", "plain"]
VERBS = ["assign", "assign_add", "assign_sub", "part 0", "part 1", "scatter_add", "scatter_sub"]


def variables(strategy, kind):
    def make(value):
        return rx.Variable([value, value], name="same")

    if kind == "plain":
        return [make(1.0), make(10.0)]
    aggregation = getattr(rx.VariableAggregation, kind)
    with strategy.scope():
        return [rx.Variable([x, x], name="same", aggregation=aggregation) for x in (1.0, 10.0)]


def write(variable, verb):
    two = jnp.full(2, 2.0)
    if verb.startswith("part"):
        variable[int(verb[-1])].assign(jnp.float32(2))
    elif verb.startswith("scatter"):
        getattr(variable, verb)(rx.IndexedSlices(two[:1], jnp.array([0])))
    else:
        getattr(variable, verb)(two)


def total(strategy, x):
    return strategy.reduce("SUM", x, axis=None)


def tenfold(strategy, x):
    return strategy.reduce("SUM", x, axis=None) * 10


def scaled(scale, strategy, x):
    return strategy.reduce("SUM", x, axis=None) * scale


class Scaling:
    def __init__(self, scale):
        self.scale = scale

    def merge(self, strategy, x):
        return strategy.reduce("SUM", x, axis=None) * self.scale


def closing_over(scale):
    return lambda strategy, x: strategy.reduce("SUM", x, axis=None) * scale


def with_default(scale):
    def merge(strategy, x, by=scale):
        return strategy.reduce("SUM", x, axis=None) * by

    return merge


# By name, a function for merge_call that each replica makes for itself.
FUNCTIONS = {
    "total": lambda: total,
    "tenfold": lambda: tenfold,
    "partial 2": lambda: functools.partial(scaled, 2.0),
    "partial 3": lambda: functools.partial(scaled, 3.0),
    "closure 2": lambda: closing_over(2.0),
    "closure 3": lambda: closing_over(3.0),
    "closure array 2": lambda: closing_over(jnp.float32(2)),
    "closure array 3": lambda: closing_over(jnp.float32(3)),
    "closure NaN": lambda: closing_over(jnp.float32("nan")),
    "default 2": lambda: with_default(2.0),
    "default 3": lambda: with_default(3.0),
    "method 2": lambda: Scaling(2.0).merge,
    "method 3": lambda: Scaling(3.0).merge,
    "lambda": lambda: lambda strategy, x: total(strategy, x),
}
STRUCTURES = {
    "leaf": lambda x: x,
    "list": lambda x: [x],
    "a": lambda x: {"a": x},
    "b": lambda x: {"b": x},
}
steps = st.one_of(
    st.tuples(st.just("write"), st.sampled_from([0, 1]), st.sampled_from(VERBS)),
    st.tuples(
        st.just("all_reduce"), st.sampled_from(["SUM", "MEAN"]), st.sampled_from([*STRUCTURES])
    ),
    st.tuples(st.just("all_gather"), st.just(0), st.sampled_from([*STRUCTURES])),
    st.tuples(st.just("merge_call"), st.just(0), st.sampled_from([*FUNCTIONS])),
)


def run_step(held, step):
    kind, detail, name = step
    if kind == "write":
        return write(held[detail], name)
    if kind == "all_reduce":
        return context().all_reduce(detail, STRUCTURES[name](jnp.ones(2)))
    if kind == "all_gather":
        return context().all_gather(STRUCTURES[name](jnp.ones(2)), axis=detail)
    return context().merge_call(FUNCTIONS[name](), (jnp.ones(()),))


def run(strategy, held, programs):
    def replica():
        mine = programs[int(context().replica_id_in_sync_group)]
        for step in mine:
            run_step(held, step)

    strategy.run(replica)


def values(strategy, held):
    return [local(strategy, v) for v in held]


@settings(max_examples=60, deadline=None)
@given(
    programs=st.tuples(*[st.lists(steps, min_size=1, max_size=3)] * 2),
    same=st.booleans(),
    kind=st.sampled_from(AGGREGATIONS),
)
def test_replicas_with_different_programs_are_refused(programs, same, kind):
    strategy = mirrored(2)
    held = variables(strategy, kind)
    before = values(strategy, held)
    programs = (programs[0], programs[0]) if same else programs

    if programs[0] == programs[1]:
        run(strategy, held, programs)
        return
    with pytest.raises(ReplicaError) as error:
        run(strategy, held, programs)

    assert f"{__file__}:" in str(error.value)
    assert values(strategy, held) == before


@settings(max_examples=40, deadline=None)
@given(
    programs=st.tuples(
        *[st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(VERBS[:5])), max_size=3)] * 2
    ),
    aggregation=st.sampled_from(["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]),
)
def test_on_read_variables_take_each_replicas_own_program(programs, aggregation):
    strategy = mirrored(2)
    with strategy.scope():
        held = [
            rx.Variable(
                [x, x],
                aggregation=getattr(rx.VariableAggregation, aggregation),
                synchronization=rx.VariableSynchronization.ON_READ,
            )
            for x in (1.0, 10.0)
        ]
    expected = [[rx.Variable([x, x]) for x in (1.0, 10.0)] for _ in programs]
    for own, program in zip(expected, programs, strict=True):
        for which, verb in program:
            write(own[which], verb)

    run(strategy, held, [[("write", *step) for step in p] for p in programs])

    for which, variable in enumerate(held):
        wanted = [own[which].numpy().tolist() for own in expected]
        assert local(strategy, variable) == wanted


@pytest.mark.parametrize("declaration", [{"trainable": False}, {"dtype": "int32"}, {"name": "b"}])
def test_variables_declared_differently_are_refused(declaration):
    strategy = mirrored(2)

    def replica():
        mine = declaration if int(context().replica_id_in_sync_group) else {}
        return rx.Variable(1.0, **{"name": "a", "trainable": True, "dtype": "float32", **mine})

    with pytest.raises(ReplicaError, match="disagree"):
        strategy.run(replica)


def test_a_merge_function_may_close_over_what_every_replica_has():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)

    def replica():
        mine = context()
        written = v.assign_add(jnp.ones(()))  # an object of this replica, the same variable
        scale = np.float32(2) * mine.num_replicas_in_sync
        return mine.merge_call(
            lambda strategy, x: (
                total(strategy, x) * scale * mine.num_replicas_in_sync + written.read_value()
            ),
            (jnp.ones(()),),
        )

    assert local(strategy, strategy.run(replica)) == [19.0, 19.0]


@pytest.mark.parametrize("aggregation", ["MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("way", ["index", "merge_call"])
def test_compiled_replicas_that_no_aggregation_combines_are_refused(way, aggregation):
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=getattr(rx.VariableAggregation, aggregation))

    def replica():
        number = context().replica_id_in_sync_group
        if way == "index":
            v[number].assign(10.0)
        else:
            context().merge_call(lambda strategy: v.assign(jnp.full(2, number + 1.0)))

    with pytest.raises(DivergenceError, match="different indices, or a merge_call") as error:
        rx.function(lambda: strategy.run(replica))()

    assert "whose aggregation is NONE" not in str(error.value)
    assert v.numpy().tolist() == [1.0, 2.0]

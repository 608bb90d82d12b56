"""What values mean does not depend on how a function came by them, nor on how it is run."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import context, mirrored, per_replica, replica_id

D = rx.distribute
AGGREGATIONS = list(rx.VariableAggregation)
ON_READ, ON_WRITE = rx.VariableSynchronization.ON_READ, rx.VariableSynchronization.ON_WRITE
strategy_of = cache(mirrored)


def hosted(strategy, fn, *args):
    """``fn`` on every replica, in a function that loops over a dataset."""

    @rx.function
    def loop():
        for _ in strategy.experimental_distribute_dataset(rx.data.Dataset.range(2).batch(2)):
            result = strategy.run(fn, args=args)
        return result

    return loop()


WAYS = {
    "eager": lambda s, fn, *args: s.run(fn, args=args),
    "function in run": lambda s, fn, *args: s.run(rx.function(fn), args=args),
    "run in function": lambda s, fn, *args: rx.function(lambda *a: s.run(fn, args=a))(*args),
    "loop": hosted,
}

# Each makes a per-replica value, in another form.
MAKERS = {
    "arrays": lambda s, rows: per_replica(s, rows),
    "by hand": lambda s, rows: D.PerReplica(rows),
    "NumPy": lambda s, rows: D.PerReplica([np.asarray(r) for r in rows]),
    "a result": lambda s, rows: WAYS["run in function"](s, lambda x: x, per_replica(s, rows)),
    "a batch": lambda s, rows: next(
        iter(
            s.experimental_distribute_dataset(
                rx.data.Dataset.from_tensor_slices(np.concatenate(rows)).batch(sum(map(len, rows)))
            )
        )
    ),
    "ragged": lambda s, rows: D.PerReplica([r[: len(r) - i] for i, r in enumerate(rows)]),
    "numbers": lambda s, rows: D.PerReplica([float(r[0]) for r in rows]),
}

USES = {
    "jnp": lambda x: jnp.add(x, 1),
    "operators": lambda x: 2 * x - x / 4,
    "comparison": lambda x: (x == 1) | (x > 2),
    "gradient": lambda x: jax.grad(lambda w: jnp.sum(w * x))(2.0),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + jnp.sum(x), 0.0),
    "branch": lambda x: rx.cond(jnp.sum(x) > 2, lambda: jnp.sum(x), lambda: -jnp.sum(x)),
    "collective": lambda x: context().all_reduce("SUM", jnp.sum(x)),
    "itself": lambda x: x,
    "tree": lambda x: jax.tree.map(jnp.sin, {"a": [x]})["a"][0],
    "merge": lambda x: context().merge_call(
        lambda s, v: s.reduce("SUM", v, axis=None), (jnp.sum(x),)
    ),
}

VERBS = {
    "reduce": lambda s, x: s.reduce("SUM", x, axis=None),
    "mean of rows": lambda s, x: s.reduce("MEAN", x, axis=0),
    "gather": lambda s, x: s.gather(x, axis=0),
    "local_results": lambda s, x: s.experimental_local_results(x),
    "run": lambda s, x: s.run(lambda v: v * 2, args=(x,)),
    "nothing": lambda s, x: x,
}


def seen(strategy, fn):
    """What came out, as plain Python; or the kind of error."""
    try:
        result = fn()
    except (TypeError, ValueError) as error:
        return type(error)
    leaves = jax.tree.leaves(strategy.experimental_local_results(result))
    assert not any(isinstance(x, jax.core.Tracer) for x in leaves)
    return [np.asarray(x).tolist() for x in leaves]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(list(MAKERS)),
    st.sampled_from(list(USES)),
    st.sampled_from(list(WAYS)),
    st.sampled_from([2, 3]),
)
def test_in_a_replica_a_captured_value_is_the_same_as_an_argument(maker, use, way, replicas):
    strategy, fn = strategy_of(replicas), USES[use]
    value = MAKERS[maker](strategy, [jnp.arange(4.0) + i for i in range(replicas)])

    captured = seen(strategy, lambda: WAYS[way](strategy, lambda: fn(value)))
    given_eagerly = seen(strategy, lambda: strategy.run(fn, args=(value,)))

    assert captured == given_eagerly


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(list(MAKERS)), st.sampled_from(list(VERBS)), st.sampled_from([2, 3]))
def test_a_function_sees_a_captured_value_as_plain_python_does(maker, verb, replicas):
    strategy, fn = strategy_of(replicas), VERBS[verb]
    value = MAKERS[maker](strategy, [jnp.arange(4.0) + i for i in range(replicas)])

    plain = seen(strategy, lambda: fn(strategy, value))

    assert seen(strategy, rx.function(lambda: fn(strategy, value))) == plain
    with strategy.scope():
        assert seen(strategy, lambda: rx.function(lambda x: fn(strategy, x))(value)) == plain


def test_a_captured_value_is_an_input_and_not_a_copy_in_the_program():
    strategy = strategy_of(2)
    value = per_replica(strategy, [jnp.arange(1000.0), jnp.arange(1000.0)])

    f = rx.function(lambda: strategy.reduce("SUM", strategy.run(lambda: value * 3), axis=None))

    assert "f32[1,1000]" in f.get_concrete_function().as_text()  # a shard, not a constant
    assert f()[1] == 6


def test_a_distributed_value_is_not_one_value_outside_of_replicas():
    value = D.PerReplica([1.0, 2.0])

    for use in (
        lambda: value + 1,
        lambda: jnp.add(value, 1),
        lambda: bool(value),
        lambda: value[0],
    ):
        with pytest.raises(TypeError, match="one value for each replica"):
            use()
    assert value in [value]
    assert value != D.PerReplica([1.0, 2.0])
    assert not hasattr(value, "shape")


def assigned(aggregation, synchronization, way, verb, amount):
    strategy = strategy_of(2)
    with strategy.scope():
        v = rx.Variable(0.0, synchronization=synchronization, aggregation=aggregation)
    returned = WAYS[way](strategy, lambda: getattr(v, verb)(amount()))
    total = float(strategy.reduce("SUM", returned, axis=None))
    return [float(x) for x in returned.values], total


# What TensorFlow 2.21 answers: always a per-replica value, of what each replica's copy has become.
RETURNED = {
    (ON_READ, "assign"): {key: [0.0, 1.0] for key in AGGREGATIONS},
    (ON_READ, "assign_add"): {key: [1.0, 1.0] for key in AGGREGATIONS},
    (ON_WRITE, "assign"): dict(
        zip(AGGREGATIONS[1:], ([1.0] * 2, [0.5] * 2, [0.0] * 2), strict=True)
    ),
    (ON_WRITE, "assign_add"): dict(
        zip(AGGREGATIONS, ([1.0] * 2, [2.0] * 2, [1.0] * 2, [1.0] * 2), strict=True)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", RETURNED, ids=lambda c: f"{c[0].name} {c[1]}")
def test_an_assignment_that_is_returned_is_each_replicas_value(way, case):
    synchronization, verb = case
    amount = replica_id if verb == "assign" else lambda: jnp.float32(1)
    for aggregation, values in RETURNED[case].items():
        expected = (values, sum(values))
        assert assigned(aggregation, synchronization, way, verb, amount) == expected, aggregation


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_all_replicas_add_is_returned_too(way):
    none = rx.VariableAggregation.NONE
    assert assigned(none, ON_WRITE, way, "assign_add", lambda: 1.0) == ([1.0, 1.0], 2.0)

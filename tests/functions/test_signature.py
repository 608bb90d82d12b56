"""Signatures: which calls share a trace, and what input_signature lets through."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.functions.signature import RaggedArgument, flatten_arguments, static_key


def key(*args, **kwargs):
    return flatten_arguments(args, kwargs).key


class Thing:
    """Equal to itself only."""


class Unhashable:
    """Says that it is equal to others, and cannot be hashed."""

    __hash__ = None

    def __eq__(self, other):
        return True


@jax.tree_util.register_dataclass
@dataclass
class Point:
    """A pytree."""

    x: object
    y: object


THING = Thing()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.ones(2), jnp.zeros(2)),
        (jnp.ones(2), np.ones(2, np.float32)),
        (np.float32(1), np.float32(2)),
        (3, 3),
        (0.5, 0.5),
        (float("nan"), float("nan")),
        ("text", "text"),
        (None, None),
        ({"b": 1, "a": jnp.ones(2)}, {"b": 1, "a": jnp.zeros(2)}),
        (Point(jnp.ones(2), 3), Point(jnp.zeros(2), 3)),
        (THING, THING),
        (jnp.sin, jnp.sin),
    ],
    ids=lambda x: type(x).__name__,
)
def test_calls_that_mean_the_same_share_a_trace(one, other):
    assert key(one) == key(other)
    assert hash(key(one)) == hash(key(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.ones(2), jnp.ones(3)),
        (jnp.ones(2), jnp.ones((2, 1))),
        (jnp.ones(2), jnp.ones(2, jnp.int32)),
        (jnp.asarray(1.0), jnp.float32(1.0)),
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        (None, 0),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Point(1, 2), Point(1, 3)),
        (Thing(), Thing()),
        (Unhashable(), Unhashable()),
        (1, jnp.int32(1)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_calls_that_may_differ_do_not(one, other):
    assert key(one) != key(other)


def test_keywords_are_told_from_positions():
    assert key(1, 2) != key(1, b=2)


def test_the_order_of_keywords_counts_where_a_function_sees_it():
    by_name, any_name = rx.function(lambda a, b: jnp.int32(a)), rx.function(lambda **x: list(x))
    for function in (by_name, any_name):
        function(a=1, b=2)
        function(b=2, a=1)
    assert by_name.experimental_get_tracing_count() == 1
    assert any_name.experimental_get_tracing_count() == 2


def test_replica_values_are_told_by_their_components_and_devices(two):
    pair = rx.distribute.PerReplica([jnp.ones(2), jnp.ones(2)])

    assert key(two.run(lambda: jnp.ones(2))) == key(two.run(lambda: jnp.zeros(2)))
    assert key(two.run(lambda: jnp.ones(2))) != key(two.run(lambda: jnp.ones(3)))
    assert key(pair) != key(jnp.ones(2))
    assert key(rx.distribute.PerReplica([1, 2])) != key(rx.distribute.PerReplica([1, 3]))
    with pytest.raises(RaggedArgument):
        key(rx.distribute.PerReplica([jnp.ones(2), jnp.ones(3)]))


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(json_like)
def test_arguments_are_put_back_as_they_were(value):
    arguments = flatten_arguments((value,), {"k": value})

    args, kwargs = arguments.with_arrays(arguments.arrays)

    assert (args, kwargs) == ((value,), {"k": value})
    assert hash(arguments.key) == hash(flatten_arguments((value,), {"k": value}).key)


def test_the_key_of_an_object_dies_with_it():
    thing = Thing()
    old = static_key(thing)
    del thing

    assert old.target() is None
    assert old != static_key(Thing())


def test_names_tell_where_a_leaf_stands():
    arguments = flatten_arguments((1, {"a": [2, 3]}), {"k": (4,)})

    names = arguments.names(lambda x, y, k: 0)

    assert names == [
        "argument 'x'",
        "argument 'y'['a'][0]",
        "argument 'y'['a'][1]",
        "argument 'k'[0]",
    ]


SPEC = rx.TensorSpec([None, 2], jnp.float32)


@pytest.fixture
def total():
    return rx.function(lambda x: jnp.sum(x), input_signature=[SPEC])


def test_what_fits_the_signature_is_converted(total):
    calls = [jnp.ones((3, 2)), np.ones((1, 2), np.float32), [[1, 2], [3, 4]], [[0.5, 0.5]]]

    assert [float(total(x)) for x in calls] == [6.0, 2.0, 10.0, 1.0]
    assert float(total(x=jnp.ones((3, 2)))) == 6.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((jnp.ones(2),), r"shape \(2,\)"),
        ((jnp.ones((3, 3)),), r"shape \(3, 3\)"),
        ((jnp.ones((3, 2), jnp.int32),), "dtype int32"),
        ((), "called with 0"),
        ((jnp.ones((1, 2)), 1, 2), "called with 3"),
    ],
    ids=["rank", "size", "dtype", "none", "many"],
)
def test_what_does_not_fit_is_a_type_error_that_says_why(total, args, words):
    with pytest.raises(TypeError, match=f"input_signature.*{words}"):
        total(*args)


def test_structures_and_replica_values_are_checked_leaf_by_leaf(two):
    f = rx.function(
        lambda d: two.run(lambda d: d["a"].sum(), args=(d,)), input_signature=[{"a": SPEC}]
    )
    good = two.run(lambda: jnp.ones((3, 2)))
    bad = two.run(lambda: jnp.ones(3))

    assert [float(x) for x in f({"a": good}).values] == [6.0, 6.0]
    with pytest.raises(TypeError, match=r"shape \(3,\)"):
        f({"a": bad})


def test_a_declared_function_gives_its_concrete_function_without_arguments(total):
    concrete = total.get_concrete_function()

    assert float(concrete(jnp.ones((1, 2)))) == 2.0
    assert total.experimental_get_tracing_count() == 1


def test_random_keys_are_arrays():
    draw = rx.function(lambda key, n: jax.random.uniform(key) * n)
    keys = jax.random.split(jax.random.key(0), 2)

    drawn = [float(draw(k, 1.0)) for k in keys]

    assert drawn == [float(jax.random.uniform(k)) for k in keys]
    assert draw.experimental_get_tracing_count() == 1
    assert key(keys[0]) != key(jax.random.PRNGKey(0))


def test_each_replica_gets_its_random_key():
    strategy = rx.distribute.MirroredStrategy(jax.devices()[:2])
    keys = jax.random.split(jax.random.key(0), 2)
    spread = strategy.experimental_distribute_values_from_function(
        lambda context: keys[context.replica_id_in_sync_group]
    )
    made = rx.function(lambda k: strategy.run(lambda k: (k, jax.random.uniform(k)), args=(k,)))

    again, drawn = made(made(spread)[0])

    assert [float(x) for x in drawn.values] == [float(jax.random.uniform(k)) for k in keys]
    assert (jax.random.key_data(again.values[1]) == jax.random.key_data(keys[1])).all()

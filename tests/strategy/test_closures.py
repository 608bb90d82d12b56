"""The law of closures: a compiled replica function sees and changes the objects that it holds.

Whichever container a replica function closes over, with or without arrays in it, the container
stays the same object; what the function does to it happens once for each trace; arrays in it are
inputs, so that new ones need no new trace; and no traced value stays in it.
"""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import local, mirrored

Pair = namedtuple("Pair", ["first", "second"])


class Box:
    def __init__(self, items):
        self.items = items


def tpu():
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver("local")
    return rx.distribute.TPUStrategy(resolver)


def run_tpu(strategy, step):
    return strategy.run(step)


def run_hosted(strategy, step):
    """The run is in a function that Python drives, because it loops over an iterator."""
    found = []

    @rx.function
    def loop(iterator):
        for _ in iterator:
            found.append(strategy.run(step))

    loop(iter(rx.data.Dataset.range(1)))
    return found[-1]


WAYS = {"mirrored": (lambda: mirrored(2), run_hosted)}
if len(jax.devices()) >= 2:
    WAYS["tpu"] = (tpu, run_tpu)

# How to build the container around an array, to change it, and to read its array and changes.
KINDS = {
    "list": (lambda x: [x], lambda c: c.append("seen"), lambda c: (c[0], c[1:])),
    "nested list": (
        lambda x: [[x], 1],
        lambda c: c[0].append("seen"),
        lambda c: (c[0][0], c[0][1:]),
    ),
    "list at the front": (lambda x: [x], lambda c: c.insert(0, "seen"), lambda c: (c[-1], c[:-1])),
    "dict": (
        lambda x: {"x": x},
        lambda c: c.setdefault("log", []).append("seen"),
        lambda c: (c["x"], c.get("log", [])),
    ),
    "OrderedDict": (
        lambda x: OrderedDict(x=x, log=[]),
        lambda c: c["log"].append("seen"),
        lambda c: (c["x"], c["log"]),
    ),
    "defaultdict": (
        lambda x: defaultdict(list, x=x, log=[]),
        lambda c: c["log"].append("seen"),
        lambda c: (c["x"], c["log"]),
    ),
    "tuple": (lambda x: (x, []), lambda c: c[1].append("seen"), lambda c: (c[0], c[1])),
    "namedtuple": (lambda x: Pair([], x), lambda c: c.first.append("seen"), lambda c: (c[1], c[0])),
    "deque": (lambda x: deque([x]), lambda c: c.append("seen"), lambda c: (c[0], list(c)[1:])),
    "object": (
        lambda x: Box([x]),
        lambda c: c.items.append("seen"),
        lambda c: (c.items[0], c.items[1:]),
    ),
    "dict of lists": (
        lambda x: {"a": [x, x], "log": []},
        lambda c: c["log"].append("seen"),
        lambda c: (c["a"][1], c["log"]),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [jnp.float32, np.ones])
def test_a_closed_over_container_is_changed_once_and_stays_itself(way, kind, make):
    make_strategy, run = WAYS[way]
    build, change, look = KINDS[kind]
    strategy = make_strategy()
    held = build(make(1))
    before = type(held), id(held)

    def step():
        change(held)
        return look(held)[0] * 2.0

    results = [local(strategy, run(strategy, step)) for _ in range(3)]

    array, changes = look(held)
    assert changes == ["seen"], "Python runs when the function is traced, which is once"
    assert not isinstance(array, jax.core.Tracer)
    assert (type(held), id(held)) == before
    assert np.all(np.asarray(results) == 2.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("deque", "object")])
def test_new_arrays_in_a_container_need_no_trace(way, kind):
    make_strategy, run = WAYS[way]
    build, _, look = KINDS[kind]
    strategy, traces = make_strategy(), []

    def one(number):
        held = build(jnp.float32(number))

        def step():
            traces.append(1)
            return look(held)[0] * 2.0

        return local(strategy, run(strategy, step))[0]

    assert [one(number) for number in (1, 2, 3)] == [2.0, 4.0, 6.0]
    assert len(traces) == 1


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(-4, 4), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=2),
)
def test_nested_containers_give_what_python_gives(numbers, kinds):
    strategy = mirrored(2)
    for number in numbers:
        held = other = jnp.float32(number)
        for kind in kinds:
            held, other = KINDS[kind][0](held), [other]

        def step(held=None, inner=held, flat=other):
            x = inner
            for kind in reversed(kinds):
                x = KINDS[kind][2](x)[0]
            return x + 1

        assert local(strategy, run_hosted(strategy, step))[0] == number + 1


@pytest.mark.parametrize("way", WAYS)
def test_a_name_without_a_value_may_be_closed_over(way):
    make_strategy, run = WAYS[way]
    strategy = make_strategy()
    x = jnp.float32(3)

    def step():
        return x if len(traces) else later

    traces = [1]
    assert local(strategy, run(strategy, step))[0] == 3.0
    later = jnp.float32(5)
    traces.clear()
    assert local(strategy, run(strategy, step))[0] == 5.0


@pytest.mark.parametrize("way", WAYS)
def test_nonlocal_values_of_python_are_kept(way):
    make_strategy, run = WAYS[way]
    strategy = make_strategy()
    x, count = jnp.float32(3), 0

    def step():
        nonlocal count
        count += 1
        return x * 1.0

    run(strategy, step)

    assert count == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_nonlocal_array_that_is_replaced_is_refused(way):
    make_strategy, run = WAYS[way]
    strategy = make_strategy()
    x = jnp.float32(3)

    def step():
        nonlocal x
        x = x + 1
        return x

    with pytest.raises(rx.errors.TracingError, match="`x`"):
        run(strategy, step)


@jax.tree_util.register_dataclass
@dataclass
class State:
    x: jax.Array
    log: list


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_pytree_node_is_refused(way):
    make_strategy, run = WAYS[way]
    strategy = make_strategy()
    state = State(jnp.float32(3), [])

    def step():
        state.log.append(1)
        return state.x * 1.0

    with pytest.raises(rx.errors.TracingError, match="State"):
        run(strategy, step)

    assert state.log == []


def test_a_captured_name_without_a_value_differs_from_one_that_is_none():
    def scaled(x):
        try:
            return x if factor is None else x * factor
        except NameError:
            return x * 0

    def step(x):
        return scaled(x)

    strategy = tpu()
    assert local(strategy, strategy.run(step, args=(2.0,)))[0] == 0.0
    factor = None
    assert local(strategy, strategy.run(step, args=(2.0,)))[0] == 2.0

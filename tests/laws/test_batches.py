"""A batch is consumed exactly once, in any control flow.

Random programs of loops, conditions and loops in loops take batches of an iterator inside an
`rx.function`. A simulation in plain Python says what every call returns, what has been assigned
when the data ends in the middle, and where the iterator stands then.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx

PRIME = 30011


@dataclass(frozen=True)
class Take:
    """Take a batch, in one of three ways."""

    way: str


@dataclass(frozen=True)
class Loop:
    """Repeat: by rx.scan, rx.while_loop or range."""

    kind: str
    times: int
    body: tuple


@dataclass(frozen=True)
class Either:
    """One of two, by whether the number so far is even."""

    even: tuple
    odd: tuple


@dataclass(frozen=True)
class Note:
    """Assign without taking."""


class EndError(Exception):
    pass


class Simulation:
    """The same in plain Python."""

    def __init__(self, rows, batch):
        values = list(range(rows))
        self.batches = [sum(values[i : i + batch]) for i in range(0, rows, batch)]
        self.position = 0
        self.seen = 1

    def run(self, program, x):
        for node in program:
            x = self.node(node, x)
        return x

    def node(self, node, x):
        match node:
            case Take(way):
                if self.position < len(self.batches):
                    self.seen = (self.seen * 31 + self.batches[self.position]) % PRIME
                    x = (x * 7 + self.batches[self.position]) % PRIME
                    self.position += 1
                elif way != "optional":
                    raise EndError
            case Loop(_, times, body):
                for _ in range(times):
                    x = self.run(body, x)
            case Either(even, odd):
                x = self.run(odd if x % 2 else even, x)
            case Note():
                self.seen = (self.seen * 17 + 1) % PRIME
        return x


class Real:
    """The program on replicax."""

    def __init__(self, strategy, iterator):
        self.strategy, self.iterator = strategy, iterator
        with strategy.scope():
            self.seen = rx.Variable(1)

    def run(self, program, x):
        for node in program:
            x = self.node(node, x)
        return x

    def node(self, node, x):
        match node:
            case Take(way):
                return self.take(way, x)
            case Loop("scan", times, body):
                step = lambda c, _: (self.run(body, c), None)  # noqa: E731
                return rx.scan(step, x, length=times)[0]
            case Loop("reversed", times, body):
                step = lambda c, i: (self.run(body, c), i)  # noqa: E731
                last, order = rx.scan(step, x, jnp.arange(times), reverse=True)
                return last + (order.sum() - sum(range(times)))
            case Loop("while", times, body):
                step = lambda s: (s[0] + 1, self.run(body, s[1]))  # noqa: E731
                return rx.while_loop(lambda s: s[0] < times, step, (0, x))[1]
            case Loop(_, times, body):
                for _ in range(times):
                    x = self.run(body, x)
                return x
            case Either(even, odd):
                return rx.cond(
                    x % 2 == 0, lambda: self.run(even, x) + 0, lambda: self.run(odd, x) + 0
                )
        self.seen.assign((self.seen * 17 + 1) % PRIME)
        return x

    def take(self, way, x):
        if way == "optional":
            optional = self.iterator.get_next_as_optional()
            if not optional.has_value():
                return x
            batch = optional.get_value()
        else:
            batch = next(self.iterator) if way == "next" else self.iterator.get_next()
        per_replica = self.strategy.run(jnp.sum, args=(batch,))
        total = self.strategy.reduce("SUM", per_replica, axis=None)
        self.seen.assign((self.seen * 31 + total) % PRIME)
        return (x * 7 + total) % PRIME


@cache
def strategy_of(replicas):
    if replicas == 0:
        return rx.distribute.get_strategy()
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def position(iterator):
    state = iterator.save_state()
    return state["steps"] if "steps" in state else state["position"]


takes = st.builds(Take, st.sampled_from(["next", "get_next", "optional"]))
programs = st.recursive(
    st.lists(takes | st.just(Note()), min_size=1, max_size=2).map(tuple),
    lambda inner: st.lists(
        takes
        | st.builds(
            Loop,
            st.sampled_from(["scan", "scan", "reversed", "while", "python"]),
            st.integers(0, 3),
            inner,
        )
        | st.builds(Either, inner, inner),
        min_size=1,
        max_size=2,
    ).map(tuple),
    max_leaves=4,
)


def check(program, replicas, *, plain, given_as, rows, batch, calls):
    strategy, simulation = strategy_of(replicas), Simulation(rows, batch)
    dataset = rx.data.Dataset.range(rows).batch(batch)
    iterator = iter(dataset if plain else strategy.experimental_distribute_dataset(dataset))
    real = Real(strategy if not plain else strategy_of(0), iterator)

    if given_as == "argument":

        def body(it, x):
            real.iterator = it
            return real.run(program, x)

        function = rx.function(body)
        call = lambda x: function(iterator, x)  # noqa: E731
    else:
        call = rx.function(lambda x: real.run(program, x))

    for number in range(calls):
        expected, result = "end", "end"
        with suppress(EndError):
            expected = simulation.run(program, number)
        with suppress(rx.errors.OutOfRangeError):
            result = int(call(jnp.int32(number)))
        assert result == expected
        assert int(real.seen) == simulation.seen
        assert position(iterator) == simulation.position
    rest = sum(1 for _ in iterator)
    assert rest == len(simulation.batches) - simulation.position


@settings(max_examples=12, deadline=None)
@given(
    program=programs,
    replicas=st.sampled_from([0, 0, 1, 2, 4]),
    plain=st.booleans(),
    given_as=st.sampled_from(["argument", "closure"]),
    rows=st.integers(0, 40),
    batch=st.sampled_from([2, 4]),
)
def test_a_batch_is_consumed_exactly_once_in_any_control_flow(
    program, replicas, plain, given_as, rows, batch
):
    check(program, replicas, plain=plain, given_as=given_as, rows=rows, batch=batch, calls=3)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    program=programs,
    replicas=st.sampled_from([0, 0, 1, 2, 4]),
    plain=st.booleans(),
    given_as=st.sampled_from(["argument", "closure"]),
    rows=st.integers(0, 60),
    batch=st.sampled_from([2, 4, 5]),
)
def test_the_same_for_many_programs(program, replicas, plain, given_as, rows, batch):
    check(program, replicas, plain=plain, given_as=given_as, rows=rows, batch=batch, calls=4)


LOOPS = [
    (Loop("scan", 5, (Take("next"), Note())),),
    (Take("next"), Loop("scan", 2, (Take("get_next"), Loop("reversed", 2, (Take("next"),))))),
    (Loop("while", 3, (Take("next"),)), Take("next")),
    (Either((Take("next"), Take("next")), (Take("next"),)), Loop("scan", 2, (Take("next"),))),
    (Loop("scan", 3, (Either((Take("next"),), (Note(), Take("get_next"))),)),),
    (Loop("scan", 3, (Take("optional"),)), Loop("python", 2, (Take("next"),))),
]


@pytest.mark.parametrize("replicas", [0, 1, 2, 4])
@pytest.mark.parametrize("program", LOOPS)
def test_loops_that_people_write(program, replicas):
    # 26 rows: a short batch, also in the middle of a call.
    check(program, replicas, plain=False, given_as="argument", rows=26, batch=4, calls=3)

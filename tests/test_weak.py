"""Weak sets whose order is the same on all workers."""

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.state.variable import live_variables
from replicax._src.strategy.base import live_strategies


class _Thing:
    pass


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_the_order_is_that_of_insertion(actions):
    things, found, expected = {}, OrderedWeakSet(), []
    for is_addition, number in actions:
        if is_addition and number not in things:
            things[number] = _Thing()
            expected.append(number)
        if is_addition:
            found.add(things[number])
        elif things.pop(number, None) is not None:
            expected.remove(number)
    assert list(found) == [things[number] for number in expected]


def test_items_of_reference_cycles_leave():
    found = OrderedWeakSet()
    items = [_Thing() for _ in range(10)]
    for item in items:
        item.itself = item
        found.add(item)
    gone = weakref.ref(items.pop(3))
    del item
    gc.collect()
    assert gone() is None
    assert list(found) == items


def test_variables_and_strategies_are_in_the_order_of_creation():
    """A resize moves them with collectives, one after another on all workers."""
    strategies = [rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) for _ in range(50)]
    assert [s for s in live_strategies if s in strategies] == strategies
    variables = []
    for strategy in strategies:
        with strategy.scope():
            variables.append(rx.Variable(0.0))
    names = {id(v): i for i, v in enumerate(variables)}
    assert [names[id(v)] for v in live_variables if id(v) in names] == list(range(50))

from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx

nest = rx.nest
Pair = namedtuple("Pair", "left right")
LEAVES = st.integers() | st.none() | st.text(max_size=2)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("structure", "leaves"),
    [
        ({"b": 2, "a": [1, (3, None)]}, [1, 3, None, 2]),
        (3, [3]),
        (None, [None]),
        ("text", ["text"]),
        ([], []),
        (Pair(1, [2]), [1, 2]),
    ],
)
def test_leaves_come_in_the_order_of_tensorflow(structure, leaves):
    assert nest.flatten(structure) == leaves


@settings(max_examples=50)
@given(TREES)
def test_packing_the_leaves_gives_the_structure_back(tree):
    assert nest.pack_sequence_as(tree, nest.flatten(tree)) == tree


@settings(max_examples=50)
@given(TREES)
def test_mapping_nothing_changes_nothing(tree):
    assert nest.map_structure(lambda x: x, tree) == tree


def test_several_structures_are_mapped_together():
    result = nest.map_structure(lambda a, b: (a, b), {"x": [1, None]}, {"x": [2, 3]})

    assert result == {"x": [(1, 2), (None, 3)]}


@pytest.mark.parametrize(("one", "other"), [([1, 2], [1]), ([1, 2], (1, 2)), ({"a": 1}, {"b": 1})])
def test_structures_that_differ_are_refused(one, other):
    with pytest.raises(ValueError, match="pytree structure error"):
        nest.map_structure(lambda a, b: a, one, other)


@pytest.mark.parametrize("flat", [[1], [1, 2, 3]])
def test_another_number_of_leaves_is_refused(flat):
    with pytest.raises(ValueError, match="leaves"):
        nest.pack_sequence_as([1, 2], flat)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], True),
        ({}, True),
        ((1,), True),
        (Pair(1, 2), True),
        ("ab", False),
        (None, False),
        (3, False),
        (np.ones(2), False),
        (jnp.ones(2), False),
    ],
)
def test_containers_are_nested_and_values_are_not(value, expected):
    assert nest.is_nested(value) is expected


def test_a_distributed_value_is_one_leaf():
    value = rx.distribute.PerReplica([1, 2])

    assert nest.flatten([value, 3]) == [value, 3]
    assert nest.map_structure(lambda v: v.values, {"a": value}) == {"a": (1, 2)}
    assert not nest.is_nested(value)

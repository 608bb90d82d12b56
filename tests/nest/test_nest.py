from collections import OrderedDict, namedtuple
from contextlib import nullcontext

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


SLICES = rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), jnp.array([3, 2]))
SAME_NAME = namedtuple("Pair", "left right")
OTHER_NAME = namedtuple("Other", "left right")


# TensorFlow 2.21's errors, with check_types and without.
@pytest.mark.parametrize(
    ("one", "other", "typed", "untyped"),
    [
        ([1, 2], [1], ValueError, ValueError),
        ([1], (1,), TypeError, None),
        ({"a": 1}, {"b": 1}, ValueError, None),
        ({"a": 1}, OrderedDict(a=1), None, None),
        (Pair(1, 2), OTHER_NAME(1, 2), TypeError, None),
        (Pair(1, 2), SAME_NAME(1, 2), None, None),
        (Pair(1, 2), (1, 2), TypeError, None),
        ([1, [2]], [1, 2], ValueError, ValueError),
        (1, [1], ValueError, ValueError),
        (None, 1, None, None),
        ([], (), TypeError, None),
        ([], 1, ValueError, ValueError),
        ({"a": 1}, [1], TypeError, None),
        (SLICES, 1, None, None),
        (SLICES, [1], ValueError, ValueError),
    ],
)
def test_structures_are_compared_as_in_tensorflow(one, other, typed, untyped):
    for check_types, error in ((True, typed), (False, untyped)):
        expected = pytest.raises(error, match="differ") if error else nullcontext()
        with expected:
            nest.assert_same_structure(one, other, check_types=check_types)
        with pytest.raises(error, match="differ") if error else nullcontext():
            nest.map_structure(lambda a, b: a, one, other, check_types=check_types)


@settings(max_examples=50)
@given(TREES)
def test_a_structure_is_the_same_as_itself(tree):
    nest.assert_same_structure(tree, nest.map_structure(lambda x: 0, tree))


def test_slices_are_one_leaf_unless_they_are_expanded():
    assert nest.flatten([SLICES, 1]) == [SLICES, 1]
    parts = nest.flatten([SLICES, 1], expand_composites=True)
    assert len(parts) == 3  # the shape is static here, no array
    assert not nest.is_nested(SLICES)
    assert nest.map_structure(type, SLICES) is rx.IndexedSlices
    doubled = nest.map_structure(lambda x: x * 2, SLICES, expand_composites=True)
    assert doubled.values.tolist() == [[2.0, 2.0]]
    assert (SLICES.dtype, SLICES.shape) == (jnp.float32, (3, 2))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: nest.map_structure(lambda x: x, [1], other=1), ValueError),
        (lambda: nest.map_structure(3, [1]), TypeError),
        (lambda: nest.map_structure(lambda: 1), ValueError),
    ],
)
def test_map_structure_refuses_what_tensorflows_refuses(call, error):
    with pytest.raises(error, match="map_structure"):
        call()


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

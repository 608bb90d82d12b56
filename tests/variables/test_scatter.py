"""Updates at some indices, against NumPy; those in replicas are in the table of test_policy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx

UFUNCS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_max": np.maximum,
    "scatter_min": np.minimum,
}


def slices(values, indices):
    return rx.IndexedSlices(jnp.asarray(values), jnp.asarray(indices))


@settings(max_examples=30)
@given(
    verb=st.sampled_from(sorted(UFUNCS)),
    # Of one length, so that one shape is compiled.
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=4, max_size=4),
)
def test_rows_that_occur_twice_count_twice(verb, rows):
    indices = np.array([i for i, _ in rows])
    values = np.array([[x, x + 1] for _, x in rows], np.float32)
    v = rx.Variable(np.full((4, 2), 6.0, np.float32))
    wanted = np.full((4, 2), 6.0, np.float32)
    UFUNCS[verb].at(wanted, indices, values)

    result = getattr(v, verb)(slices(values, indices))

    assert result is v
    np.testing.assert_allclose(v.numpy(), wanted, rtol=1e-5)


def test_rows_are_replaced():
    v = rx.Variable(jnp.zeros((3, 2)))

    v.scatter_update(slices([[5.0, 6.0]], [2]))

    assert v.numpy().tolist() == [[0, 0], [0, 0], [5, 6]]


def test_entries_are_found_by_index_tuples():
    v = rx.Variable(jnp.zeros((2, 3)))
    at = [[0, 1], [1, 2]]

    v.scatter_nd_update(jnp.array(at), jnp.array([5.0, 6.0]))
    v.scatter_nd_add(jnp.array(at), jnp.array([1.0, 1.0]))
    v.scatter_nd_sub(jnp.array(at[:1]), jnp.array([2.0]))

    assert v.numpy().tolist() == [[0, 4, 0], [0, 0, 7]]
    assert v.gather_nd(at).tolist() == [4, 7]
    assert v.sparse_read([1]).tolist() == [[0, 0, 7]]


def test_a_batch_of_rows_is_replaced():
    v = rx.Variable(jnp.zeros((2, 3)))

    v.batch_scatter_update(slices([[5.0], [6.0]], [[0], [2]]))

    assert v.numpy().tolist() == [[5, 0, 0], [0, 0, 6]]


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("verb", ["scatter_update", "scatter_max", "scatter_min"])
def test_what_cannot_be_added_up_is_refused(two, verb, aggregation):
    with two.scope():
        v = rx.Variable(jnp.zeros(3), name="table", aggregation=rx.VariableAggregation[aggregation])

    with pytest.raises(NotImplementedError, match=rf"'table'.*{aggregation}.*ONLY_FIRST"):
        getattr(v, verb)(slices([1.0], [0]))


def test_an_on_read_variable_refuses_single_indices(two):
    with two.scope():
        v = rx.Variable(
            jnp.zeros(3), name="table", synchronization=rx.VariableSynchronization.ON_READ
        )

    with pytest.raises(NotImplementedError, match=r"'table'.*ON_READ.*assign"):
        v.scatter_add(slices([1.0], [0]))


def test_something_else_than_slices_is_refused():
    with pytest.raises(TypeError, match=r"'Variable'.*rx\.IndexedSlices\(values, indices\)"):
        rx.Variable(jnp.zeros(3)).scatter_add(jnp.ones(3))


def test_the_dtype_of_the_variable_stays():
    v = rx.Variable(jnp.zeros(3, jnp.bfloat16))

    v.scatter_add(slices([1.0], [0]))

    assert v.dtype == jnp.bfloat16
    assert v.read_value().dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("verb", ["add", "sub", "mul", "div", "max", "min", "update"])
def test_integers_stay_integers(verb, dtype):
    v = rx.Variable(jnp.array([7, 9, 100], dtype))

    getattr(v, f"scatter_{verb}")(rx.IndexedSlices(jnp.array([2], dtype), jnp.array([1])))

    expected = {"add": 11, "sub": 7, "mul": 18, "div": 4, "max": 9, "min": 2, "update": 2}[verb]
    assert v.dtype == v.read_value().dtype == dtype
    assert v.numpy().tolist() == [7, expected, 100]


def test_integers_are_divided_towards_zero_one_after_the_other_as_in_tensorflow():
    v = rx.Variable(jnp.array([7, -7, 100]))
    narrow = rx.Variable(jnp.array([100, -128], jnp.int8))

    v.scatter_div(rx.IndexedSlices(jnp.array([2, 2, 3, 4]), jnp.array([0, 1, 2, 2])))
    narrow.scatter_div(rx.IndexedSlices(jnp.array([20, 20], jnp.int8), jnp.array([0, 0])))

    assert v.numpy().tolist() == [3, -3, 8]
    assert narrow.numpy().tolist() == [0, -128]

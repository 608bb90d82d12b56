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


# Parts: `v[key].assign(value)`.

INDICES = st.integers(-4, 3)
SLICES = st.builds(slice, *[st.none() | st.integers(-5, 5)] * 2, st.sampled_from([None, 1, 2, -1]))
KEYS = st.one_of(
    INDICES,
    SLICES,
    st.just(Ellipsis),
    st.tuples(INDICES, st.integers(-3, 2)),
    st.tuples(SLICES, st.integers(-3, 2)),
    st.tuples(st.just(Ellipsis), st.integers(-3, 2)),
    st.tuples(st.none(), SLICES),
)


@settings(max_examples=40)
@given(key=KEYS, plain=st.booleans())
def test_a_part_is_assigned_as_numpy_assigns_it_on_every_copy(two, key, plain):
    start = np.arange(12, dtype=np.float32).reshape(4, 3)
    wanted = start.copy()
    new = 99.0 if plain else np.full(start[key].shape, 50, np.float32)
    wanted[key] = new
    with two.scope():
        v = rx.Variable(start)

    assert v[key].assign(new) is v

    assert [c.numpy().tolist() for c in v.components] == [wanted.tolist()] * 2


@pytest.mark.parametrize("key", [1, (slice(1, 3), 0), (..., -1), (None, 2)], ids=str)
def test_a_part_is_assigned_in_a_function_too(mode, two, key):
    start = np.arange(12, dtype=np.float32).reshape(4, 3)
    wanted = start.copy()
    wanted[key] += 5
    with two.scope():
        v = rx.Variable(start)

    @mode
    def step():
        v[key].assign(v[key] + 5)
        return v[key]

    assert np.array_equal(step(), wanted[key])
    assert [c.numpy().tolist() for c in v.components] == [wanted.tolist()] * 2


@pytest.mark.parametrize(
    ("aggregation", "found"),
    [("SUM", 21.0), ("MEAN", 10.5), ("ONLY_FIRST_REPLICA", 10.0), ("NONE", None)],
)
def test_parts_of_several_replicas_become_one_and_the_rest_stays(mode, two, aggregation, found):
    with two.scope():
        v = rx.Variable([1.0, 2.0, 3.0], aggregation=rx.VariableAggregation[aggregation])

    def write():
        index = rx.distribute.get_replica_context().replica_id_in_sync_group
        v[1].assign(jnp.asarray(index, jnp.float32) + 10)

    step = mode(lambda: two.run(write))
    if found is None:
        with pytest.raises(rx.errors.DivergenceError):
            step()
        found = 2.0
    else:
        step()

    assert [c.numpy().tolist() for c in v.components] == [[1.0, found, 3.0]] * 2


def test_a_part_of_an_on_read_variable_is_a_replicas_own(mode, two):
    with two.scope():
        v = rx.Variable(
            [1.0, 2.0],
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def write():
        index = rx.distribute.get_replica_context().replica_id_in_sync_group
        v[1].assign(jnp.asarray(index, jnp.float32) + 10)

    mode(lambda: two.run(write))()

    assert [c.numpy().tolist() for c in v.components] == [[1, 10], [1, 11]]
    v[0].assign(9.0)
    assert v.numpy().tolist() == [9, 21]


def test_a_part_of_a_variable_that_is_cut_is_assigned():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
    with strategy.scope():
        v = rx.Variable(jnp.zeros((1024, 128)))

    v[3:5, 1].assign([7.0, 8.0])

    assert v.cell.sharded
    assert np.argwhere(v.numpy()).tolist() == [[3, 1], [4, 1]]


def test_a_part_is_read_as_it_was():
    v = rx.Variable([1.0, 2.0])
    before = v[:]

    v[0].assign(5.0)

    assert before.tolist() == [1, 2]
    assert not hasattr(v.read_value(), "assign")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda v: v[4], r"Index 4 is out of bounds for axis 0, which has 4"),
        (lambda v: v[..., -4].assign(0), r"Index -4 is out of bounds for axis 1, which has 3"),
        (lambda v: v[0].assign([1, 2]), r"shape \(2,\) to a part of shape \(3,\).*broadcast_to"),
        (lambda v: v[0, 0].assign(1j), r"complex64.*astype"),
    ],
)
def test_a_part_that_is_not_there_or_does_not_fit_is_refused(write, words):
    v = rx.Variable(np.zeros((4, 3), np.float32))

    with pytest.raises(ValueError, match=words):
        write(v)
    assert not v.numpy().any()

"""Rows that replicas join, against what TensorFlow 2.21 answered on two CPU devices."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import context, mirrored


@pytest.fixture
def two():
    return mirrored(2)


@pytest.fixture(params=["eager", "compiled"])
def mode(request):
    return rx.function if request.param == "compiled" else lambda f: f


def rows():
    """Rows 0 and 0 of ones in the first replica, rows 0 and 1 of twos in the second."""
    i = context().replica_id_in_sync_group
    return rx.IndexedSlices(jnp.ones((2, 3)) * (1.0 + i), jnp.stack([0 * i, i]), (5, 3))


# tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.IndexedSlices with dense_shape [5, 3]
JOINED = {"SUM": [1.0, 1.0, 2.0, 2.0], "MEAN": [0.5, 0.5, 1.0, 1.0]}
REDUCED = {("SUM", 0): [6.0] * 3, ("MEAN", 0): [0.6] * 3, ("SUM", 1): [12.0, 6.0, 0.0, 0.0, 0.0]}
GATHERED = [2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("op", JOINED)
def test_all_reduce_joins_the_rows_of_all_replicas(two, mode, op):
    step = lambda: context().all_reduce(op, [rows(), jnp.ones(2)])  # noqa: E731

    slices, dense = mode(lambda: two.run(step))()

    for values, indices in zip(slices.values.values, slices.indices.values, strict=True):
        assert values[:, 0].tolist() == JOINED[op]
        assert indices.tolist() == [0, 0, 0, 1]
    assert slices.dense_shape == (5, 3)
    assert dense.values[1].tolist() == [2.0, 2.0] if op == "SUM" else [1.0, 1.0]


@pytest.mark.parametrize("op", JOINED)
def test_reduce_joins_the_rows_of_all_replicas(two, mode, op):
    joined = mode(lambda: two.reduce(op, two.run(rows), axis=None))()

    assert joined.values[:, 2].tolist() == JOINED[op]
    assert joined.indices.tolist() == [0, 0, 0, 1]
    assert joined.dense_shape == (5, 3)


@pytest.mark.parametrize("op", JOINED)
@pytest.mark.parametrize("verb", ["reduce_to", "batch_reduce_to"])
def test_reduce_to_joins_the_rows_where_they_are_wanted(two, mode, op, verb):
    with two.scope():
        v = rx.Variable(jnp.zeros((5, 3)))

    def reduced(value, where):
        if verb == "reduce_to":
            return two.extended.reduce_to(op, value, where)
        return two.extended.batch_reduce_to(op, [(value, where), (jnp.ones(2), where)][:1])[0]

    def step(slices):
        def merge(strategy, slices):
            joined = reduced(slices, v)
            strategy.extended.update(v, lambda copy, rows: copy.scatter_add(rows), args=(joined,))
            return joined

        return context().merge_call(merge, args=(slices,))

    slices = mode(lambda: two.run(lambda: step(rows())))()

    for values, indices in zip(slices.values.values, slices.indices.values, strict=True):
        assert values[:, 0].tolist() == JOINED[op]
        assert indices.tolist() == [0, 0, 0, 1]
    total = [sum(JOINED[op][:3]), JOINED[op][3], 0, 0, 0]
    assert [c.numpy()[:, 1].tolist() for c in v.components] == [total] * 2
    outside = reduced(two.run(rows), "CPU:1")
    assert outside.values[:, 2].tolist() == JOINED[op]
    assert outside.dense_shape == (5, 3)


@pytest.mark.parametrize(("op", "axis"), REDUCED)
def test_reduce_along_an_axis_is_that_of_the_whole_arrays(two, mode, op, axis):
    reduced = mode(lambda: two.reduce(op, two.run(rows), axis=axis))()

    np.testing.assert_allclose(reduced, REDUCED[op, axis], rtol=1e-6)


def test_gather_joins_the_whole_arrays(two, mode):
    gathered = mode(lambda: two.gather(two.run(rows), axis=0))()

    assert gathered.shape == (10, 3)
    assert gathered[:, 0].tolist() == GATHERED


def test_replicas_may_have_different_numbers_of_rows(two):
    def step():
        count = 1 + int(context().replica_id_in_sync_group)
        return context().all_reduce("SUM", rx.IndexedSlices(jnp.ones((count, 3)), [0] * count))

    joined = two.run(step)

    assert [v.shape for v in joined.values.values] == [(3, 3)] * 2
    assert joined.indices.values[0].tolist() == [0, 0, 0]


def test_one_replica_keeps_its_rows():
    one = mirrored(1)

    joined = one.reduce("MEAN", one.run(rows), axis=None)

    assert joined.values.tolist() == [[1.0] * 3] * 2
    assert one.gather(one.run(rows), axis=0)[:, 0].tolist() == GATHERED[:5]


def test_all_gather_refuses_them_as_tensorflow_does(two):
    with pytest.raises(NotImplementedError, match="all_reduce, which joins"):
        two.run(lambda: context().all_gather(rows(), axis=0))


def test_rows_of_an_array_of_unknown_size_have_no_axes(two):
    unknown = two.run(lambda: rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1])))

    assert two.reduce("SUM", unknown, axis=None).indices.tolist() == [1, 1]
    with pytest.raises(ValueError, match="dense_shape"):
        two.reduce("SUM", unknown, axis=0)


def test_rows_of_nobodys_are_refused_as_tensorflow_does(two):
    with pytest.raises(ValueError, match=r"one replica's rows.*strategy\.run"):
        two.reduce("SUM", rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1])), axis=None)


@pytest.mark.parametrize("shapes", [[(2, 2), (2, 3)], [(2,), (2, 2)]], ids=["sizes", "ranks"])
def test_values_that_cannot_be_joined_are_an_invalid_argument(two, shapes):
    parts = rx.distribute.PerReplica([jnp.ones(s) for s in shapes])

    with pytest.raises(rx.errors.InvalidArgumentError, match="only differ along"):
        two.gather(parts, axis=0)
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"differ along") as info:
        two.run(lambda x: context().all_gather(x, axis=0), args=(parts,))
    assert isinstance(info.value, ValueError)
    assert __file__ in info.value.__notes__[0]
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"drop_remainder"):
        two.reduce("SUM", parts, axis=None)

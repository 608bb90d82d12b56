"""Rows that replicas join, against what TensorFlow 2.21 answered on two CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import replicax as rx
from replicax._src.base.types import ReduceOp
from replicax._src.values.per_replica import stacked
from replicax._src.values.placement import stack
from replicax._src.values.reduce import agree, reduce_value
from tests.replicas import context, mirrored, per_replica

PerReplica = rx.distribute.PerReplica
STRATEGY = mirrored(4)
OPS = {"SUM": np.sum, "MEAN": np.mean}


def oracle(op, arrays, axis):
    """Join the replicas on a new first axis, and reduce over it and the given ones."""
    rows = np.stack([np.asarray(a, np.float64) for a in arrays])
    axes = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    inner = rows.ndim - 1
    return OPS[op](rows, axis=(0, *(a % inner + 1 for a in axes)))


@settings(max_examples=40)
@given(
    data=st.data(),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, max_side=3),
    op=st.sampled_from(sorted(OPS)),
    form=st.sampled_from(["pieces", "stacked", "compiled"]),
)
def test_reduce_is_numpys_over_replicas_and_axes(data, shape, op, form):
    arrays = [
        data.draw(hnp.arrays(np.float32, shape, elements=st.integers(-8, 8))) for _ in range(4)
    ]
    axis = data.draw(
        st.none()
        | st.lists(st.integers(0, max(len(shape) - 1, 0)), unique=True, max_size=len(shape)).map(
            lambda axes: tuple(a - len(shape) if a % 2 else a for a in axes)
        )
    )
    value = PerReplica(arrays)
    if form == "stacked":
        value = stacked(stack(arrays, STRATEGY.topology), STRATEGY.topology)

    if form == "compiled":
        result = rx.function(lambda v: STRATEGY.reduce(op, v, axis=axis))(value)
    else:
        result = STRATEGY.reduce(op, value, axis=axis)

    np.testing.assert_allclose(np.asarray(result), oracle(op, arrays, axis), rtol=1e-6)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    op=st.sampled_from(sorted(OPS)),
    columns=st.integers(1, 2),
)
def test_ragged_rows_count_as_often_as_they_are(sizes, op, columns):
    numbers = np.arange(sum(sizes) * columns, dtype=np.float32).reshape(-1, columns)
    cuts = np.cumsum(sizes)[:-1]
    value = PerReplica([jnp.asarray(part) for part in np.split(numbers, cuts)])

    result = np.asarray(STRATEGY.reduce(op, value, axis=0))

    if len(numbers):
        np.testing.assert_allclose(result, OPS[op](numbers, axis=0), rtol=1e-6)
    elif op == "SUM":
        assert result.tolist() == [0.0] * columns
    else:
        assert np.isnan(result).all()


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    axis=st.sampled_from([0, 1, -1, -2]),
)
def test_gather_is_numpys_concatenate(sizes, axis):
    shape = lambda n: (n, 2) if axis in (0, -2) else (2, n)  # noqa: E731
    parts = [np.full(shape(n), i, np.int32) for i, n in enumerate(sizes)]

    result = STRATEGY.gather(PerReplica([jnp.asarray(p) for p in parts]), axis=axis)

    np.testing.assert_array_equal(np.asarray(result), np.concatenate(parts, axis))
    assert result.dtype == jnp.int32


@pytest.mark.parametrize(
    ("op", "dtype", "expected", "result"),
    [
        ("SUM", jnp.int32, 6, jnp.int32),
        ("MEAN", jnp.int32, 1.5, jnp.float32),
        ("SUM", jnp.bool_, 3, jnp.int32),
        ("MEAN", jnp.bool_, 0.75, jnp.float32),
        ("SUM", jnp.bfloat16, 6, jnp.bfloat16),
        ("SUM", jnp.complex64, 6, jnp.complex64),
        ("MEAN", jnp.uint8, 1.5, jnp.float32),
    ],
)
@pytest.mark.parametrize("compile_it", [False, True])
def test_every_dtype_reduces_to_its_own(op, dtype, expected, result, compile_it):
    value = per_replica(STRATEGY, [jnp.asarray(i, dtype) for i in range(4)])
    reduce = lambda v: STRATEGY.reduce(op, v, axis=None)  # noqa: E731

    got = (rx.function(reduce) if compile_it else reduce)(value)

    assert got.dtype == result
    assert got == expected


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [1.5, 2.5, 3.5, 4.5], [1, 2.0, True, np.int8(4)]])
def test_plain_numbers_of_the_replicas_are_reduced(values):
    assert float(STRATEGY.reduce("SUM", PerReplica(values), axis=None)) == sum(values)


def test_structures_are_reduced_leaf_by_leaf():
    tree = {"a": PerReplica([1.0] * 4), "b": [PerReplica([jnp.ones(2)] * 4)], "c": 5}

    reduced = STRATEGY.reduce("MEAN", tree, axis=None)

    assert float(reduced["a"]) == 1.0
    assert reduced["b"][0].tolist() == [1.0, 1.0]
    assert reduced["c"] == 5


def test_the_pages_own_numbers():
    two = mirrored(2)
    whole = per_replica(two, [np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)])
    short = per_replica(two, [np.arange(4, dtype=np.float32), np.arange(4, 6, dtype=np.float32)])

    assert two.reduce("SUM", whole, axis=None).tolist() == [4, 6, 8, 10]
    assert float(two.reduce("SUM", whole, axis=0)) == 28
    assert float(two.reduce("MEAN", short, axis=0)) == 2.5


@pytest.mark.parametrize("op", ["max", "", "PRODUCT", 3, None, rx.VariableAggregation.SUM])
def test_an_unknown_op_names_those_that_exist(op):
    with pytest.raises(ValueError, match=r"ReduceOp\.SUM or MEAN"):
        STRATEGY.reduce(op, PerReplica([1.0] * 4), axis=None)


@pytest.mark.parametrize("op", ["SUM", "sum", "Sum", ReduceOp.SUM])
def test_ops_are_named_in_any_case(op):
    assert float(STRATEGY.reduce(op, PerReplica([1.0] * 4), axis=None)) == 4.0


@pytest.mark.parametrize(
    ("verb", "axis", "worst"),
    [
        ("reduce", 2, 2),
        ("reduce", -3, -3),
        ("reduce", (0, 2), 2),
        ("reduce", [5], 5),
        ("gather", 2, 2),
        ("gather", -3, -3),
    ],
)
def test_an_axis_that_does_not_exist_is_refused_with_the_rank(verb, axis, worst):
    call = {"reduce": lambda v: STRATEGY.reduce("SUM", v, axis=axis)}.get(
        verb, lambda v: STRATEGY.gather(v, axis=axis)
    )

    with pytest.raises(ValueError, match="does not exist: each replica's value has 2 axes") as e:
        call(PerReplica([jnp.ones((2, 2))] * 4))

    assert f"axis={worst}" in str(e.value)


@pytest.mark.parametrize("axis", ["0", 0.5])
def test_an_axis_that_is_not_an_integer_is_refused(axis):
    with pytest.raises(TypeError):
        STRATEGY.reduce("SUM", PerReplica([jnp.ones(2)] * 4), axis=axis)


@pytest.mark.parametrize("axis", [np.int64(0), [0], (0,), (-1,)])
def test_axes_come_as_integers_of_any_kind_or_as_several(axis):
    assert float(STRATEGY.reduce("SUM", PerReplica([jnp.ones(2)] * 4), axis=axis)) == 8.0


def test_scalars_are_not_gathered_and_the_error_names_reduce():
    with pytest.raises(ValueError, match=r"reduce\(op, value, axis=None\)"):
        STRATEGY.gather(PerReplica([1.0] * 4), axis=0)


def test_ragged_values_without_an_axis_are_refused_with_their_shapes():
    value = PerReplica([jnp.ones(4), jnp.ones(4), jnp.ones(4), jnp.ones(2)])

    with pytest.raises(ValueError, match="cannot be combined element by element") as error:
        STRATEGY.reduce("SUM", value, axis=None)

    assert "(4,), (4,), (4,), (2,)" in str(error.value)
    assert "axis=0" in str(error.value)
    assert "drop_remainder=True" in str(error.value)


def test_gathered_values_may_differ_along_the_axis_only():
    value = PerReplica([jnp.ones((1, 2))] * 3 + [jnp.ones((1, 3))])

    with pytest.raises(ValueError, match="can only differ along the gathered axis, 0"):
        STRATEGY.gather(value, axis=0)


@pytest.mark.parametrize("verb", ["reduce", "gather"])
def test_what_is_not_a_number_is_refused_by_name(verb):
    value = PerReplica(["a", "b", "c", "d"])

    with pytest.raises(TypeError, match=r"A replica holds 'a' \(str\)") as error:
        STRATEGY.reduce("SUM", value, axis=0) if verb == "reduce" else STRATEGY.gather(value, 0)

    assert "experimental_local_results" in str(error.value)


def test_results_lie_on_the_host_cpu_and_are_free():
    value = per_replica(mirrored(2, first=4), [jnp.ones(2), jnp.ones(2)])
    strategy = mirrored(2, first=4)

    for result in (
        strategy.reduce("SUM", value, axis=None),
        strategy.gather(value, axis=0),
        strategy.reduce("SUM", PerReplica([jnp.ones(1), jnp.ones(2)]), axis=0),
    ):
        assert result.devices() == {jax.devices("cpu")[0]}
        assert not result.committed


def test_results_lie_on_the_device_that_is_current():
    value = per_replica(STRATEGY, [jnp.ones(2)] * 4)

    with rx.device("CPU:6"):
        results = [
            STRATEGY.reduce("SUM", value, axis=None),
            STRATEGY.gather(value, axis=0),
            STRATEGY.reduce("SUM", PerReplica([jnp.ones(n) for n in range(4)]), axis=0),
        ]

    assert all(r.devices() == {jax.devices()[6]} for r in results)


def test_a_value_of_committed_arrays_is_reduced_and_gathered():
    parts = [jax.device_put(jnp.ones(n + 1), jax.devices()[n + 2]) for n in range(4)]

    assert float(STRATEGY.reduce("SUM", PerReplica(parts), axis=0)) == 10.0
    assert STRATEGY.gather(PerReplica(parts), axis=0).shape == (10,)


def test_a_reduction_of_the_engine_takes_pieces_on_any_device():
    strange = PerReplica([jax.device_put(jnp.float32(i), jax.devices()[7]) for i in range(4)])

    assert float(reduce_value(ReduceOp.SUM, strange, None, STRATEGY.topology)) == 6.0


def test_replicas_agree_when_they_are_equal_and_not_otherwise():
    nan = np.float32("nan")

    assert agree([nan, nan])
    assert agree([np.ones(2), np.ones(2)])
    assert not agree([np.ones(2), np.ones(3)])
    assert not agree([np.float32(1), np.float32(2)])


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.bool_, jnp.float16])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["even", "short"])
def test_narrow_numbers_are_combined_alike_in_and_out_of_merge_call(op, dtype, sizes, two, mode):
    high = 1 if dtype == jnp.bool_ else 100 if dtype == jnp.int8 else 200
    rows = [np.full(n, high, dtype) for n in sizes]

    def step(x):
        return context().merge_call(lambda s, v: s.reduce(op, v, axis=None), (x[0],))

    outside = two.reduce(op, per_replica(two, [r[0] for r in rows]), axis=None)
    inside = mode(lambda x: two.run(step, args=(x,)))(per_replica(two, rows))

    total = np.int32(2 * high).astype(np.int32 if dtype == jnp.bool_ else dtype)  # it may wrap
    assert float(outside) == (high if op == "MEAN" else float(total))
    assert [float(x) for x in inside.values] == [float(outside)] * 2
    assert {x.dtype for x in inside.values} == {outside.dtype}


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["even", "short"])
def test_the_all_reduced_mean_of_narrow_integers_does_not_wrap(sizes, two, mode):
    rows = [np.full(n, 200, np.uint8) for n in sizes]

    means = mode(lambda x: two.run(lambda x: context().all_reduce("MEAN", x[0]), args=(x,)))(
        per_replica(two, rows)
    )

    assert [float(m) for m in means.values] == [200.0, 200.0]


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


SHAPES = {
    "tuple": lambda: (4, 2),
    "list": lambda: [4, 2],
    "NumPy": lambda: np.array([4, 2]),
    "JAX": lambda: jnp.array([4, 2]),
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", SHAPES)
def test_slices_with_any_dense_shape_cross_functions_and_replicas(kind, two, mode):
    def slices():
        return rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), SHAPES[kind]())

    def seen(result):
        shape = result.dense_shape
        shape = shape.values[0] if isinstance(shape, rx.distribute.PerReplica) else shape
        return None if shape is None else np.asarray(shape).tolist()

    wanted = None if kind == "none" else [4, 2]
    assert seen(mode(slices)()) == wanted
    assert seen(mode(lambda x: x)(slices())) == wanted
    assert seen(mode(lambda: two.run(slices))()) == wanted
    joined = mode(lambda: two.run(lambda: context().all_reduce("SUM", slices())))()
    assert seen(joined) == wanted
    assert joined.values.values[0].shape == (2, 2)
    mean = mode(lambda: two.reduce("MEAN", two.run(slices), axis=None))()
    assert seen(mean) == wanted
    assert mean.values.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("kind", ["tuple", "list", "NumPy"])
def test_slices_are_reduced_along_an_axis_and_gathered(kind, two, mode):
    def slices():
        return rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), SHAPES[kind]())

    total = mode(lambda: two.reduce("SUM", two.run(slices), axis=0))()
    rows = mode(lambda: two.gather(two.run(slices), axis=0))()

    assert total.tolist() == [2.0, 2.0]
    assert rows.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]] * 2


def test_a_traced_size_of_the_whole_array_is_refused_with_advice(two):
    def slices():
        return rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), jnp.array([4, 2]))

    with pytest.raises(rx.errors.TracingError, match="tuple of numbers"):
        rx.function(lambda: two.reduce("SUM", two.run(slices), axis=0))()

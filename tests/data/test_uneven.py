"""Ragged and sparse batches, and functions of tf.data.experimental over groups and examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx

D = rx.data.Dataset
X = rx.data.experimental
LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=9)


def rows_of(lengths):
    rows = [np.arange(n, dtype=np.float32) for n in lengths]
    signature = rx.TensorSpec([None], np.float32)
    return D.from_generator(lambda: rows, output_signature=signature), rows


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_ragged_batches_hold_the_rows(lengths, size, drop):
    dataset, rows = rows_of(lengths)
    found = [row for batch in dataset.ragged_batch(size, drop) for row in batch.to_list()]

    kept = len(rows) - len(rows) % size if drop else len(rows)
    assert found == [row.tolist() for row in rows[:kept]]


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([None, 5]))
def test_sparse_batches_are_padded_batches(lengths, size, width):
    dataset, _ = rows_of(lengths)
    sparse = [batch.to_dense().tolist() for batch in dataset.sparse_batch(size, [width])]
    padded = [batch.tolist() for batch in dataset.padded_batch(size, [width])]

    assert sparse == padded


def test_ragged_batch_stacks_parts_of_one_size():
    dataset = D.range(1, 4).map(lambda n: {"n": n, "row": np.full((n, 2), n)})
    batch = next(iter(dataset.ragged_batch(3)))

    assert batch["n"].tolist() == [1, 2, 3]
    assert batch["row"].row_splits.tolist() == [0, 1, 3, 6]
    assert batch["row"].values.shape == (6, 2)
    assert batch["row"].to_tensor().shape == (3, 3, 2)


def test_specs_of_uneven_batches():
    dataset, _ = rows_of([1, 2])
    ragged = dataset.ragged_batch(2, drop_remainder=True, row_splits_dtype=np.int32).element_spec
    sparse = dataset.sparse_batch(2, [5]).element_spec

    assert ragged.values == rx.TensorSpec([None], np.float32)
    assert ragged.row_splits == rx.TensorSpec([3], np.int32)
    assert sparse.indices == rx.TensorSpec([None, 2], np.int64)
    assert sparse.dense_shape == rx.TensorSpec([2], np.int64)


def test_uneven_batches_refuse_at_the_call():
    squares = D.range(3).map(lambda n: np.full((n, n), n))
    with pytest.raises(NotImplementedError, match="further axes without a fixed size"):
        squares.ragged_batch(2)
    with pytest.raises(TypeError, match="needs elements of one array"):
        D.range(3).map(lambda n: (n, n)).sparse_batch(2, [1])
    with pytest.raises(ValueError, match="has 2 axes"):
        rows_of([1])[0].sparse_batch(2, [1, 1])
    with pytest.raises(rx.errors.DataLossError, match="which is larger"):
        list(rows_of([3])[0].sparse_batch(2, [2]))


@pytest.mark.parametrize("verb", ["ragged_batch", "sparse_batch"])
def test_uneven_batches_are_not_divided_over_replicas(verb):
    dataset, _ = rows_of([1, 1, 1, 2])
    args = (4,) if verb == "ragged_batch" else (4, [2])
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.experimental_distribute_dataset(getattr(dataset, verb)(*args))

    with pytest.raises(TypeError, match="whose rows cannot be divided over replicas"):
        next(iter(distributed))


SUM = X.Reducer(lambda key: np.int64(0), lambda state, x: state + x, lambda state: (state, -state))


def test_group_by_reducer_gives_results_in_the_order_of_keys():
    dataset = D.range(10).apply(X.group_by_reducer(lambda x: (x + 1) % 3, SUM))

    assert [(int(a), int(b)) for a, b in dataset] == [(15, -15), (18, -18), (12, -12)]
    scalar = rx.TensorSpec((), np.int64)
    assert dataset.element_spec == (scalar, scalar)
    assert D.range(0).apply(X.group_by_reducer(lambda x: x, SUM)).element_spec == (scalar, scalar)


def test_group_by_reducer_refuses_states_that_change():
    changing = X.Reducer(lambda key: np.int64(0), lambda state, x: state + 0.5, lambda state: state)
    with pytest.raises(TypeError, match="must have the dtypes of its first one"):
        D.range(3).apply(X.group_by_reducer(lambda x: x, changing))
    with pytest.raises(TypeError, match=r"needs an rx\.data\.experimental\.Reducer"):
        X.group_by_reducer(lambda x: x, 3)


def test_pad_to_cardinality():
    names = D.from_tensor_slices({"x": np.arange(3), "name": ["a", "b", "c"]})
    padded = names.apply(X.pad_to_cardinality(5, "real"))

    assert len(padded) == 5
    assert [bool(element["real"]) for element in padded] == [True] * 3 + [False] * 2
    assert [element["name"] for element in padded] == [b"a", b"b", b"c", b"", b""]
    for wrong in (D.range(3), names.repeat(), names.repeat(2), names.filter(lambda x: True)):
        with pytest.raises(ValueError, match="pad_to_cardinality"):
            wrong.apply(X.pad_to_cardinality(5))


def test_parallel_interleave_keeps_the_order_of_interleave():
    def tens(k):
        return D.range(10 * k, 10 * k + 3)

    found = D.range(3).apply(X.parallel_interleave(tens, cycle_length=2, block_length=2))

    assert list(map(int, found)) == list(map(int, D.range(3).interleave(tens, 2, 2)))


FEATURES = {
    "x": rx.io.FixedLenFeature([2], np.float32),
    "words": rx.io.VarLenFeature(bytes),
    "rows": rx.io.RaggedFeature(np.int64),
    "steps": rx.io.FixedLenSequenceFeature([], np.int64, allow_missing=True),
    "y": rx.io.FixedLenFeature([], np.int64),
}


def records(count):
    return [
        rx.io.serialize_example(
            {
                "x": np.ones(2, np.float32),
                "words": [b"a"] * (k + 1),
                "rows": np.arange(k),
                "steps": np.arange(k + 1),
                "y": [k],
            }
        )
        for k in range(count)
    ]


def leaves(value):
    parts = value.values() if isinstance(value, dict) else value
    return (
        [leaf for part in parts for leaf in leaves(part)]
        if hasattr(value, "__iter__") and (not isinstance(value, np.ndarray))
        else [value]
    )


def test_parse_example_dataset_has_the_spec_of_its_features():
    batches = D.from_tensor_slices(records(5)).batch(2)
    parsed = batches.apply(X.parse_example_dataset(FEATURES, num_parallel_calls=2))
    empty = batches.take(0).apply(X.parse_example_dataset(FEATURES))

    assert empty.element_spec == parsed.element_spec
    specs = leaves(parsed.element_spec)
    for element in parsed:
        assert list(element) == list(parsed.element_spec)
        for leaf, spec in zip(leaves(element), specs, strict=True):
            assert spec.is_compatible_with(leaf), (leaf, spec)
    with pytest.raises(TypeError, match="needs a dataset of batches of strings"):
        D.from_tensor_slices(records(2)).apply(X.parse_example_dataset(FEATURES))
    with pytest.raises(ValueError, match="needs features"):
        X.parse_example_dataset(None)


def test_make_batched_features_dataset(tmp_path):
    path = str(tmp_path / "a.tfrecord")
    with rx.io.TFRecordWriter(path) as writer:
        for record in records(5):
            writer.write(record)

    def made(**options):
        return X.make_batched_features_dataset(path, 2, FEATURES, label_key="y", **options)

    labels = [label.tolist() for _, label in made(num_epochs=1, shuffle=False)]
    assert labels == [[0, 1], [2, 3], [4]]
    dropped = made(num_epochs=1, shuffle=False, drop_final_batch=True)
    assert [label.tolist() for _, label in dropped] == [[0, 1], [2, 3]]
    endless = made(shuffle_seed=1)
    assert endless.element_spec[1] == rx.TensorSpec([2], np.int64)
    assert sorted(x for _, y in endless.take(5) for x in y.tolist()) == sorted(2 * [*range(5)])
    with pytest.raises(ValueError, match="there is no such feature"):
        X.make_batched_features_dataset(path, 2, FEATURES, label_key="z")

"""batch, padded_batch, unbatch, rebatch, window: against NumPy."""

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax.data import Dataset
from tests.data.pipelines import ints

_COUNTS = st.integers(0, 70)
_SIZES = st.integers(1, 12)

Pair = namedtuple("Pair", "left right")


@given(count=_COUNTS, size=_SIZES, drop=st.booleans())
def test_batches_are_slices_of_the_array(count, size, drop):
    array = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    dataset = Dataset.from_tensor_slices(array).batch(size, drop_remainder=drop)

    batches = list(dataset)

    expected = [array[i : i + size] for i in range(0, count, size)]
    if drop and count % size:
        expected.pop()
    assert len(batches) == len(expected) == len(dataset)
    for batch, slice_ in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch, slice_)


@given(count=_COUNTS, size=_SIZES)
def test_unbatch_undoes_batch(count, size):
    assert ints(Dataset.range(count).batch(size).unbatch()) == list(range(count))


@given(count=_COUNTS, size=_SIZES, sizes=st.lists(_SIZES, min_size=1, max_size=3))
def test_rebatch_keeps_all_elements_in_order(count, size, sizes):
    batches = list(Dataset.range(count).batch(size).rebatch(sizes))

    assert [int(x) for batch in batches for x in batch] == list(range(count))
    lengths = [len(batch) for batch in batches]
    turns = [sizes[k % len(sizes)] for k in range(len(lengths))]
    assert lengths[:-1] == turns[:-1]


def test_rebatch_can_drop_what_is_left():
    assert [len(b) for b in Dataset.range(10).batch(4).rebatch(4, drop_remainder=True)] == [4, 4]


def test_structures_are_kept():
    dataset = Dataset.from_tensor_slices(
        (Pair(np.arange(4), np.ones((4, 2))), {"b": np.zeros(4), "a": (np.arange(4) * 2,)})
    ).batch(3)

    (pair, rest) = next(iter(dataset))

    assert isinstance(pair, Pair)
    assert pair.right.shape == (3, 2)
    assert list(rest) == ["b", "a"]
    assert rest["a"][0].tolist() == [0, 2, 4]


def test_batches_do_not_alias_the_users_memory():
    array = np.zeros(6)
    for dataset in (
        Dataset.from_tensor_slices(array).batch(6),
        Dataset.from_tensors(array),
        Dataset.from_tensor_slices(array[None]),
    ):
        next(iter(dataset))[:] = 7

    assert not array.any()


def test_strings_are_batched_as_objects_with_their_zero_bytes():
    batch = next(iter(Dataset.from_tensor_slices([b"a\0", "é"]).batch(2)))

    assert batch.dtype == object
    assert batch.tolist() == [b"a\0", "é".encode()]


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("verb", ["batch", "padded_batch", "rebatch"])
def test_a_batch_has_at_least_one_element(verb, size):
    with pytest.raises(InvalidArgumentError, match=rf"{verb}\(batch_size={size}\).* at least 1"):
        getattr(Dataset.range(3).batch(1), verb)(size)


def test_a_batch_size_is_an_int():
    with pytest.raises(InvalidArgumentError, match="must be an int, got float"):
        Dataset.range(3).batch(2.0)


def test_elements_of_different_shapes_do_not_make_a_batch():
    dataset = Dataset.from_generator(lambda: [[1], [1, 2]]).batch(2)

    with pytest.raises(
        InvalidArgumentError, match=r"int32\[1\].*element 1.*int32\[2\].*padded_bat"
    ):
        list(dataset)


def test_scalars_cannot_be_taken_apart():
    with pytest.raises(InvalidArgumentError, match="along their first axis"):
        list(Dataset.range(3).unbatch())
    with pytest.raises(InvalidArgumentError, match="Call `batch` first"):
        _ = Dataset.range(3).unbatch().element_spec


def ragged():
    return Dataset.from_generator(lambda: [[1], [1, 2, 3], [4, 5]])


def test_padding_reaches_to_the_longest_of_each_batch():
    first, second = ragged().padded_batch(2)

    assert first.tolist() == [[1, 0, 0], [1, 2, 3]]
    assert second.tolist() == [[4, 5]]


def test_padding_takes_shapes_and_values():
    (batch,) = ragged().padded_batch(3, padded_shapes=[4], padding_values=-1)

    assert batch.tolist() == [[1, -1, -1, -1], [1, 2, 3, -1], [4, 5, -1, -1]]


def test_padding_follows_the_nesting():
    dataset = ragged().enumerate().map(lambda i, x: {"i": i, "x": x})
    (batch,) = dataset.padded_batch(3, padded_shapes={"i": [], "x": [None]})

    assert batch["i"].tolist() == [0, 1, 2]
    assert batch["x"].shape == (3, 3)


def test_padding_fills_strings_with_nothing():
    dataset = Dataset.from_generator(lambda: [["a"], ["b", "c"]])

    assert next(iter(dataset.padded_batch(2))).tolist() == [[b"a", b""], [b"b", b"c"]]


def test_padding_does_not_cut():
    with pytest.raises(
        InvalidArgumentError, match=r"\(3,\) does not fit into padded_shapes \(2,\)"
    ):
        list(ragged().padded_batch(3, padded_shapes=[2]))


def test_padded_shapes_are_nested_like_elements():
    with pytest.raises(StructureError, match=r"not nested like the elements"):
        list(Dataset.range(3).enumerate().padded_batch(2, padded_shapes=[3]))


@given(
    count=st.integers(0, 20),
    size=st.integers(1, 5),
    shift=st.integers(1, 6),
    stride=st.integers(1, 3),
    drop=st.booleans(),
)
def test_windows_are_strided_slices(count, size, shift, stride, drop):
    dataset = Dataset.range(count).window(size, shift=shift, stride=stride, drop_remainder=drop)
    numbers = list(range(count))
    reach = (size - 1) * stride + 1
    expected = [numbers[i : i + reach : stride] for i in range(0, count, shift)]
    if drop:
        expected = [w for k, w in enumerate(expected) if k * shift + reach <= count]

    assert [ints(window) for window in dataset] == expected
    assert len(dataset) == len(expected)


def test_a_window_of_pairs_is_a_pair_of_windows():
    left, right = next(iter(Dataset.range(4).enumerate(10).window(2)))

    assert (ints(left), ints(right)) == ([10, 11], [0, 1])


def test_windows_can_be_flattened_to_batches():
    dataset = Dataset.range(5).window(3, 1, drop_remainder=True).flat_map(lambda w: w.batch(3))

    assert [x.tolist() for x in dataset] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]

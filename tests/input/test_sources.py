"""What may be given as a dataset."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.input.sources import ForeignSource, source_of, to_numpy


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def epoch(strategy, dataset):
    dist = strategy.experimental_distribute_dataset(dataset)
    return [[np.asarray(x).tolist() for x in strategy.experimental_local_results(b)] for b in dist]


class Loader:
    """Iterated anew by every loop, as loaders of other libraries are."""

    def __iter__(self):
        return (np.arange(4) + 4 * i for i in range(2))

    def __len__(self):
        return 2


class Numbered:
    """Numbered batches, as Keras's PyDataset has them."""

    num_batches = 2

    def __getitem__(self, i):
        return np.arange(4) + 4 * i

    def __len__(self):
        return 2


class Tensor:
    """What a torch tensor can do, as far as we look."""

    def __init__(self, data):
        self._data = data

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self._data


@pytest.mark.parametrize(
    "dataset",
    [
        Loader(),
        Numbered(),
        [np.arange(4), np.arange(4, 8)],
        [Tensor(np.arange(4)), Tensor(np.arange(4, 8))],
        (np.arange(4) + 4 * i for i in range(2)),
    ],
    ids=["loader", "numbered", "list", "tensors", "generator"],
)
def test_batches_of_other_libraries_are_divided_like_our_own(strategy, dataset):
    assert epoch(strategy, dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_generator_gives_one_epoch_and_then_says_what_to_use(strategy):
    dist = strategy.experimental_distribute_dataset(np.arange(4) for _ in range(2))
    assert len(list(dist)) == 2

    with pytest.raises(ValueError, match="from_generator"):
        list(dist)


def test_something_that_cannot_be_iterated_is_refused():
    with pytest.raises(TypeError, match="is not a dataset"):
        source_of(3)


def test_structures_of_other_libraries_become_ours():
    Pair = collections.namedtuple("Pair", "x y")

    assert to_numpy({"a": [1, 2]})["a"].tolist() == [1, 2]
    assert to_numpy(Pair(np.ones(1), 2)).y == 2
    assert [x.tolist() for x in to_numpy([np.ones(1), np.zeros(1)])] == [[1], [0]]


def test_arrays_of_other_libraries_are_copied():
    array = np.zeros(4)

    (copy,) = ForeignSource([array]).open()[0]

    assert not np.shares_memory(copy, array)


def test_the_spec_of_a_foreign_dataset_is_learnt_from_its_first_batch(strategy):
    spec = strategy.experimental_distribute_dataset(Loader()).element_spec

    assert [s.shape for s in spec.value_specs] == [(None,), (None,)]


def test_the_length_of_a_foreign_dataset_is_its_cardinality(strategy):
    assert strategy.experimental_distribute_dataset(Loader()).cardinality == 2


def test_an_array_that_is_cut_row_by_row_is_explained_once(caplog, monkeypatch):
    monkeypatch.setattr("replicax._src.input.distribute._has_warned", False)
    two = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = np.arange(8).reshape(4, 2)

    two.experimental_distribute_dataset(rows[:3])
    two.experimental_distribute_dataset([rows, rows])
    two.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(rows))
    rx.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(rows)
    assert not caplog.records

    for _ in range(3):
        steps = list(two.experimental_distribute_dataset({"x": rows}))

    assert [[int(x[0]) for x in step["x"].values] for step in steps] == rows.tolist()
    (record,) = caplog.records
    assert "shape (4, 2), which is cut row by row" in record.getMessage()


@given(rows=st.integers(1, 4), width=st.integers(1, 4))
def test_python_lists_in_dictionaries_are_rows(rows, width):
    """As in batches of Hugging Face datasets without a format."""
    expected = np.arange(rows * width).reshape(rows, width)
    found = to_numpy({"tokens": expected.tolist(), "label": list(range(rows))})
    np.testing.assert_array_equal(found["tokens"], expected)
    np.testing.assert_array_equal(found["label"], np.arange(rows))


def test_rows_of_different_lengths_are_named():
    with pytest.raises(ValueError, match=r"rows of 'tokens' have different lengths.*Pad"):
        to_numpy({"tokens": [[1, 2], [3]]})

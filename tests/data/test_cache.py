"""cache: one pass, then what was kept."""

from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from replicax.data import Dataset
from replicax.data._errors import DataLossError
from tests.data.pipelines import ints

Pair = namedtuple("Pair", "a b")


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path):
    return "" if request.param == "memory" else tmp_path / "kept"


def counting(calls):
    def remember(x):
        calls.append(int(x))
        return x * 2

    return remember


def test_the_input_is_read_once(place):
    calls = []
    dataset = Dataset.range(5).map(counting(calls)).cache(place)

    assert ints(dataset) == ints(dataset) == ints(dataset.batch(5).unbatch()) == [0, 2, 4, 6, 8]
    assert len(calls) == 5


def test_an_incomplete_pass_is_not_kept(place):
    calls = []
    dataset = Dataset.range(5).map(counting(calls)).cache(place)
    for _ in dataset:
        break

    assert ints(dataset) == [0, 2, 4, 6, 8]
    assert len(calls) == 6


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_tensor_slices(
            {"x": np.arange(6.0), "s": [b"a\0", b"", b"c", b"d", b"e", b"f"]}
        ),
        Dataset.range(6).enumerate().map(lambda i, x: Pair(i, (x, x * 2))),
        Dataset.range(6).batch(4),
        Dataset.range(1, 6).map(lambda n: np.full(int(n), n)),
        Dataset.range(6).map(lambda x: x.astype(ml_dtypes.bfloat16)),
        Dataset.range(0),
        Dataset.from_tensor_slices([["a", "b"], ["c", "d"]]),
    ],
    ids=["dict", "named", "batches", "ragged", "bfloat16", "empty", "strings"],
)
def test_what_comes_back_is_what_went_in(dataset, place):
    kept = dataset.cache(place)
    first, second = list(kept), list(kept)

    for a, b, c in zip(dataset, first, second, strict=True):
        assert repr(a) == repr(b) == repr(c)
        assert type(a) is type(c)


def test_what_is_handed_out_can_be_written_to(place):
    for dataset in (Dataset.range(6).batch(3).cache(place), Dataset.range(6).cache().batch(3)):
        for batch in dataset:
            batch[:] = -1

        assert np.concatenate(list(dataset)).tolist() == list(range(6))


def test_a_kept_shuffle_stays_as_it_was(place):
    dataset = Dataset.range(30).shuffle(30).cache(place)

    assert ints(dataset) == ints(dataset.repeat(2))[:30] == ints(dataset)


def test_the_epochs_and_the_inner_orders_of_what_is_kept_differ():
    epochs = ints(Dataset.range(30).shuffle(30).repeat(2).cache())
    inner = Dataset.range(2).flat_map(lambda _: Dataset.range(30).shuffle(30)).cache()

    assert epochs[:30] != epochs[30:]
    assert ints(inner)[:30] != ints(inner)[30:]
    assert ints(inner) == ints(inner)


def test_a_shuffle_after_the_cache_is_new_in_each_pass(place):
    dataset = Dataset.range(30).cache(place).shuffle(30)

    assert ints(dataset) != ints(dataset)


def test_a_file_serves_the_next_process(tmp_path):
    list(Dataset.range(5).cache(tmp_path / "kept"))

    def never(x):
        raise AssertionError

    later = Dataset.range(5).map(never).cache(tmp_path / "kept")

    assert ints(later) == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_file_that_is_cut_off_says_where(tmp_path):
    path = tmp_path / "kept"
    list(Dataset.range(50).cache(path))
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(
        DataLossError, match=r"kept' ends at byte \d+, where \d+ bytes were expected"
    ):
        list(Dataset.range(50).cache(path))


def test_a_file_of_something_else_is_not_read(tmp_path):
    path = tmp_path / "kept"
    path.write_text("hello, I am a text")

    with pytest.raises(DataLossError, match="is not a cache file"):
        list(Dataset.range(50).cache(path))


def test_a_file_of_another_pipeline_is_not_read(tmp_path):
    # The types of named tuples cannot be kept, so the pipeline that reads is asked for them.
    list(Dataset.range(5).map(lambda x: Pair(x, x)).cache(tmp_path / "kept"))

    with pytest.raises(DataLossError, match="holds elements of 2 parts, but this dataset has 1"):
        list(Dataset.range(5).cache(tmp_path / "kept"))


def test_an_abandoned_file_is_removed(tmp_path):
    for _ in Dataset.range(1000).cache(tmp_path / "kept"):
        break

    assert list(tmp_path.iterdir()) == []

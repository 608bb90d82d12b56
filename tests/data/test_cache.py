"""cache: one pass, then what was kept."""

import secrets
import tempfile
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.tf_errors import DataLossError
from replicax._src.data.nodes.cache import writing
from replicax._src.data.seeds import Run
from replicax.data import Dataset
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


@pytest.mark.parametrize(
    "other",
    [
        Dataset.range(6).shard(2, 1),
        Dataset.range(6).take(3),
        Dataset.range(6).skip(3),
        Dataset.range(7),
        Dataset.from_tensor_slices(np.arange(6)),
    ],
    ids=["shard", "take", "skip", "range", "rows"],
)
def test_a_file_that_was_kept_of_other_data_is_refused(tmp_path, other):
    kept = Dataset.range(6).cache(tmp_path / "kept")
    assert ints(kept) == ints(kept)

    with pytest.raises(DataLossError, match=r"holds range\(0, 6, 1\), but this dataset is"):
        ints(other.cache(tmp_path / "kept"))


def test_a_file_kept_before_parts_were_told_is_read(tmp_path):
    file = writing(str(tmp_path / "kept"))
    file.add(Dataset.range(3).node.open(Run()).pull(3))
    file.commit()

    assert (tmp_path / "kept").read_bytes().startswith(b"replicax-cache-2\n")  # as it was then
    assert ints(Dataset.range(3).take(3).cache(tmp_path / "kept")) == [0, 1, 2]


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


MIXED = Dataset.from_tensor_slices(
    {"x": np.arange(4, dtype=np.float32), "s": [b"a", b"bc", b"", b"d"]}
)


def read_kept(path):
    """What a cache file gives before it fails, if it does."""
    found = []
    try:
        for element in MIXED.cache(path):
            found.append(repr(element))
    except DataLossError:
        return found, False
    return found, True


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_gives_other_data(tmp_path, step):
    path = tmp_path / "kept"
    good = [repr(element) for element in MIXED.cache(path)]
    content = path.read_bytes()

    for place in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        found, is_whole = read_kept(path)
        assert not is_whole
        assert found == good[: len(found)]


def test_no_shorter_or_longer_file_gives_other_data(tmp_path):
    path = tmp_path / "kept"
    good = [repr(element) for element in MIXED.batch(1).cache(path)]
    content = path.read_bytes()

    for size in range(0, len(content), 3):
        path.write_bytes(content[:size])
        assert not read_kept(path)[1]
    path.write_bytes(content + content)
    assert not read_kept(path)[1]
    assert len(good) == 4


@given(data=st.data())
def test_no_other_change_of_a_file_gives_other_data(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kept")
        good = [repr(element) for element in MIXED.cache(path)]
        content = bytearray(path.read_bytes())
        start, stop = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
        content[start:stop] = data.draw(
            st.one_of(st.binary(max_size=20), st.just(content[: stop - start]))
        )
        path.write_bytes(content)
        found, is_whole = read_kept(path)

    assert found == good if is_whole else found == good[: len(found)]


def test_a_link_in_the_way_of_a_cache_is_not_written_through(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(secrets, "token_hex", lambda n: "foreseen")
    (tmp_path / "kept.foreseen.part").symlink_to(victim)

    with pytest.raises(FileExistsError):
        list(MIXED.cache(tmp_path / "kept"))
    assert victim.read_text() == "precious"


def test_two_caches_that_are_written_at_once_do_not_meet(tmp_path):
    first, second = iter(MIXED.cache(tmp_path / "kept")), iter(MIXED.cache(tmp_path / "kept"))
    pairs = list(zip(first, second, strict=True))

    assert all(repr(a) == repr(b) for a, b in pairs)
    assert read_kept(tmp_path / "kept")[1]


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

"""Datasets and gfile over URLs: the same results as with local files."""

import csv
import gzip
import io

import numpy as np
import pytest

import replicax as rx
from tests.object_store import Killed, faulty, store

__all__ = ["store"]
gfile = rx.io.gfile


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path, store):
    """A folder, local or behind a URL, for what both must do alike."""
    return str(tmp_path) if request.param == "local" else "memory://bucket/data"


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_records_are_written_and_read(folder, compression):
    gfile.makedirs(folder)
    paths = [f"{folder}/{i}.tfrecord" for i in range(3)]
    for i, path in enumerate(paths):
        with rx.io.TFRecordWriter(path, compression) as writer:
            for k in range(100):
                writer.write(f"{i}-{k}".encode() * 1000)

    found = rx.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=False)
    assert [name.decode() for name in found] == paths
    data = rx.data.TFRecordDataset(found, compression, num_parallel_reads=2)
    assert sorted(r[: r.index(b"-") + 2] for r in data)[0] == b"0-0"
    assert len(list(data)) == 300
    twice = rx.data.TFRecordDataset([paths[0], paths[0]], compression, num_parallel_reads=2)
    assert len(list(twice)) == 200  # two readers of one file


def test_lines_and_columns_are_read(folder):
    rx.io.write_file(f"{folder}/deep/a.txt", "one\ntwo\r\nthree")
    assert list(rx.data.TextLineDataset(f"{folder}/deep/a.txt")) == [b"one", b"two", b"three"]
    assert list(rx.data.FixedLengthRecordDataset(f"{folder}/deep/a.txt", 7)) == [
        b"one\ntwo",
        b"\r\nthree",
    ]
    text = io.StringIO()
    csv.writer(text).writerows([["x", "y"], [1, "a"], [2, "b"]])
    rx.io.write_file(f"{folder}/a.csv", text.getvalue())
    rx.io.write_file(f"{folder}/a.csv.gz", gzip.compress(text.getvalue().encode()))
    for name, kind in [("a.csv", None), ("a.csv.gz", "GZIP")]:
        data = rx.data.experimental.make_csv_dataset(
            f"{folder}/{name}", 2, num_epochs=1, shuffle=False, compression_type=kind
        )
        (batch,) = data
        assert np.asarray(batch["x"]).tolist() == [1, 2]
        assert np.asarray(batch["y"]).tolist() == [b"a", b"b"]


def test_files_that_are_not_there_are_named(folder):
    with pytest.raises(rx.errors.NotFoundError, match=r"no\.txt"):
        list(rx.data.TextLineDataset(f"{folder}/no.txt"))
    with pytest.raises(rx.errors.NotFoundError, match=r"no\.txt"):
        rx.io.read_file(f"{folder}/no.txt")
    with pytest.raises(rx.errors.InvalidArgumentError, match="No files match"):
        rx.data.Dataset.list_files(f"{folder}/*.txt")
    for call in (gfile.stat, gfile.remove, gfile.listdir, gfile.GFile(f"{folder}/no").read):
        with pytest.raises(rx.errors.NotFoundError):
            call(f"{folder}/no") if call in (gfile.stat, gfile.remove, gfile.listdir) else call()
    assert not gfile.exists(f"{folder}/no")
    assert gfile.glob(f"{folder}/no/*") == []
    assert list(gfile.walk(f"{folder}/no")) == []


def test_gfile_does_what_it_does_with_local_files(folder):
    gfile.makedirs(f"{folder}/a/b")
    with gfile.GFile(f"{folder}/a/b/1.txt", "w") as file:
        file.write("ä\n")
        file.write("two\n")
    with gfile.GFile(f"{folder}/a/b/1.txt") as file:
        assert (file.readline(), file.read(), file.size()) == ("ä\n", "two\n", 7)
        file.seek(3)
        assert (file.read(2), list(file)) == ("tw", ["o\n"])
    gfile.copy(f"{folder}/a/b/1.txt", f"{folder}/a/.hidden")
    gfile.rename(f"{folder}/a/b/1.txt", f"{folder}/a/x[1].txt")
    with pytest.raises(rx.errors.AlreadyExistsError):
        gfile.copy(f"{folder}/a/.hidden", f"{folder}/a/x[1].txt")
    rx.io.write_file(f"{folder}/a/c/d/2.txt", b"123")

    assert sorted(set(gfile.listdir(f"{folder}/a")) - {"b"}) == [".hidden", "c", "x[1].txt"]
    assert gfile.glob(f"{folder}/a/*.txt") == [f"{folder}/a/x[1].txt"]
    assert gfile.glob(f"{folder}/a/x[[]1].txt") == [f"{folder}/a/x[1].txt"]
    assert gfile.glob(f"{folder}/a/?h*") == [f"{folder}/a/.hidden"]
    assert gfile.glob(f"{folder}/*/c/*/[^1].txt") == [f"{folder}/a/c/d/2.txt"]
    assert rx.io.matching_files(f"{folder}/*/c/d/2.*").tolist() == [
        f"{folder}/a/c/d/2.txt".encode()
    ]
    assert (gfile.isdir(f"{folder}/a/c"), gfile.isdir(f"{folder}/a/.hidden")) == (True, False)
    told = gfile.stat(f"{folder}/a/c/d/2.txt")
    assert (told.length, told.is_directory, told.mtime_nsec > 0) == (3, False, True)
    walked = {top: files for top, _, files in gfile.walk(f"{folder}/a")}
    assert walked[f"{folder}/a/c/d"] == ["2.txt"]
    assert next(iter(gfile.walk(f"{folder}/a/c", topdown=False)))[0] == f"{folder}/a/c/d"
    gfile.remove(f"{folder}/a/x[1].txt")
    gfile.rmtree(f"{folder}/a")
    assert not gfile.exists(f"{folder}/a")


def test_copies_go_from_one_file_system_to_another(tmp_path, store):
    rx.io.write_file("memory://bucket/a", b"x" * 1000)
    gfile.copy("memory://bucket/a", tmp_path / "a")
    gfile.copy(tmp_path / "a", "memory://other/b")
    assert rx.io.read_file("memory://other/b") == b"x" * 1000


def test_a_copy_that_breaks_off_leaves_no_part_of_a_file(tmp_path, store, monkeypatch):
    rx.io.write_file("memory://bucket/a", b"x" * (9 << 20))

    def cat_file(self, path, start=None, end=None, **kwargs):
        if start:
            raise OSError("503")
        return type(self).__mro__[1].cat_file(self, path, start, end)

    monkeypatch.setattr(store, "cat_file", cat_file)
    with pytest.raises(OSError, match="503"):
        gfile.copy("memory://bucket/a", "memory://other/b")
    with pytest.raises(OSError, match="503"):
        gfile.copy("memory://bucket/a", tmp_path / "b")
    assert not gfile.exists("memory://other/b")
    assert not gfile.exists(tmp_path / "b")


@pytest.mark.parametrize("mode", ["a", "r+", "w+", "ab"])
def test_objects_are_not_appended_to(store, mode):
    rx.io.write_file("memory://bucket/a", b"x")
    with pytest.raises(rx.errors.UnimplementedError, match="written once"):
        gfile.GFile("memory://bucket/a", mode).write("y")
    assert rx.io.read_file("memory://bucket/a") == b"x"


def test_elements_are_kept_for_later_passes(folder):
    calls = []

    def counted(x):
        calls.append(1)
        return x, x * 2.5

    data = rx.data.Dataset.range(5).map(counted)
    for kept in (data.cache(f"{folder}/cache/file"), data.snapshot(f"{folder}/snap")):
        calls.clear()
        first = [(int(a), float(b)) for a, b in kept]
        assert [(int(a), float(b)) for a, b in kept] == first == [(i, i * 2.5) for i in range(5)]
        assert len(calls) == 5
    data.save(f"{folder}/saved", shard_func=lambda x, y: x % 2)
    data.save(f"{folder}/saved", shard_func=lambda x, y: x % 2)  # replaces
    assert sorted(int(a) for a, _ in rx.data.Dataset.load(f"{folder}/saved")) == list(range(5))
    assert len(gfile.listdir(f"{folder}/saved")) == 2  # one folder, and the list
    sharded = rx.data.Dataset.range(4).snapshot(f"{folder}/two", shard_func=lambda x: x % 2)
    assert sorted(map(int, sharded)) == sorted(map(int, sharded)) == [0, 1, 2, 3]


def test_a_pass_that_breaks_off_leaves_no_cache(folder):
    data = rx.data.Dataset.range(5).map(lambda x: 1 // int(3 - x))
    for kept in (data.cache(f"{folder}/cache/file"), data.snapshot(f"{folder}/snap")):
        with pytest.raises(rx.errors.InvalidArgumentError, match="ZeroDivision"):
            list(kept)
    with pytest.raises(rx.errors.InvalidArgumentError, match="ZeroDivision"):
        data.save(f"{folder}/saved")
    left = [f"{top}/{name}" for top, _, files in gfile.walk(folder) for name in files]
    assert left == []


def test_a_save_that_is_killed_leaves_the_dataset_before_it(store):
    path = "memory://bucket/saved"
    rx.data.Dataset.range(3).save(path)
    with faulty(store, lambda number, work: work()):
        rx.data.Dataset.range(4).save(path)
    count = len(store.requests)
    for when in range(1, count + 1):
        rx.data.Dataset.range(3).save(path)

        def act(number, work, when=when):
            if number >= when:
                raise Killed
            return work()

        with faulty(store, act), pytest.raises(Killed):
            rx.data.Dataset.range(4).save(path)
        assert len(list(rx.data.Dataset.load(path))) in (3, 4)

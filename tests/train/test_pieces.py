"""Any part of an array comes back, however it was cut when it was saved."""

import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._src.base.tf_errors import DataLossError
from replicax._src.train import checkpoint_files
from replicax._src.train.array_pieces import Part, Piece, Saved, Value, assign_tasks, whole
from replicax._src.train.checkpoint_files import CheckedFiles, as_bytes, checksum, checksums
from replicax._src.values.sharded import ShardLayout


@st.composite
def intervals(draw, length):
    """An axis, cut at a few places."""
    cuts = draw(st.lists(st.integers(0, length), max_size=3))
    bounds = sorted({0, length, *cuts})
    return list(itertools.pairwise(bounds))


@st.composite
def cuttings(draw, shape):
    """All parts of an array: a grid of boxes, or ranges of its entries."""
    if draw(st.booleans()):
        ranges = draw(intervals(math.prod(shape)))
        return [Part((r,), is_flat=True) for r in ranges]
    axes = [draw(intervals(n)) for n in shape]
    return [Part(box) for box in itertools.product(*axes)]


def taken(array, part):
    return (array.ravel() if part.is_flat else array)[part.slices()]


@settings(max_examples=150)
@given(st.data(), st.lists(st.integers(1, 5), max_size=3), st.sampled_from(["<f4", "u1", "<c8"]))
def test_every_part_can_be_read_of_every_cutting(tmp_path_factory, data, shape, dtype):
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    pieces, folder = [], tmp_path_factory.mktemp("x") / "data"
    folder.mkdir()
    with mock.patch.object(checkpoint_files, "BLOCK", data.draw(st.sampled_from([3, 16, 1000]))):
        stream = b"before"
        for part in data.draw(cuttings(tuple(shape))):
            pieces.append(Piece(part, "file", len(stream)))
            stream += taken(array, part).tobytes()
        (folder / "file").write_bytes(stream)
        files = CheckedFiles(str(folder), {"file": [len(stream), checksums(stream)]})
        saved = Saved(tuple(shape), np.dtype(dtype), None, pieces)
        saved.check(files)

        for part in data.draw(cuttings(tuple(shape))):
            room = saved.empty(part)
            found = saved.read(files, part, room)
            assert found is room
            assert found.shape == part.shape
            assert found.tobytes() == taken(array, part).tobytes()


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 30))
def test_checksums_do_not_depend_on_how_a_file_is_put_together(parts, block):
    joined = b"".join(parts)
    with mock.patch.object(checkpoint_files, "BLOCK", block):
        expected = [checksums(joined[i : i + block])[0] for i in range(0, len(joined), block)]
        assert checksums(*parts) == checksums(joined) == expected


def test_a_checksum_is_the_published_one():
    assert checksum(b"") == 0x2D06800538D394C2  # as the specification of XXH3 has it


@given(st.data(), st.integers(1, 6000), st.integers(0, 99))
def test_damage_changes_the_checksum(data, size, seed):
    good = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    bad = good.copy()
    begin = data.draw(st.integers(0, size - 1))
    place = bad[begin : begin + data.draw(st.integers(1, size - begin))]
    change = data.draw(st.sampled_from(["zeros", "flipped", "moved"]))
    place[:] = {"zeros": 0, "flipped": ~place, "moved": np.roll(place, 8)}[change]
    is_same = good.tobytes() == bad.tobytes()
    assert (checksum(good) == checksum(bad)) == is_same


def test_pieces_that_do_not_make_up_an_array_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(64))
    files = CheckedFiles(str(tmp_path), {"file": [64, checksums(bytes(64))]})
    good = Piece(whole((4, 4)), "file", 0)
    Saved((4, 4), np.dtype("f4"), None, [good]).check(files)
    for bad in (
        Saved((4, 5), np.dtype("f4"), None, [good]),  # too few
        Saved((4, 4), np.dtype("f4"), None, [good, good]),  # too many
        Saved((4, 4), np.dtype("f4"), None, [Piece(whole((4, 4)), "file", 1)]),  # past the end
        Saved((4, 4), np.dtype("f4"), None, [Piece(Part(((0, 4), (1, 5))), "file", 0)]),
        Saved((8,), np.dtype("O"), None, [Piece(whole((8,)), "file", 0)]),  # never read as pointers
    ):
        with pytest.raises(ValueError, match=r"piece|array"):
            bad.check(files)


def test_only_the_blocks_that_a_part_lies_in_are_read(tmp_path):
    data = np.arange(1 << 20, dtype="<f4")
    (tmp_path / "file").write_bytes(data.tobytes())
    files = CheckedFiles(str(tmp_path), {"file": [data.nbytes, checksums(as_bytes(data))]})
    saved = Saved(data.shape, data.dtype, None, [Piece(whole(data.shape), "file", 0)])
    with open(tmp_path / "file", "r+b") as file:
        file.seek(3 << 20)
        file.write(b"\x01")

    half = Part(((0, data.size // 2),))
    np.testing.assert_array_equal(saved.read(files, half), data[: data.size // 2])
    with pytest.raises(DataLossError, match=r"/file' is damaged"):
        saved.read(files, Part(((data.size // 2, data.size),)))


def test_each_part_is_written_once_by_one_that_holds_it():
    devices = np.asarray(jax.devices()[:4])
    rows = NamedSharding(Mesh(devices, "r"), PartitionSpec("r"))
    mirrored = NamedSharding(Mesh(devices, "r"), PartitionSpec())
    values = {
        "rows": Value(jax.device_put(jnp.arange(8.0), rows)),
        "flat": Value(
            jax.device_put(ShardLayout((3, 3), 4).stored(np.arange(9.0, dtype="f4")), rows),
            ShardLayout((3, 3), 4),
        ),
        "mirrored": Value(jax.device_put(jnp.arange(3.0), mirrored)),
        "plain": Value(np.arange(2.0)),
        "empty": Value(np.zeros((0, 3))),
    }
    tasks, lost = assign_tasks(values, [0])
    assert not lost
    written = [(task.key, task.value.on_host(task.part).tolist()) for task in tasks[0]]
    assert written == [
        *(("rows", [i, i + 1]) for i in (0, 2, 4, 6)),
        *(("flat", [i, i + 1, i + 2]) for i in (0, 3, 6)),
        ("mirrored", [0.0, 1.0, 2.0]),
        ("plain", [0.0, 1.0]),
    ]


class Spread(Value):
    """A value that several workers hold."""

    def __init__(self, parts):
        super().__init__(np.zeros(8))
        object.__setattr__(self, "parts", parts)

    def holders(self):
        return self.parts


def test_workers_write_about_as_much_each_and_who_cannot_is_named():
    all_three = {whole((8,)): [0, 1, 2]}
    values = {f"v{i}": Spread(all_three) for i in range(6)}
    tasks, lost = assign_tasks(values, [0, 1, 2])
    assert [len(tasks[w]) for w in range(3)] == [2, 2, 2]
    assert not lost

    halves = {Part(((0, 4),)): [0], Part(((4, 8),)): [1]}
    tasks, lost = assign_tasks({**values, "cut": Spread(halves)}, [0, 2])
    assert lost == ["cut"]

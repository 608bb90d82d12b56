"""Text, fixed-length and TFRecord files: every record, every error with its place."""

import gzip
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError, NotFoundError
from replicax.data import Dataset, FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
from replicax.io import TFRecordWriter

PACK = {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def write_records(path, records, options=None):
    with TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def read_until_error(dataset):
    """The elements before the error, and the error."""
    good = []
    try:
        for element in dataset:
            good.append(element)
    except Exception as error:
        return good, error
    return good, None


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_lines_come_without_their_ends(folder, compression):
    path = folder / f"text{compression}"
    path.write_bytes(PACK[compression](b"a\r\nb\rc\n\nd"))

    # Observed on TensorFlow: every carriage return goes, also inside a line.
    assert list(TextLineDataset(path, compression)) == [b"a", b"bc", b"", b"d"]


@settings(max_examples=30)
@given(
    text=st.binary(max_size=300).map(lambda b: b.replace(b"\r", b"")), repeat=st.integers(1, 9000)
)
def test_lines_are_what_split_gives(folder, text, repeat):
    content = text * repeat
    (folder / "any.txt").write_bytes(content)
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()

    assert list(TextLineDataset(folder / "any.txt")) == expected


def test_lines_longer_than_a_chunk_are_whole(folder):
    path = folder / "long.txt"
    path.write_bytes(b"a" * 3_000_000 + b"\n" + b"b" * 1_500_000)

    assert [len(line) for line in TextLineDataset(path)] == [3_000_000, 1_500_000]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_fixed_records_leave_header_and_footer_out(folder, compression):
    path = folder / f"fixed{compression}"
    path.write_bytes(PACK[compression](b"HHaaabbbcccF"))
    dataset = FixedLengthRecordDataset(path, 3, 2, 1, compression_type=compression)

    assert list(dataset) == [b"aaa", b"bbb", b"ccc"]


def test_fixed_records_must_fit(folder):
    path = folder / "unfit"
    path.write_bytes(b"HHaaabbbx")

    good, error = read_until_error(FixedLengthRecordDataset(path, 3, header_bytes=2))

    assert good == [b"aaa", b"bbb"]
    assert isinstance(error, InvalidArgumentError)
    assert "has 9 bytes" in str(error)
    assert "there are 7, which is not a multiple of the record length 3" in str(error)


@pytest.mark.parametrize("options", [None, "", "GZIP", "ZLIB"])
def test_records_come_back(folder, options):
    rng = np.random.default_rng(1)
    records = [rng.bytes(int(n)) for n in rng.integers(0, 5000, 400)] + [rng.bytes(3_000_000)]
    path = write_records(folder / f"records{options}", records, options)

    assert list(TFRecordDataset(path, options)) == records


@settings(max_examples=40)
@given(records=st.lists(st.binary(max_size=200), max_size=30))
def test_any_records_come_back(folder, records):
    path = write_records(folder / "any.tfrecord", records)

    assert list(TFRecordDataset(path)) == records


def test_files_are_read_in_their_order_or_in_turns(folder):
    names = [
        write_records(folder / f"turn{k}", [f"{k}{i}".encode() for i in range(n)])
        for k, n in enumerate((3, 5, 2))
    ]

    assert list(TFRecordDataset(names)) == [
        *(b"00", b"01", b"02"),
        *(b"10", b"11", b"12", b"13", b"14"),
        *(b"20", b"21"),
    ]
    # Observed on TensorFlow.
    assert list(TFRecordDataset(names, num_parallel_reads=2)) == [
        *(b"00", b"10", b"01", b"11", b"02", b"12", b"13", b"20", b"14", b"21")
    ]
    assert list(TFRecordDataset(Dataset.from_tensor_slices(names))) == list(TFRecordDataset(names))


def test_names_can_be_read_by_flat_map_and_interleave(folder):
    names = []
    for k in range(3):
        path = folder / f"part{k}.txt"
        path.write_text("".join(f"{k}{i}\n" for i in range(2)))
        names.append(str(path))
    files = Dataset.list_files(str(folder / "part?.txt"), shuffle=False)

    assert list(files.flat_map(TextLineDataset)) == [b"00", b"01", b"10", b"11", b"20", b"21"]
    assert list(files.interleave(TextLineDataset, cycle_length=3)) == [
        *(b"00", b"10", b"20", b"01", b"11", b"21")
    ]


@pytest.mark.parametrize("make", [TextLineDataset, TFRecordDataset])
def test_a_missing_file_is_named_when_it_is_read(make, folder):
    present = folder / "present"
    write_records(present, [])
    dataset = make([str(present), "/no/such/file"])

    with pytest.raises(NotFoundError, match="There is no file '/no/such/file'") as info:
        list(dataset)
    assert isinstance(info.value, FileNotFoundError)


def test_a_compression_must_be_known():
    with pytest.raises(InvalidArgumentError, match=r"compression_type='gz'.*'GZIP' or 'ZLIB'"):
        TFRecordDataset("a", compression_type="gz")


def test_a_file_name_is_not_a_number():
    with pytest.raises(InvalidArgumentError, match=r"A file name is .*, got 3 of type int"):
        TFRecordDataset([3])


RECORDS = [b"first record", b"second", b"the third one"]
OFFSETS = [0, 28, 50]


@pytest.mark.parametrize("cut", range(1, 79))
def test_a_truncated_file_names_the_record_that_is_cut(folder, cut):
    path = folder / "whole"
    write_records(path, RECORDS)
    content = path.read_bytes()
    (folder / "cut").write_bytes(content[:cut])
    complete = sum(end <= cut for end in (*OFFSETS[1:], len(content)))

    good, error = read_until_error(TFRecordDataset(folder / "cut"))

    assert good == RECORDS[:complete]
    if cut in (*OFFSETS, len(content)):
        assert error is None
    else:
        assert isinstance(error, DataLossError)
        assert isinstance(error, OSError)
        assert f"cut' is cut off: the record at byte {OFFSETS[complete]}" in str(error)
        assert f"has {cut - OFFSETS[complete]} bytes" in str(error)


@pytest.mark.parametrize("place", range(79))
def test_every_flipped_bit_is_found(folder, place):
    path = folder / "sound"
    write_records(path, RECORDS)
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    (folder / "flipped").write_bytes(content)
    record = sum(offset <= place for offset in OFFSETS) - 1

    good, error = read_until_error(TFRecordDataset(folder / "flipped").batch(1))

    assert [batch[0] for batch in good] == RECORDS[:record]
    assert isinstance(error, DataLossError)
    assert "flipped' is corrupt: the checksum of the" in str(error)
    assert f"of the record at byte {OFFSETS[record]} is wrong" in str(error)
    what = "length" if place - OFFSETS[record] < 12 else "data"
    assert f"checksum of the {what}" in str(error)


def test_corruption_after_many_chunks_is_found_at_its_place(folder):
    records = [bytes([k % 256]) * 1000 for k in range(4000)]
    path = folder / "large"
    write_records(path, records)
    content = bytearray(path.read_bytes())
    content[3000 * 1016 + 500] ^= 1
    path.write_bytes(content)

    good, error = read_until_error(TFRecordDataset(path))

    assert good == records[:3000]
    assert f"the data of the record at byte {3000 * 1016}" in str(error)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_truncated_compressed_file_is_found(folder, compression):
    path = folder / f"short{compression}"
    write_records(path, [np.random.default_rng(1).bytes(1000)] * 3, compression)
    path.write_bytes(path.read_bytes()[:-30])

    _, error = read_until_error(TFRecordDataset(path, compression))

    assert isinstance(error, DataLossError)
    assert f"is cut off: its {compression} stream has no end" in str(error)


def test_a_corrupt_compressed_file_is_found(folder):
    path = folder / "not.gz"
    path.write_bytes(b"this is no gzip file")

    _, error = read_until_error(TextLineDataset(path, "GZIP"))

    assert isinstance(error, DataLossError)
    assert "not.gz' is corrupt: its GZIP stream breaks" in str(error)


def test_several_compressed_streams_in_one_file_are_read(folder):
    path = folder / "two.gz"
    path.write_bytes(gzip.compress(b"a\nb\n") + gzip.compress(b"c\n"))

    assert list(TextLineDataset(path, "GZIP")) == [b"a", b"b", b"c"]


def test_files_are_closed_with_the_iterator(folder):
    path = folder / "many.txt"
    path.write_text("line\n" * 1_000_000)
    for _ in TextLineDataset([path, path], num_parallel_reads=2):
        break
    path.unlink()  # a ResourceWarning would fail the test


def test_readers_restore_in_the_middle_of_a_file(folder):
    names = [write_records(folder / f"r{k}", [bytes([k, i]) for i in range(50)]) for k in range(3)]
    for parallel in (None, 2):
        dataset = TFRecordDataset(names, num_parallel_reads=parallel).shuffle(20).batch(7)
        iterator = iter(dataset)
        for _ in range(9):
            next(iterator)
        state = iterator.save_state()
        rest = [batch.tolist() for batch in iterator]
        again = iter(dataset)
        again.restore_state(state)

        assert [batch.tolist() for batch in again] == rest


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("reader", [TFRecordDataset, TextLineDataset])
def test_a_small_file_that_stands_for_much_is_read_in_little_memory(tmp_path, compression, reader):
    record, count = b"x" * (1 << 19), 128
    path = str(tmp_path / "large")
    if reader is TFRecordDataset:
        write_records(path, [record] * count, compression)
    else:
        (tmp_path / "large").write_bytes(PACK[compression]((record + b"\n") * count))
    tracemalloc.start()
    try:
        found = sum(element == record for element in reader(path, compression))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found == count
    assert peak < 16 * len(record)

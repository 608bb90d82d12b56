"""Writing TFRecord files."""

import struct

import pytest

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax.data import TFRecordDataset
from replicax.io import TFRecordOptions, TFRecordWriter


def test_the_file_is_what_tensorflow_writes(tmp_path):
    path = tmp_path / "a"
    with TFRecordWriter(path) as writer:
        writer.write(b"abc")

    # Written by TensorFlow 2.21 for the same record.
    assert path.read_bytes().hex() == "0300000000000000b099490e6162636e57f121"


@pytest.mark.parametrize(
    "options",
    [
        TFRecordOptions("GZIP", compression_level=9),
        TFRecordOptions("ZLIB", compression_level=1),
        "GZIP",
    ],
)
def test_files_can_be_compressed(tmp_path, options):
    path = tmp_path / "a"
    with TFRecordWriter(path, options) as writer:
        for _ in range(3000):
            writer.write(b"the same again")
    kind = options if isinstance(options, str) else options.compression_type

    assert path.stat().st_size < 3000
    assert list(TFRecordDataset(path, kind)) == [b"the same again"] * 3000


@pytest.mark.parametrize("options", [None, "GZIP"])
def test_flushed_records_can_be_read_while_writing_continues(tmp_path, options):
    path = tmp_path / "a"
    writer = TFRecordWriter(path, options)
    writer.write(b"one")
    writer.flush()
    size = path.stat().st_size
    writer.write("zwei")
    writer.close()

    assert 0 < size < path.stat().st_size
    assert list(TFRecordDataset(path, options)) == [b"one", b"zwei"]


def test_an_empty_file_has_no_records(tmp_path):
    with TFRecordWriter(tmp_path / "a"):
        pass

    assert list(TFRecordDataset(tmp_path / "a")) == []


def test_a_record_is_bytes(tmp_path):
    with (
        TFRecordWriter(tmp_path / "a") as writer,
        pytest.raises(InvalidArgumentError, match=r"A record is bytes, got dict. Serialize it"),
    ):
        writer.write({})


def test_a_closed_writer_says_so(tmp_path):
    writer = TFRecordWriter(tmp_path / "a")
    writer.close()
    writer.close()

    with pytest.raises(InvalidArgumentError, match="is closed"):
        writer.write(b"x")


def test_the_header_is_length_and_checksum(tmp_path):
    with TFRecordWriter(tmp_path / "a") as writer:
        writer.write(b"x" * 300)

    assert struct.unpack("<Q", (tmp_path / "a").read_bytes()[:8]) == (300,)

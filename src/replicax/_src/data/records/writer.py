"""`TFRecordWriter` and its options."""

import os
import struct
import zlib
from typing import IO, Any, Self

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.records.tfrecord import to_compression
from replicax._src.data.records.wire_format import checksums, masked
from replicax._src.files import storage
from replicax._src.files.paths import user_path

_BULK_BYTES = 1 << 20
_BULK_RECORDS = 1024


class TFRecordOptions:
    """Options of a `TFRecordWriter`.

    Args:
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        flush_mode: Accepted for compatibility with TensorFlow and ignored.
        input_buffer_size: Ignored.
        output_buffer_size: Ignored.
        window_bits: Ignored.
        compression_level: From 0, no compression, to 9, smallest; zlib's default if None.
        compression_method: Ignored.
        mem_level: Ignored.
        compression_strategy: Ignored.

    Example:
        >>> rx.io.TFRecordOptions("GZIP").compression_type
        'GZIP'
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's signature
        self,
        compression_type: str | None = None,
        flush_mode: int | None = None,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        window_bits: int | None = None,
        compression_level: int | None = None,
        compression_method: int | None = None,
        mem_level: int | None = None,
        compression_strategy: int | None = None,
    ) -> None:
        self.compression_type = to_compression(compression_type, "TFRecordOptions")
        self.flush_mode = flush_mode
        self.input_buffer_size = input_buffer_size
        self.output_buffer_size = output_buffer_size
        self.window_bits = window_bits
        self.compression_level = compression_level
        self.compression_method = compression_method
        self.mem_level = mem_level
        self.compression_strategy = compression_strategy


class TFRecordWriter:
    """Writes records of bytes to a TFRecord file; a context manager.

    Args:
        path: The file, which is overwritten if it exists. In an object store it appears when the
            writer is closed.
        options: `TFRecordOptions`, or the name of a compression type.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> with rx.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"first")
        ...     writer.write(b"second")
        >>> list(rx.data.TFRecordDataset(path))
        [b'first', b'second']
    """

    def __init__(
        self, path: str | os.PathLike[str], options: TFRecordOptions | str | None = None
    ) -> None:
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        self._file: IO[bytes] | None = self._open(path)
        self._compressor: Any = None
        if options.compression_type:
            window = 31 if options.compression_type == "GZIP" else 15
            level = -1 if options.compression_level is None else options.compression_level
            self._compressor = zlib.compressobj(level, zlib.DEFLATED, window)
        self._buffered: list[bytes] = []
        self._bytes = 0

    def write(self, record: bytes) -> None:
        """Append a record.

        Args:
            record: The bytes of the record; a str is encoded as UTF-8.

        Example:
            >>> import os, tempfile
            >>> writer = rx.io.TFRecordWriter(os.path.join(tempfile.mkdtemp(), "a.tfrecord"))
            >>> writer.write(b"first")
            >>> writer.close()
        """
        if self._file is None:
            raise InvalidArgumentError(
                "This TFRecordWriter is closed. Open a new one; it replaces the file."
            )
        if isinstance(record, str):
            record = record.encode()
        if not isinstance(record, bytes):
            raise InvalidArgumentError(
                f"A record is bytes, got {type(record).__name__}. Serialize it first, for example"
                " with `rx.io.serialize_example({'x': value})` or `array.tobytes()`."
            )
        self._buffered.append(record)
        self._bytes += len(record)
        if self._bytes >= _BULK_BYTES or len(self._buffered) >= _BULK_RECORDS:
            self._write_buffered()

    def flush(self) -> None:
        """Write all buffered records to the file.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
            >>> with rx.io.TFRecordWriter(path) as writer:
            ...     writer.write(b"first")
            ...     writer.flush()
            ...     os.path.getsize(path)
            21
        """
        if self._file is None:
            return
        self._write_buffered()
        if self._compressor is not None:
            self._file.write(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Write all buffered records and close the file.

        Example:
            >>> import os, tempfile
            >>> writer = rx.io.TFRecordWriter(os.path.join(tempfile.mkdtemp(), "a.tfrecord"))
            >>> writer.close()
        """
        if self._file is None:
            return
        self._write_buffered()
        if self._compressor is not None:
            self._file.write(self._compressor.flush())
        self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: str | os.PathLike[str]) -> IO[bytes]:
        return storage.open_file(user_path(path), "wb")

    def _write_buffered(self) -> None:
        if self._file is None or not self._buffered:
            return
        data = _framed(self._buffered)
        self._buffered, self._bytes = [], 0
        self._file.write(data if self._compressor is None else self._compressor.compress(data))


def _framed(records: list[bytes]) -> bytes:
    """Return records in the TFRecord format, with lengths and checksums."""
    # In bulk, because the NumPy checksums are fast only for many records at once.
    lengths = np.array([len(record) for record in records], np.int64)
    headers = lengths.astype("<u8").tobytes()
    places = np.arange(len(records)) * 8
    header_sums = masked(checksums(headers, places, np.full(len(records), 8))).tolist()
    starts = np.cumsum(lengths) - lengths
    data_sums = masked(checksums(b"".join(records), starts, lengths)).tolist()
    pack_header, pack_sum = struct.Struct("<QI").pack, struct.Struct("<I").pack
    parts: list[bytes] = []
    for record, header_sum, data_sum in zip(records, header_sums, data_sums, strict=True):
        parts.append(pack_header(len(record), header_sum))
        parts.append(record)
        parts.append(pack_sum(data_sum))
    return b"".join(parts)

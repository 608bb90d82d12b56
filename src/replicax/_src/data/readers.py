"""Datasets over files: TFRecords, lines of text and fixed-length records."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, final

import numpy as np

from replicax._src.base.tf_errors import ArgumentTypeError, NotFoundError, StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.element_blocks import Block, ColumnBlock
from replicax._src.data.node import AUTOTUNE, UNKNOWN_CARDINALITY, Node, SourceNode, Stream, to_int
from replicax._src.data.nodes.flat_map import FlatMapNode, InterleaveNode, InterleaveStream
from replicax._src.data.nodes.prefetch import PrefetchStream
from replicax._src.data.nodes.source import SlicesNode
from replicax._src.data.records.tfrecord import (
    FixedLengthFormat,
    TextFormat,
    TFRecordFormat,
    to_compression,
)
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import LEAF
from replicax._src.data.user_functions import ElementFunction
from replicax._src.files import storage
from replicax._src.files.paths import user_path

_READ_AHEAD = 1024  # records to prefetch from each file that is read in parallel
_STRING = TensorSpec((), object)


class FileFormat(Protocol):
    """A file format: how a file is split into records."""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Yield lists of records, of any length; yield intact records before raising."""
        ...


@final
@dataclass(frozen=True, eq=False)
class ReaderNode(SourceNode):
    """A source of the records of files, read sequentially or interleaved."""

    files: tuple[str, ...]
    format: FileFormat
    num_parallel_reads: int | None = None
    grouping = ("num_parallel_reads",)

    @property
    def part(self) -> str:
        """The names of the files, without their folders."""
        return f"files {', '.join(map(os.path.basename, self.files))}"

    @property
    def element_spec(self) -> TensorSpec:
        """A scalar string."""
        return _STRING

    @property
    def cardinality(self) -> int:
        """Unknown before the files are read; 0 without files."""
        return UNKNOWN_CARDINALITY if self.files else 0

    @property
    def peeked(self) -> "ReaderNode":
        """The same reader without threads."""
        return replace(self, num_parallel_reads=None)

    def with_files(self, files: tuple[str, ...]) -> "ReaderNode":
        """Return the same reader over other files."""
        return replace(self, files=files)

    def shard_files(self, num_shards: int, index: int) -> "ReaderNode":
        """Return the same reader over every ``num_shards``-th file, starting at ``index``."""
        return self.with_files(self.files[index::num_shards])

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if self.num_parallel_reads in (None, 1):
            return _FilesStream(self.files, self.format)
        names = SlicesNode.of(list(self.files)) if self.files else None
        if names is None:
            return _FilesStream((), self.format)
        cycle = self.num_parallel_reads or 1
        cycle = cycle if cycle > 0 else len(self.files)
        return InterleaveStream(names.open(run), self._open_ahead, cycle=cycle, block=1)

    def _open_ahead(self, name: bytes, _: int) -> tuple[Stream, bool]:
        stream = _FilesStream((os.fsdecode(name),), self.format)
        return PrefetchStream(stream, _READ_AHEAD, step=_READ_AHEAD), True


@final
class _FilesStream(Stream):
    """A pass over the records of files, one file after the other."""

    def __init__(self, files: tuple[str, ...], file_format: FileFormat) -> None:
        self._files = iter(files)
        self._format = file_format
        self._lists: Iterator[list[bytes]] | None = None
        self._records: list[bytes] = []
        self._used = 0

    def pull(self, limit: int) -> Block | None:
        if not self._has_records():
            return None
        records = self._records[self._used : self._used + limit]
        self._used += len(records)
        column = np.empty(len(records), object)
        column[:] = records
        return ColumnBlock(LEAF, [column], len(records))

    def skip(self, count: int) -> int:
        done = 0
        while done < count and self._has_records():
            step = min(count - done, len(self._records) - self._used)
            self._used += step
            done += step
        return done

    def close(self) -> None:
        close = getattr(self._lists, "close", None)
        if close is not None:
            close()
        self._files = iter(())
        self._records = []

    def _has_records(self) -> bool:
        while self._used >= len(self._records):
            if self._lists is None:
                path = next(self._files, None)
                if path is None:
                    return False
                _check_exists(path)
                self._lists = self._format.read(path)
            records = next(self._lists, None)
            if records is None:
                self._lists = None
                continue
            self._records, self._used = records, 0
        return True


def _check_exists(path: str) -> None:
    if not storage.exists(path):
        raise NotFoundError(
            f"There is no file {path!r}{storage.here(path)}."
            " Relative names count from there; `Dataset.list_files('folder/*')` finds what exists."
        )


_DEFAULT_CYCLE = 16  # files read in parallel with AUTOTUNE

FileNames = str | bytes | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset


class _RecordsDataset(Dataset[bytes]):
    """The base of datasets over file formats whose only option is the compression."""

    _format: ClassVar[type[TFRecordFormat | TextFormat]]

    def __init__(
        self,
        filenames: FileNames,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        del buffer_size, name
        verb = type(self).__name__
        record_format = self._format(to_compression(compression_type, verb))
        super().__init__(reader_of(filenames, record_format, num_parallel_reads, verb))


class TFRecordDataset(_RecordsDataset):
    """The records of TFRecord files, as bytes; every checksum is verified.

    Args:
        filenames: A file, several, or a dataset of names.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        buffer_size: Ignored; files are read in large pieces.
        num_parallel_reads: Number of files to read in parallel, with their records interleaved.
            Sequential if None.
        name: Ignored.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> with rx.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"one")
        >>> list(rx.data.TFRecordDataset([path, path]))
        [b'one', b'one']
    """

    _format = TFRecordFormat


class TextLineDataset(_RecordsDataset):
    r"""The lines of text files, as bytes without line endings.

    Args:
        filenames: A file, several, or a dataset of names.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        buffer_size: Ignored; files are read in large pieces.
        num_parallel_reads: Number of files to read in parallel, with their lines interleaved.
        name: Ignored.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.txt")
        >>> _ = path.write_text("one\ntwo\n")
        >>> list(rx.data.TextLineDataset(path))
        [b'one', b'two']
    """

    _format = TextFormat


class FixedLengthRecordDataset(Dataset[bytes]):
    """Fixed-length records of binary files, as bytes.

    Args:
        filenames: A file, several, or a dataset of names.
        record_bytes: The length of a record.
        header_bytes: Bytes to skip at the start of each file.
        footer_bytes: Bytes to skip at the end of each file.
        buffer_size: Ignored; files are read in large pieces.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        num_parallel_reads: Number of files to read in parallel, with their records interleaved.
        name: Ignored.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.bin")
        >>> _ = path.write_bytes(b"Haaabbb")
        >>> list(rx.data.FixedLengthRecordDataset(path, 3, header_bytes=1))
        [b'aaa', b'bbb']
    """

    def __init__(  # noqa: PLR0913
        self,
        filenames: FileNames,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        del buffer_size, name
        verb = "FixedLengthRecordDataset"
        record_format = FixedLengthFormat(
            to_int(record_bytes, verb, "record_bytes", least=1),
            to_int(header_bytes or 0, verb, "header_bytes", least=0),
            to_int(footer_bytes or 0, verb, "footer_bytes", least=0),
            to_compression(compression_type, verb),
        )
        super().__init__(reader_of(filenames, record_format, num_parallel_reads, verb))


def reader_of(
    filenames: FileNames, file_format: FileFormat, num_parallel_reads: int | None, verb: str
) -> Node:
    """Return a node that reads files, whose names may come from a dataset."""
    if isinstance(filenames, Dataset):
        files = filenames.node
        if files.is_spec_known and files.element_spec != _STRING:
            raise StructureError(
                f"{verb}() needs a dataset of file names, one string in each element; the elements"
                f" of this one are {files.element_spec}."
            )
        read = ElementFunction(lambda name: Dataset(ReaderNode((_path(name),), file_format)), verb)
        if num_parallel_reads in (None, 1):
            return FlatMapNode(files, read, Seeds(None), declared=_STRING)
        cycle = _DEFAULT_CYCLE if num_parallel_reads == AUTOTUNE else num_parallel_reads
        cycle = to_int(cycle, verb, "num_parallel_reads", least=1)
        return InterleaveNode(files, read, Seeds(None), cycle, 1, cycle, declared=_STRING)
    if isinstance(filenames, (str, bytes, os.PathLike)):
        names: list[Any] = [filenames]
    else:
        names = list(filenames)
    return ReaderNode(tuple(_path(name) for name in names), file_format, num_parallel_reads)


def _path(name: Any) -> str:
    if isinstance(name, (str, bytes, os.PathLike)):
        return user_path(name)
    raise ArgumentTypeError(
        f"A file name is a str, bytes or a path, got {name!r} of type {type(name).__name__}."
    )

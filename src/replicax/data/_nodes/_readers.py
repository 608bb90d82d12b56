"""Files as sources: records, lines, pieces of a fixed length."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, ColumnBlock
from replicax.data._errors import NotFoundError
from replicax.data._node import UNKNOWN_CARDINALITY, SourceNode, Stream
from replicax.data._nodes._flat_map import InterleaveStream
from replicax.data._nodes._prefetch import PrefetchStream
from replicax.data._nodes._source import SlicesNode
from replicax.data._seeds import Run
from replicax.data._structure import LEAF

_READ_AHEAD = 1024


class FileFormat(Protocol):
    """How a file is cut into records."""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Records in lists of convenient size; what is good comes before an error."""
        ...


@final
@dataclass(frozen=True, eq=False)
class ReaderNode(SourceNode):
    """The records of files, one file after the other, or several in turn."""

    files: tuple[str, ...]
    format: FileFormat
    num_parallel_reads: int | None = None

    @property
    def element_spec(self) -> TensorSpec:
        """One string."""
        return TensorSpec((), object)

    @property
    def cardinality(self) -> int:
        """Not known before the files are read."""
        return UNKNOWN_CARDINALITY if self.files else 0

    @property
    def peeked(self) -> "ReaderNode":
        """Without threads."""
        return replace(self, num_parallel_reads=None)

    def with_files(self, files: tuple[str, ...]) -> "ReaderNode":
        """The same reader over other files."""
        return replace(self, files=files)

    def shard_files(self, num_shards: int, index: int) -> "ReaderNode":
        """The same reader over every ``num_shards``-th file."""
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

    def _open_ahead(self, name: bytes, _: int) -> Stream:
        stream = _FilesStream((os.fsdecode(name),), self.format)
        return PrefetchStream(stream, _READ_AHEAD, step=_READ_AHEAD)


@final
class _FilesStream(Stream):
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
    if not os.path.exists(path):
        raise NotFoundError(
            f"There is no file {path!r} (the current folder is {os.getcwd()!r})."
            " Relative names count from there; `Dataset.list_files('folder/*')` finds what exists."
        )

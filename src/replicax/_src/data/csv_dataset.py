"""Datasets over CSV files."""

import csv
import gzip
import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.graph_facts import Known
from replicax._src.data.node import AUTOTUNE, to_int
from replicax._src.data.nodes.map import MapNode
from replicax._src.data.readers import FileNames, reader_of
from replicax._src.data.records.csv import CsvFormat, CsvRules
from replicax._src.data.records.tfrecord import to_compression
from replicax._src.data.user_functions import ElementFunction
from replicax._src.files import storage

_TYPES = (np.int32, np.int64, np.float32, np.float64, object)  # from strictest to most general


class CsvDataset(Dataset):
    r"""The records of CSV files, as tuples of numbers and strings.

    Args:
        filenames: A file, several, or a dataset of names.
        record_defaults: For each selected column its dtype, which makes it required, or its default
            in a list: ``[np.int32, [0.0], bytes]``.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        buffer_size: Ignored; files are read in large pieces.
        header: Whether to skip the first line of each file.
        field_delim: The delimiter between fields.
        use_quote_delim: Whether fields may be enclosed in double quotes.
        na_value: A string that means a missing value, in addition to the empty string.
        select_cols: Indices of the columns to read; all if None.
        exclude_cols: Indices of the columns to leave out, instead of ``select_cols``.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("x,name\n1,a\n2,b\n")
        >>> dataset = rx.data.experimental.CsvDataset(path, [np.int32, bytes], header=True)
        >>> [(int(x), name) for x, name in dataset]
        [(1, b'a'), (2, b'b')]
    """

    def __init__(  # noqa: PLR0913
        self,
        filenames: FileNames,
        record_defaults: Sequence[Any],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,  # noqa: FBT001, FBT002
        field_delim: str = ",",
        use_quote_delim: bool = True,  # noqa: FBT001, FBT002
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
    ) -> None:
        del buffer_size
        if select_cols is not None and exclude_cols is not None:
            raise InvalidArgumentError(
                "CsvDataset(select_cols=..., exclude_cols=...): give one of the two."
            )
        columns = [_column_default(default) for default in record_defaults]
        if exclude_cols is not None:
            excluded = {int(index) for index in exclude_cols}
            total = len(columns) + len(excluded)
            select_cols = [index for index in range(total) if index not in excluded]
        rules = CsvRules.of(
            columns,
            "CsvDataset",
            field_delim=field_delim,
            use_quote_delim=use_quote_delim,
            na_value=na_value,
            selected=select_cols,
        )
        compression = to_compression(compression_type, "Csv")
        file_format = CsvFormat(header, use_quote_delim, rules.delimiter, compression)
        records = reader_of(filenames, file_format, None, "CsvDataset")
        numbered = Dataset(records).enumerate().node
        function = ElementFunction(
            lambda number, record: tuple(rules.values(record or None, int(number))), "CsvDataset"
        )
        spec = tuple(TensorSpec((), column.dtype) for column in rules.columns)
        super().__init__(MapNode(numbered, function, known_spec=Known(spec)))


def make_csv_dataset(  # noqa: PLR0913
    file_pattern: str | Sequence[str],
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[str | int] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,  # noqa: FBT001, FBT002
    na_value: str = "",
    header: bool = True,  # noqa: FBT001, FBT002
    num_epochs: int | None = None,
    shuffle: bool = True,  # noqa: FBT001, FBT002
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,  # noqa: FBT001, FBT002
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,  # noqa: FBT001, FBT002
    encoding: str = "utf-8",
) -> Dataset:
    r"""Read CSV files as batches of named columns.

    Args:
        file_pattern: A pattern such as ``"data/*.csv"``, or several.
        batch_size: Records per batch.
        column_names: The names of all columns; read from the first line if None.
        column_defaults: For each selected column its dtype or its default; inferred from the first
            records if None.
        label_name: The column to return as the label, the second item of each element.
        select_columns: Names or indices of the columns to read; all if None.
        field_delim: The delimiter between fields.
        use_quote_delim: Whether fields may be enclosed in double quotes.
        na_value: A string that means a missing value, in addition to the empty string.
        header: Whether the first line of each file has the column names.
        num_epochs: Number of passes over the files; infinite if None.
        shuffle: Whether to shuffle files and records.
        shuffle_buffer_size: Size of the shuffle buffer, in records.
        shuffle_seed: The seed of the order.
        prefetch_buffer_size: Batches to prefetch.
        num_parallel_reads: Number of files to interleave; one after the other if None.
        sloppy: Ignored: the order is always the same.
        num_rows_for_inference: Records to infer dtypes from; all if None.
        compression_type: ``""`` (or None) or ``"GZIP"``; ``"ZLIB"`` if names and dtypes are given.
        ignore_errors: Whether to skip records that cannot be parsed.
        encoding: The encoding of the files, used to infer names and dtypes.

    Returns:
        A dataset of ordered dicts, or of pairs of one and a label.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("x,y\n1,0.5\n2,1.5\n")
        >>> dataset = rx.data.experimental.make_csv_dataset(
        ...     str(path), 2, label_name="y", num_epochs=1, shuffle=False
        ... )
        >>> rows, labels = next(iter(dataset))
        >>> rows["x"], labels
        (array([1, 2], dtype=int32), array([0.5, 1.5], dtype=float32))
    """
    del sloppy
    files = [name.decode() for name in Dataset.list_files(file_pattern, shuffle=False)]
    preview = _CsvPreview(
        files, field_delim, compression_type, encoding, has_quotes=use_quote_delim
    )
    if column_names is None and not header:
        raise InvalidArgumentError(
            "make_csv_dataset(header=False) needs column_names: the files do not contain them."
        )
    names = preview.names() if column_names is None else list(column_names)
    indices = _column_indices(
        range(len(names)) if select_columns is None else select_columns, names
    )
    defaults = column_defaults
    if defaults is None:
        rows = preview.records(len(names), header=header)
        defaults = _infer_defaults(islice(rows, num_rows_for_inference), indices, na_value)
    names = [names[index] for index in indices]
    _check_columns(names, defaults, label_name)

    def read(file: bytes) -> Dataset:
        records = CsvDataset(
            file,
            defaults,
            compression_type=compression_type,
            header=header,
            field_delim=field_delim,
            use_quote_delim=use_quote_delim,
            na_value=na_value,
            select_cols=None if select_columns is None else indices,
        )
        return records.ignore_errors() if ignore_errors else records

    def name_columns(*columns: Any) -> Any:
        features = OrderedDict(zip(names, columns, strict=True))
        return features if label_name is None else (features, features.pop(label_name))

    dataset = Dataset.from_tensor_slices(files)
    if shuffle:
        dataset = dataset.shuffle(len(files), shuffle_seed)
    cycle = None if num_parallel_reads == AUTOTUNE else num_parallel_reads or 1
    dataset = dataset.interleave(read, cycle_length=cycle, block_length=1)
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    if num_epochs != 1:
        dataset = dataset.repeat(num_epochs)
    size = to_int(batch_size, "make_csv_dataset", "batch_size", least=1)
    dataset = dataset.batch(size, drop_remainder=num_epochs is None).map(name_columns)
    return dataset.prefetch(prefetch_buffer_size)


def _column_default(default: Any) -> Any:
    """Return a dtype as an empty array of that dtype, and any other `default` unchanged."""
    is_dtype = isinstance(default, (type, np.dtype))
    if not is_dtype:
        return default
    return np.empty(0, object if np.dtype(default).kind in "OSU" else default)


def _column_indices(columns: Sequence[str | int], names: Sequence[str]) -> list[int]:
    """Return the sorted indices of `columns`, given by name or index."""
    indices: list[int] = []
    for column in columns:
        if isinstance(column, int):
            index = column
        else:
            index = names.index(column) if column in names else -1
        if not 0 <= index < len(names):
            raise InvalidArgumentError(
                f"select_columns has {column!r}, which is none of the {len(names)} columns {names}."
            )
        indices.append(index)
    if len(set(indices)) != len(indices):
        raise InvalidArgumentError(f"select_columns={list(columns)!r} has a column twice.")
    return sorted(indices)


def _check_columns(names: Sequence[str], defaults: Sequence[Any], label: str | None) -> None:
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"Columns need different names, got {names}.")
    if len(names) != len(defaults):
        raise InvalidArgumentError(
            f"make_csv_dataset() got {len(defaults)} column_defaults for the columns {names}."
        )
    if label is not None and label not in names:
        raise InvalidArgumentError(f"label_name={label!r} is none of the columns {names}.")


class _CsvPreview:
    """Reads column names and first records of CSV files, to infer names and dtypes."""

    def __init__(
        self,
        files: list[str],
        delimiter: str,
        compression: str | None,
        encoding: str,
        *,
        has_quotes: bool,
    ) -> None:
        self._files = files
        self._csv_options: Any = {
            "delimiter": delimiter,
            "quoting": csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        }
        self._compression = to_compression(compression, "make_csv_dataset")
        self._encoding = encoding

    def names(self) -> list[str]:
        """Return the column names in the first line, which must be equal in all files."""
        found: list[str] | None = None
        for file in self._files:
            row = next(self._rows(file), None)
            if row is None or (found is not None and row != found):
                raise InvalidArgumentError(
                    f"{file!r} must begin with the names of its columns, the same in all files;"
                    f" it begins with {row}, and {self._files[0]!r} with {found}."
                )
            found = row
        assert found is not None
        return found

    def records(self, total: int, *, header: bool) -> Iterator[list[str]]:
        """Yield the records of all files, each of which must have `total` fields."""
        for file in self._files:
            for row in islice(self._rows(file), 1 if header else 0, None):
                if len(row) != total:
                    raise InvalidArgumentError(
                        f"A record of {file!r} has {len(row)} fields, where {total} columns are"
                        f" expected: {row}."
                    )
                yield row

    def _rows(self, file: str) -> Iterator[list[str]]:
        if self._compression == "ZLIB":
            raise InvalidArgumentError(
                "Columns cannot be inferred from ZLIB files: give column_names and column_defaults."
            )
        with storage.open_file(file) as raw:
            binary: Any = gzip.open(raw) if self._compression else raw  # noqa: SIM115
            with io.TextIOWrapper(binary, encoding=self._encoding, newline="") as content:
                yield from csv.reader(content, **self._csv_options)


def _infer_defaults(rows: Iterator[list[str]], indices: Sequence[int], na_value: str) -> list[Any]:
    """Return a default for each column in `indices`, of the dtype inferred from `rows`."""
    kinds: list[Any] = [None] * len(indices)
    for row in rows:
        for k, index in enumerate(indices):
            kinds[k] = _infer_dtype(row[index], na_value, kinds[k])
    found = [object if kind is None else kind for kind in kinds]
    return [[""] if kind is object else np.zeros(1, kind) for kind in found]


def _infer_dtype(text: str, na_value: str, previous: Any) -> Any:
    """Return the strictest dtype for `text` that is at least as general as `previous`."""
    if text in ("", na_value):
        return previous
    start = 0 if previous is None else _TYPES.index(previous)
    return next(kind for kind in _TYPES[start:] if _is_valid(text, kind))


def _is_valid(text: str, kind: Any) -> bool:
    """Whether `text` parses as dtype `kind` without overflowing."""
    if kind is object:
        return True
    try:
        if kind in (np.int32, np.int64):
            kind(int(text))
            return True
        with np.errstate(over="ignore"):
            return bool(kind(text) < np.inf)
    except (ValueError, OverflowError):
        return False

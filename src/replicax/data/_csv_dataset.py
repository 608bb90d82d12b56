"""Datasets over CSV files."""

import csv
import gzip
import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from replicax._types import TensorSpec
from replicax.data import _storage
from replicax.data._dataset import Dataset
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction
from replicax.data._known import Known
from replicax.data._node import AUTOTUNE, to_int
from replicax.data._nodes._map import MapNode
from replicax.data._readers import FileNames, reader_of
from replicax.data._records._csv import CsvFormat, CsvRules
from replicax.data._records._tfrecord import to_compression

_TYPES = (np.int32, np.int64, np.float32, np.float64, object)  # from the strictest on


class CsvDataset(Dataset):
    r"""The records of CSV files, as tuples of numbers and strings.

    Args:
        filenames: A file, several, or a dataset of names.
        record_defaults: For each wanted column its dtype, if there must be a value, or its default
            in a list: ``[np.int32, [0.0], bytes]``.
        compression_type: ``""`` (or None), ``"GZIP"`` or ``"ZLIB"``.
        buffer_size: Ignored; files are read in large pieces.
        header: Whether the first line of each file is left out.
        field_delim: What stands between fields.
        use_quote_delim: Whether fields may stand in double quotes.
        na_value: What stands for a missing value, besides nothing.
        select_cols: The numbers of the wanted columns; all if None.
        exclude_cols: The numbers of the other columns, instead.

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
        columns = [_described(given) for given in record_defaults]
        if exclude_cols is not None:
            left_out = {int(place) for place in exclude_cols}
            total = len(columns) + len(left_out)
            select_cols = [place for place in range(total) if place not in left_out]
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
    r"""Batches of columns by name, from CSV files.

    Args:
        file_pattern: A pattern such as ``"data/*.csv"``, or several.
        batch_size: Records of a batch.
        column_names: The names of all columns; those of the first line if None.
        column_defaults: For each wanted column its dtype or its default; learnt from the first
            records if None.
        label_name: The column that becomes the second part of elements.
        select_columns: Names or numbers of the wanted columns; all if None.
        field_delim: What stands between fields.
        use_quote_delim: Whether fields may stand in double quotes.
        na_value: What stands for a missing value, besides nothing.
        header: Whether the first line of each file has the names.
        num_epochs: How often the files are read; without end if None.
        shuffle: Whether files and records come in random order.
        shuffle_buffer_size: Records to choose from.
        shuffle_seed: The seed of the order.
        prefetch_buffer_size: Batches made ahead.
        num_parallel_reads: Files that are read in turn; one after the other if None.
        sloppy: Ignored: the order is always the same.
        num_rows_for_inference: Records to learn dtypes from; all if None.
        compression_type: ``""`` (or None) or ``"GZIP"``; ``"ZLIB"`` if names and dtypes are given.
        ignore_errors: Whether records that cannot be read are left out.
        encoding: That of the files, while names and dtypes are learnt.

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
    peek = _Peek(files, field_delim, compression_type, encoding, has_quotes=use_quote_delim)
    if column_names is None and not header:
        raise InvalidArgumentError(
            "make_csv_dataset(header=False) needs column_names: the files do not tell them."
        )
    names = peek.names() if column_names is None else list(column_names)
    places = _places(range(len(names)) if select_columns is None else select_columns, names)
    defaults = column_defaults
    if defaults is None:
        rows = peek.records(len(names), header=header)
        defaults = _learnt(islice(rows, num_rows_for_inference), places, na_value)
    names = [names[place] for place in places]
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
            select_cols=None if select_columns is None else places,
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


def _described(given: Any) -> Any:
    """A dtype as an empty array of it; anything else is a default."""
    is_dtype = isinstance(given, (type, np.dtype))
    if not is_dtype:
        return given
    return np.empty(0, object if np.dtype(given).kind in "OSU" else given)


def _places(chosen: Sequence[str | int], names: Sequence[str]) -> list[int]:
    places: list[int] = []
    for one in chosen:
        place = one if isinstance(one, int) else (names.index(one) if one in names else -1)
        if not 0 <= place < len(names):
            raise InvalidArgumentError(
                f"select_columns has {one!r}, which is none of the {len(names)} columns {names}."
            )
        places.append(place)
    if len(set(places)) != len(places):
        raise InvalidArgumentError(f"select_columns={list(chosen)!r} has a column twice.")
    return sorted(places)


def _check_columns(names: Sequence[str], defaults: Sequence[Any], label: str | None) -> None:
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"Columns need different names, got {names}.")
    if len(names) != len(defaults):
        raise InvalidArgumentError(
            f"make_csv_dataset() got {len(defaults)} column_defaults for the columns {names}."
        )
    if label is not None and label not in names:
        raise InvalidArgumentError(f"label_name={label!r} is none of the columns {names}.")


class _Peek:
    """The first lines of files."""

    def __init__(
        self,
        files: list[str],
        delimiter: str,
        compression: str | None,
        code: str,
        *,
        has_quotes: bool,
    ) -> None:
        self._files = files
        self._how: Any = {
            "delimiter": delimiter,
            "quoting": csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        }
        self._compression = to_compression(compression, "make_csv_dataset")
        self._encoding = code

    def names(self) -> list[str]:
        """Those in the first line, the same in all files."""
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
        """The records of all files."""
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
                "Columns cannot be learnt from ZLIB files: give column_names and column_defaults."
            )
        with _storage.open_file(file) as raw:
            binary: Any = gzip.open(raw) if self._compression else raw  # noqa: SIM115
            with io.TextIOWrapper(binary, encoding=self._encoding, newline="") as content:
                yield from csv.reader(content, **self._how)


def _learnt(rows: Iterator[list[str]], places: Sequence[int], na_value: str) -> list[Any]:
    """A default for each wanted column, of the dtype that its first values have."""
    kinds: list[Any] = [None] * len(places)
    for row in rows:
        for k, place in enumerate(places):
            kinds[k] = _kind(row[place], na_value, kinds[k])
    found = [object if kind is None else kind for kind in kinds]
    return [[""] if kind is object else np.zeros(1, kind) for kind in found]


def _kind(text: str, na_value: str, before: Any) -> Any:
    """The strictest dtype for a value and those before it."""
    if text in ("", na_value):
        return before
    start = 0 if before is None else _TYPES.index(before)
    return next(kind for kind in _TYPES[start:] if _is_valid(text, kind))


def _is_valid(text: str, kind: Any) -> bool:
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

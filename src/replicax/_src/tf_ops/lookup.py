"""Functions of `tf.lookup`, on the host."""

from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.records.file_io import read_file
from replicax._src.tf_ops.strings import to_bytes


class TextFileIndex:
    """Column indices that stand for the number of a line, and for the whole line.

    Example:
        >>> tf.lookup.TextFileIndex.WHOLE_LINE
        -2
    """

    WHOLE_LINE = -2
    LINE_NUMBER = -1


class KeyValueTensorInitializer:
    """The keys and values of a table, given as two arrays.

    Example:
        >>> tf.lookup.KeyValueTensorInitializer(["a"], [1]).items()
        [(b'a', 1)]
    """

    def __init__(
        self,
        keys: Any,
        values: Any,
        key_dtype: Any = None,
        value_dtype: Any = None,
        name: str | None = None,
    ) -> None:
        self._keys, self._values = list(np.asarray(keys, object)), np.asarray(values)
        self.key_dtype = np.dtype(key_dtype) if key_dtype not in (None, bytes) else np.dtype(object)
        self.value_dtype = (
            self._values.dtype if value_dtype in (None, bytes) else np.dtype(value_dtype)
        )

    def items(self) -> Any:
        """Return pairs of keys and values."""
        return [(_key(k), v) for k, v in zip(self._keys, self._values.tolist(), strict=True)]


def _key(value: Any) -> Any:
    return to_bytes(value) if isinstance(value, (str, bytes)) else int(value)


class TextFileInitializer:
    """The keys and values of a table, from the lines of a file.

    Example:
        >>> tf.lookup.TextFileInitializer("vocab.txt", bytes, -2, jnp.int32, -1).value_dtype
        dtype('int32')
    """

    def __init__(
        self,
        filename: Any,
        key_dtype: Any,
        key_index: Any,
        value_dtype: Any,
        value_index: Any,
        vocab_size: Any = None,
        delimiter: Any = "\t",
        name: str | None = None,
        value_index_offset: Any = 0,
    ) -> None:
        self.key_dtype = np.dtype(object if key_dtype in (bytes, str) else key_dtype)
        self.value_dtype = np.dtype(object if value_dtype in (bytes, str) else value_dtype)
        self._filename, self._delimiter = filename, delimiter
        self._places, self._size, self._offset = (
            (key_index, value_index),
            vocab_size,
            value_index_offset,
        )

    def items(self) -> Any:
        """Return pairs of keys and values."""
        lines = read_file(self._filename).decode().splitlines()[: self._size]
        kinds = (self.key_dtype, self.value_dtype)
        return [
            tuple(
                self._column(line, i, place, kind)
                for place, kind in zip(self._places, kinds, strict=True)
            )
            for i, line in enumerate(lines)
        ]

    def _column(self, line: Any, number: Any, column: Any, kind: Any) -> Any:
        if column == TextFileIndex.LINE_NUMBER:
            return number + self._offset
        text = line if column == TextFileIndex.WHOLE_LINE else line.split(self._delimiter)[column]
        return text.encode() if kind.kind == "O" else kind.type(text).item()


class StaticHashTable:
    """A table from strings or numbers to values, for functions of elements.

    Example:
        >>> pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
        >>> tf.lookup.StaticHashTable(pairs, -1).lookup(["b", "x"])
        array([ 2, -1])
    """

    def __init__(
        self,
        initializer: Any,
        default_value: Any,
        name: str | None = None,
        experimental_is_anonymous: Any = False,
    ) -> None:
        self._table = dict(initializer.items())
        self._default = default_value
        self.key_dtype, self.value_dtype = initializer.key_dtype, initializer.value_dtype

    @property
    def default_value(self) -> Any:
        """The value of keys that are not in the table."""
        return self._default

    def size(self, name: str | None = None) -> Any:
        """Return the number of keys."""
        return len(self._table)

    def lookup(self, keys: Any, name: str | None = None) -> Any:
        """Return the values of keys."""
        if isinstance(keys, (str, bytes)):
            return self._value(to_bytes(keys))
        x = np.asarray(keys, object)
        result = np.empty(x.shape, object)
        result.reshape(-1)[:] = [self._value(_key(k)) for k in x.reshape(-1)]
        kind = self.value_dtype if self.value_dtype.kind != "U" else np.dtype(object)
        return result.astype(kind) if result.ndim else result.astype(kind)[()]

    def _value(self, key: Any) -> Any:
        value = self._table.get(key, self._default)
        return to_bytes(value) if isinstance(value, str) else value

    def export(self, name: str | None = None) -> Any:
        """Return all keys, and all values."""
        return np.array(list(self._table), object), np.array(list(self._table.values()))

    __getitem__ = lookup


class StaticVocabularyTable(StaticHashTable):
    """A table from strings to numbers; all other strings are hashed to the numbers after those.

    Example:
        >>> pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [0, 1])
        >>> tf.lookup.StaticVocabularyTable(pairs, 1).lookup(["b", "x"])
        array([1, 2])
    """

    def __init__(
        self,
        initializer: Any,
        num_oov_buckets: Any,
        lookup_key_dtype: Any = None,
        name: str | None = None,
        experimental_is_anonymous: Any = False,
    ) -> None:
        if num_oov_buckets <= 0:
            raise InvalidArgumentError(f"num_oov_buckets must be positive, got {num_oov_buckets}.")
        if initializer is not None:
            super().__init__(initializer, -1)
        else:
            self._table, self.key_dtype = {}, np.dtype(object)
        self.value_dtype = np.dtype(np.int64)
        self._buckets = int(num_oov_buckets)

    def size(self, name: str | None = None) -> Any:
        """Return the number of keys plus the number of buckets for other strings."""
        return len(self._table) + self._buckets

    def _value(self, key: Any) -> Any:
        if key in self._table:
            return self._table[key]
        number = sum(key) if isinstance(key, bytes) else key
        return len(self._table) + number % self._buckets

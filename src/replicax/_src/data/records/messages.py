"""The protocol buffer API of `Example` messages in pure Python: `Message` and the value lists."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, SupportsIndex, TypeVar

import numpy as np

from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError, StructureError
from replicax._src.data.records.column_parser import values_of
from replicax._src.data.records.wire_format import fields, write_feature

_T = TypeVar("_T")
_INT64 = range(-(1 << 63), 1 << 63)


class _Values(list[Any]):
    """A list that validates its values and calls `touch` when it changes.

    The message that contains the list uses `touch` to mark its field as set.
    """

    def __init__(self, check: Callable[[Any], Any], values: Iterable[Any] = ()) -> None:
        super().__init__(map(check, values))
        self._check = check
        self.touch: Callable[[], None] = lambda: None

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        super().extend([self._check(value) for value in values])
        self.touch()

    def insert(self, index: SupportsIndex, value: Any) -> None:
        super().insert(index, self._check(value))
        self.touch()

    def __setitem__(self, index: Any, value: Any) -> None:
        values = [self._check(v) for v in value] if isinstance(index, slice) else None
        super().__setitem__(index, self._check(value) if values is None else values)
        self.touch()


class MessageMap(dict[str, Any]):
    """A dict of messages of one type; accessing a missing one creates it."""

    def __init__(self, kind: "type[Message]", values: Mapping[str, Any]) -> None:
        super().__init__({str(name): as_message(kind, value) for name, value in values.items()})
        self._kind = kind

    def __missing__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise StructureError(f"The name of a feature is a str, got {type(name).__name__}.")
        return self.setdefault(name, self._kind())


class Message:
    """The base of messages, with the methods of protocol buffers that Example code uses."""

    _parts: ClassVar[dict[str, int]]  # names of fields, and their numbers
    _values: dict[str, Any]
    _set: set[str]

    def __init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in self._parts:
                raise InvalidArgumentError(
                    f"{type(self).__name__}({name}=...): its fields are {list(self._parts)}."
                )
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_set", set())
        for name, value in kwargs.items():
            if value is not None:
                self._values[name] = self._convert(name, value)
                self._mark(name)

    if not TYPE_CHECKING:  # hidden from checkers, so that they reject undeclared fields

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name not in self._parts:
                raise AttributeError(
                    f"{type(self).__name__} has no field {name!r}; it has {list(self._parts)}."
                )
            if name not in self._values:
                self._values[name] = self._convert(name, None)
            return self._values[name]

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be assigned, as in protocol buffers. Pass it"
                " to the constructor, or change its contents: `.value.extend(...)`,"
                " `.CopyFrom(...)`."
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            self.HasField(name) == other.HasField(name)
            and getattr(self, name) == getattr(other, name)
            for name in self._parts
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        present = (name for name in self._parts if self.HasField(name))
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in present)})"

    def _convert(self, name: str, value: Any) -> Any:
        """Return `value` as a value of the field `name`; an empty one if None."""
        raise NotImplementedError

    def _mark(self, name: str) -> None:
        """Mark a field as set."""
        self._set.add(name)

    def _read(self, data: bytes, start: int, end: int) -> None:
        """Merge the serialized message in ``data[start:end]`` into this one."""
        raise NotImplementedError

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        """Return the serialized message, with map keys in the given order."""
        raise NotImplementedError

    def HasField(self, field_name: str) -> bool:  # noqa: N802 - the name in protocol buffers
        """Whether a field is set.

        Args:
            field_name: The name of the field.

        Returns:
            True if it was set explicitly or contains values.

        Example:
            >>> rx.train.Feature().HasField("int64_list")
            False
        """
        value = self._values.get(field_name)
        is_set = isinstance(value, Message) and field_name in self._set
        return is_set or bool(value is not None and _has_content(value))

    def SerializeToString(self, deterministic: bool | None = None) -> bytes:  # noqa: N802, FBT001
        r"""Return the serialized message.

        Args:
            deterministic: True to sort map keys; otherwise they keep insertion order.

        Returns:
            The bytes, for `FromString` and the functions of `rx.io`.

        Example:
            >>> rx.train.Int64List(value=[1, 2]).SerializeToString()
            b'\n\x02\x01\x02'
        """
        return self._serialized(sorted if deterministic else iter)

    @classmethod
    def FromString(cls, data: bytes) -> Self:  # noqa: N802
        """Return the message parsed from bytes.

        Args:
            data: A serialized message of this type.

        Returns:
            The message.

        Raises:
            DataLossError: The bytes are not a valid message of this type.

        Example:
            >>> data = rx.io.serialize_example({"x": 1})
            >>> rx.train.Example.FromString(data).features.feature["x"].int64_list.value
            [1]
        """
        message = cls()
        message.ParseFromString(data)
        return message

    def ParseFromString(self, data: bytes) -> int:  # noqa: N802
        """Replace this message by the one parsed from bytes.

        Args:
            data: A serialized message of this type.

        Returns:
            The number of bytes.

        Example:
            >>> rx.train.Example().ParseFromString(rx.io.serialize_example({"x": 1}))
            14
        """
        data = bytes(data)
        self.Clear()
        try:
            self._read(data, 0, len(data))
        except (IndexError, ValueError) as error:
            raise DataLossError(
                f"These {len(data)} bytes are not a serialized {type(self).__name__} ({error}):"
                f" {data[:40]!r}."
            ) from None
        return len(data)

    def CopyFrom(self, other_msg: Self) -> None:  # noqa: N802
        """Replace this message by a copy of another one.

        Args:
            other_msg: A message of the same type.

        Example:
            >>> feature = rx.train.Feature()
            >>> feature.CopyFrom(rx.train.Feature(int64_list=rx.train.Int64List(value=[1])))
            >>> feature.int64_list.value
            [1]
        """
        self.ParseFromString(as_message(type(self), other_msg).SerializeToString())

    def Clear(self) -> None:  # noqa: N802
        """Clear all fields.

        Example:
            >>> values = rx.train.Int64List(value=[1])
            >>> values.Clear()
            >>> values.value
            []
        """
        self._values.clear()
        self._set.clear()


class _List(Message, Generic[_T]):
    """The base of messages with a list of values of one type."""

    _parts = {"value": 1}  # noqa: RUF012
    _kind: ClassVar[int]

    if TYPE_CHECKING:

        def __init__(self, *, value: Iterable[_T] = ()) -> None: ...

        @property
        def value(self) -> list[_T]: ...

    @staticmethod
    def _check(value: Any) -> Any:
        raise NotImplementedError

    def _convert(self, name: str, value: Any) -> Any:
        return _Values(type(self)._check, () if value is None else value)

    def _read(self, data: bytes, start: int, end: int) -> None:
        spans = [span for number, span in fields(data, start, end) if number == 1]
        self.value.extend(values_of(data, self._kind, spans).tolist())

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        feature = write_feature(self._kind, list(self.value))
        ((_, (start, end)),) = fields(feature, 0, len(feature))  # unwrap the enclosing Feature
        return feature[start:end]


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise StructureError(
            f"A BytesList holds bytes, got {value!r:.60} of type {type(value).__name__}. Write"
            " `text.encode()` for a str, `array.tobytes()` for an array."
        )
    return bytes(value)


def _float(value: Any) -> float:
    if isinstance(value, (str, bytes)) or np.ndim(value):
        raise StructureError(
            f"A FloatList holds numbers, got {value!r:.60} of type {type(value).__name__}. Flatten"
            " an array: `FloatList(value=array.reshape(-1))`."
        )
    return float(np.float32(value))


def _int(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise StructureError(
            f"An Int64List holds ints, got {value!r:.60} of type {type(value).__name__}. Write"
            " `int(value)`, or keep floats in a FloatList."
        )
    if number not in _INT64:
        raise StructureError(f"An Int64List holds ints of 64 bits, and {number} has more.")
    return number


class BytesList(_List[bytes]):
    """The bytes values of a feature.

    Example:
        >>> rx.train.BytesList(value=[b"a"]).value
        [b'a']
    """

    _kind = 1
    _check = staticmethod(_bytes)

    if TYPE_CHECKING:

        def __init__(self, *, value: Iterable[bytes] = ...) -> None: ...
        @property
        def value(self) -> list[bytes]: ...


class FloatList(_List[float]):
    """The float values of a feature, stored as float32.

    Example:
        >>> rx.train.FloatList(value=[0.5]).value
        [0.5]
    """

    _kind = 2
    _check = staticmethod(_float)

    if TYPE_CHECKING:

        def __init__(self, *, value: Iterable[float] = ...) -> None: ...
        @property
        def value(self) -> list[float]: ...


class Int64List(_List[int]):
    """The int values of a feature.

    Example:
        >>> rx.train.Int64List(value=[1]).value
        [1]
    """

    _kind = 3
    _check = staticmethod(_int)

    if TYPE_CHECKING:

        def __init__(self, *, value: Iterable[int] = ...) -> None: ...
        @property
        def value(self) -> list[int]: ...


def as_message(kind: type[Any], value: Any) -> Any:
    """Convert `value` to a message of type `kind`: from a dict of its fields, or None for empty."""
    if isinstance(value, kind):
        return value
    if value is None or isinstance(value, Mapping):
        return kind(**(value or {}))
    raise StructureError(
        f"A {kind.__name__} was expected, got {value!r:.60} of type {type(value).__name__}. Write"
        f" `rx.train.{kind.__name__}(...)`."
    )


def _has_content(value: Any) -> bool:
    if isinstance(value, Message):
        return any(value.HasField(name) for name in value._parts)
    return bool(value)

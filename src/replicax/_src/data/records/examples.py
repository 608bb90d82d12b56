"""`Example` and `SequenceExample`, the protocol buffer messages that TFRecord files contain."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import to_array
from replicax._src.data.records.messages import (
    BytesList,
    FloatList,
    Int64List,
    Message,
    MessageMap,
    as_message,
)
from replicax._src.data.records.wire_format import fields, write_example, write_feature, write_field


class Feature(Message):
    """The values of one feature, in one of three typed lists.

    Example:
        >>> rx.train.Feature(int64_list=rx.train.Int64List(value=[1])).int64_list.value
        [1]
    """

    _parts = {"bytes_list": 1, "float_list": 2, "int64_list": 3}  # noqa: RUF012
    _kinds: ClassVar = {"bytes_list": BytesList, "float_list": FloatList, "int64_list": Int64List}

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            bytes_list: BytesList | Mapping[str, Any] | None = ...,
            float_list: FloatList | Mapping[str, Any] | None = ...,
            int64_list: Int64List | Mapping[str, Any] | None = ...,
        ) -> None: ...
        @property
        def bytes_list(self) -> BytesList: ...
        @property
        def float_list(self) -> FloatList: ...
        @property
        def int64_list(self) -> Int64List: ...

    def WhichOneof(self, oneof_group: str = "kind") -> str | None:  # noqa: N802
        """Return the name of the list that is set.

        Args:
            oneof_group: ``"kind"``.

        Returns:
            The name of the list, or None.

        Example:
            >>> rx.train.Feature(float_list=rx.train.FloatList(value=[1])).WhichOneof("kind")
            'float_list'
        """
        if oneof_group != "kind":
            raise InvalidArgumentError(f"A Feature has one group, 'kind', not {oneof_group!r}.")
        return next((name for name in self._parts if self.HasField(name)), None)

    def _convert(self, name: str, value: Any) -> Any:
        values = as_message(self._kinds[name], value)
        # Changing a list makes it the one that is set, as in protocol buffers.
        values.value.touch = lambda: self._mark(name)
        return values

    def _mark(self, name: str) -> None:
        # The lists are a oneof: setting one clears the others.
        for other in set(self._parts) - {name}:
            self._values.pop(other, None)
        self._set.clear()
        self._set.add(name)

    def _read(self, data: bytes, start: int, end: int) -> None:
        names = {number: name for name, number in self._parts.items()}
        for number, span in fields(data, start, end):
            if number in names:
                getattr(self, names[number])._read(data, *span)
                self._mark(names[number])

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        name = self.WhichOneof()
        if name is None:
            return b""
        return write_field(self._parts[name], getattr(self, name)._serialized(order))


_FeatureLike = Feature | Mapping[str, Any]


class _Map(Message):
    """A message with one map field, from names to messages."""

    _item: ClassVar[type[Message]]

    def _convert(self, name: str, value: Any) -> Any:
        return MessageMap(self._item, {} if value is None else value)

    def _read(self, data: bytes, start: int, end: int) -> None:
        (name,) = self._parts
        for number, span in fields(data, start, end):
            key, item = "", self._item()
            for part, inner in fields(data, *span) if number == 1 else ():
                if part == 1:
                    key = data[slice(*inner)].decode()
                elif part == 2:
                    item._read(data, *inner)
            if number == 1:
                getattr(self, name)[key] = item

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        (name,) = self._parts
        items = getattr(self, name)
        pairs = ((key.encode(), items[key]._serialized(order)) for key in order(items))
        return b"".join(write_field(1, write_field(1, k) + write_field(2, v)) for k, v in pairs)


class _Composite(Message):
    """A message whose fields are messages."""

    _kinds: ClassVar[dict[str, type[Message]]]

    def _convert(self, name: str, value: Any) -> Any:
        return as_message(self._kinds[name], value)

    def _read(self, data: bytes, start: int, end: int) -> None:
        names = {number: name for name, number in self._parts.items()}
        for number, span in fields(data, start, end):
            if number in names:
                getattr(self, names[number])._read(data, *span)
                self._mark(names[number])

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        present = [name for name in self._parts if self.HasField(name)]
        parts = ((self._parts[name], getattr(self, name)._serialized(order)) for name in present)
        return b"".join(write_field(number, content) for number, content in parts)


class Features(_Map):
    """Features by name; accessing a missing one creates it.

    Example:
        >>> features = rx.train.Features()
        >>> features.feature["x"].int64_list.value.append(3)
        >>> features
        Features(feature={'x': Feature(int64_list=Int64List(value=[3]))})
    """

    _parts: ClassVar = {"feature": 1}
    _item = Feature

    if TYPE_CHECKING:

        def __init__(self, *, feature: Mapping[str, _FeatureLike] | None = ...) -> None: ...
        @property
        def feature(self) -> dict[str, Feature]: ...


class FeatureList(Message):
    """A list of features: the steps of a sequence.

    Example:
        >>> step = rx.train.Feature(int64_list=rx.train.Int64List(value=[3]))
        >>> len(rx.train.FeatureList(feature=[step, step]).feature)
        2
    """

    _parts: ClassVar = {"feature": 1}

    if TYPE_CHECKING:

        def __init__(self, *, feature: Iterable[_FeatureLike] = ...) -> None: ...
        @property
        def feature(self) -> list[Feature]: ...

    def _convert(self, name: str, value: Any) -> Any:
        return [as_message(Feature, item) for item in value or ()]

    def _read(self, data: bytes, start: int, end: int) -> None:
        for number, span in fields(data, start, end):
            if number == 1:
                self.feature.append(Feature.FromString(data[slice(*span)]))

    def _serialized(self, order: Callable[[Iterable[Any]], Iterable[Any]]) -> bytes:
        return b"".join(write_field(1, item._serialized(order)) for item in self.feature)


class FeatureLists(_Map):
    """Lists of features by name; accessing a missing one creates it.

    Example:
        >>> rx.train.FeatureLists(feature_list={"x": rx.train.FeatureList()}).feature_list
        {'x': FeatureList()}
    """

    _parts: ClassVar = {"feature_list": 1}
    _item = FeatureList

    if TYPE_CHECKING:

        def __init__(self, *, feature_list: Mapping[str, Any] | None = ...) -> None: ...
        @property
        def feature_list(self) -> dict[str, FeatureList]: ...


class Example(_Composite):
    """A set of named features, the usual content of a TFRecord record.

    Example:
        >>> feature = rx.train.Feature(int64_list=rx.train.Int64List(value=[1]))
        >>> example = rx.train.Example(features=rx.train.Features(feature={"x": feature}))
        >>> rx.train.Example.FromString(example.SerializeToString()) == example
        True
    """

    _parts: ClassVar = {"features": 1}
    _kinds: ClassVar = {"features": Features}

    if TYPE_CHECKING:

        def __init__(self, *, features: Features | Mapping[str, Any] | None = ...) -> None: ...
        @property
        def features(self) -> Features: ...


class SequenceExample(_Composite):
    """Context features, and lists of features for the steps of a sequence.

    Example:
        >>> sequence = rx.train.SequenceExample()
        >>> sequence.context.feature["length"].int64_list.value.append(2)
        >>> for word in (b"a", b"b"):
        ...     step = rx.train.Feature(bytes_list=rx.train.BytesList(value=[word]))
        ...     sequence.feature_lists.feature_list["words"].feature.append(step)
        >>> rx.train.SequenceExample.FromString(sequence.SerializeToString()) == sequence
        True
    """

    _parts: ClassVar = {"context": 1, "feature_lists": 2}
    _kinds: ClassVar = {"context": Features, "feature_lists": FeatureLists}

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            context: Features | Mapping[str, Any] | None = ...,
            feature_lists: FeatureLists | Mapping[str, Any] | None = ...,
        ) -> None: ...
        @property
        def context(self) -> Features: ...
        @property
        def feature_lists(self) -> FeatureLists: ...


def serialize_example(features: Mapping[str, Any]) -> bytes:
    """Serialize named values as an Example.

    Args:
        features: For each name a number, a string, or an array or list of them. Ints and bools are
            stored as int64, floats as float32. Shapes are not stored; `FixedLenFeature` restores
            them.

    Returns:
        The serialized message.

    Example:
        >>> data = rx.io.serialize_example({"image": np.zeros(4, np.float32), "label": 3})
        >>> features = {"label": rx.io.FixedLenFeature([], np.int64)}
        >>> int(rx.io.parse_single_example(data, features)["label"])
        3
    """
    return write_example({name: _write_values(name, value) for name, value in features.items()})


def _write_values(name: str, value: Any) -> bytes:
    array = to_array(value).reshape(-1)
    if array.dtype.kind == "O":
        return write_feature(1, array.tolist())
    if array.dtype.kind == "f":
        return write_feature(2, array)
    if array.dtype.kind in "iub":
        return write_feature(3, array.astype(np.int64).tolist())
    raise InvalidArgumentError(
        f"The feature {name!r} has dtype {array.dtype}, but an Example holds only floats, ints and"
        " strings. Convert it, or keep its bytes: `array.tobytes()`."
    )

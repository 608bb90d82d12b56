"""`Example` messages in Python: built, serialized, and read back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import to_array
from replicax.data._records._template import values_of
from replicax.data._records._wire import layout_of, write_example, write_feature


@dataclass
class BytesList:
    """Strings of a feature.

    Example:
        >>> rx.io.BytesList(value=[b"a"]).value
        [b'a']
    """

    value: Iterable[bytes] = ()


@dataclass
class FloatList:
    """Floats of a feature, kept as float32.

    Example:
        >>> rx.io.FloatList(value=[0.5]).value
        [0.5]
    """

    value: Iterable[float] = ()


@dataclass
class Int64List:
    """Ints of a feature.

    Example:
        >>> rx.io.Int64List(value=[1]).value
        [1]
    """

    value: Iterable[int] = ()


@dataclass
class Feature:
    """The values of one feature; exactly one of the three lists is set.

    Example:
        >>> rx.io.Feature(int64_list=rx.io.Int64List(value=[1])).int64_list.value
        [1]
    """

    bytes_list: BytesList | None = None
    float_list: FloatList | None = None
    int64_list: Int64List | None = None


@dataclass
class Features:
    """Features by name.

    Example:
        >>> rx.io.Features(feature={"x": rx.io.Feature()}).feature
        {'x': Feature(bytes_list=None, float_list=None, int64_list=None)}
    """

    feature: Mapping[str, Feature] = field(default_factory=dict)


@dataclass
class Example:
    """A set of named features: what a record of a TFRecord file usually holds.

    Example:
        >>> feature = rx.io.Feature(int64_list=rx.io.Int64List(value=[1]))
        >>> example = rx.io.Example(features=rx.io.Features(feature={"x": feature}))
        >>> rx.io.Example.FromString(example.SerializeToString()) == example
        True
    """

    features: Features = field(default_factory=Features)

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name in protocol buffers
        r"""The bytes of the message.

        Returns:
            What `parse_example` reads.

        Example:
            >>> rx.io.Example().SerializeToString()
            b'\n\x00'
        """
        return write_example(
            {name: _write(name, feature) for name, feature in self.features.feature.items()}
        )

    @classmethod
    def FromString(cls, data: bytes) -> "Example":  # noqa: N802 - the name in protocol buffers
        """The message in some bytes.

        Args:
            data: A serialized Example.

        Returns:
            The message.

        Raises:
            DataLossError: The bytes are not an Example.

        Example:
            >>> data = rx.io.serialize_example({"x": 1})
            >>> rx.io.Example.FromString(data).features.feature["x"].int64_list.value
            [1]
        """
        features: dict[str, Feature] = {}
        for name, (kind, spans) in layout_of(data).items():
            values = values_of(data, kind, spans).tolist() if kind in (1, 2, 3) else []
            features[name.decode()] = _READ[kind](values) if kind in _READ else Feature()
        return cls(Features(features))


def serialize_example(features: Mapping[str, Any]) -> bytes:
    """Values by name -> a serialized Example.

    Args:
        features: For each name a number, a string, or an array or list of them. Ints and bools are
            kept as int64, floats as float32; shapes are not kept, `FixedLenFeature` restores them.

    Returns:
        The bytes of the message.

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


def _write(name: str, feature: Feature) -> bytes:
    parts = [(1, feature.bytes_list), (2, feature.float_list), (3, feature.int64_list)]
    given = [(kind, list(part.value)) for kind, part in parts if part is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"The feature {name!r} has {len(given)} lists, but a Feature holds one of bytes_list,"
            " float_list and int64_list."
        )
    return write_feature(*given[0]) if given else b""


_READ = {
    1: lambda values: Feature(bytes_list=BytesList(values)),
    2: lambda values: Feature(float_list=FloatList(values)),
    3: lambda values: Feature(int64_list=Int64List(values)),
}

"""Serialization of arrays as `TensorProto` messages, and `decode_raw`."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import Array, to_array
from replicax._src.data.records.column_parser import values_of
from replicax._src.data.records.features import empty_value
from replicax._src.data.records.wire_format import Span, fields, varint, write_field, write_varint

_NUMBERS: dict[Any, int] = {
    np.dtype(np.float32): 1,
    np.dtype(np.float64): 2,
    np.dtype(np.int32): 3,
    np.dtype(np.uint8): 4,
    np.dtype(np.int16): 5,
    np.dtype(np.int8): 6,
    np.dtype(object): 7,
    np.dtype(np.complex64): 8,
    np.dtype(np.int64): 9,
    np.dtype(np.bool_): 10,
    np.dtype(ml_dtypes.bfloat16): 14,
    np.dtype(np.uint16): 17,
    np.dtype(np.complex128): 18,
    np.dtype(np.float16): 19,
    np.dtype(np.uint32): 22,
    np.dtype(np.uint64): 23,
}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}
_STRINGS = 7
_BITS = {14: np.uint16, 19: np.uint16}  # dtypes stored as the bits of their values in an int field
_FIXED = {5: "<f4", 6: "<f8", 9: "<f4", 12: "<f8"}  # float fields; pairs for complex numbers
_VARINTS = (7, 10, 11, 13, 16, 17)  # int and bool fields


def serialize_tensor(tensor: Any, name: str | None = None) -> bytes:
    r"""Serialize an array for `parse_tensor`, here or in TensorFlow.

    Args:
        tensor: An array, a number, a string, or lists of them.
        name: Ignored.

    Returns:
        A serialized TensorProto.

    Example:
        >>> rx.io.parse_tensor(rx.io.serialize_tensor([1.5, 2.5]), np.float32)
        array([1.5, 2.5], dtype=float32)
    """
    del name
    array = to_array(tensor)
    number = _NUMBERS.get(array.dtype)
    if number is None:
        raise InvalidArgumentError(
            f"serialize_tensor() got an array of dtype {array.dtype}, which no TensorProto holds."
            " Convert it first."
        )
    sizes = [b"" if not n else write_varint(8) + write_varint(n) for n in array.shape]
    shape = b"".join(write_field(2, size) for size in sizes)
    head = write_varint(8) + write_varint(number) + write_field(2, shape)
    if number == _STRINGS:
        return head + b"".join(write_field(8, item) for item in array.reshape(-1).tolist())
    return head + (write_field(4, array.tobytes()) if array.size else b"")


def parse_tensor(serialized: Any, out_type: DTypeLike, name: str | None = None) -> Any:
    """Return the array of a serialized `TensorProto`.

    Args:
        serialized: The bytes that `serialize_tensor` returned, here or in TensorFlow.
        out_type: The expected dtype.
        name: Ignored.

    Returns:
        An array, or a scalar.

    Raises:
        InvalidArgumentError: The bytes are not a TensorProto of that dtype.

    Example:
        >>> rx.io.parse_tensor(rx.io.serialize_tensor([[1, 2]]), np.int32)
        array([[1, 2]], dtype=int32)
    """
    del name
    data = to_array(serialized)[()]
    if not isinstance(data, bytes):
        raise InvalidArgumentError(
            f"parse_tensor() needs the bytes of one array, got {type(data).__name__}."
        )
    wanted = np.dtype(object) if np.dtype(out_type).kind in "OSU" else np.dtype(out_type)
    try:
        array = _parsed(data)
    except (IndexError, ValueError, KeyError) as error:
        raise InvalidArgumentError(
            f"These {len(data)} bytes are not a serialized array ({error}): {data[:40]!r}."
        ) from None
    if array.dtype != wanted:
        raise InvalidArgumentError(
            f"parse_tensor(out_type={wanted}): the bytes hold an array of {array.dtype}. Parse it"
            " as that and convert it afterwards."
        )
    return array[()] if array.ndim == 0 else array


def _parsed(data: bytes) -> Array:
    """Return the array of a serialized TensorProto, of any dtype; raise if malformed."""
    number, shape, content = 0, list[int](), None
    spans: dict[int, list[Span]] = {}
    for field, (start, end) in fields(data, 0, len(data)):
        if field == 1:
            number = varint(data, start)[0]
        elif field == 2:
            shape = [_size(data, span) for part, span in fields(data, start, end) if part == 2]
        elif field == 4:
            content = data[start:end]
        else:
            spans.setdefault(field, []).append((start, end))
    dtype = _DTYPES[number]
    if content is not None:
        return np.frombuffer(bytearray(content), dtype).reshape(shape)
    return _expanded(_values(data, spans, number), shape, dtype)


def _size(data: bytes, span: Span) -> int:
    """Return the size in a serialized `TensorShapeProto.Dim`, whose default is 0."""
    return next(
        (varint(data, start)[0] for part, (start, _) in fields(data, *span) if part == 1), 0
    )


def _values(data: bytes, spans: dict[int, list[Span]], number: int) -> Array:
    """Return the flat values of a TensorProto that are stored in a typed field."""
    dtype = _DTYPES[number]
    if number == _STRINGS:
        return values_of(data, 1, spans.get(8, []))
    for field, parts in spans.items():
        content = b"".join(data[slice(*span)] for span in parts)
        if field in _FIXED:
            values = np.frombuffer(content, _FIXED[field])
            return values.view(dtype) if dtype.kind == "c" else values.astype(dtype)
        if field in _VARINTS:
            integers = values_of(data, 3, parts)
            bits = _BITS.get(number)
            return integers.astype(dtype) if bits is None else integers.astype(bits).view(dtype)
    return np.zeros(0, dtype)


def _expanded(values: Array, shape: list[int], dtype: np.dtype[Any]) -> Array:
    """Return an array of `shape`; a TensorProto may omit trailing values equal to the last."""
    result: Array = np.full(int(np.prod(shape)), empty_value(dtype), dtype)
    if len(values) > len(result):
        raise ValueError(f"{len(values)} values for the shape {shape}")
    result[: len(values)] = values
    if len(values):
        result[len(values) :] = values[-1]
    return result.reshape(shape)


def decode_raw(
    input_bytes: Any,
    out_type: Any,
    little_endian: bool = True,  # noqa: FBT001, FBT002
    fixed_length: int | None = None,
    name: Any = None,
) -> Array:
    r"""Reinterpret the bytes of strings as numbers.

    Args:
        input_bytes: One string, or an array of strings of equal length.
        out_type: The dtype of the numbers.
        little_endian: The byte order of ``input_bytes``.
        fixed_length: Truncate or zero-pad each string to this number of bytes.
        name: Ignored.

    Returns:
        An array with one more axis than ``input_bytes``.

    Example:
        >>> rx.io.decode_raw(b"\x01\x00\x02\x00", np.int16)
        array([1, 2], dtype=int16)
        >>> rx.io.decode_raw([b"a", b"bcd"], np.uint8, fixed_length=2)
        array([[97,  0], [98, 99]], dtype=uint8)
    """
    del name
    dtype = np.dtype(out_type).newbyteorder("<" if little_endian else ">")
    strings = to_array(input_bytes)
    flat = strings.reshape(-1).tolist()
    if fixed_length is not None:
        if fixed_length < 1 or fixed_length % dtype.itemsize:
            raise InvalidArgumentError(
                f"decode_raw(fixed_length={fixed_length}): give a multiple of {dtype.itemsize}, the"
                f" size of {np.dtype(out_type)}."
            )
        flat = [item[:fixed_length].ljust(fixed_length, b"\0") for item in flat]
    lengths = {len(item) for item in flat}
    if len(lengths) > 1 or any(length % dtype.itemsize for length in lengths):
        raise InvalidArgumentError(
            f"decode_raw() needs strings of one length, a multiple of {dtype.itemsize} for"
            f" {np.dtype(out_type)}; got lengths {sorted(lengths)[:10]}. Pass fixed_length to cut"
            " and fill them."
        )
    numbers = np.frombuffer(bytearray().join(flat), dtype).astype(np.dtype(out_type), copy=False)
    return numbers.reshape(*strings.shape, -1 if flat else 0)

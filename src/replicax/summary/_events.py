"""Summaries -> the bytes of TensorBoard's event files, as TensorFlow writes them."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array
from replicax.data._records._wire import write_field, write_varint

_FLOAT, _DOUBLE, _STRING = 1, 2, 7  # numbers of TensorFlow's dtypes
_BUCKETS = 30
_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> PNG's type of colour
_WHITE = 255


def header(wall_time: float) -> bytes:
    """The first record of a file."""
    writer = write_field(10, write_field(1, b"replicax"))
    return _event(wall_time, 0, write_field(3, b"brain.Event:2") + writer)


def event(wall_time: float, step: int, value: bytes) -> bytes:
    """One value of a summary at a step."""
    return _event(wall_time, step, write_field(5, write_field(1, value)))


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    number = _varint_field(2, step) if step else b""
    return b"\x09" + struct.pack("<d", wall_time) + number + what


def scalar_value(tag: str, data: Array, description: str | None) -> bytes:
    """A number, as float32."""
    if data.shape != ():
        raise InvalidArgumentError(
            f"rx.summary.scalar {tag!r} takes one number, got an array of shape {data.shape}."
            " Reduce it first (`jnp.mean(x)`), or use `rx.summary.histogram`."
        )
    return _value(tag, _numbers(_FLOAT, data.astype("<f4")), "scalars", description)


def histogram_value(tag: str, data: Array, buckets: int | None, description: str | None) -> bytes:
    """How many values lie in each of some intervals: rows of left edge, right edge and count."""
    count = max(0, _BUCKETS if buckets is None else buckets)
    flat = data.reshape(-1).astype(np.float64)
    rows = np.zeros((count, 3), "<f8")
    if flat.size and count:
        low, high = flat.min(), flat.max()
        if low == high:
            rows[:, :2], rows[-1, 2] = high, flat.size
        else:
            places = np.floor((flat - low) / ((high - low) / count)).astype(np.int64)
            edges = np.linspace(low, high, count + 1)
            rows[:, 0], rows[:, 1] = edges[:-1], edges[1:]
            rows[:, 2] = np.bincount(np.minimum(places, count - 1), minlength=count)
    return _value(tag, _numbers(_DOUBLE, rows), "histograms", description)


def image_value(tag: str, data: Array, max_outputs: int, description: str | None) -> bytes:
    """The first few images of a batch, as PNG."""
    if data.ndim != 4 or data.shape[-1] not in _COLOURS:
        raise InvalidArgumentError(
            f"rx.summary.image {tag!r} takes images of shape [count, height, width, channels] with"
            f" 1 to 4 channels, got shape {data.shape}. For one image write `x[None]`; for gray"
            " ones without channels `x[..., None]`."
        )
    if data.dtype != np.uint8:
        data = np.clip(data.astype(np.float64) * (_WHITE + 0.5), 0, _WHITE).astype(np.uint8)
    height, width = data.shape[1:3]
    images = [png(image) for image in data[: max(0, max_outputs)]]
    strings = [str(width).encode(), str(height).encode(), *images]
    return _value(tag, _strings(strings, (len(strings),)), "images", description)


def text_value(tag: str, data: Array, description: str | None) -> bytes:
    """Strings, in Markdown."""
    strings = [x if isinstance(x, bytes) else str(x).encode() for x in data.reshape(-1).tolist()]
    return _value(tag, _strings(strings, data.shape), "text", description)


def png(image: Array) -> bytes:
    """An image of 8 bits as the bytes of a PNG file."""
    height, width, channels = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = image.reshape(height, -1)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _value(tag: str, tensor: bytes, plugin: str, description: str | None) -> bytes:
    about = write_field(1, write_field(1, plugin.encode()))
    if description:
        about += write_field(3, description.encode())
    return write_field(1, tag.encode()) + write_field(8, tensor) + write_field(9, about)


def _numbers(dtype: int, data: Array) -> bytes:
    return _varint_field(1, dtype) + _shape(data.shape) + write_field(4, data.tobytes())


def _strings(strings: Sequence[bytes], shape: tuple[int, ...]) -> bytes:
    values = b"".join(write_field(8, string) for string in strings)
    return _varint_field(1, _STRING) + _shape(shape) + values


def _shape(shape: tuple[int, ...]) -> bytes:
    sizes = (write_field(2, _varint_field(1, size) if size else b"") for size in shape)
    return write_field(2, b"".join(sizes))


def _varint_field(number: int, value: int) -> bytes:
    return write_varint(number << 3) + write_varint(value)

"""TensorBoard event files: `SummaryWriter`, the current writer and step, and the encoding.

The bytes are those that TensorFlow writes: TFRecords of `Event` messages.
"""

import contextlib
import io
import itertools
import os
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import Array
from replicax._src.data.records.wire_format import write_field, write_varint
from replicax._src.data.records.writer import TFRecordWriter
from replicax._src.files import storage
from replicax._src.files.paths import is_url, user_path

_FLUSH_MILLIS, _MAX_QUEUE = 120_000, 10
_file_numbers = itertools.count()  # makes the names of this process's files unique
_FLOAT, _DOUBLE, _STRING = 1, 2, 7  # values of TensorFlow's enum of dtypes
_BUCKETS = 30
_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # number of channels -> colour type of PNG
_WHITE = 255
_LARGEST_OBJECT = 16 << 20  # bytes of a remote file, which is uploaded again with each flush


@dataclass(frozen=True)
class State:
    """The writer, step and condition that apply to summaries in the current context."""

    writer: "SummaryWriter | None" = None
    step: Any = None
    condition: Any = True


state: ContextVar[State] = ContextVar("summary", default=State())  # noqa: B039 - it is frozen
defaults: dict[str, Any] = {}  # set by `set_as_default` and `set_step`, for all threads


class SummaryWriter:
    """A writer of summaries for TensorBoard, returned by `create_file_writer`.

    With several workers only the first one writes; summaries of the others are dropped.

    Example:
        >>> writer = rx.summary.create_noop_writer()
        >>> with writer.as_default(step=1):
        ...     rx.summary.scalar("loss", 0.5)
        False
    """

    def __init__(
        self,
        open_file: Callable[[], TFRecordWriter] | None,
        queue: int,
        wait: float,
        *,
        is_remote: bool = False,
    ) -> None:
        self._open = open_file
        self._is_remote = is_remote
        if is_remote and _before_exit is not None:
            _before_exit(partial(_close_if_alive, weakref.ref(self)))
        self._queue = queue
        self._wait = wait
        self._records: TFRecordWriter | None = None
        self._buffered = 0
        self._flushed = time.monotonic()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def writes(self) -> bool:
        """Whether the writer has a file and is not closed."""
        return self._open is not None and not self._is_closed

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator["SummaryWriter"]:
        """Make this the current writer in a ``with`` block.

        Args:
            step: The default step of summaries in the block.

        Example:
            >>> with rx.summary.create_noop_writer().as_default():
            ...     rx.summary.should_record_summaries()
            False
        """
        now = state.get()
        token = state.set(replace(now, writer=self, step=now.step if step is None else step))
        try:
            yield self
        finally:
            if not self._is_remote or self._is_late():
                self.flush()
            state.reset(token)

    def set_as_default(self, step: Any = None) -> None:
        """Make this the current writer outside of all `as_default` blocks.

        Args:
            step: The default step of summaries.

        Example:
            >>> rx.summary.create_noop_writer().set_as_default()
        """
        defaults["writer"] = self
        if step is not None:
            defaults["step"] = step

    def init(self) -> None:
        """Do nothing; a writer needs no initialization.

        Example:
            >>> rx.summary.create_noop_writer().init()
        """

    def write(self, step: int, value: bytes) -> None:
        """Append one encoded summary value to the file, which the first call creates.

        Args:
            step: The step.
            value: A serialized `Summary.Value` message.
        """
        with self._lock:
            if self._records is None:
                assert self._open is not None
                self._records = self._open()
                weakref.finalize(self, self._records.close)  # also runs at interpreter exit
            self._records.write(event(time.time(), step, value))
            self._buffered += 1
        if self._is_late() or (self._buffered >= self._queue and not self._is_remote):
            self.flush()

    def _is_late(self) -> bool:
        return time.monotonic() - self._flushed > self._wait

    def flush(self) -> None:
        """Write buffered summaries to the file.

        Example:
            >>> rx.summary.create_noop_writer().flush()
        """
        with self._lock:
            self._buffered, self._flushed = 0, time.monotonic()
            if self._records is not None and not self._is_closed:
                self._records.flush()
                if isinstance(self._records, _RemoteRecords) and self._records.is_full:
                    self._records.close()
                    self._records = None

    def close(self) -> None:
        """Close the file; later summaries are not recorded.

        Example:
            >>> rx.summary.create_noop_writer().close()
        """
        with self._lock:
            self._is_closed = True
            if self._records is not None:
                self._records.close()


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
    experimental_trackable: bool = False,
    experimental_mesh: Any = None,
) -> SummaryWriter:
    """Return a writer of a new event file for TensorBoard.

    The first summary creates the file. With several workers only the first one writes.

    Args:
        logdir: The folder, which is created if missing. A file at a URL is uploaded as a whole
            every ``flush_millis``, on `flush` and on `close`; at 16 MiB a new file is started.
        max_queue: Number of summaries after which a local file is flushed; 10 if None.
        flush_millis: Time after which the file is flushed; two minutes if None.
        filename_suffix: The suffix of the file name; ``".v2"`` if None.
        name: Accepted for compatibility with TensorFlow and ignored.
        experimental_trackable: Ignored.
        experimental_mesh: Ignored.

    Returns:
        The writer.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> writer = rx.summary.create_file_writer(folder)
        >>> with writer.as_default():
        ...     for step in range(3):
        ...         _ = rx.summary.scalar("loss", 1 / (step + 1), step=step)
        >>> len(os.listdir(folder))
        1
    """
    suffix = ".v2" if filename_suffix is None else filename_suffix
    queue = _MAX_QUEUE if max_queue is None else max_queue
    wait = (_FLUSH_MILLIS if flush_millis is None else flush_millis) / 1000
    folder = user_path(logdir)
    is_remote = is_url(folder)
    return SummaryWriter(partial(_open, folder, suffix), queue, wait, is_remote=is_remote)


class _EventObject(io.BytesIO):
    """A remote file that is uploaded as a whole on each flush: objects cannot be appended to."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._sent = -1

    def flush(self) -> None:
        if not self.closed and self.tell() != self._sent:
            storage.put(self._path, self.getvalue())
            self._sent = self.tell()

    def close(self) -> None:
        self.flush()
        super().close()


class _RemoteRecords(TFRecordWriter):
    """A TFRecord writer of a remote event file."""

    def _open(self, path: str | os.PathLike[str]) -> IO[bytes]:
        return _EventObject(os.fspath(path))

    @property
    def is_full(self) -> bool:
        """Whether the file is so large that a new one should be started."""
        return self._file is not None and self._file.tell() >= _LARGEST_OBJECT


def _close_if_alive(writer: "weakref.ref[SummaryWriter]") -> None:
    alive = writer()
    if alive is not None:
        alive.close()


# Remote writers are closed by this hook, not by `atexit`: uploading needs threads, which Python
# shuts down before it runs `atexit` callbacks.
_before_exit: Callable[..., None] | None = getattr(threading, "_register_atexit", None)


def _open(folder: str, suffix: str) -> TFRecordWriter:
    """Create an event file in `folder`, with its header record."""
    storage.make_folders(folder)
    now, host = time.time(), socket.gethostname()
    name = f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{next(_file_numbers)}{suffix}"
    path = os.path.join(folder, name)
    records = _RemoteRecords(path) if is_url(folder) else TFRecordWriter(path)
    records.write(header(now))
    return records


def create_noop_writer() -> SummaryWriter:
    """Return a writer that writes nothing.

    Example:
        >>> rx.summary.create_noop_writer().writes
        False
    """
    return SummaryWriter(None, _MAX_QUEUE, _FLUSH_MILLIS / 1000)


def get_step() -> Any:
    """Return the default step of summaries.

    Example:
        >>> with rx.summary.create_noop_writer().as_default(step=7):
        ...     rx.summary.experimental.get_step()
        7
    """
    step = state.get().step
    return defaults.get("step") if step is None else step


def set_step(step: Any) -> None:
    """Set the default step of summaries.

    Args:
        step: A number, or a variable that counts steps; None for no default.

    Example:
        >>> rx.summary.experimental.set_step(5)
        >>> rx.summary.experimental.get_step()
        5
        >>> rx.summary.experimental.set_step(None)
    """
    defaults["step"] = step


def header(wall_time: float) -> bytes:
    """Return the first record of an event file, with the format version."""
    writer = write_field(10, write_field(1, b"replicax"))
    return _event(wall_time, 0, write_field(3, b"brain.Event:2") + writer)


def event(wall_time: float, step: int, value: bytes) -> bytes:
    """Return a serialized `Event` with one summary value."""
    return _event(wall_time, step, write_field(5, write_field(1, value)))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    number = _varint_field(2, step) if step else b""
    return b"\x09" + struct.pack("<d", wall_time) + number + content


def scalar_value(tag: str, data: Array, description: str | None) -> bytes:
    """Return a serialized scalar summary, stored as float32."""
    if data.shape != ():
        raise InvalidArgumentError(
            f"rx.summary.scalar {tag!r} takes one number, got an array of shape {data.shape}."
            " Reduce it first (`jnp.mean(x)`), or use `rx.summary.histogram`."
        )
    return _value(tag, _numbers(_FLOAT, data.astype("<f4")), "scalars", description)


def histogram_value(tag: str, data: Array, buckets: int | None, description: str | None) -> bytes:
    """Return a serialized histogram summary: rows of left edge, right edge and count."""
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
    """Return a serialized image summary: the first images of a batch, encoded as PNG."""
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
    """Return a serialized text summary."""
    strings = [x if isinstance(x, bytes) else str(x).encode() for x in data.reshape(-1).tolist()]
    return _value(tag, _strings(strings, data.shape), "text", description)


def keras_model_value(tag: str, data: Array, description: str | None) -> bytes:
    """Return a serialized Keras model, as JSON, which TensorBoard draws as a graph."""
    tensor = _strings([str(data).encode()], ())
    return _value(tag, tensor, "graph_keras_model", description, b"1")


def png(image: Array) -> bytes:
    """Encode an 8-bit image of height, width and channels as PNG."""
    height, width, channels = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # first byte: filter type 0, none
    rows[:, 1:] = image.reshape(height, -1)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _value(
    tag: str, tensor: bytes, plugin: str, description: str | None, content: bytes = b""
) -> bytes:
    """Return a serialized `Summary.Value` of a tensor, for a plugin of TensorBoard."""
    data = write_field(1, plugin.encode()) + (write_field(2, content) if content else b"")
    metadata = write_field(1, data)
    if description:
        metadata += write_field(3, description.encode())
    return write_field(1, tag.encode()) + write_field(8, tensor) + write_field(9, metadata)


def _numbers(dtype: int, data: Array) -> bytes:
    """Return a serialized `TensorProto` of numbers."""
    return _varint_field(1, dtype) + _shape(data.shape) + write_field(4, data.tobytes())


def _strings(strings: Sequence[bytes], shape: tuple[int, ...]) -> bytes:
    """Return a serialized `TensorProto` of strings."""
    values = b"".join(write_field(8, string) for string in strings)
    return _varint_field(1, _STRING) + _shape(shape) + values


def _shape(shape: tuple[int, ...]) -> bytes:
    sizes = (write_field(2, _varint_field(1, size) if size else b"") for size in shape)
    return write_field(2, b"".join(sizes))


def _varint_field(number: int, value: int) -> bytes:
    return write_varint(number << 3) + write_varint(value)

"""The transfer of batches to the devices, through reused host buffers and a prefetching thread.

The prefetcher uses queues whose operations are single C calls (`SimpleQueue`, `deque`). A signal
handler that raises in the consumer can therefore run before or after an operation but not during
one: no element is lost between the thread and the consumer, and no lock is left inconsistent.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import call, itemgetter
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np

from replicax._src.base.fault_points import fault_point
from replicax._src.base.threads import deferred_signals, new_thread
from replicax._src.compat.jax import uncommitted
from replicax._src.input.split import HostStep, catch_failures
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import pieces, stacked
from replicax._src.values.placement import NUMERIC, fitting, on_device

_ALIGNMENT = 64  # bytes; JAX's CPU devices use arrays with this alignment without a copy
_MIN_POOLED = 1 << 16  # bytes; below this size malloc is as fast as the pool
_MAX_SPARE = 16  # the number of free buffers to keep


@dataclass(frozen=True)
class Feed:
    """Transfers steps from the host to the devices of the replicas.

    Attributes:
        topology: The devices of the replicas.
        wraps: Whether elements become per-replica values; with one replica they are plain arrays.
        fetch: Whether to put elements on the replicas' devices, or on the host's CPU device.
        buffers: The pool of host memory that arrays are copied to before the transfer.
    """

    topology: Topology
    wraps: bool
    fetch: bool = True
    buffers: "BufferPool" = field(default_factory=lambda: BufferPool())

    def __call__(self, step: HostStep) -> Any:
        """Return `step` as arrays on the devices; strings stay on the host."""
        if not self.wraps:
            (part,) = step.pieces(1)
            return jax.tree.map(lambda x: self._single(x), part)
        if step.parts or not self.fetch:
            columns = step.pieces(len(self.topology.local_replicas))
            return jax.tree.map(lambda *xs: self._uneven(xs), *columns)
        leaves, treedef = jax.tree.flatten(step.even)
        numeric = [i for i, x in enumerate(leaves) if _is_numeric(x)]
        put = self._put([self._stage(leaves[i], by_rows=True) for i in numeric])
        values: dict[int, Any] = {
            i: stacked(a, self.topology) for i, a in zip(numeric, put, strict=True)
        }
        for i, x in enumerate(leaves):
            if i not in values:
                values[i] = pieces(list(x), self.topology)
        return jax.tree.unflatten(treedef, [values[i] for i in range(len(leaves))])

    def _put(self, rows: list[np.ndarray]) -> list[jax.Array]:
        """Put stacked rows on the replicas' devices, one row for each."""
        sharding = self.topology.stacked
        if self.topology.is_fully_addressable:
            put: list[jax.Array] = jax.device_put(rows, sharding)
            return put
        return [
            jax.make_array_from_process_local_data(
                sharding, _canonical(x), (self.topology.num_replicas, *x.shape[1:])
            )
            for x in rows
        ]

    def _single(self, x: Any) -> Any:
        if not _is_numeric(x):
            return x
        # Uncommitted, so that programs may combine it with arrays on other devices.
        return uncommitted(jax.device_put(self._stage(np.asarray(x)), self._device(0)))

    def _uneven(self, parts: tuple[Any, ...]) -> Any:
        if not all(map(_is_numeric, parts)):
            return pieces(parts, self.topology)
        put = [on_device(self._stage(np.asarray(p)), self._device(i)) for i, p in enumerate(parts)]
        return pieces(put, self.topology)

    def _stage(self, x: np.ndarray, *, by_rows: bool = False) -> np.ndarray:
        """Return `x` in memory that the user cannot modify: a device may read or alias it later."""
        fits: np.ndarray = fitting(x)
        # Either `fitting` has copied it, or `batch` has written it to the pool directly.
        if fits is not x or self.buffers.owns(x):
            return fits
        return self.buffers.copy(x, by_rows=by_rows)

    def _device(self, replica: int) -> jax.Device:
        return (
            self.topology.primary_devices[replica]
            if self.fetch
            else jax.local_devices(backend="cpu")[0]
        )


def _canonical(x: np.ndarray) -> np.ndarray:
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _is_numeric(x: Any) -> bool:
    return np.asarray(x).dtype.kind in NUMERIC


class _PooledBuffer(np.ndarray):
    """A buffer that returns its memory to the pool when the last reference to it is dropped.

    The `base` of a NumPy view leads to this object and not past it, because its own base is a
    bytearray and not an array; so every view keeps it alive.
    """

    free: deque[bytearray]

    def __del__(self) -> None:
        if isinstance(self.base, bytearray):  # not a view of another buffer
            self.free.append(self.base)


class BufferPool:
    """A pool of aligned host memory that is reused for later batches.

    On CPU devices, `device_put` aliases aligned memory instead of copying it, so the array that is
    written here becomes the device buffer. When JAX releases it, the memory goes to the next batch;
    NumPy would return it to the system and fault in new pages for every batch.
    """

    def __init__(self) -> None:
        # A deque, as its operations are atomic: memory comes back in whichever thread drops the
        # last reference. If it is full, an append drops a buffer at the other end.
        self._free: deque[bytearray] = deque(maxlen=_MAX_SPARE)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], aligned: int = 1) -> np.ndarray:
        """Return an uninitialized array, from the pool if it is large.

        Args:
            shape: The shape.
            dtype: The dtype.
            aligned: The alignment of rows in bytes; rows are padded if needed.
        """
        strides = [dtype.itemsize]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        strides[0] += -strides[0] % aligned
        size = strides[0] * math.prod(shape[:1])
        if size < _MIN_POOLED or dtype.hasobject:
            return np.empty(shape, dtype)
        # Allocate extra bytes and start at the first aligned address.
        buffer = _PooledBuffer(size + _ALIGNMENT, np.uint8, self._allocate(size + _ALIGNMENT))
        buffer.free = self._free
        return np.ndarray(shape, dtype, buffer, -buffer.ctypes.data % _ALIGNMENT, strides)

    def owns(self, x: np.ndarray) -> bool:
        """Whether `x` is an array of this pool, or a view of one."""
        while isinstance(x.base, np.ndarray):
            x = x.base
        return isinstance(x, _PooledBuffer) and x.free is self._free

    def copy(self, x: np.ndarray, *, by_rows: bool) -> np.ndarray:
        """Return a copy of `x`; `by_rows` aligns every row, as rows go to different devices."""
        copied = self.new(x.shape, x.dtype, _ALIGNMENT if by_rows else 1)
        copied[...] = x
        return copied

    def _allocate(self, size: int) -> bytearray:
        """Return a free buffer of exactly `size` bytes, or a new one."""
        with suppress(IndexError):  # another thread emptied the pool meanwhile
            for _ in range(len(self._free)):
                memory = self._free.pop()
                if len(memory) == size:
                    return memory
                self._free.appendleft(memory)
        return bytearray(size)


_END = object()
_JOIN_SECONDS = 5.0  # how long `close` waits for the thread to end


class Prefetch:
    """A thread that produces up to `depth` elements of an iterator ahead of the consumer."""

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        depth: int,
        stop: threading.Event | None = None,
    ) -> None:
        # A token in `_room` for each element that may still be put into `_ready`: a bounded queue
        # made of two whose operations are C calls. (`Queue` has locks in Python code.)
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(max(depth, 1)):
            self._room.put(None)
        self._stop = stop or threading.Event()
        self._taken: deque[Any] = deque()
        self._is_done = False
        # The thread refers to the queues and the event but not to this object, so dropping this
        # object runs the finalizer, which ends the thread.
        end = partial(_end, self._stop, self._room, self._ready)
        self._finalizer = weakref.finalize(self, end)
        arguments = make, self._ready, self._room, self._stop
        self._thread = new_thread(_produce, *arguments, name="replicax-feed", stop=end)
        with deferred_signals:
            self._thread.start()

    def move_to(self, elements: deque[Any]) -> bool:
        """Append the next element to `elements`, atomically; return False at the end.

        Raises:
            Exception: The error that ended the iterator.
        """
        if self._is_done:
            return False
        if not self._taken:
            # One C call takes the element from the queue, stores it and frees its room: a signal
            # handler that raises cannot run in between. So does the `extend` below.
            taken = map(self._taken.append, map(call, (self._ready.get,)))
            deque(chain(taken, map(self._room.put, (None,))), maxlen=0)
        kind, value = self._taken[0]
        if kind is not None:
            elements.extend(map(itemgetter(1), map(call, (self._taken.popleft,))))
            return True
        self.close()
        if value is _END:
            return False
        raise value

    @property
    def is_done(self) -> bool:
        """Whether it was closed, or the consumer has seen its end."""
        return self._is_done

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._is_done = True
        with deferred_signals:
            self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _produce(
    make: Callable[[], Iterator[Any]],
    ready: SimpleQueue[Any],
    room: SimpleQueue[None],
    stop: threading.Event,
) -> None:
    """Put the elements of `make()` into `ready`, then an end mark with `_END` or the error."""
    last: Any = _END
    try:
        elements = make()
        try:
            # An element is made before there is room for it, so one more than `depth` is ahead.
            for element in catch_failures(elements):
                room.get()
                if stop.is_set():
                    return
                fault_point("input")
                ready.put((True, element))
                del element  # a `Failed` here would keep its traceback and the consumer alive
        finally:
            close = getattr(elements, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # handed to the consumer
        last = error
    ready.put((None, last))


def _end(stop: threading.Event, room: SimpleQueue[None], ready: SimpleQueue[Any]) -> None:
    """Stop the producer, drop the elements that are ready, and wake a waiting consumer."""
    stop.set()
    room.put(None)
    while True:
        try:
            ready.get_nowait()
        except Empty:
            break
    # A consumer may be waiting, and the loop above may have removed the producer's end mark.
    ready.put((None, _END))

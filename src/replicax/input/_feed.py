"""Feed: parts of batches -> values on the devices, made ready in a thread.

Prefetch: elements made ready in a thread that ends with its consumer.

The queues are those that are one call into C, so that a signal's handler that raises in the
consumer can come before or after a step of theirs, never within: no element is lost between the
thread and the consumer, and no lock is left in a wrong state.
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

from replicax._faults import fault_point
from replicax._jax_private import uncommitted
from replicax._threads import held, new_thread
from replicax.input._split import HostStep, attempts
from replicax.topology._mesh import Topology
from replicax.values._per_replica import pieces, stacked
from replicax.values._placement import NUMERIC, fitting, on_device

_ALIGNED = 64  # bytes; what JAX's devices on the CPU take as it is
_LARGE = 1 << 16  # bytes; smaller ones come from malloc as quickly
_SPARE = 16  # how many pieces of memory may wait for the next batch


@dataclass(frozen=True)
class Feed:
    """Where the elements of a distributed dataset go.

    Attributes:
        topology: The devices of the replicas.
        wraps: Whether elements are per-replica values; with one replica they are plain.
        fetch: Whether they are put on the replicas' devices, or stay on the host's.
        rooms: Where what is put is copied to.
    """

    topology: Topology
    wraps: bool
    fetch: bool = True
    rooms: "Rooms" = field(default_factory=lambda: Rooms())

    def __call__(self, step: HostStep) -> Any:
        """The step on the devices; strings stay on the host, as devices have none."""
        if not self.wraps:
            (part,) = step.pieces(1)
            return jax.tree.map(lambda x: self._single(x), part)
        if step.parts or not self.fetch:
            columns = step.pieces(len(self.topology.own))
            return jax.tree.map(lambda *xs: self._uneven(xs), *columns)
        leaves, treedef = jax.tree.flatten(step.even)
        numeric = [i for i, x in enumerate(leaves) if _is_numeric(x)]
        put = self._put([self._own(leaves[i], by_rows=True) for i in numeric])
        values: dict[int, Any] = {
            i: stacked(a, self.topology) for i, a in zip(numeric, put, strict=True)
        }
        for i, x in enumerate(leaves):
            if i not in values:
                values[i] = pieces(list(x), self.topology)
        return jax.tree.unflatten(treedef, [values[i] for i in range(len(leaves))])

    def _put(self, rows: list[np.ndarray]) -> list[jax.Array]:
        sharding = self.topology.stacked
        if self.topology.is_whole:
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
        return uncommitted(jax.device_put(self._own(np.asarray(x)), self._device(0)))

    def _uneven(self, parts: tuple[Any, ...]) -> Any:
        if not all(map(_is_numeric, parts)):
            return pieces(parts, self.topology)
        put = [on_device(self._own(np.asarray(p)), self._device(i)) for i, p in enumerate(parts)]
        return pieces(put, self.topology)

    def _own(self, x: np.ndarray, *, by_rows: bool = False) -> np.ndarray:
        """In memory that no user refers to, as devices may read it later, or have it for good."""
        fits: np.ndarray = fitting(x)
        if fits is not x or self.rooms.has(x):  # batches are made there if no function sees them
            return fits
        return self.rooms.copy(x, by_rows=by_rows)

    def _device(self, replica: int) -> jax.Device:
        return self.topology.leads[replica] if self.fetch else jax.local_devices(backend="cpu")[0]


def _canonical(x: np.ndarray) -> np.ndarray:
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _is_numeric(x: Any) -> bool:
    return np.asarray(x).dtype.kind in NUMERIC


class _Room(np.ndarray):
    """Memory while anything refers to it; then it is given back.

    Views refer to the array that they were made of, or to the one which that is a view of: this
    one, and never past it, as what it is a view of is no array.
    """

    free: deque[bytearray]

    def __del__(self) -> None:
        if isinstance(self.base, bytearray):  # not a view of a room
            self.free.append(self.base)


class Rooms:
    """Memory for devices, which is used again.

    `device_put` takes memory that is aligned as it is, so that what is written here is what the
    device has, and JAX alone refers to it. When JAX lets go of it, NumPy would give the memory back
    to the system, and take it anew for the next batch, page by page; here the next batch gets it.
    """

    def __init__(self) -> None:
        self._free: deque[bytearray] = deque(maxlen=_SPARE)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], aligned: int = 1) -> np.ndarray:
        """An array to be filled.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            aligned: To how many bytes its rows are.
        """
        strides = [dtype.itemsize]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        strides[0] += -strides[0] % aligned
        size = strides[0] * math.prod(shape[:1])
        if size < _LARGE or dtype.hasobject:
            return np.empty(shape, dtype)
        room = _Room(size + _ALIGNED, np.uint8, self._take(size + _ALIGNED))
        room.free = self._free
        return np.ndarray(shape, dtype, room, -room.ctypes.data % _ALIGNED, strides)

    def has(self, x: np.ndarray) -> bool:
        """Whether it is in memory from here."""
        while isinstance(x.base, np.ndarray):
            x = x.base
        return isinstance(x, _Room) and x.free is self._free

    def copy(self, x: np.ndarray, *, by_rows: bool) -> np.ndarray:
        """A copy, in which each row is aligned if they go to different devices."""
        copied = self.new(x.shape, x.dtype, _ALIGNED if by_rows else 1)
        copied[...] = x
        return copied

    def _take(self, size: int) -> bytearray:
        with suppress(IndexError):  # another pass was quicker
            for _ in range(len(self._free)):
                memory = self._free.pop()
                if len(memory) == size:
                    return memory
                self._free.appendleft(memory)
        return bytearray(size)


_END = object()
_PATIENCE = 5.0  # seconds that a thread may take to end


class Prefetch:
    """Elements that are made ahead of time, at most ``depth`` of them."""

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        depth: int,
        stop: threading.Event | None = None,
    ) -> None:
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(max(depth, 1)):
            self._room.put(None)
        self._stop = stop or threading.Event()
        self._taken: deque[Any] = deque()
        self._is_done = False
        # The thread knows the queues and the event, never this object: dropping it ends the thread.
        end = partial(_end, self._stop, self._room, self._ready)
        self._finalizer = weakref.finalize(self, end)
        arguments = make, self._ready, self._room, self._stop
        self._thread = new_thread(_produce, *arguments, name="replicax-feed", stop=end)
        with held:
            self._thread.start()

    def move_to(self, elements: deque[Any]) -> bool:
        """Append the next element to ``elements``, wholly or not at all; False at the end.

        Raises:
            Exception: What making the element raised.
        """
        if self._is_done:
            return False
        if not self._taken:
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

    def close(self) -> None:
        """End the thread."""
        self._is_done = True
        with held:
            self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)


def _produce(
    make: Callable[[], Iterator[Any]],
    ready: SimpleQueue[Any],
    room: SimpleQueue[None],
    stop: threading.Event,
) -> None:
    last: Any = _END
    try:
        elements = make()
        try:
            for element in attempts(elements):
                room.get()
                if stop.is_set():
                    return
                fault_point("input")
                ready.put((True, element))
                del element  # what failed would be kept alive, and its trace with the consumer
        finally:
            close = getattr(elements, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # handed to the consumer
        last = error
    ready.put((None, last))


def _end(stop: threading.Event, room: SimpleQueue[None], ready: SimpleQueue[Any]) -> None:
    stop.set()
    room.put(None)
    while True:
        try:
            ready.get_nowait()
        except Empty:
            break
    ready.put((None, _END))  # for a thread that waits: its mark may be among those taken out

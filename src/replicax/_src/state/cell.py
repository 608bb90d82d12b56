"""`Cell`, the storage of one variable's value, and the undo journal of eager runs.

A mirrored cell holds one array that is equal on all replicas of its topology; within each replica
the array is replicated over the logical devices, or sharded over them. A sharded cell is mirrored
for its readers and writers, but each replica stores only a shard. A per-replica cell holds one
value per replica: a stacked array, or a tuple after eager replicas wrote to it.
"""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.base.errors import DivergenceError, PlacementError, user_line
from replicax._src.collectives.rendezvous import Abandoned
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current, within
from replicax._src.state.declaration import (
    Awaited,
    is_offloading,
    is_planned,
    new_variable_callbacks,
    notify_of_new_variables,
    refuse_planned,
)
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import PerReplica, pieces, stacked
from replicax._src.values.placement import (
    HOST_MEMORY,
    WHOLE,
    first,
    fresh_copy,
    join,
    on_device,
    replicate,
    split,
    stack,
)
from replicax._src.values.sharded import SMALL_BYTES, ShardLayout, sharded_axis
from replicax._src.workers import elastic

_numbers = itertools.count(1)

# Serializes read-modify-write and donation of variables, so threads lose no update and never see an
# array that a compiled call has consumed. Never block on a replica, worker, dataset or callback
# while holding it; enqueueing an operation is all that may happen.
variable_lock = threading.RLock()

Copies: TypeAlias = tuple[Any, Callable[[], Any]]
NO_COPIES: Copies = (None, lambda: np.empty(0))


class Cell:
    """The storage of one variable.

    Attributes:
        value: The array, or the tuple of a per-replica cell's pieces.
        owned: Whether this cell has the only reference to `value`, so that a compiled call may
            donate it: the array is the output of a compiled call, or a copy made for this cell.
            A read clears the flag.
        spec: The sharding of the value over the logical devices of each replica.
        averages: Whether different values written by the replicas are averaged (floats only), as
            for batch statistics. Otherwise different values are an error.
        draws: Whether it is the state of a random number generator.
        trainable: Whether gradient tapes watch it without a call of `watch`.
        sharded: Whether each replica stores only its shard of the value.
        offloaded: Whether the value is stored in the memory of the host; see `offload`. A tuple of
            copies that were written one by one is not.
        copies: In an elastic run, a value and a function that returns what else this worker has of
            it: of a per-replica cell, the copies of all workers' replicas, stacked (see
            `all_copies`); of a sharded one, the next worker's parts.
        line: The line of user code that wrote it in the last trace, for messages; "" if unknown.
    """

    __slots__ = (
        "__weakref__",
        "_verdict",
        "averages",
        "copies",
        "draws",
        "dtype",
        "guards",
        "line",
        "name",
        "number",
        "offloaded",
        "owned",
        "per_replica",
        "shape",
        "sharded",
        "spec",
        "topology",
        "trainable",
        "value",
    )

    transient = False  # whether it is filled for every call and holds no value between calls

    def __init__(  # noqa: PLR0913
        self,
        value: jax.Array,
        topology: Topology | None,
        name: str,
        *,
        per_replica: bool,
        spec: PartitionSpec = WHOLE,
        sharded: bool = False,
    ) -> None:
        self.shape: tuple[int, ...] = tuple(value.shape)
        self.dtype: Any = value.dtype
        self.topology = topology
        self.per_replica = per_replica
        self.spec = spec
        self.sharded = sharded
        self.offloaded = is_offloading() and not per_replica and is_worth_moving(value, topology)
        self.name = name
        # The same in every process of a cluster, since all processes create the same variables.
        self.number = next(_numbers) if topology is not None else 0
        self.owned = False
        self.averages = self.draws = False
        self.trainable = False
        self.guards: Cell | None = None
        self.line = ""
        self._verdict: Cell | None = None
        self.copies = NO_COPIES
        self.value: Any = None
        if per_replica:
            self.store_same(value)
        else:
            self.store(value)
        if new_variable_callbacks and not is_planned(value):
            self.owned = False
            self.value = Awaited(self.value, notify_of_new_variables)

    def __repr__(self) -> str:
        return f"<the value of variable {self.name!r} at {id(self):#x}>"

    @property
    def shard_layout(self) -> ShardLayout | None:
        """The layout of a sharded value on the replicas; None for other cells."""
        topology = self.topology
        if not self.sharded or topology is None:
            return None
        count = topology.shard_count
        groups = topology.num_replicas // count
        return ShardLayout(self.shape, count, topology.lines, groups=groups, logical=self.spec)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that `array` returns."""
        if self.per_replica:
            assert self.topology is not None
            return (self.topology.num_replicas, *self.shape)
        layout = self.shard_layout
        return self.shape if layout is None else layout.stored_shape

    def array(self) -> jax.Array:
        """Return the value in the form compiled code takes: replicated, in shards, or stacked."""
        self._require_value()
        if self.sharded:
            self._reshard_copies()
        if isinstance(self.value, tuple):
            assert self.topology is not None
            old, self.value = self.value, stack(self.value, self.topology)
            if self.copies[0] is old:
                self.copies = (self.value, self.copies[1])
        stored: jax.Array = self.value
        return stored

    def note_copies(self, copies: Callable[[], Any]) -> None:
        """Record copies of other workers' parts of the current value, which `copies` returns.

        A resize takes the part of a lost worker from them.
        """
        self.copies = (self.value, copies)

    def note_next_parts(self, parts: jax.Array) -> None:
        """Record the next worker's parts of the current value of a sharded cell."""
        self.note_copies(lambda: parts)

    @property
    def has_copies(self) -> bool:
        """Whether `copies` belongs to the current value."""
        return self.copies[0] is self.value and self.value is not None

    def all_copies(self) -> np.ndarray | None:
        """Return the copies of all workers' replicas, stacked; None if this worker lacks them."""
        if self.topology is not None and self.topology.is_fully_addressable:
            return np.stack([on_host(x) for x in self.pieces()])
        return self.copies[1]() if self.has_copies else None

    def store_same(self, value: jax.Array) -> None:
        """Store the same value for each replica of a per-replica cell, as all workers do."""
        topology = self.topology
        assert topology is not None
        self.store(PerReplica([value] * len(topology.local_replicas)))
        if elastic.is_on():
            count = topology.num_replicas
            self.note_copies(lambda: np.stack([on_host(value)] * count))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the stored value; the cell must have a topology."""
        where = self.device_sharding
        return where.with_memory_kind(HOST_MEMORY) if self.offloaded else where

    @property
    def device_sharding(self) -> NamedSharding:
        """The sharding of the value while a step computes with it, in the devices' memory."""
        assert self.topology is not None
        if self.per_replica:
            return self.topology.stacked
        layout = self.shard_layout
        return self.topology.sharding(self.spec if layout is None else layout.full_spec)

    def _on_devices(self) -> Any:
        """Return the stored value in the devices' memory: operations take no array of the host."""
        is_moved = self.offloaded and isinstance(self.value, jax.Array)
        return jax.device_put(self.value, self.device_sharding) if is_moved else self.value

    def lay_out(self, spec: PartitionSpec) -> None:
        """Reshard the value over the logical devices as `spec` describes."""
        value = self.value if is_planned(self.value) else self.view()
        self.spec = spec
        if self.sharded and spec != WHOLE:
            assert self.topology is not None
            self.sharded = sharded_axis(self.shape, self.topology.shard_count, spec) is not None
        self.store(value)

    def to_one_device(self) -> None:
        """Reduce a plain value that a strategy's function left replicated to a single device."""
        if isinstance(self.value.sharding, NamedSharding) and self.value.is_fully_replicated:
            self.value = first(self.value)
            self.owned = False

    def verdict(self) -> "Cell":
        """Return the cell that receives whether the replicas agreed on this one."""
        if self._verdict is None:
            with concrete():
                self._verdict = Cell(jnp.asarray(True), None, self.name, per_replica=False)
            self._verdict.guards = self
        return self._verdict

    def forget_verdict(self) -> None:
        """Drop the verdict's cell, whose value is on devices that no longer exist."""
        self._verdict = None

    def note_line(self) -> None:
        """Record the line of user code that writes the variable in the current trace."""
        self.line = user_line(sys._getframe(1)) or self.line  # noqa: SLF001

    def view(self) -> Any:
        """Return the value for cross-replica code: an array, or a per-replica value."""
        self._require_value()
        if self.sharded:
            return self._with_layout(self._collected(0))
        with variable_lock:
            self.owned = False
            if not self.per_replica:
                return first(self._on_devices())
            if isinstance(self.value, tuple):
                return pieces(self.value, self.topology)  # type: ignore[arg-type]
            assert self.topology is not None
            return stacked(self.value, self.topology)

    def _require_value(self) -> None:
        if isinstance(self.value, Awaited):
            awaited, self.value = self.value, self.value.value
            awaited.before_use()
        else:
            refuse_planned(self.value, self.name)

    def store(self, x: Any) -> None:
        """Replace the value by `x`, which has the form that `view` returns."""
        if is_planned(x):
            self.put(x)
        elif self.per_replica:
            self.put(tuple(x.stored.values))
        elif self.topology is None:
            own = fresh_copy(x)
            # Uncommitted, so it can be used with arrays on any device: where the value was computed
            # must not decide where it is used.
            self.put(first(own) if own.is_fully_replicated else own)
        elif (layout := self.shard_layout) is not None:
            self.put(layout.spread(x, self.topology))
        else:
            self.put(
                replicate(x, self.topology, self.spec), owned=self.topology.is_fully_addressable
            )

    def put(self, value: Any, *, owned: bool = False) -> None:
        """Replace the stored array or tuple by `value`; `owned` if nothing else references it."""
        with variable_lock:
            if (journal := current().journal) is not None:
                journal.note(self)
            # An eager run may be undone, which restores an array that others may reference.
            self.owned = owned and journal is None
            is_moved = self.offloaded and isinstance(value, jax.Array)
            self.value = jax.device_put(value, self.sharding) if is_moved else value

    def piece(self, replica: int) -> jax.Array:
        """Return the value of replica number `replica`."""
        return self._collected(replica) if self.sharded else self.pieces()[replica]

    def pieces(self) -> tuple[jax.Array, ...]:
        """Return the value of every replica of this process."""
        if self.sharded:
            return self._copies()
        with variable_lock:
            view = self.view()
            if self.per_replica:
                values: tuple[jax.Array, ...] = view.values
                return values
            stored = self._on_devices()
            return split(stored, self.topology) if self.topology is not None else (view,)

    def store_piece(self, replica: int, x: Any) -> None:
        """Replace the value of replica number `replica`."""
        if self.topology is None:
            self.store(x)
            return
        piece = on_device(fresh_copy(x), self.topology.primary_devices[replica])
        with variable_lock:
            own = list(self.pieces())
            own[replica] = piece
            whole = not self.per_replica and not self.sharded
            self.put(join(own, self.topology, self.spec) if whole else tuple(own))

    def _with_layout(self, x: jax.Array) -> jax.Array:
        """Return a gathered value sharded over logical devices, so that new variables follow it."""
        topology = self.topology
        assert topology is not None
        if self.spec == WHOLE or not topology.is_fully_addressable:
            return x
        return replicate(x, topology, self.spec)

    def _collected(self, replica: int) -> jax.Array:
        """Gather a sharded value to the device of one of this process's replicas."""
        self._require_value()
        if isinstance(self.value, tuple):
            copy: jax.Array = self.value[replica]
            return copy
        layout, topology = self.shard_layout, self.topology
        assert layout is not None
        assert topology is not None
        with variable_lock:
            self.owned, parts = (
                False,
                self._on_devices(),
            )  # another thread's call must not consume them
        return layout.collected(
            parts, topology, topology.primary_devices[replica], f"variable {self.name!r}"
        )

    def _copies(self) -> tuple[jax.Array, ...]:
        """Gather a sharded value to the devices of all of this process's replicas."""
        lead = self._collected(0)
        if isinstance(self.value, tuple):
            return self.value
        assert self.topology is not None
        return tuple(on_device(lead, device) for device in self.topology.primary_devices)

    def _reshard_copies(self) -> None:
        """Reshard a value whose copies were written one by one; they must be equal."""
        if not isinstance(self.value, tuple):
            return
        copies = [on_host(x) for x in self.value]
        if any(x.tobytes() != copies[0].tobytes() for x in copies):
            raise DivergenceError(
                f"Single copies of variable {self.name!r} were assigned, and they differ. The"
                ' variable is sharded (variable_policy="sharded"): each replica holds a part of one'
                " value. Assign the variable itself, or the same value to all copies."
            )
        self.store(self.value[0])


def is_worth_moving(x: Any, topology: Topology | None) -> bool:
    """Whether a variable of the shape and dtype of `x` can be stored on the host, and is large.

    Raises:
        PlacementError: If the topology has devices of other processes.
    """
    if topology is None or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    if not topology.is_fully_addressable:
        raise PlacementError(
            "Variables of strategies of several workers cannot be stored in the memory of the host:"
            ' create them outside of `rx.offload()`. variable_policy="sharded" divides them by the'
            " number of replicas."
        )
    return bool(prod(x.shape) * np.dtype(x.dtype).itemsize > SMALL_BYTES)


class Journal(dict[Cell, Any]):
    """The values that cells had before an eager run wrote to them, for rollback.

    Attributes:
        is_over: Whether the run has ended.
        taken: In a step of an elastic run, the iterators that it takes elements from, with their
            number. The elements are only peeked at until the step is committed.
        is_repeatable: Whether the rollback is complete, so that the run can be repeated.
    """

    is_over = False
    taken: dict[Any, int] | None = None
    is_repeatable = True

    def note(self, cell: Cell) -> None:
        """Save the value of `cell` before its first write.

        Raises:
            Abandoned: In a replica whose run has already ended.
        """
        if self.is_over:
            raise Abandoned
        if cell not in self:
            cell.owned = False
            self[cell] = cell.value


def run_atomically(run: Callable[[], Any], **frame: Any) -> Any:
    """Call `run`, the code of eager replicas; if it raises, roll back all variables.

    The exception may come from the code, or from a signal handler at any point. The rollback is a
    single call into C, so no signal handler can interrupt it.

    Args:
        run: The code.
        **frame: Fields of the current frame while it runs.
    """
    if current().journal is not None or current().level is not None:
        return within(run, **frame)  # the enclosing run or trace is rolled back as a whole
    # The rollback is built here from iterators implemented in C, and only consumed on failure: a
    # Python loop in the handler could itself be interrupted by a signal half way.
    journal = Journal()
    end = map(setattr, (journal,), ("is_over",), (True,))
    undo = starmap(_set_value, chain.from_iterable(map(dict.items, (journal,))))
    steps = chain(end, undo)
    try:
        return within(run, journal=journal, **frame)
    except BaseException:
        with variable_lock:
            deque(steps, maxlen=0)
        raise


_set_value = vars(Cell)["value"].__set__


def on_host(x: Any) -> np.ndarray:
    """Return an array as NumPy; PRNG keys as their underlying integers."""
    is_keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_keys else x)


def format_value(x: jax.Array) -> str:
    """Format a value for display: a number, or an array."""
    array = on_host(x)
    return repr(array.item()) if array.ndim == 0 else repr(array)

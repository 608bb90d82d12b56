"""Cell: where one variable's value lives between calls.

A mirrored cell holds one array that is the same on all replicas of its topology; within each
replica it is on every logical device, or cut over them. A sharded one is mirrored for who reads and
writes it, and held in parts, one on each replica. A per-replica cell holds one value for each
replica: a stacked array, or a tuple after eager replicas wrote to it.
"""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._errors import DivergenceError, user_line
from replicax._jax_private import concrete
from replicax.collectives._meeting import Abandoned
from replicax.context._current import current, within
from replicax.state._declaration import (
    Awaited,
    is_planned,
    newcomers,
    refuse_planned,
    tell_newcomers,
)
from replicax.topology._mesh import Topology
from replicax.values._cut import SPEC, Cut
from replicax.values._per_replica import PerReplica, pieces, stacked
from replicax.values._placement import (
    WHOLE,
    first,
    join,
    on_device,
    own_copy,
    replicate,
    split,
    stack,
)

_numbers = itertools.count(1)

# Held while a value is read and replaced, or given away, so that threads lose no update and see no
# array that a compiled call consumes. Nobody waits for a replica, a worker, an element of a dataset
# or a callback while he holds it: only for the runtime to take an operation.
changing = threading.RLock()


class Cell:
    """The storage of one variable.

    Attributes:
        value: The array, or the tuple of a per-replica cell's pieces.
        owned: Whether nobody else holds ``value``, so that a compiled call may consume it: an array
            that a compiled call made, or a copy that was stored here. Reading it gives it away.
        spec: How a mirrored value is cut over the logical devices of each replica, or over the
            replicas.
        averages: Whether replicas that write different values to a mirrored cell leave their mean,
            as statistics of their batches do; of floats only. Otherwise that is an error.
        draws: Whether it is a source of random numbers.
        trainable: Whether gradient tapes watch it by themselves.
        sharded: Whether each replica holds only its part of the value.
        line: Where the user's code wrote it in the last trace, for messages; empty if not known.
    """

    __slots__ = (
        "__weakref__",
        "_verdict",
        "averages",
        "draws",
        "dtype",
        "guards",
        "line",
        "name",
        "number",
        "owned",
        "per_replica",
        "shape",
        "sharded",
        "spec",
        "topology",
        "trainable",
        "value",
    )

    transient = False  # whether it is filled anew for every call, and not kept

    def __init__(
        self,
        value: jax.Array,
        topology: Topology | None,
        name: str,
        *,
        per_replica: bool,
        spec: PartitionSpec = WHOLE,
    ) -> None:
        self.shape: tuple[int, ...] = tuple(value.shape)
        self.dtype: Any = value.dtype
        self.topology = topology
        self.per_replica = per_replica
        self.spec = spec
        self.sharded = spec == SPEC
        self.name = name
        # The same in every process of a cluster, where all make the same variables.
        self.number = next(_numbers) if topology is not None else 0
        self.owned = False
        self.averages = self.draws = False
        self.trainable = False
        self.guards: Cell | None = None
        self.line = ""
        self._verdict: Cell | None = None
        self.value: Any = None
        if per_replica:
            assert topology is not None
            self.store(PerReplica([value] * len(topology.own)))
        else:
            self.store(value)
        if newcomers and not is_planned(value):
            self.owned = False
            self.value = Awaited(self.value, tell_newcomers)

    def __repr__(self) -> str:
        return f"<the value of variable {self.name!r} at {id(self):#x}>"

    @property
    def cut(self) -> Cut | None:
        """How a sharded value lies on the replicas; None for the others."""
        topology = self.topology
        if not self.sharded or topology is None:
            return None
        return Cut(self.shape, topology.num_replicas, topology.lines)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what `array` gives."""
        if self.per_replica:
            assert self.topology is not None
            return (self.topology.num_replicas, *self.shape)
        cut = self.cut
        return self.shape if cut is None else cut.stored_shape

    def array(self) -> jax.Array:
        """The value as compiled code takes it: replicated, in parts, or stacked."""
        self._require_value()
        if self.sharded:
            self._unite()
        if isinstance(self.value, tuple):
            assert self.topology is not None
            self.value = stack(self.value, self.topology)
        held: jax.Array = self.value
        return held

    @property
    def sharding(self) -> NamedSharding:
        """Where compiled code puts the value, in a cell that belongs to a topology."""
        assert self.topology is not None
        return self.topology.stacked if self.per_replica else self.topology.sharding(self.spec)

    def lay_out(self, spec: PartitionSpec) -> None:
        """Cut the value over the logical devices in another way."""
        value = self.value if is_planned(self.value) else self.view()
        self.spec = spec
        self.store(value)

    def to_one_device(self) -> None:
        """Take a plain value back from the devices that a strategy's function left it on."""
        if isinstance(self.value.sharding, NamedSharding) and self.value.is_fully_replicated:
            self.value = first(self.value)
            self.owned = False

    def verdict(self) -> "Cell":
        """The cell into which a compiled call writes whether the replicas agreed on this one."""
        if self._verdict is None:
            with concrete():
                self._verdict = Cell(jnp.asarray(True), None, self.name, per_replica=False)
            self._verdict.guards = self
        return self._verdict

    def note_line(self) -> None:
        """Keep the line of the user's code that writes it now, in a trace."""
        self.line = user_line(sys._getframe(1)) or self.line  # noqa: SLF001

    def view(self) -> Any:
        """The value as cross-replica code sees it: an array, or a per-replica value."""
        self._require_value()
        if self.sharded:
            return self._collected(0)
        with changing:
            self.owned = False
            if not self.per_replica:
                return first(self.value)
            if isinstance(self.value, tuple):
                return pieces(self.value, self.topology)  # type: ignore[arg-type]
            assert self.topology is not None
            return stacked(self.value, self.topology)

    def _require_value(self) -> None:
        if isinstance(self.value, Awaited):
            awaited, self.value = self.value, self.value.value
            awaited.settle()
        else:
            refuse_planned(self.value, self.name)

    def store(self, x: Any) -> None:
        """Replace the value, by one of the kind that `view` gives."""
        if is_planned(x):
            self.put(x)
        elif self.per_replica:
            self.put(tuple(x.held.values))
        elif self.topology is None:
            own = own_copy(x)
            # Free to meet other arrays: where the value came from must not decide where it is used.
            self.put(first(own) if own.is_fully_replicated else own)
        elif (cut := self.cut) is not None:
            self.put(cut.spread(x, self.topology))
        else:
            self.put(replicate(x, self.topology, self.spec), owned=self.topology.is_whole)

    def put(self, value: Any, *, owned: bool = False) -> None:
        """Replace what is held, by an array or tuple that is ready, and perhaps nobody else's."""
        with changing:
            if (journal := current().journal) is not None:
                journal.note(self)
            # What an eager run wrote may be undone, to an array that others hold.
            self.owned = owned and journal is None
            self.value = value

    def piece(self, replica: int) -> jax.Array:
        """One replica's own value."""
        return self._collected(replica) if self.sharded else self.pieces()[replica]

    def pieces(self) -> tuple[jax.Array, ...]:
        """Every replica's own value."""
        if self.sharded:
            return self._copies()
        with changing:
            view = self.view()
            if self.per_replica:
                values: tuple[jax.Array, ...] = view.values
                return values
            return split(self.value, self.topology) if self.topology is not None else (view,)

    def store_piece(self, replica: int, x: Any) -> None:
        """Replace one replica's own value."""
        if self.topology is None:
            self.store(x)
            return
        piece = on_device(own_copy(x), self.topology.leads[replica])
        with changing:
            own = list(self.pieces())
            own[replica] = piece
            whole = not self.per_replica and not self.sharded
            self.put(join(own, self.topology, self.spec) if whole else tuple(own))

    def _collected(self, replica: int) -> jax.Array:
        """A sharded value in one place, where one of this process's replicas is."""
        self._require_value()
        if isinstance(self.value, tuple):
            copy: jax.Array = self.value[replica]
            return copy
        cut, topology = self.cut, self.topology
        assert cut is not None
        assert topology is not None
        with changing:
            self.owned, parts = False, self.value  # another thread's call must not consume them
        return cut.collected(parts, topology, topology.leads[replica], f"variable {self.name!r}")

    def _copies(self) -> tuple[jax.Array, ...]:
        """A sharded value in all of these places."""
        lead = self._collected(0)
        if isinstance(self.value, tuple):
            return self.value
        assert self.topology is not None
        return tuple(on_device(lead, device) for device in self.topology.leads)

    def _unite(self) -> None:
        """Take apart again what was written copy by copy."""
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


class Journal(dict[Cell, Any]):
    """What the cells held that an eager run has written."""

    is_over = False

    def note(self, cell: Cell) -> None:
        """Keep what ``cell`` holds, which is written next.

        Raises:
            Abandoned: In a replica whose run has ended without it.
        """
        if self.is_over:
            raise Abandoned
        if cell not in self:
            cell.owned = False
            self[cell] = cell.value


def wholly(run: Callable[[], Any], **frame: Any) -> Any:
    """``run()``, which is the code of eager replicas; if it raises, no variable has changed.

    Whatever raises: the code, or the handler of a signal at any moment. The undoing is one call
    into C, in which no handler runs.

    Args:
        run: The code.
        **frame: What it finds in the current frame.
    """
    if current().journal is not None or current().level is not None:
        return within(run, **frame)  # part of what is undone as a whole
    journal = Journal()
    end = map(setattr, (journal,), ("is_over",), (True,))
    undo = starmap(_hold, chain.from_iterable(map(dict.items, (journal,))))
    steps = chain(end, undo)
    try:
        return within(run, journal=journal, **frame)
    except BaseException:
        with changing:
            deque(steps, maxlen=0)
        raise


_hold = vars(Cell)["value"].__set__


def on_host(x: Any) -> np.ndarray:
    """The bits of an array as NumPy has them; of random keys, the numbers that they stand for."""
    is_keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_keys else x)


def shown(x: jax.Array) -> str:
    """The value for a person: a number, or an array."""
    array = on_host(x)
    return repr(array.item()) if array.ndim == 0 else repr(array)

"""`Program`: one traced signature of a function, compiled, with the variables that it uses."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from math import prod
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax._src.base.errors import DivergenceError, ScopeError, TracingError
from replicax._src.base.fault_points import fault_point
from replicax._src.base.managers import contextmanager
from replicax._src.base.threads import deferred_signals
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.compat.jax import undisturbed
from replicax._src.context.current import current
from replicax._src.data.optional import Ahead
from replicax._src.functions.boundary import IteratorArgument, Outputs
from replicax._src.functions.iterator_inputs import reaches
from replicax._src.functions.jaxpr.cpu_kernels import with_cpu_kernels
from replicax._src.functions.jaxpr.lift import MAY_RAISE, Lifted, host_calls, outline
from replicax._src.functions.modes import PythonFallback
from replicax._src.functions.signature import Arguments
from replicax._src.state.agreement import divergence_message
from replicax._src.state.cell import Cell, variable_lock
from replicax._src.state.levels import TraceLevel
from replicax._src.state.variables import CHECKS_EVERY_CALL, check_cells
from replicax._src.topology.mesh import REPLICA_AXIS, Topology, on_all_replicas
from replicax._src.values import neighbors
from replicax._src.values.placement import first, fresh_copy, per_replica_jit, replicate, stack
from replicax._src.workers import elastic
from replicax._src.workers.group import digest, required
from replicax._src.workers.watchdog import load


class Program:
    """A compiled call: takes arrays and variables, returns results and new variable values."""

    def __init__(self, lifted: Lifted, level: TraceLevel, outputs: Outputs, name: str) -> None:
        lifted = lifted.rewritten(with_cpu_kernels)
        self.name = name
        self._calls = 0
        self.outputs = outputs
        self.topology = _one_topology(level.topologies, name)
        reads, read, written = lifted.reads, set(lifted.reads), set(lifted.writes)
        # `changed` and `written` share one order: JAX pairs each donated array with the first
        # output of its shape. Paired with another variable's output, it would be copied first.
        self.changed = [c for c in lifted.writes if c in read]
        self.read_only = [c for c in reads if c not in written]
        self.written = [*self.changed, *(c for c in lifted.writes if c not in read)]
        self._verdicts = [i for i, c in enumerate(self.written) if c.guards is not None]
        topology = self.topology
        self._taken = level.taken
        self._iterator_arguments = [x for x in level.taken if isinstance(x, IteratorArgument)]
        self._plain_cells = [
            c for c in {*reads, *self.written} if c.topology is None and not c.transient
        ]
        self._foreign = [
            i for i, c in enumerate(self.read_only) if c.topology not in (None, topology)
        ]
        if topology is not None and not isinstance(level.topologies.get(topology), str):
            elastic.refuse_while_joining(f"calls {name}, which is a step,")
        alone = topology is None or topology.is_fully_addressable
        # Elements of a worker-local iterator must be put where all workers' arrays are.
        self._worker_local = [
            i
            for i, c in enumerate(self.read_only)
            if c.transient and c.topology is None and not alone
        ]
        self._refuse_foreign_writes()
        place = {c: i for i, c in enumerate([*self.changed, *self.read_only])}
        order = [place[c] for c in reads]
        num_outs = lifted.num_outs
        at = {c: num_outs + i for i, c in enumerate(lifted.writes)}
        new_at = [at[c] for c in self.written]

        # Captured arrays are inputs where they may differ between processes: as constants they
        # would make the programs differ, and with them the order of their collectives.
        self._closed_over: list[Any] = []
        if topology is not None and not alone:
            self._closed_over = [_placed(x, topology) for x in lifted.consts]

        def pure(
            changed: Any, read_only: Any, args: Any, closed_over: Any = ()
        ) -> tuple[list[Any], list[Any]]:
            cells = (*self.changed, *self.read_only)
            state = [
                _on_devices(x) if c.offloaded else x
                for x, c in zip((*changed, *read_only), cells, strict=True)
            ]
            call = lifted.call if alone else lifted.with_consts(closed_over)
            results = call(*args, *(state[i] for i in order))
            new = [results[i] for i in new_at]
            copies = [x for x, c in zip(new, self.written, strict=True) if c in self._copied]
            return [*new, *([_packed(copies)] if copies else [])], results[:num_outs]

        pure.__name__ = pure.__qualname__ = name
        # A call that may fail at run time must leave the variables unchanged, so it cannot donate.
        calls = host_calls(lifted.jaxpr)
        self._may_fail = bool(self._verdicts) or not calls.isdisjoint(MAY_RAISE)
        # An elastic step keeps the old values until all workers have the new ones.
        is_spread = topology is not None and not topology.is_fully_addressable
        self._is_elastic = is_spread and elastic.is_supported()
        self._calls_back = "debug_callback" in calls
        self.donates = not self._may_fail and not self._is_elastic
        donate = (0,) if self.donates else ()
        self._changes = bool(self.written or self._taken)
        # The copies of all workers' replicas, which would be lost with a worker.
        self._copied = [c for c in self.written if self._is_elastic and _is_packable(c)]
        sharded = neighbors.is_enabled(topology) and self._is_elastic
        self._sharded = [i for i, c in enumerate(self.written) if c.sharded and sharded]
        self.jitted = jax.jit(pure, donate_argnums=donate, out_shardings=self._shardings())
        self._call: Callable[..., Any] = self._first_call
        self._label = name
        if topology is not None and not topology.is_fully_addressable:
            self._label = f"{name} (program {digest(' '.join(outline(lifted.jaxpr)))})"

    def __call__(self, arrays: Sequence[Any], leaves: Sequence[Any] = ()) -> Any:
        """Run the program on the stored values of the variables.

        Args:
            arrays: The arrays among the arguments.
            leaves: All leaves of the arguments, from which it takes the iterators.
        """
        if not self._taken:
            return self._execute(arrays, leaves)
        sources = {
            leaves[x.place] if isinstance(x, IteratorArgument) else x: n
            for x, n in self._taken.items()
        }
        return self._call_locked(sources, sorted(sources, key=id), arrays, leaves)

    def _call_locked(
        self,
        sources: Mapping[Ahead, int],
        locked: Sequence[Ahead],
        arrays: Sequence[Any],
        leaves: Sequence[Any],
    ) -> Any:
        """Run the call while holding the locks of all iterators in `locked`, in that order."""
        if locked:
            with locked[0].lock:
                return self._call_locked(sources, locked[1:], arrays, leaves)
        # Produce elements now: a pipeline's functions must not run under the lock of all calls.
        for iterator, count in sources.items():
            reaches(iterator, count)
        return self._execute(arrays, leaves)

    def _execute(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Run the program under the lock of all calls, and return its results."""
        topology = self.topology
        self._calls += 1
        if topology is not None:
            arrays = [_placed(x, topology) for x in arrays]
        # Another thread's call must not see a donated array.
        with _call_lock:
            self._bind(leaves)
            inputs = (self._read_only(), arrays, self._closed_over)
            if topology is None or topology.is_fully_addressable:
                outs, _ = self._step(inputs)
            else:
                outs = self._step_with_workers(inputs, topology)
        if CHECKS_EVERY_CALL:
            check_cells(self.written, f" after call {self._calls} of {self.name}")
        return self.outputs.rebuild(outs, local=topology is not None)

    def _step(self, inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Run the program and commit the new values of the variables atomically.

        An exception raised by a signal handler must not interrupt between the call that donates the
        old arrays and the commit of the last new one, nor before the iterators are advanced.
        """
        if (journal := current().journal) is not None:
            for cell in self.written:
                journal.note(cell)
        if self._may_fail or not self._changes:
            new, outs = self._call([c.array() for c in self.changed], *inputs)
            if self._changes:
                jax.block_until_ready(new)
                self._check_verdicts(new)
                with deferred_signals, variable_lock:
                    self._commit(new)
            return outs, new
        # Without the lock if the program has callbacks: one may read a variable from another
        # thread while this call waits for it.
        with deferred_signals, variable_lock if not self._calls_back else nullcontext():
            # An owned value is the unread output of an earlier call: it can be donated directly.
            changed = [c.value if c.owned else fresh_copy(c.array()) for c in self.changed]
            new, outs = self._call(changed, *inputs)
            self._commit(new)
        return outs, new

    def _first_call(self, *args: Any) -> Any:
        # The first call traces and lowers in Python, where the exception of a signal handler could
        # leave JAX in the middle of a trace; later calls do not.
        result = undisturbed(lambda: self._compile_and_run(*args))
        self._call = self.jitted
        return result

    def _compile_and_run(self, *args: Any) -> Any:
        if self._is_elastic:
            group = required()
            with group.compiling():
                self.jitted.lower(*args).compile()  # the call finds it in JAX's caches
            group.give_up(0.0)
        return self.jitted(*args)

    def _commit(self, new: Sequence[Any], parts: Sequence[Any] = ()) -> None:
        """Store the new values of variables, and advance the iterators.

        Args:
            new: The values.
            parts: Copies of the next worker's parts of those that are sharded, if they are kept.
        """
        for cell, value in zip(self.written, new, strict=False):
            cell.value = value
            cell.owned = True
        if self._copied:  # the last output
            _note_copies(self._copied, new[-1])
        for i, part in zip(self._sharded, parts, strict=False):
            self.written[i].note_next_parts(part)
        for iterator, count in self._taken.items():
            iterator.consume(count)

    def _step_with_workers(self, inputs: tuple[Any, ...], topology: Topology) -> list[Any]:
        """Like `_step`, with other processes; restore the old values if a process fails."""
        if self._is_elastic and current().journal is None:
            return self._elastic_step(inputs, topology)
        with on_all_replicas(topology, f"call {self._calls} of {self._label}") as finished:
            old = [c.value for c in self.written]
            outs, new = self._step(inputs)
            try:
                finished((outs, new))
            except jax.errors.JaxRuntimeError:
                if not any(isinstance(x, jax.Array) and x.is_deleted() for x in old):
                    for cell, value in zip(self.written, old, strict=True):
                        cell.value, cell.owned = value, False
                raise
            load.steps += 1
            return outs

    def _elastic_step(self, inputs: tuple[Any, ...], topology: Topology) -> list[Any]:
        """Like `_step_with_workers`, in two phases; see `replicax._src.workers.elastic`.

        Raises:
            StepInterrupted: If a worker was lost; the variables and iterators are unchanged.
        """
        results: list[Any] = []
        try:
            with on_all_replicas(topology, f"call {self._calls} of {self._label}") as finished:
                self._keep_neighbors(finished)
                new, outs = finished(self._call([c.array() for c in self.changed], *inputs))
                self._check_verdicts(new)
                parts = finished(self._shifted([new[i] for i in self._sharded], self._sharded))
                results = [new, outs, parts]
                fault_point("barrier")
                finished(step_barrier(topology))
        except WorkerLostError as error:
            if not (group := required()).may_resize:
                raise
            interrupted = elastic.StepInterrupted(group.loss, error.index)
            if results:
                interrupted.commit = lambda: self._finish(*results)
            raise interrupted from error
        with deferred_signals, variable_lock:
            self._commit(new, parts)
        load.steps += 1
        return outs  # type: ignore[no-any-return]

    def _keep_neighbors(self, finished: Callable[[Any], Any]) -> None:
        """Copy parts of sharded variables that have changed outside of steps."""
        missing = [i for i in self._sharded if not self.written[i].has_copies]
        old = [self.written[i].array() for i in missing]
        for i, part in zip(missing, finished(self._shifted(old, missing)), strict=True):
            self.written[i].note_next_parts(part)

    def _shifted(self, arrays: Sequence[Any], places: Sequence[int]) -> tuple[jax.Array, ...]:
        """Return each worker's copies of the next worker's parts of variables in `written`."""
        layouts = [layout for i in places if (layout := self.written[i].shard_layout)]
        assert self.topology is not None
        return neighbors.shifted(arrays, layouts, self.topology)

    def _finish(self, new: Sequence[Any], outs: Sequence[Any], parts: Sequence[Any]) -> Any:
        """Commit a step whose barrier failed, and return its results."""
        with deferred_signals, variable_lock:
            self._commit(new, parts)
        load.steps += 1
        return self.outputs.rebuild(outs, local=True)

    def _bind(self, leaves: Sequence[Any]) -> None:
        """Bind the iterator arguments to those of this call."""
        for argument in self._iterator_arguments:
            iterator = leaves[argument.place]
            if iterator in self._taken:
                raise PythonFallback  # also closed over: only Python knows the order of the two
            argument.bind(iterator)

    def _read_only(self) -> list[Any]:
        """Return the arrays of the variables that the program reads but does not write."""
        topology = self.topology
        if self._plain_cells:
            with variable_lock:
                self._gather_plain()
        read_only = [c.array() for c in self.read_only]
        for i in self._worker_local:
            assert topology is not None
            read_only[i] = _placed(read_only[i], topology)
        for i in self._foreign:
            assert topology is not None
            read_only[i] = _mirrored(first(read_only[i]), topology)
        return read_only

    def _gather_plain(self) -> None:
        """Move plain variables to the devices of the program."""
        topology = self.topology
        for cell in self._plain_cells:
            if topology is None:
                cell.to_one_device()
            elif cell.array().sharding != topology.mirrored:
                cell.value = _mirrored(cell.array(), topology)
                cell.owned = False

    def lowered(self, arrays: Sequence[Any]) -> Any:
        """Return JAX's lowered form, for inspection of the compiled program."""
        read_only, changed = self._read_only(), [c.array() for c in self.changed]
        return self.jitted.lower(changed, read_only, list(arrays), self._closed_over)

    def _shardings(self) -> Any:
        topology = self.topology
        if topology is None:
            return None
        return (
            [
                *(c.sharding if c.topology else topology.mirrored for c in self.written),
                *([topology.mirrored] if self._copied else []),
            ],
            [topology.stacked if s else topology.mirrored for s in self.outputs.stacked],
        )

    def _check_verdicts(self, new: Sequence[Any]) -> None:
        for i in self._verdicts:
            guarded = self.written[i].guards
            if not bool(np.asarray(new[i])) and guarded is not None:
                raise DivergenceError(divergence_message(guarded, ()))

    def _refuse_foreign_writes(self) -> None:
        for cell in self.written:
            if cell.topology not in (None, self.topology):
                raise ScopeError(
                    f"{self.name} assigns variable {cell.name!r} of one strategy and computes with"
                    " another one's replicas. Create the variable in the scope of the strategy"
                    " that writes it."
                )


def _on_devices(x: Any) -> Any:
    """Return an array of the host's memory in the memory of the devices."""
    return jax.device_put(x, jax.memory.Space.Device)


# Called with the function, its flattened arguments, and the program.
Watcher = Callable[[Any, Any, Any], None]

_watcher: ContextVar[Watcher | None] = ContextVar("replicax_watcher", default=None)


def notify_watcher(function: Any, arguments: Any, program: Program) -> None:
    """Notify the active watcher of a newly traced program, before its first run."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(function, arguments, program)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for each function that this thread traces in the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@final
class ConcreteFunction:
    """One compiled signature of a function.

    Example:
        >>> f = rx.function(lambda x: x + 1)
        >>> "add" in f.get_concrete_function(jnp.zeros(2)).as_text()
        True
    """

    def __init__(self, owner: Callable[..., Any], program: Program, arguments: Arguments) -> None:
        self._owner = owner
        self._program = program
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner(*args, **kwargs)

    @property
    def structured_input_signature(self) -> Any:
        """The arguments, with a shape and dtype in place of each array."""
        return self._arguments.with_arrays([jax.typeof(x) for x in self._arguments.arrays])

    def as_text(self) -> str:
        """Return the optimized HLO that the devices run."""
        return str(self._program.lowered(self._arguments.arrays).compile().as_text())


def _placed(x: Any, topology: Topology) -> Any:
    """Move an argument to the devices of `topology`, unless it is there already."""
    if not topology.is_fully_addressable:
        known = isinstance(x, jax.Array) and x.sharding.device_set == topology.mirrored.device_set
        return x if known else replicate(x, topology)
    # JAX moves uncommitted arrays to the devices of the others; committed ones must be copied.
    if not isinstance(x, jax.Array) or not x.committed:
        return x
    where = x.sharding
    if where.device_set == topology.mirrored.device_set and (
        topology.num_replicas == 1 or getattr(where, "mesh", None) == topology.mesh
    ):
        return x
    if x.is_fully_replicated:
        return jax.device_put(first(x), topology.mirrored)
    # A per-replica value of another strategy, or an array that the user sharded.
    is_stacked = x.shape[0] == topology.num_replicas
    return jax.device_put(x, topology.stacked if is_stacked else topology.mirrored)


def _mirrored(x: jax.Array, topology: Topology) -> jax.Array:
    if topology.is_fully_addressable:
        placed: jax.Array = jax.device_put(x, topology.mirrored)
        return placed
    return replicate(x, topology)


def _is_packable(cell: Cell) -> bool:
    """Whether `_packed` takes the copies of a cell."""
    names = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "uint32"}
    return cell.per_replica and cell.dtype.name in names


def _packed(copies: Sequence[Any]) -> Any:
    """Return the bytes of stacked arrays as one array with a row for each replica.

    One array, because each one that all workers receive is an all-gather.
    """
    rows = [jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1) for x in copies]
    return jnp.concatenate(rows, axis=1)


def _note_copies(cells: Sequence[Cell], packed: jax.Array) -> None:
    """Record the copies of `cells`, which `packed` contains."""
    end = 0
    for cell in cells:
        begin, end = end, end + prod(cell.shape) * cell.dtype.itemsize

        def copies(cell: Cell = cell, begin: int = begin, end: int = end) -> np.ndarray:
            rows = np.ascontiguousarray(np.asarray(first(packed))[:, begin:end])
            found: np.ndarray = rows.view(cell.dtype).reshape(len(rows), *cell.shape)
            return found

        cell.note_copies(copies)


def step_barrier(topology: Topology) -> jax.Array:
    """Wait until all replicas get here."""
    program, ones = _barrier(topology)
    passed: jax.Array = program(ones)
    return passed


@elastic.cached_until_resize
def _barrier(topology: Topology) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return an all-reduce of one number for each replica, and its argument."""
    axis = PartitionSpec(REPLICA_AXIS)
    program = per_replica_jit(
        lambda x: jax.lax.psum(x, REPLICA_AXIS), topology, axis, PartitionSpec()
    )
    ones = [np.ones((), np.int32)] * len(topology.local_replicas)
    return program, stack(ones, topology)


def _describe_use(use: Any) -> str:
    return use if isinstance(use, str) else f"a run of {use}"


_call_lock = threading.RLock()


def _one_topology(found: Mapping[Topology, Any], name: str) -> Topology | None:
    """Return the topology of a program; raise `TracingError` if it uses several."""
    several = [t for t in found if len(t.devices) > 1]
    if len(several) > 1:
        (a, b), whats = several[:2], [_describe_use(found[t]) for t in several]
        raise TracingError(
            f"{name} computes on two sets of replicas, of {a.num_replicas} devices ({whats[0]}) and"
            f" {b.num_replicas} devices ({whats[1]}). Use one strategy in one function."
        )
    return next(iter(several or found), None)

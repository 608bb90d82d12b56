"""`Strategy.run`: choose between eager, compiled, ragged and single-replica execution.

`run_host_driven` serves runs inside a function that Python executes, compiling and caching each. A
replica function defined inside the loop is a new object on every step. It is the same program if
its code is the same and all objects that it can reach are equivalent; captured arrays become
inputs.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from replicax._src.base.errors import ScopeError, TracingError
from replicax._src.base.threads import deferred_signals
from replicax._src.collectives import eager
from replicax._src.compat.jax import at_rest
from replicax._src.context.current import current, entered
from replicax._src.context.replica import ReplicaContext
from replicax._src.functions.boundary import replica_value
from replicax._src.functions.cache_keys import static_key
from replicax._src.functions.function import BoundFunction, Function
from replicax._src.functions.modes import runs_eagerly
from replicax._src.functions.reachable import ReachableObjects, first_difference
from replicax._src.functions.signature import conform
from replicax._src.state.cell import run_atomically
from replicax._src.state.levels import current_trace, is_staging, level
from replicax._src.strategy.closures import Closure
from replicax._src.strategy.compiled_run import run_compiled
from replicax._src.strategy.links import CompiledLink, SoloLink, as_replica
from replicax._src.strategy.ragged_run import CannotTrace, run_ragged
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import is_opaque, is_ragged, is_text
from replicax._src.values.placement import is_traced, on_device
from replicax._src.values.structures import (
    check_counts,
    map_in_order,
    regroup,
    replicas_with_rows,
    select,
)
from replicax._src.workers.watchdog import load

if TYPE_CHECKING:
    from replicax._src.strategy.base import StrategyBase
    from replicax._src.topology.mesh import Topology

_MAX_ENTRIES = 256
_MANY_PROGRAMS = 6
_log = logging.getLogger("replicax")
T = TypeVar("T")


class LRUCache(Generic[T]):
    """An LRU cache."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, T] = OrderedDict()

    def find(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value for `key`; create it with `make` if it is missing."""
        found = self._entries.pop(key, None)
        return self.put(key, make() if found is None else found)

    def get(self, key: Any) -> T | None:
        """Return the value for `key`, or None."""
        return self._entries.get(key)

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()

    def put(self, key: Any, thing: T) -> T:
        """Store a value as the most recently used one."""
        self._entries[key] = thing
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)
        return thing


@dataclass
class HostDrivenProgram:
    """A compiled replica function, with the closure for its next trace."""

    function: Callable[..., Any]
    # The latest equivalent function, and its closure: the side effects of a trace on Python objects
    # must apply to the objects of the call that caused it.
    latest: list[Any]


@dataclass
class HostDrivenRun:
    """The latest program of a replica function, with the Python state that it depends on."""

    statics: list[Any]
    reach: ReachableObjects
    program: HostDrivenProgram
    meanings: int = 1
    is_new: bool = True


def run_host_driven(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `fn` on every replica, compiled.

    Raises:
        CannotTrace: If the function can only run op by op: it takes strings, or replicas hold
            different shapes and it needs their values.
    """
    closure = Closure.of(fn)
    found = _find_program(strategy, closure)
    leaves = jax.tree.leaves((args, kwargs, closure.arrays), is_leaf=is_opaque)
    if any(map(is_text, leaves)):
        raise CannotTrace
    is_short = any(map(is_ragged, leaves))
    function = found.program.function
    if is_short:
        # Programs of ragged runs do not take the captured arrays as inputs: they belong to the key.
        key = (function, tuple(map(static_key, jax.tree.leaves(closure.arrays))))
        result = run_ragged(strategy, topology, fn, (args, kwargs), key)
    else:
        found.program.latest[:] = [fn, closure]
        result = function(closure.arrays, args, kwargs)
    if found.is_new or (is_short and not found.reach.is_unchanged()):
        # Changes that the trace itself made to Python objects must not cause another trace.
        after = Closure.of(fn)
        reach = ReachableObjects(*after.edges())
        statics = [edge.value for edge in after.statics]
        _remember(strategy, after, replace(found, statics=statics, reach=reach, is_new=False))
    return result


def _find_program(strategy: StrategyBase, closure: Closure) -> HostDrivenRun:
    """Return the program for the function and the Python state it reads; create it if missing."""
    statics = [edge.value for edge in closure.statics]
    run = strategy.host_driven_runs.get(closure.place)
    if (
        run is not None
        and len(run.statics) == len(statics)
        and all(map(operator.is_, run.statics, statics))
        and run.reach.is_unchanged()
    ):
        return run
    reach = ReachableObjects(*closure.edges())
    program = strategy.host_driven_programs.get((closure.place, reach.key))
    found = HostDrivenRun(
        statics, reach, program or _host_driven_program(strategy), is_new=program is None
    )
    if run is not None:
        found.meanings = run.meanings + found.is_new
        if found.meanings == _MANY_PROGRAMS and run.meanings < _MANY_PROGRAMS:
            _log.warning(
                "%r is compiled again whenever a Python value that it reads changes, now for the"
                " %dth time. Last, %s. Keep numbers that change in an rx.Variable, or pass them to"
                " `strategy.run` as arrays.",
                getattr(closure.fn, "__name__", closure.fn),
                _MANY_PROGRAMS,
                first_difference(run.reach, reach),
            )
    return _remember(strategy, closure, found)


def _host_driven_program(strategy: StrategyBase) -> HostDrivenProgram:
    """Return a program that runs the latest equivalent function."""
    # A function that a loop defines is a new object in each iteration. The program is traced once
    # and reads the newest of them from this list, so that all share it.
    latest: list[Any] = []

    def call(arrays: Any, a: Any, k: Any) -> Any:
        with entered(host_driven=False), latest[1].filled(arrays) as fn:
            return strategy.run(fn, a, k)

    return HostDrivenProgram(Function(call), latest)


def _remember(strategy: StrategyBase, closure: Closure, run: HostDrivenRun) -> HostDrivenRun:
    strategy.host_driven_programs.put((closure.place, run.reach.key), run.program)
    return strategy.host_driven_runs.put(closure.place, run)


_warned = False


def run_replicas(
    strategy: StrategyBase, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `fn` on every replica of `strategy`."""
    topology = strategy.topology
    if topology is not None:
        _check_place(topology, (args, kwargs))
        if not check_counts((args, kwargs), topology):
            _warn_if_undistributed((args, kwargs), topology)
    if isinstance(fn, Function | BoundFunction):
        if current().level is None and not runs_eagerly[0]:
            return _run_function(strategy, fn, args, kwargs)
        fn = fn.python_function
    frame = current()
    is_solo = topology is None or topology.num_replicas == 1
    # In a function that Python drives, each run is a program of its own. In a function that is
    # being traced (`frame.level`), the run becomes part of that trace below.
    compiles = strategy.compiles_runs or (frame.host_driven and not is_solo)
    if topology is not None and compiles and frame.level is None:
        with suppress(CannotTrace):
            return run_host_driven(strategy, topology, fn, args, kwargs)
    if topology is None or is_solo:
        return _run_solo(strategy, topology, fn, args, kwargs)
    if frame.level is not None:
        context = ReplicaContext(strategy, CompiledLink(topology, strategy.cross_device_ops))
        return run_compiled(context, topology, fn, args, kwargs)
    return _run_threads(strategy, topology, fn, args, kwargs)


def _warn_if_undistributed(arguments: Any, topology: Topology) -> None:
    """Warn once if an argument looks like a global batch: arrays are not split over replicas."""
    global _warned
    number = topology.num_replicas
    if _warned or number == 1:
        return
    for array in jax.tree.leaves(arguments):
        if isinstance(array, np.ndarray) and array.ndim and array.size and not len(array) % number:
            _warned = True
            _log.warning(
                "`strategy.run` was given a NumPy array of shape %s and no distributed value: every"
                " one of the %d replicas gets all of it. To split a batch over the replicas, take"
                " it from `strategy.experimental_distribute_dataset(dataset)`, for example with"
                " `rx.data.Dataset.from_tensors(batch)` for a single one. (Shown only once.)",
                array.shape,
                number,
            )
            return


_IN_FOREIGN_TRACE = (
    "`strategy.run` was called in a function that JAX traces itself (jax.jit, jax.grad, jax.vmap,"
    " jax.lax.scan, jax.checkpoint, ...). Its replicas would run once, while the function is"
    " traced, with values that exist only in the trace. Write `@rx.function` in place of `jax.jit`,"
    " which compiles the replicas into one program; use `rx.scan`, `rx.cond` and `rx.while_loop`;"
    " and take gradients inside the replica function."
)


def _check_place(topology: Topology, arguments: Any) -> None:
    """Check that `run` is called where it can be.

    Raises:
        ScopeError: While a tape records, or in code that is part of every replica.
        TracingError: In a trace of JAX, which the replicas' threads take no part in.
    """
    is_foreign = current_trace() is not at_rest and current().level is None
    if is_foreign and topology.num_replicas > 1:
        leaves = jax.tree.leaves(arguments, is_leaf=is_opaque)
        if is_staging() or any(map(is_traced, leaves)):
            raise TracingError(_IN_FOREIGN_TRACE)
    if current().tapes and topology.num_replicas > 1:
        raise ScopeError(
            "`strategy.run` was called while a GradientTape records, which cannot look into the"
            " replicas. Open the tape inside the replica function, around the loss; there each"
            " replica has the gradient of its own loss. For a run without gradients, use `with"
            " tape.stop_recording():`."
        )
    if current().body is not None:
        raise ScopeError(
            "`strategy.run` was called inside a merge_call or an update of compiled code, which is"
            " itself part of every replica. Call it outside of the replica function, or run"
            " without `rx.function`."
        )


def _run_function(
    strategy: StrategyBase,
    fn: Function[..., Any] | BoundFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compile the run of an `rx.function` as a whole."""
    python = fn.python_function
    if fn.input_signature is not None:
        args = conform(fn.input_signature, args, repr(fn))
    key = (strategy, static_key(fn.instance) if isinstance(fn, BoundFunction) else None)
    compiled = fn.runs.setdefault(key, Function(partial(_call_run, strategy, python)))
    return compiled(args, kwargs)


def _call_run(strategy: StrategyBase, python: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return run_replicas(strategy, python, args, kwargs)


def _run_solo(
    strategy: StrategyBase,
    topology: Topology | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `fn` directly, as the only replica."""
    args, kwargs = select((args, kwargs), 0)
    if topology is None:
        return run_atomically(
            lambda: _replica_values(fn(*args, **kwargs)), replica=strategy.solo_context
        )
    if topology.cores > 1:
        level().uses(topology, strategy)
    context, device = ReplicaContext(strategy, SoloLink(topology)), topology.primary_devices[0]
    if topology.cores == 1:  # with several devices, its arrays stay sharded
        args, kwargs = _to_device((args, kwargs), device)

    def run() -> Any:
        with jax.default_device(device):
            return _replica_values(fn(*args, **kwargs))

    return run_atomically(run, strategy=strategy, replica=context)


def _run_threads(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run every replica eagerly, op by op, in its own thread."""
    rows = replicas_with_rows((args, kwargs), topology)

    def body(replica: int) -> Any:
        device = topology.primary_devices[replica]
        dtype = strategy.reduce_dtype
        with as_replica(strategy, topology, replica, has_rows=rows[replica], reduce_dtype=dtype):
            own_args, own_kwargs = _to_device(select((args, kwargs), replica), device)
            result = fn(*own_args, **own_kwargs)
            return eager.wait_if_staged(_on_own_device(result, device))

    def run() -> Any:
        with deferred_signals, eager.open_rendezvous(topology) as rendezvous:
            return regroup(rendezvous.run(body), topology)

    try:
        results = run_atomically(run)
    except jax.errors.UnexpectedTracerError as error:
        if current_trace() is at_rest:
            raise
        raise TracingError(_IN_FOREIGN_TRACE) from error  # the replicas capture a traced value
    load.steps += 1
    return results


def _replica_values(result: Any) -> Any:
    return map_in_order(replica_value, result, is_opaque)


def _to_device(arguments: Any, device: jax.Device) -> Any:
    """Move arguments to the replica's device, uncommitted."""

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or is_traced(x):
            return x
        return x if not x.committed and x.devices() == {device} else on_device(x, device)

    return map_in_order(moved, arguments, is_opaque)


def _on_own_device(result: Any, device: jax.Device) -> Any:
    def moved(x: Any) -> Any:
        x = replica_value(x)
        if not isinstance(x, jax.Array) or x.devices() == {device}:
            return x
        return on_device(x, device)

    return map_in_order(moved, result, is_opaque)

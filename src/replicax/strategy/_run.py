"""run: PerReplica -> replica function -> PerReplica, by whichever way fits where it is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax._errors import ScopeError
from replicax._interrupts import held
from replicax.collectives import _eager
from replicax.context._current import current
from replicax.context._replica import ReplicaContext
from replicax.function._captured import own_value
from replicax.function._eagerly import runs_eagerly
from replicax.function._function import BoundFunction, Function
from replicax.function._signature import conform, static_key
from replicax.strategy._compiled import run_compiled
from replicax.strategy._hosted import run_hosted
from replicax.strategy._links import CompiledLink, SoloLink
from replicax.strategy._ragged import CannotTrace
from replicax.strategy._replica_thread import as_replica
from replicax.topology._mesh import Topology
from replicax.values._per_replica import is_opaque
from replicax.values._placement import is_traced, on_device
from replicax.values._structures import check_counts, regroup, select, who_has_rows
from replicax.variables._cell import wholly
from replicax.variables._levels import level

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase

_log = logging.getLogger("replicax")
_said = False


def run_replicas(
    strategy: StrategyBase, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``fn`` on every replica of ``strategy``."""
    topology = strategy.topology
    if topology is not None:
        _check_place(topology)
        if not check_counts((args, kwargs), topology):
            _say_that_all_get_all((args, kwargs), topology)
    if isinstance(fn, Function | BoundFunction):
        if current().level is None and not runs_eagerly[0]:
            return _run_function(strategy, fn, args, kwargs)
        fn = fn.python_function
    frame = current()
    is_solo = topology is None or topology.num_replicas == 1
    compiles = strategy.compiles_runs or (frame.hosted and not is_solo)
    if topology is not None and compiles and frame.level is None:
        with suppress(CannotTrace):
            return run_hosted(strategy, topology, fn, args, kwargs)
    if topology is None or is_solo:
        return _run_solo(strategy, topology, fn, args, kwargs)
    if frame.level is not None:
        context = ReplicaContext(strategy, CompiledLink(topology, strategy.cross_device_ops))
        return run_compiled(context, topology, fn, args, kwargs)
    return _run_threads(strategy, topology, fn, args, kwargs)


def _say_that_all_get_all(arguments: Any, topology: Topology) -> None:
    """Say once that arrays are not divided, where they look like a batch that was meant to be."""
    global _said
    number = topology.num_replicas
    if _said or number == 1:
        return
    for array in jax.tree.leaves(arguments):
        if isinstance(array, np.ndarray) and array.ndim and array.size and not len(array) % number:
            _said = True
            _log.warning(
                "`strategy.run` was given a NumPy array of shape %s and no distributed value: every"
                " one of the %d replicas gets all of it. To divide a batch over the replicas, take"
                " it from `strategy.experimental_distribute_dataset(dataset)`, for example with"
                " `rx.data.Dataset.from_tensors(batch)` for a single one. (Said once.)",
                array.shape,
                number,
            )
            return


def _check_place(topology: Topology) -> None:
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
    """A function that is compiled anyway: compile the run of it."""
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
    """One replica: call it here."""
    args, kwargs = select((args, kwargs), 0)
    if topology is None:
        return wholly(lambda: _own(fn(*args, **kwargs)), replica=strategy.solo_context)
    if topology.cores > 1:
        level().uses(topology, f"a run of {strategy}")
    context, device = ReplicaContext(strategy, SoloLink(topology)), topology.leads[0]
    if topology.cores == 1:  # a replica of several devices keeps its arrays spread
        args, kwargs = _given((args, kwargs), device)

    def run() -> Any:
        with jax.default_device(device):
            return _own(fn(*args, **kwargs))

    return wholly(run, strategy=strategy, replica=context)


def _run_threads(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Eager: every replica op by op in a thread of its own."""
    rows = who_has_rows((args, kwargs), topology)

    def body(replica: int) -> Any:
        device = topology.leads[replica]
        with as_replica(strategy, topology, replica, has_rows=rows[replica]):
            own_args, own_kwargs = _given(select((args, kwargs), replica), device)
            result = fn(*own_args, **own_kwargs)
            return _eager.settled(_on_own_device(result, device))

    def run() -> Any:
        with held, _eager.opened(topology) as meeting:
            return regroup(meeting.hold(body), topology)

    return wholly(run)


def _own(result: Any) -> Any:
    return jax.tree.map(own_value, result, is_leaf=is_opaque)


def _given(arguments: Any, device: jax.Device) -> Any:
    """Arguments on the replica's device, free to meet arrays of other devices."""

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or is_traced(x):
            return x
        return x if not x.committed and x.devices() == {device} else on_device(x, device)

    return jax.tree.map(moved, arguments, is_leaf=is_opaque)


def _on_own_device(result: Any, device: jax.Device) -> Any:
    def moved(x: Any) -> Any:
        x = own_value(x)
        if not isinstance(x, jax.Array) or x.devices() == {device}:
            return x
        return on_device(x, device)

    return jax.tree.map(moved, result, is_leaf=is_opaque)

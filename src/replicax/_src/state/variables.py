"""Variables inside other objects and structures, and checks that mirrored copies are equal.

Three subjects:

- Objects of Keras or Flax that contain an `rx.Variable`. An adapter adds a method
  `__rx_variable__` to the library's class, which returns the variable or None. Code that accepts
  variables calls `variable_of`, so that such objects work wherever an `rx.Variable` does.
- `variables`, which maps a pytree of arrays to the same pytree of variables.
- `check_in_sync` and its relatives, which compare the copies of mirrored variables.
"""

import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from replicax._src.base.errors import DivergenceError
from replicax._src.base.managers import contextmanager
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current
from replicax._src.state.cell import Cell, on_host, variable_lock
from replicax._src.state.hooks import report_read
from replicax._src.state.levels import level, refuse_in_foreign_trace
from replicax._src.state.variable import Variable, live_variables
from replicax._src.values.per_replica import Distributed
from replicax._src.values.reduce import agree
from replicax._src.workers.group import required

_allowing_reads: ContextVar[bool] = ContextVar("replicax_allow_reads", default=False)


def variable_of(x: Any) -> Variable | None:
    """Return the variable that `x` is or contains; None for any other object."""
    if isinstance(x, Variable):
        return x
    ask = getattr(type(x), "__rx_variable__", None)
    return ask(x) if ask is not None else None


def required_variable(x: Any, verb: str) -> Variable:
    """Return the variable that `x` is or contains, for the function named `verb`.

    Raises:
        TypeError: If `x` is neither.
    """
    variable = variable_of(x)
    if variable is None:
        raise TypeError(
            f"{verb} needs a variable, got {x!r} ({type(x).__name__}). Pass an rx.Variable, or a"
            " library's own that was made in the scope of a strategy."
        )
    return variable


def value_of(x: Any) -> Any:
    """Return the value of a variable in the current context; any other `x` unchanged."""
    variable = variable_of(x)
    return x if variable is None else variable.read_value()


@contextmanager
def allow_reads() -> Iterator[None]:
    """Allow reads while JAX traces, for library code that does not cache its traces."""
    token = _allowing_reads.set(True)
    try:
        yield
    finally:
        _allowing_reads.reset(token)


def read_global(variable: Variable) -> jax.Array:
    """Return the value for a library's own code: across replicas, on all their devices.

    In a replica or a traced function this is `Variable.read_value`. Elsewhere it is the array of
    all replicas instead of the first copy, so that operations on it run on the variable's devices.
    With several workers, each computes on its local copy.
    """
    frame = current()
    if frame.level is not None or frame.replica is not None:
        if not (_allowing_reads.get() and level().is_eager):
            return variable.read_value()
        with concrete():
            return variable.read_value()
    cell = variable.cell
    if not _allowing_reads.get():
        refuse_in_foreign_trace(cell)
    with concrete():
        alone = cell.topology is None or not cell.topology.is_fully_addressable
        if alone or cell.per_replica or cell.sharded:
            return variable.read_value()
        # Both steps under one lock: another thread's call could replace the value in between.
        with variable_lock:
            cell.owned = False
            whole = cell.array()
    seen: jax.Array = report_read(cell, whole)
    return seen


def stored_array(variable: Variable) -> jax.Array:
    """Return the array that the devices of all workers hold; it is never donated afterwards.

    For a sharded variable this is the stored array, in shards; see `Cell.shard_layout`.
    """
    cell = variable.cell
    refuse_in_foreign_trace(cell)
    with concrete(), variable_lock:
        array = cell.array()
        cell.owned = False
    return array


def variables(tree: Any, name: str | None = None, **declared: Any) -> Any:
    """Create a variable for each array of a structure, named by its path.

    Args:
        tree: Dictionaries, lists, tuples and other pytrees of arrays and numbers. A list is a
            structure here, even a list of numbers.
        name: A prefix for the paths.
        **declared: Arguments of `rx.Variable` for every variable: ``trainable``, ``dtype``,
            ``synchronization``, ``aggregation``.

    Returns:
        The same structure, of variables.

    Raises:
        ValueError: If a leaf is not an array.

    Example:
        >>> model = rx.variables({"dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}})
        >>> model["dense"]["kernel"].name
        'dense/kernel:0'
        >>> [v.shape for v in jax.tree.leaves(model)]
        [(3,), (2, 3)]
    """

    def made(path: Any, leaf: Any) -> Variable:
        own = jax.tree_util.keystr(path, simple=True, separator="/")
        variable: Variable = Variable(
            leaf, name="/".join(part for part in (name, own) if part) or None, **declared
        )
        return variable

    return jax.tree_util.tree_map_with_path(made, tree)


CHECKS_EVERY_CALL = os.environ.get("REPLICAX_CHECK_SYNC", "") not in ("", "0")


def check_in_sync(variables: Iterable[Any] | None = None, step: Any = None) -> None:
    """Check that every mirrored variable is bitwise equal on all replicas.

    With the environment variable ``REPLICAX_CHECK_SYNC=1`` this runs after every call of a
    compiled function, on the variables that it wrote, and before the call on arguments that were
    equal on all replicas in an earlier call, such as parameters carried by a program.

    Args:
        variables: The variables to check; all live variables by default.
        step: The step to name in the error message.

    Raises:
        DivergenceError: If copies differ; names the first such variable, the index and the values.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0, name="weight")
        >>> v.components[1].assign(2.0).numpy()
        array(2., dtype=float32)
        >>> rx.debug.check_in_sync([v])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        replicax.errors.DivergenceError: Mirrored variable 'weight' differs between replicas...
    """
    chosen = live_variables if variables is None else variables
    check_cells(
        [required_variable(v, "check_in_sync").whole.cell for v in chosen],
        "" if step is None else f" after step {step}",
    )


_alike: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def check_carried(function: Any, arguments: Iterable[tuple[str, Any]], call: str) -> None:
    """Check arguments that were equal on all replicas in an earlier call, such as carried state.

    Raises:
        DivergenceError: If one of them now differs between replicas.
    """
    alike = _alike.setdefault(function, set())
    for name, x in arguments:
        if isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Distributed):
            alike.add(name)
        elif isinstance(x, Distributed) and name in alike:
            values = [on_host(p) for p in x.values]
            if not agree(values):
                raise DivergenceError(
                    f"The {name} of {call} was the same on all replicas in an earlier call, and"
                    f" differs now: {_difference(values)}. State that a step returns stays the"
                    " same only if it is made of values that are: all-reduce the gradients first,"
                    ' `rx.distribute.get_replica_context().all_reduce("SUM", gradients)`, or keep'
                    " the state in an rx.Variable."
                )


def check_cells(cells: Iterable[Cell], when: str) -> None:
    """Check that each mirrored cell of `cells` is equal on all replicas.

    Raises:
        DivergenceError: If one is not.
    """
    spread: dict[str, tuple[Cell, np.ndarray]] = {}
    fault = ""
    for cell in cells:
        if cell.per_replica or cell.topology is None or cell.sharded:  # no copies to compare
            continue
        pieces = [on_host(p) for p in cell.pieces()]
        if not fault and not agree(pieces):
            fault = _report(cell.name, pieces, when)
        if not cell.topology.is_fully_addressable:
            spread[str(cell.number)] = (cell, pieces[0])
    if spread:
        fault = _compare_workers(spread, fault, when)
    if fault:
        raise DivergenceError(fault)


def _compare_workers(spread: dict[str, tuple[Cell, np.ndarray]], fault: str, when: str) -> str:
    """Compare cells across workers; return the error message or "", the same on all workers."""
    mine = {
        number: [hashlib.sha256(value.tobytes()).hexdigest(), str(value.ravel()[:3])]
        for number, (_, value) in spread.items()
    }
    answers = required().agree("the values of variables", [fault, mine])
    for worker, (theirs, _) in enumerate(answers):
        if theirs:
            return f"On worker {worker}: {theirs}"
    for number, (cell, _) in sorted(spread.items(), key=lambda item: int(item[0])):
        first = answers[0][1].get(number)
        for worker, (_, values) in enumerate(answers):
            if first and number in values and values[number][0] != first[0]:
                return (
                    f"Mirrored variable {cell.name!r} differs between workers{when}: worker 0 has"
                    f" {first[1]}..., worker {worker} has {values[number][1]}.... An `assign`"
                    " outside of `strategy.run` is local to each worker: assign the same value on"
                    " all, or write it inside `strategy.run`."
                )
    return ""


def _report(name: str, pieces: list[Any], when: str) -> str:
    return (
        f"Mirrored variable {name!r} differs between replicas{when}: {_difference(pieces)}."
        " Something wrote to single copies, or replicas computed an update from different values;"
        " all-reduce the values that the update is computed from."
    )


def _difference(pieces: list[Any]) -> str:
    """Describe the first entry in which the pieces differ bitwise."""
    other = next(i for i, p in enumerate(pieces) if p.tobytes() != pieces[0].tobytes())
    a, b = pieces[0], pieces[other]
    if a.shape != b.shape:
        return f"replica 0 has the shape {a.shape}, replica {other} {b.shape}"
    differ = (_bytes(a) != _bytes(b)).any(axis=-1)
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    at = f" at index {where}" if where else ""
    return (
        f"{int(differ.sum())} of {a.size} entries, first{at}: replica 0 has {a[where]}, replica"
        f" {other} has {b[where]}"
    )


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.frombuffer(a.tobytes(), np.uint8).reshape(*a.shape, a.dtype.itemsize)

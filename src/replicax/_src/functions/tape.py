"""`GradientTape`: record the operations in its block, to differentiate them afterwards.

Values stay ordinary arrays. A tape identifies the arrays that it follows by `id`: each operation
on one of them runs through `jax.vjp`, and the tape keeps the resulting VJP function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.base.managers import contextmanager
from replicax._src.base.types import UnconnectedGradients
from replicax._src.compat.jax import unrecorded
from replicax._src.context.current import current, entered
from replicax._src.functions.gradients import (
    DerivativeGuard,
    GradientRequest,
    Operation,
    Record,
    has_variable,
    partial_at,
)
from replicax._src.functions.recording import is_recorded_by, recorded
from replicax._src.state.cell import Cell
from replicax._src.state.hooks import is_differentiable
from replicax._src.state.variable import live_variables
from replicax._src.state.variables import value_of, variable_of
from replicax._src.values.per_replica import plain
from replicax._src.values.structures import map_in_order

_NONE = UnconnectedGradients.NONE


@final
class GradientTape:
    """Records the operations in its block, to compute gradients of their results.

    Trainable variables are watched automatically, arrays after a call of `watch`. In compiled code
    a tape costs the same as `rx.value_and_grad`. Open it inside the replica function, not around
    `strategy.run`.

    Args:
        persistent: Whether more than one gradient may be computed.
        watch_accessed_variables: Whether trainable variables are watched automatically.

    Example:
        >>> w = rx.Variable(3.0)
        >>> with rx.GradientTape() as tape:
        ...     loss = w * w
        >>> float(tape.gradient(loss, w))
        6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watches = watch_accessed_variables
        self._record: Record | None = None
        self._open: list[ExitStack] = []  # one for each block that it was entered with
        self._has_ended = False  # an inner one of these blocks ended
        self._outer: tuple[Any, ...] = ()
        self._cells: list[Cell] = []

    def __enter__(self) -> GradientTape:
        if self.is_recording():
            raise ValueError(
                "Tape is still recording, This can happen if you try to re-enter an already-active"
                " tape."
            )
        self._record = self._record or Record()
        self._has_ended = False
        others = tuple(t for t in current().tapes if t is not self)
        with ExitStack() as stack:
            stack.enter_context(entered(tapes=(*others, self)))
            # In a block nested in its own, operations are recorded already: recording them again
            # would count their gradients twice.
            if not is_recorded_by(self):
                self._outer = others
                stack.enter_context(recorded(self))
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()
        self._has_ended = bool(self._open)

    def watch(self, tensor: Any) -> None:
        """Follow arrays, or variables that are not watched automatically.

        Args:
            tensor: An array, a variable, or a structure of them.

        Raises:
            ValueError: If it contains other objects.

        Example:
            >>> x = jnp.float32(3)
            >>> with rx.GradientTape() as tape:
            ...     tape.watch(x)
            ...     y = x * x
            >>> float(tape.gradient(y, x))
            6.0
        """
        record = self._live()
        if not any(tape.is_recording() for tape in current().tapes):
            record = Record()  # TensorFlow watches nothing while no tape records
        for x in _leaves(tensor):
            variable = variable_of(x)
            if variable is not None:
                record.reads.setdefault(variable.cell, {})
            elif isinstance(x, jax.Array):
                record.follow(x)
            else:
                raise ValueError(
                    f"tape.watch needs jax.Arrays or variables, got {x!r} of type"
                    f" {type(x).__name__!r}. Make it an array first, `x = jnp.asarray(x)`, and"
                    " compute with that one."
                )

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Suspend recording in the block.

        Raises:
            RuntimeError: If the tape does not record.

        Example:
            >>> w = rx.Variable(3.0)
            >>> with rx.GradientTape() as tape:
            ...     with tape.stop_recording():
            ...         loss = w * w
            >>> tape.gradient(loss, w) is None
            True
        """
        if not self.is_recording():
            raise RuntimeError("Trying to stop recording a tape which is not recording.")
        try:
            with self._paused():
                yield
        finally:
            # As in TensorFlow: a gradient computed in the block ends the recording of a tape that
            # is not persistent, and resuming starts a new one.
            self._record = self._record or Record()
            self._has_ended = False

    @contextmanager
    def _paused(self) -> Iterator[None]:
        others = tuple(t for t in current().tapes if t is not self)
        with entered(tapes=others), ExitStack() as stack:
            if not others:
                stack.enter_context(unrecorded())
            yield

    def is_recording(self) -> bool:
        """Whether operations of this thread are being recorded."""
        return self._record is not None and not self._has_ended and self in current().tapes

    def reset(self) -> None:
        """Discard the recording.

        Raises:
            ValueError: If the tape does not record.

        Example:
            >>> w = rx.Variable(3.0)
            >>> with rx.GradientTape() as tape:
            ...     loss = w * w
            ...     tape.reset()
            >>> tape.gradient(loss, w) is None
            True
        """
        if not self.is_recording():
            raise ValueError("Tape is not recording.")
        self._record = Record()

    def watched_variables(self) -> tuple[Any, ...]:
        """Return the watched variables, in the order in which they were first read.

        Example:
            >>> w = rx.Variable(3.0, name="w")
            >>> with rx.GradientTape() as tape:
            ...     loss = w * w
            >>> [v.name for v in tape.watched_variables()]
            ['w:0']
        """
        if self._record is not None:
            self._cells = list(self._record.reads)
        by_cell = {v.cell: v for v in live_variables if v.whole is v}
        found = [by_cell[c] for c in self._cells if c in by_cell]
        return tuple(found)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = _NONE,
    ) -> Any:
        """Return the gradient of ``target`` with respect to ``sources``.

        Args:
            target: An array or a structure of arrays; their gradients are summed.
            sources: Variables, or arrays that are watched or were computed from watched ones.
            output_gradients: A weight for each array of ``target``, instead of ones.
            unconnected_gradients: The gradient of a source that ``target`` does not depend on:
                None, or zeros.

        Returns:
            The structure of ``sources``, with a gradient in place of each source.

        Raises:
            RuntimeError: If a gradient was already computed and the tape is not persistent.

        Example:
            >>> x, y = rx.Variable(2.0), rx.Variable(5.0)
            >>> with rx.GradientTape() as tape:
            ...     z = x * x * y
            >>> {k: float(g) for k, g in tape.gradient(z, {"x": x, "y": y}).items()}
            {'x': 20.0, 'y': 4.0}
        """
        if target is None:
            raise TypeError(
                "tape.gradient needs an array or a structure of arrays as its target, got None."
            )
        targets, weights = _leaves(target), [None] * len(_leaves(target))
        if output_gradients is not None:
            weights = jax.tree.leaves(output_gradients, is_leaf=lambda x: x is None)
        if len(weights) != len(targets):
            raise ValueError(
                f"tape.gradient got {len(targets)} targets and {len(weights)} output_gradients;"
                " give one for each, or None for ones."
            )
        with self._request(sources, unconnected_gradients) as request:
            found = request.answer(targets, [value_of(w) for w in weights])
        for tape in current().tapes:
            for source, zeros in request.zeros:
                tape.note_zeros(source, zeros)
        return found

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: UnconnectedGradients | str = _NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Return the derivative of each entry of an array by each entry of the sources.

        Args:
            target: One array.
            sources: Variables or arrays, as for `gradient`.
            unconnected_gradients: As for `gradient`.
            parallel_iterations: Accepted for compatibility with TensorFlow.
            experimental_use_pfor: Compute all rows at once; False takes less memory.

        Returns:
            The structure of ``sources``; for each source an array of the target's shape followed by
            the source's shape.

        Example:
            >>> x = rx.Variable([1.0, 2.0])
            >>> with rx.GradientTape() as tape:
            ...     y = x * x
            >>> tape.jacobian(y, x).tolist()
            [[2.0, 0.0], [0.0, 4.0]]
        """
        target = _one_array(target, "jacobian")
        rows = jnp.eye(target.size, dtype=target.dtype).reshape(target.size, *target.shape)
        with self._request(sources, unconnected_gradients) as request:
            found = _for_each(
                lambda row: request.answer_recorded(target, row), rows, experimental_use_pfor
            )
        return jax.tree.map(lambda g: g.reshape(*target.shape, *g.shape[1:]), found)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: UnconnectedGradients | str = _NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Return the jacobian of each row; row i of the target depends only on row i of the source.

        Args:
            target: An array of shape ``[b, ...]``.
            source: A watched array of shape ``[b, ...]``.
            unconnected_gradients: Accepted for compatibility with TensorFlow; always zeros.
            parallel_iterations: Accepted for compatibility with TensorFlow.
            experimental_use_pfor: Compute all entries at once; False takes less memory.

        Returns:
            An array of shape ``[b, (target's other axes), (source's other axes)]``.

        Raises:
            ValueError: If the numbers of rows differ.

        Example:
            >>> x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
            >>> with rx.GradientTape() as tape:
            ...     tape.watch(x)
            ...     y = x * x
            >>> tape.batch_jacobian(y, x)[1].tolist()
            [[6.0, 0.0], [0.0, 8.0]]
        """
        target = _one_array(target, "batch_jacobian")
        if not target.ndim or jnp.shape(source)[:1] != target.shape[:1]:
            raise ValueError(
                f"Need first dimension of target shape ({target.shape}) and source shape"
                f" ({jnp.shape(source)}) to match."
            )
        size = target[0].size
        columns = jnp.eye(size, dtype=target.dtype).reshape(size, 1, *target.shape[1:])
        with self._request(source, unconnected_gradients) as request:
            found = _for_each(
                lambda c: request.answer_recorded(target, jnp.broadcast_to(c, target.shape)),
                columns,
                experimental_use_pfor,
            )
        if found is None:  # TensorFlow returns zeros here, whatever `unconnected_gradients` is
            return jnp.zeros((*target.shape, *jnp.shape(source)[1:]), target.dtype)
        return jnp.moveaxis(found, 0, 1).reshape(*target.shape, *found.shape[2:])

    # Hooks called by the recording and by variables.

    def follows(self, x: Any) -> bool:
        """Whether `x` is watched, or was computed from watched arrays."""
        return self._record is not None and id(x) in self._record.followed

    def record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        """Run an operation; if it uses a followed array, keep its VJP function."""
        record, tapes = self._record, current().tapes
        if record is None or self._has_ended or self not in tapes:
            return call(*args)
        places = [i for i, x in enumerate(args) if id(x) in record.followed]
        given = {id(x) for x in args}
        with recorded(DerivativeGuard(record, given)) if opaque else nullcontext():
            if not places:
                return call(*args)
            outs, pull = jax.vjp(partial_at(call, args, places), *(args[i] for i in places))
        # An input returned unchanged gets a new identity: its gradient is that of this output.
        outs = [jnp.copy(x) if id(x) in given and is_differentiable(x) else x for x in outs]
        recorded_by = tuple(tape for tape in self._outer if tape in tapes)
        record.operations.append(Operation(call, args, places, outs, pull, recorded_by))
        for x in outs:
            record.follow(x)
        return outs

    def note_read(self, cell: Cell, value: jax.Array) -> None:
        """Follow `value`, which reading `cell` returned, if the variable is watched."""
        record = None if self._has_ended else self._record
        if record is not None and self._watched(record, cell):
            record.reads.setdefault(cell, {})[id(value)] = value
            record.follow(value)

    def note_zeros(self, source: Any, zeros: jax.Array) -> None:
        """Follow `zeros` if this tape follows `source`: TensorFlow computes them from it."""
        record = None if self._has_ended else self._record
        if record is None:
            return
        variable = variable_of(source)
        if self.follows(source) if variable is None else self._watched(record, variable.cell):
            record.follow(zeros)

    def _watched(self, record: Record, cell: Cell) -> bool:
        return cell in record.reads or (self._watches and cell.trainable)

    def _live(self) -> Record:
        if self._record is None:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients"
                " (or jacobians). Ask for all of them in one call, `tape.gradient(loss, [a, b])`,"
                " or write `rx.GradientTape(persistent=True)`."
            )
        return self._record

    @contextmanager
    def _request(
        self, sources: Any, unconnected: UnconnectedGradients | str
    ) -> Iterator[GradientRequest]:
        arrays = map_in_order(plain, sources, has_variable)
        request = GradientRequest(self._live(), arrays, UnconnectedGradients.parse(unconnected))
        with ExitStack() as stack:
            if not self._persistent:
                self._cells, self._record = list(request.record.reads), None
                if self in current().tapes:
                    stack.enter_context(self._paused())
            yield request


def _leaves(tree: Any) -> list[Any]:
    return list(map(plain, jax.tree.leaves(tree, is_leaf=has_variable)))


def _one_array(target: Any, verb: str) -> jax.Array:
    target = plain(target)
    if isinstance(target, jax.Array):
        return target
    raise TypeError(
        f"tape.{verb} needs one array that was computed while the tape recorded, got {target!r}"
        f" ({type(target).__name__})."
    )


def _for_each(fn: Callable[[Any], Any], rows: jax.Array, at_once: bool) -> Any:
    return jax.vmap(fn)(rows) if at_once else jax.lax.map(fn, rows)

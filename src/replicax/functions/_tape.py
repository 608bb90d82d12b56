"""GradientTape: what is computed while it is open is recorded, to be differentiated later.

Values stay ordinary arrays. A tape knows the arrays that it follows by identity: each operation
on one of them runs through `jax.vjp`, and the function that takes gradients backwards is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._blocks import contextmanager
from replicax._jax_private import unrecorded
from replicax._types import UnconnectedGradients
from replicax.context._current import current, entered
from replicax.functions._grad import DerivativeGuard, Operation, Question, Record, is_variable
from replicax.functions._recording import recorded
from replicax.state._cell import Cell
from replicax.state._creation import is_differentiable
from replicax.state._held import value_of, variable_of
from replicax.state._variable import live_variables
from replicax.values._per_replica import plain

_NONE = UnconnectedGradients.NONE


@final
class GradientTape:
    """Records what is computed in its block, for gradients of it.

    Trainable variables are watched by themselves; arrays after `watch`. In compiled code it costs
    what `rx.value_and_grad` costs. Open it inside the replica function, not around `strategy.run`.

    Args:
        persistent: Whether more than one gradient may be asked for.
        watch_accessed_variables: Whether trainable variables are watched by themselves.

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
        self._open: ExitStack | None = None
        self._outer: tuple[Any, ...] = ()
        self._cells: list[Cell] = []

    def __enter__(self) -> GradientTape:
        if self._open is not None:
            raise ValueError(
                "Tape is still recording, This can happen if you try to re-enter an already-active"
                " tape."
            )
        self._record = self._record or Record()
        self._outer = current().tapes
        with ExitStack() as stack:
            stack.enter_context(entered(tapes=(*self._outer, self)))
            stack.enter_context(recorded(self))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None

    def watch(self, tensor: Any) -> None:
        """Follow arrays, or variables that are not watched by themselves.

        Args:
            tensor: An array, a variable, or a structure of them.

        Raises:
            ValueError: If it holds something else.

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
        """Do not record until the block ends.

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
            # As in TensorFlow, where a gradient that was asked for in the block ends the record of
            # a tape that is not persistent, and going on starts a new one.
            self._record = self._record or Record()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        others = tuple(t for t in current().tapes if t is not self)
        with entered(tapes=others), ExitStack() as stack:
            if not others:
                stack.enter_context(unrecorded())
            yield

    def is_recording(self) -> bool:
        """Whether operations of this thread are recorded now."""
        return self._record is not None and self in current().tapes

    def reset(self) -> None:
        """Forget everything that was recorded.

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
        """The variables that are watched, in the order in which they were first read.

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
        """The gradient of what was computed, with respect to what it was computed from.

        Args:
            target: An array or a structure of arrays; their gradients are added up.
            sources: Variables, or arrays that are watched or were computed from such.
            output_gradients: What to weigh each array of ``target`` with, instead of ones.
            unconnected_gradients: What to return for a source that ``target`` does not depend on:
                None, or zeros.

        Returns:
            The structure of ``sources``, with a gradient in the place of each.

        Raises:
            RuntimeError: If it was asked for a gradient before, and is not persistent.

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
        with self._asked(sources, unconnected_gradients) as question:
            return question.answer(targets, [value_of(w) for w in weights])

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: UnconnectedGradients | str = _NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """The derivative of each entry of an array with respect to each entry of the sources.

        Args:
            target: One array.
            sources: Variables or arrays, as for `gradient`.
            unconnected_gradients: As for `gradient`.
            parallel_iterations: Accepted for TensorFlow's sake.
            experimental_use_pfor: Compute all rows at once; False takes less memory.

        Returns:
            The structure of ``sources``, with an array of the target's shape followed by the
            source's shape in the place of each.

        Example:
            >>> x = rx.Variable([1.0, 2.0])
            >>> with rx.GradientTape() as tape:
            ...     y = x * x
            >>> tape.jacobian(y, x).tolist()
            [[2.0, 0.0], [0.0, 4.0]]
        """
        target = _one_array(target, "jacobian")
        rows = jnp.eye(target.size, dtype=target.dtype).reshape(target.size, *target.shape)
        with self._asked(sources, unconnected_gradients) as question:
            found = _for_each(
                lambda row: question.answer_recorded(target, row), rows, experimental_use_pfor
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
        """The jacobian of each row, where row i of the target depends on row i of the source only.

        Args:
            target: An array of shape ``[b, ...]``.
            source: A watched array of shape ``[b, ...]``.
            unconnected_gradients: Accepted for TensorFlow's sake: the answer is zeros.
            parallel_iterations: Accepted for TensorFlow's sake.
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
        with self._asked(source, unconnected_gradients) as question:
            found = _for_each(
                lambda c: question.answer_recorded(target, jnp.broadcast_to(c, target.shape)),
                columns,
                experimental_use_pfor,
            )
        if found is None:  # TensorFlow gives zeros here, whatever `unconnected_gradients` says
            return jnp.zeros((*target.shape, *jnp.shape(source)[1:]), target.dtype)
        return jnp.moveaxis(found, 0, 1).reshape(*target.shape, *found.shape[2:])

    # What the operations and the variables tell it.

    def follows(self, x: Any) -> bool:
        """Whether ``x`` is watched, or was computed from what is."""
        return self._record is not None and id(x) in self._record.followed

    def record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        """Run an operation, and keep how to take gradients backwards through it."""
        record, tapes = self._record, current().tapes
        if record is None or self not in tapes:
            return call(*args)
        places = [i for i, x in enumerate(args) if id(x) in record.followed]

        def of_followed(*xs: Any) -> list[Any]:
            every = list(args)
            for i, x in zip(places, xs, strict=True):
                every[i] = x
            return call(*every)

        inputs, given = [args[i] for i in places], {id(x) for x in args}
        with recorded(DerivativeGuard(record, given)) if opaque else nullcontext():
            if not places:
                return call(*args)
            outs, pull = jax.vjp(of_followed, *inputs)
        # An array that is handed through is another one from here on.
        outs = [jnp.copy(x) if id(x) in given and is_differentiable(x) else x for x in outs]
        seen_by = tuple(tape for tape in self._outer if tape in tapes)
        record.operations.append(Operation(of_followed, inputs, outs, pull, seen_by))
        for x in outs:
            record.follow(x)
        return outs

    def note_read(self, cell: Cell, value: jax.Array) -> None:
        """Follow what a watched variable gave."""
        record = self._record
        if record is not None and (cell in record.reads or (self._watches and cell.trainable)):
            record.reads.setdefault(cell, {})[id(value)] = value
            record.follow(value)

    def _live(self) -> Record:
        if self._record is None:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients"
                " (or jacobians)"
            )
        return self._record

    @contextmanager
    def _asked(self, sources: Any, unconnected: UnconnectedGradients | str) -> Iterator[Question]:
        arrays = jax.tree.map(plain, sources, is_leaf=is_variable)
        question = Question(self._live(), arrays, UnconnectedGradients.parse(unconnected))
        with ExitStack() as stack:
            if not self._persistent:
                self._cells, self._record = list(question.record.reads), None
                if self in current().tapes:
                    stack.enter_context(self._paused())
            yield question


def _leaves(tree: Any) -> list[Any]:
    return list(map(plain, jax.tree.leaves(tree, is_leaf=is_variable)))


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

"""Gradients with respect to variables: `value_and_grad`, and the backward pass of tapes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import TracingError, VariableError
from replicax._src.base.types import UnconnectedGradients
from replicax._src.context.current import current
from replicax._src.state.cell import Cell
from replicax._src.state.hooks import is_differentiable
from replicax._src.state.levels import Overlay, current_trace, level
from replicax._src.state.policy import write_own
from replicax._src.state.variable import Variable
from replicax._src.state.variables import variable_of
from replicax._src.values.structures import unflatten_as


@dataclass(frozen=True)
class Operation:
    """One operation that a tape recorded.

    Attributes:
        call: The operation as a function of `args`.
        places: The indices of the `args` that the tape followed when the operation ran.
        pull: Maps gradients of `outputs` to gradients of these arguments (the VJP).
        recorded_by: The enclosing tapes that recorded the computation of `pull`.
    """

    call: Callable[..., list[Any]]
    args: list[Any]
    places: list[int]
    outputs: list[Any]
    pull: Callable[[list[Any]], Sequence[Any]]
    recorded_by: tuple[Any, ...]

    def indices_of(self, wanted: set[int]) -> list[int]:
        """Return the indices of the `args` that take a gradient: followed ones and `wanted` ids."""
        late = [i for i, x in enumerate(self.args) if id(x) in wanted and i not in self.places]
        return sorted([*self.places, *late]) if late else self.places

    def pulled(
        self, gradients: dict[int, Any], places: list[int]
    ) -> Iterator[tuple[jax.Array, Any]]:
        """Yield each argument in `places` with this operation's contribution to its gradient."""
        given, taken = [], set()
        for out in self.outputs:
            # An array that the operation returned twice has one gradient: count it once.
            known = id(out) in gradients and id(out) not in taken
            given.append(gradients[id(out)] if known else _zero(out))
            taken.add(id(out))
        pull, inputs = self.pull, [self.args[i] for i in places]
        if places is not self.places or any(t not in self.recorded_by for t in current().tapes):
            # A tape that did not record `pull` must see how the gradient depends on the inputs.
            _, pull = jax.vjp(partial_at(self.call, self.args, places), *inputs)
        for x, part in zip(inputs, pull(given), strict=True):
            if part.dtype != jax.dtypes.float0:
                yield x, part


def partial_at(
    call: Callable[..., list[Any]], args: Sequence[Any], places: Sequence[int]
) -> Callable[..., list[Any]]:
    """Return ``call`` as a function of the arguments at ``places``, with the others bound."""

    def called(*xs: Any) -> list[Any]:
        every = list(args)
        for i, x in zip(places, xs, strict=True):
            every[i] = x
        return call(*every)

    return called


@dataclass
class Record:
    """The recording of a tape.

    Attributes:
        operations: The operations, in execution order.
        followed: The arrays that are watched or computed from watched ones, by `id`.
        reads: The arrays that reads of each watched variable returned, by `id`.
    """

    operations: list[Operation] = field(default_factory=list)
    followed: dict[int, Any] = field(default_factory=dict)
    reads: dict[Cell, dict[int, Any]] = field(default_factory=dict)

    def follow(self, x: Any) -> None:
        if is_differentiable(x):
            self.followed[id(x)] = x

    def backwards(self, gradients: dict[int, Any], sources: Sequence[Sequence[int]]) -> list[Any]:
        """Return the gradient of each source, given the gradients of the targets by `id`."""
        kept = {i for source in sources for i in source}
        between, reached = self._from(kept)
        gradients = {i: g for i, g in gradients.items() if i in reached}
        for operation, places in reversed(between):
            if not any(id(x) in gradients for x in operation.outputs):
                continue
            for x, part in operation.pulled(gradients, places):
                if id(x) in reached:
                    gradients[id(x)] = gradients[id(x)] + part if id(x) in gradients else part
            for x in operation.outputs:
                if id(x) not in kept:
                    gradients.pop(id(x), None)
        return [_total([gradients[i] for i in s if i in gradients]) for s in sources]

    def _from(self, sources: set[int]) -> tuple[list[tuple[Operation, list[int]]], set[int]]:
        """Return the operations that depend on the sources, and through which arguments.

        Also return the ids of all arrays that depend on the sources. As in TensorFlow, a source
        counts for operations recorded before it was watched, if another argument was followed then.
        """
        reached, watched = set(sources), sources & self.followed.keys()
        operations: list[tuple[Operation, list[int]]] = []
        for operation in self.operations:
            places = operation.indices_of(watched)
            if any(id(operation.args[i]) in reached for i in places):
                operations.append((operation, places))
                reached.update(id(x) for x in operation.outputs if is_differentiable(x))
        return operations, reached


class GradientRequest:
    """A request for gradients of a recording with respect to `sources`.

    Attributes:
        zeros: The sources that the targets do not depend on, and the zeros returned for them.
    """

    def __init__(self, record: Record, sources: Any, unconnected: UnconnectedGradients) -> None:
        self.record = record
        self._tree = sources
        self._sources = jax.tree.leaves(sources, is_leaf=has_variable)
        self._unconnected = unconnected
        self.zeros: list[tuple[Any, jax.Array]] = []

    def answer(self, targets: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Return the gradient of the weighted sum of the targets with respect to each source."""
        start: dict[int, Any] = {}
        for x, weight in zip(targets, weights, strict=True):
            variable = variable_of(x)
            value = _array(x, "of") if variable is None else variable
            if jnp.issubdtype(value.dtype, jnp.inexact):
                own = jnp.ones(value.shape, value.dtype)
                own = own if weight is None else _conjugate(jnp.asarray(weight, value.dtype))
                key = id(x) if variable is None else id(variable.cell)
                start[key] = start[key] + own if key in start else own
        found = self.record.backwards(start, [self._places(s) for s in self._sources])
        answers = list(map(self._finished, self._sources, found))
        replica = current().replica
        if replica is not None and any(map(replica.is_local_mean, targets)):
            replica.note_local_mean(*answers)
        return unflatten_as(self._tree, answers, has_variable)

    def answer_recorded(self, target: jax.Array, weight: jax.Array) -> Any:
        """Return the gradients of one target; zero or None unless the tape follows it.

        The gradient of an array with respect to itself is one even if the tape does not follow it.
        TensorFlow reshapes the target of a jacobian, though, which makes it a different tensor, so
        for a target that is not followed the jacobian is unconnected.
        """
        if id(target) in self.record.followed:
            return self.answer([target], [weight])
        return self.answer([], [])

    def _places(self, source: Any) -> list[int]:
        variable = variable_of(source)
        if variable is not None:
            return [id(variable.cell), *self.record.reads.get(variable.cell, ())]
        return [id(_array(source, "with respect to"))]

    def _finished(self, source: Any, gradient: Any) -> Any:
        if gradient is not None:
            return _conjugate(gradient)
        if self._unconnected is not UnconnectedGradients.ZERO:
            return None
        zeros = jnp.zeros(source.shape, source.dtype)
        self.zeros.append((source, zeros))
        return zeros


class DerivativeGuard:
    """A recorder that ensures code with custom derivatives hides no array from the tape."""

    def __init__(self, record: Record, given: set[int]) -> None:
        self._record = record
        self._given = given

    def follows(self, x: Any) -> bool:
        return id(x) in self._record.followed and id(x) not in self._given

    def record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        if any(map(self.follows, args)):
            raise TracingError(
                "A function with jax.custom_jvp, jax.custom_vjp or jax.shard_map uses a variable or"
                " an array that a GradientTape follows, without taking it as an argument: its"
                " gradient would be lost. Pass it as an argument."
            )
        return call(*args)


def has_variable(x: Any) -> bool:
    """Whether `x` is or contains a variable."""
    return variable_of(x) is not None


def _array(x: Any, what: str) -> jax.Array:
    if isinstance(x, jax.Array):
        return x
    raise TypeError(
        f"A gradient is {what} variables or jax.Arrays, got {x!r} ({type(x).__name__}). Values that"
        " were converted to Python numbers or NumPy arrays are not followed."
    )


def _conjugate(x: jax.Array) -> jax.Array:
    # For complex numbers, TensorFlow's gradient is the conjugate of JAX's.
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _zero(x: Any) -> Any:
    if is_differentiable(x):
        return jnp.zeros(x.shape, x.dtype)
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def _total(parts: list[Any]) -> Any:
    return sum(parts[1:], parts[0]) if parts else None


def value_and_grad(
    fn: Callable[..., Any], variables: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes ``fn`` and its gradients with respect to variables.

    Assignments in ``fn`` take effect. Inside `strategy.run` the gradients are this replica's
    own; all-reduce them before they are applied.

    Args:
        fn: Returns a scalar, or a scalar and something else with ``has_aux``.
        variables: A variable or a structure of them.
        has_aux: Whether ``fn`` returns a pair.

    Returns:
        A function of the arguments of ``fn`` that returns its result, and the gradients in the
        structure of ``variables``.

    Raises:
        TypeError: If ``variables`` contains other objects, or ``fn`` returns no scalar array.

    Example:
        >>> w = rx.Variable(3.0)
        >>> value, gradient = rx.value_and_grad(lambda x: w * w * x, w)(2.0)
        >>> float(value), float(gradient)
        (18.0, 12.0)
    """
    leaves, treedef = jax.tree.flatten(variables, is_leaf=has_variable)
    if not leaves:
        raise TypeError(
            f"value_and_grad needs the variables to differentiate with respect to, got"
            f" {variables!r}. Write `rx.value_and_grad(fn, [w, b])`; for arguments, use"
            " jax.value_and_grad."
        )
    given = [_checked(v) for v in leaves]
    # A variable that occurs twice is differentiated once; both places get the gradient.
    cells = list(dict.fromkeys(v.cell for v in given))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        overlays: list[Overlay] = []
        around = current_trace()
        replica, is_local_mean = current().replica, False

        def pure(values: list[jax.Array]) -> tuple[jax.Array, Any]:
            overlay = Overlay(dict(zip(cells, values, strict=True)), around)
            with overlay.active():
                result = fn(*args, **kwargs)
            loss, aux = _pair(result) if has_aux else (result, None)
            nonlocal is_local_mean
            is_local_mean = replica is not None and replica.is_local_mean(loss)
            overlays.append(overlay)
            return _scalar(loss), (aux, list(overlay.writes.values()))

        values = [next(v for v in given if v.cell is c).read_value() for c in cells]
        (loss, (aux, new)), gradients = jax.value_and_grad(pure, has_aux=True)(values)
        keep_writes(overlays[-1], new)
        if replica is not None and is_local_mean:
            replica.note_local_mean(loss, *gradients)
        own = dict(zip(cells, gradients, strict=True))
        gradients = [own[v.cell] for v in given]
        return ((loss, aux) if has_aux else loss), jax.tree.unflatten(treedef, gradients)

    return wrapped


def keep_writes(overlay: Overlay, values: Iterable[Any] | None = None) -> None:
    """Apply the writes buffered in `overlay`, or other values of them, to the enclosing level."""
    values = overlay.writes.values() if values is None else values
    outside, replica = level(), current().replica
    for cell, value in zip(overlay.writes, values, strict=True):
        if outside.is_eager and replica is not None and not cell.per_replica:
            write_own(cell, value, replica)
        else:
            outside.write(cell, value)


def grad(
    fn: Callable[..., Any], variables: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value.

    Example:
        >>> w = rx.Variable(3.0)
        >>> float(rx.grad(lambda: w * w, w)())
        6.0
    """
    both = value_and_grad(fn, variables, has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return wrapped


def _checked(x: Any) -> Variable:
    v = variable_of(x)
    if v is None:
        raise TypeError(
            f"value_and_grad differentiates with respect to variables, got {x!r}"
            f" ({type(x).__name__}). For arrays, use jax.value_and_grad."
        )
    if not jnp.issubdtype(v.dtype, jnp.inexact):
        raise VariableError(
            f"Variable {v.name!r} of dtype {v.dtype} has no gradient; only floating-point"
            " variables have one."
        )
    return v


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(
        "With has_aux=True the function given to value_and_grad must return a pair, the loss and"
        f" something else; got {type(result).__name__}."
    )


def _scalar(loss: Any) -> jax.Array:
    if isinstance(loss, jax.Array | float | int) and jnp.shape(loss) == ():
        return jnp.asarray(loss)
    what = (
        f"shape {jnp.shape(loss)}" if isinstance(loss, jax.Array) else f"type {type(loss).__name__}"
    )
    raise TypeError(
        f"The function given to value_and_grad must return one scalar, got {what}. Reduce it, for"
        " example with `rx.nn.compute_average_loss(per_example_loss, global_batch_size=...)`;"
        " return more than the loss with `has_aux=True`."
    )

"""Creation of variables (creator scopes, initial values), and reads reported to gradient tapes."""

import copy
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import TracingError, VariableError, check_parameters
from replicax._src.base.ops import canonical_dtype
from replicax._src.compat.jax import concrete, renewed, unrecorded
from replicax._src.context.current import current, enter, entered, leave
from replicax._src.state.cell import Cell
from replicax._src.state.declaration import is_planned, is_planning, plan
from replicax._src.state.levels import Storage, TraceLevel, level
from replicax._src.values.placement import fresh_copy, is_traced, private

Creator = Callable[..., Any]
_T = TypeVar("_T")

created_variables: ContextVar[list[Any] | None] = ContextVar(
    "replicax_created_variables", default=None
)
_creators: ContextVar[tuple[Creator, ...]] = ContextVar("replicax_creators", default=())


def variable_creator_scope(variable_creator: Creator) -> AbstractContextManager[None]:
    """Call a function for every variable that is created in the block.

    Args:
        variable_creator: Called as ``variable_creator(next_creator, **kwargs)`` with the
            arguments of `rx.Variable`; returns a variable, usually ``next_creator(**kwargs)``.
            Scopes nest; the innermost is called first.

    Raises:
        RuntimeError: The block is left before a scope that was entered in it.

    Example:
        >>> def frozen(next_creator, **kwargs):
        ...     return next_creator(**{**kwargs, "trainable": False})
        >>> with rx.variable_creator_scope(frozen):
        ...     v = rx.Variable(1.0)
        >>> v.trainable
        False
    """
    return _CreatorScope(variable_creator)


class _CreatorScope(ContextDecorator):
    """An open `variable_creator_scope`, shown by the name of its function."""

    def __init__(self, creator: Creator) -> None:
        self._creator = creator

    def __str__(self) -> str:
        name = getattr(self._creator, "__qualname__", repr(self._creator))
        return f"the variable creator {name}"

    def __enter__(self) -> None:
        block = ExitStack()
        block.callback(_creators.reset, _creators.set((*_creators.get(), self._creator)))
        enter(self, block)

    def __exit__(self, *error: Any) -> None:
        leave(self, "The scope of", *error).close()


class CreatedOnce(type):
    """Metaclass: routes construction through creator scopes, once for all replicas of a run."""

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        if args:
            kwargs["initial_value"] = args[0]
        if len(args) > 1:
            kwargs["trainable"] = args[1]
        if len(args) > 2:
            raise TypeError(
                f"rx.Variable takes the initial value and `trainable` by position, the rest by"
                f" keyword; got {len(args)} positional arguments."
            )

        def make(**final: Any) -> Any:
            replica = current().replica
            if replica is None or isinstance(level(), TraceLevel):
                return type.__call__(cls, **final)
            return replica.merge_call(_Creation(cls, final))

        create = make
        for creator in _creators.get():
            create = _chained(creator, create)
        return create(**kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Creation:
    """The creation of a variable, as a function for `merge_call` that runs once."""

    cls: type
    kwargs: dict[str, Any]
    purpose: str = "the creation of a variable"
    once: bool = True

    @property
    def subject(self) -> dict[str, Any]:
        """The declaration, without the initial value: the first replica's is used, as in TF."""
        return {k: v for k, v in self.kwargs.items() if k != "initial_value"}

    def __call__(self, _: Any) -> Any:
        return type.__call__(self.cls, **self.kwargs)


def duplicate(variable: Any) -> Any:
    """Return a new variable with the declaration and value of `variable`, on every replica.

    Raises:
        TracingError: In a replica or a traced function, which has no concrete values.
    """
    if not level().is_eager or current().replica is not None:
        raise TracingError(
            f"Variable {variable.name!r} is copied inside a replica or a function that is traced."
            " Copy it outside, across replicas."
        )
    whole = variable.whole
    if whole is not variable:
        return duplicate(whole).components[whole.components.index(variable)]
    old, value = variable.cell, variable.cell.view()
    lead = value.values[0] if old.per_replica else value
    cell = Cell(
        lead,
        old.topology,
        old.name,
        per_replica=old.per_replica,
        spec=old.spec,
        sharded=old.sharded,
    )
    cell.trainable, cell.averages, cell.draws = old.trainable, old.averages, old.draws
    if old.per_replica:
        cell.store(value)
    policy = copy.copy(variable._policy)  # noqa: SLF001
    policy.cell = cell
    made = object.__new__(type(variable))
    own = {"_policy": policy, "_whole": made, "_components": None, "is_written": False}
    vars(made).update({**vars(variable), **own})
    return made


def _chained(creator: Creator, inner: Creator) -> Creator:
    return lambda **kwargs: creator(inner, **kwargs)


def _as_array(value: Any, dtype: Any) -> jax.Array:
    """Convert an initial value to an array that shares no memory with it."""
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.number):
        return fresh_copy(value if dtype is None else value.astype(canonical_dtype(dtype)))
    refuse_tree(value)
    try:
        return jnp.asarray(private(value), dtype=canonical_dtype(dtype))
    except (TypeError, ValueError) as error:
        if not isinstance(value, list | tuple):
            raise
        raise VariableError(
            f"rx.Variable holds one array, and the parts of {value!r:.200} do not make one: {error}"
            " For a structure of arrays, `rx.variables(tree)` makes a variable of each, named by"
            " its path."
        ) from error


def refuse_tree(value: Any) -> None:
    """Refuse an initial value that is not one array; (nested) lists of numbers are.

    Raises:
        VariableError: If it contains a dictionary, None, a string or another object.
    """
    leaves = jax.tree.leaves(value, is_leaf=lambda x: not isinstance(x, list | tuple))
    for leaf in leaves:
        if not hasattr(leaf, "__array__") and not isinstance(leaf, bool | int | float | complex):
            raise VariableError(
                f"rx.Variable holds one array, and {value!r} has {leaf!r} ({type(leaf).__name__})"
                " in it. For a structure of arrays, `rx.variables(tree)` makes a variable of each,"
                " named by its path."
            )


class _ValuesBeforeTrace(Storage):
    """The values of variables before the function that is being traced, for initializers.

    An initializer may therefore draw random numbers, whose generator state is a variable, as it
    would outside of the function.
    """

    def __init__(self, trace: TraceLevel) -> None:
        self._trace = trace

    def read(self, cell: Cell) -> Any:
        """Return the value; raise `TracingError` if the function changed or created `cell`."""
        where: Any = self._trace
        while isinstance(where, TraceLevel):
            if cell in where.writes or any(cell is v.cell for v, _ in where.created):
                raise TracingError(
                    "A variable is created with an initializer that reads variable"
                    f" {cell.name!r}, which the function being traced has created or changed: its"
                    " value is known only when the function runs. Create the new variable before"
                    " the first call."
                )
            where = where.outer
        return super().read(cell)


def value_before(cell: Cell) -> Any:
    """Return the value of a variable before the function that is being traced.

    Raises:
        TracingError: If the function has changed or created the variable.
    """
    where = level()
    with concrete():
        return (
            _ValuesBeforeTrace(where).read(cell)
            if isinstance(where, TraceLevel)
            else where.read(cell)
        )


def _call_initializer(start: Callable[[], Any]) -> Any:
    where = level()
    if not isinstance(where, TraceLevel):
        return start()
    with entered(level=_ValuesBeforeTrace(where), replica=None, body=None, tapes=()):
        return start()


_NEEDS_ARGUMENTS = (
    "The initial value of variable {!r} is a function that needs arguments, and it is called"
    " without any. Write `rx.Variable(lambda: initializer(shape))`."
)


def initial_array(initial_value: Any, dtype: Any, name: str) -> tuple[Any, Any]:
    """Return the initial value of a new variable as an array.

    Returns:
        The array and None; or, for a traced initial value, zeros and the tracer. While planning,
        only the shape and dtype of an array of several elements, and None.
    """
    if initial_value is None:
        raise ValueError(
            f"Variable {name!r} needs an initial value: an array, a number, or a function that"
            " takes no arguments and returns one."
        )
    # A counter or a learning rate takes no memory, and optimizers read theirs when they are made.
    if is_planning() and (planned := plan(initial_value, dtype)).size > 1:
        return planned, None
    if is_planned(initial_value):
        initial_value = jnp.zeros(initial_value.shape, initial_value.dtype)
    with concrete():
        value = initial_value
        if callable(initial_value):
            try:
                value = _call_initializer(initial_value)
            except TypeError:
                check_parameters(initial_value, 0, _NEEDS_ARGUMENTS.format(name))
                raise
        value = value if is_traced(value) else _as_array(value, dtype)
    if not is_traced(value):
        return value, None
    where = level()
    if not isinstance(where, TraceLevel):
        raise TracingError(
            f"The initial value of variable {name!r} exists only while JAX traces a function."
            " Create the variable outside, or pass a function that makes the value."
        )
    cast = value if dtype is None else value.astype(canonical_dtype(dtype))
    with concrete():
        return jnp.zeros(cast.shape, cast.dtype), cast


class Listener(Protocol):
    """The interface of a gradient tape that variables use."""

    @abstractmethod
    def note_read(self, cell: Cell, value: jax.Array) -> None:
        """Record that reading `cell` returned `value`."""


def read(cell: Cell) -> Any:
    """Return the value of `cell` at the current level, and report the read to active tapes."""
    value = level().read(cell)
    return report_read(cell, value) if current().tapes else value


def report_read(cell: Cell, value: Any) -> Any:
    """Report to the active tapes that reading `cell` returned `value`; return the value to use."""
    tapes: tuple[Listener, ...] = current().tapes
    if not tapes or not is_differentiable(value):
        return value
    # Tapes identify arrays by `id`. The cell's array may also be returned by reads outside of the
    # tapes, be the array that was assigned, or be shared with another variable, none of which a
    # tape may follow. So each read under a tape gets an array object of its own.
    with unrecorded():
        value = renewed(value)
    for tape in tapes:
        tape.note_read(cell, value)
    return value


def is_differentiable(x: Any) -> bool:
    """Whether `x` is an array of a dtype that has gradients."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)

"""The current frame, a ContextVar with the ambient strategy, replica and level."""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from replicax._src.base.errors import ScopeError
from replicax._src.base.managers import contextmanager

if TYPE_CHECKING:
    from replicax._src.context.replica import ReplicaContext
    from replicax._src.strategy.strategies import Strategy  # the annotation of a public function
    from replicax._src.topology.mesh import Topology


class AmbientStrategy(Protocol):
    """The members of a strategy that variables, functions and replicas use.

    Strategies are a higher layer, whose `StrategyBase` has these members and many more.
    """

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """The topology: which devices form which replica; None for the default strategy."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """The topology; for the default strategy, JAX's default device."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""

    @property
    @abstractmethod
    def wraps_single(self) -> bool:
        """Whether values are per-replica values even with a single replica."""

    @property
    @abstractmethod
    def variable_policy(self) -> Any:
        """Whether the replicas mirror or shard the variables."""

    @property
    @abstractmethod
    def reduce_dtype(self) -> Any:
        """The dtype in which gradients of sharded variables are summed; None keeps each one's."""

    @property
    @abstractmethod
    def solo_context(self) -> ReplicaContext:
        """The context of the only replica, for code outside of `run`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The execution context of the running code.

    Attributes:
        strategy: The ambient strategy; None for the default one.
        replica: The running replica; None in cross-replica context.
        level: The target of variable reads and writes; None for their storage.
        body: In cross-replica code inside a compiled replica function, that replica.
        host_driven: Whether Python runs the body of an `rx.function`; each run in it is compiled.
        tapes: The recording gradient tapes, outermost first.
        journal: The old values of variables that an eager run has written, for rollback.
    """

    strategy: AmbientStrategy | None = None
    replica: ReplicaContext | None = None
    level: Any = None
    body: ReplicaContext | None = None
    host_driven: bool = False
    tapes: tuple[Any, ...] = ()
    journal: Any = None


_S = TypeVar("_S", bound="AmbientStrategy")
_outermost = Frame()
_frame: ContextVar[Frame] = ContextVar("replicax_frame", default=_outermost)
_strategies: dict[str, Any] = {}
_open_scopes: ContextVar[tuple[Any, ...]] = ContextVar("replicax_open_scopes", default=())


def current() -> Frame:
    """Return the frame of the running code."""
    return _frame.get()


def in_replica() -> bool:
    """Whether the code belongs to one replica, including cross-replica code in its trace."""
    frame = current()
    return frame.replica is not None or frame.body is not None


def entered(**changes: Any) -> AbstractContextManager[Frame]:
    """Return a context manager that changes some fields of the current frame."""
    return _FrameChange(changes)


class _FrameChange(AbstractContextManager[Frame]):
    __slots__ = ("_before", "_changes")

    def __init__(self, changes: dict[str, Any]) -> None:
        self._changes = changes

    def __enter__(self) -> Frame:
        self._before = _frame.get()
        frame = replace(self._before, **self._changes)
        _frame.set(frame)
        return frame

    def __exit__(self, *_: object) -> None:
        _frame.set(self._before)


def within(fn: Callable[[], Any], **changes: Any) -> Any:
    """Call `fn` with some fields of the current frame changed.

    Unlike the exit of a context manager, which a signal handler may interrupt, the frame is always
    restored: by a single call into C, and even if blocks inside were left without their exit.
    """
    before = _frame.get()
    try:
        _frame.set(replace(before, **changes))
        return fn()
    finally:
        _frame.set(before)


def set_default(strategy: AmbientStrategy) -> None:
    """Set the strategy outside of all scopes; called once, by `replicax._src.wiring`."""
    _strategies["default"] = strategy


def ambient_strategy() -> AmbientStrategy:
    """Return the strategy of the current scope, or the default one."""
    strategy: AmbientStrategy = (
        current().strategy or _strategies.get("set") or _strategies["default"]
    )
    return strategy


def get_strategy() -> Strategy:
    """Return the strategy of the current scope, or the default one.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     rx.distribute.get_strategy() is strategy
        True
        >>> rx.distribute.get_strategy().num_replicas_in_sync
        1
    """
    return ambient_strategy()  # type: ignore[return-value]


class Attributes:
    """Versions of plain Python attributes of a library's objects, which traces capture.

    Every combination of values gets a number, and gets the same number when it recurs: a model
    that is switched between training and evaluation keeps one program for each.
    """

    def __init__(self) -> None:
        self.last = ""  # the attribute that was changed last, for messages
        self._number: int | None = 0
        self._numbers: dict[frozenset[Any], int] = {frozenset(): 0}
        self._owners: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._changed: dict[tuple[int, str], Any] = {}
        self._first: dict[tuple[int, str], Any] = {}
        self._counter = itertools.count(1)
        self._capacity = 64  # how many objects to track before dead ones are dropped
        self._lock = threading.RLock()

    def note(self, owner: Any, name: str, old: Any, new: Any) -> None:
        """Record that an attribute of `owner` changes from `old` to `new`."""
        before, after = _version_key(old), _version_key(new)
        if before == after:
            return
        with self._lock:
            place = self._owner(owner), name
            if self._first.setdefault(place, before) == after:
                self._changed.pop(place, None)
            else:
                self._changed[place] = after
            self.last = f"{type(owner).__name__}.{name}"
            self._number = None

    def number(self) -> int:
        """Return the number of the current combination of values."""
        number = self._number
        if number is None:
            with self._lock:
                state = frozenset(self._changed.items())
                number = self._number = self._numbers.setdefault(state, next(self._counter))
        return number

    def _owner(self, owner: Any) -> int:
        """Return a number that is never used for another object, unlike `id`."""
        known = self._owners.get(id(owner))
        if known is None or known[0]() is not owner:
            known = self._owners[id(owner)] = weakref.ref(owner), next(self._counter)
            if len(self._owners) > self._capacity:
                self._forget()
        return known[1]

    def _forget(self) -> None:
        """Drop dead objects, and merge the combinations that differed only in them."""
        self._owners = {i: o for i, o in self._owners.items() if o[0]() is not None}
        self._capacity = 2 * len(self._owners) + 64
        alive = {number for _, number in self._owners.values()}
        now = self.number()
        self._changed, self._first = (
            {place: mark for place, mark in known.items() if place[0] in alive}
            for known in (self._changed, self._first)
        )
        self._numbers = {
            frozenset(item for item in state if item[0][0] in alive): number
            for state, number in sorted(self._numbers.items(), key=lambda s: s[1] == now)
        }


@dataclass(frozen=True, slots=True, eq=False)
class _ByIdentity:
    """A wrapper that compares by identity, whatever the value's `__eq__` is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _version_key(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_version_key, value))
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return (type(value), value) if is_plain else _ByIdentity(value)


attributes = Attributes()


def context_key() -> tuple[Any, bool, int]:
    """Return the part of a program's cache key that depends on the context.

    Returns:
        The current strategy, whether the context is cross-replica, and `attributes.number()`.
    """
    frame = _frame.get()
    strategy = frame.strategy or _strategies.get("set") or _strategies["default"]
    return strategy, frame.replica is None, attributes.number()


def has_strategy() -> bool:
    """Whether a strategy other than the default is current.

    Example:
        >>> rx.distribute.has_strategy()
        False
    """
    return ambient_strategy() is not _strategies["default"]


def get_replica_context() -> ReplicaContext | Any:
    """Return the context of the running replica, or None in cross-replica context.

    Outside of any scope it is the context of the default strategy's only replica. The annotation
    leaves out None on purpose, so that replica functions need no assertion.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     rx.distribute.get_replica_context() is None
        True
        >>> rx.distribute.get_replica_context().num_replicas_in_sync
        1
    """
    frame = current()
    if frame.replica is not None:
        return frame.replica
    if frame.strategy is not None or _strategies.get("set"):
        return None
    return _strategies["default"].solo_context


def is_default(strategy: Any) -> bool:
    """Whether `strategy` is the default strategy."""
    return strategy is _strategies["default"]


def in_cross_replica_context() -> bool:
    """Whether the running code is in cross-replica context.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     rx.distribute.in_cross_replica_context()
        True
    """
    return get_replica_context() is None


def experimental_set_strategy(strategy: Any) -> None:
    """Make ``strategy`` the current one for the rest of the program; None restores the default.

    Raises:
        RuntimeError: Inside a scope.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> rx.distribute.experimental_set_strategy(strategy)
        >>> rx.distribute.get_strategy() is strategy
        True
        >>> rx.distribute.experimental_set_strategy(None)
    """
    if current().strategy is not None:
        raise ScopeError(
            "experimental_set_strategy was called inside a scope of"
            f" {current().strategy}. Call it outside of every `with strategy.scope():`."
        )
    if strategy is not None and not hasattr(strategy, "num_replicas_in_sync"):
        raise TypeError(
            f"experimental_set_strategy needs a strategy, or None for the default, got {strategy!r}"
            "."
        )
    _strategies["set"] = None if is_default(strategy) else strategy


def twins(one: object, other: object) -> str:
    """Return a hint for errors that name two strategies which look the same."""
    if one is other or str(one) != str(other):
        return ""
    return " They are two strategies, though they look the same: create one, and use it everywhere."


@contextmanager
def strategy_scope(strategy: AmbientStrategy) -> Iterator[AmbientStrategy]:
    """Make `strategy` the ambient one in the block, in cross-replica context."""
    frame = current()
    if frame.replica is not None and not is_default(frame.replica.strategy):
        raise ScopeError(
            f"`strategy.scope()` was entered inside a replica function of {frame.strategy}. Enter"
            " the scope outside of `strategy.run`; inside, variables are already distributed."
        )
    outer = _ambient(frame)
    if outer is not None and outer is not strategy:
        raise ScopeError(
            f"Cannot enter the scope of the strategy {strategy} inside a scope of another one,"
            f" {outer}. Leave that scope first; a program may use both, one after the other."
            f"{twins(strategy, outer)}"
        )
    if is_default(strategy):  # it is always current outside of other scopes
        yield strategy
        return
    with entered(strategy=strategy, replica=None):
        yield strategy


class Scope(ContextDecorator, Generic[_S]):
    """The scope of a strategy as a reentrant context manager."""

    def __init__(self, strategy: _S) -> None:
        self._strategy = strategy

    def __enter__(self) -> _S:
        block = strategy_scope(self._strategy)
        block.__enter__()
        enter(self._strategy, block)
        return self._strategy

    def __exit__(self, *error: Any) -> None:
        _explain_missing_context(error[1])
        # Nested scopes of one strategy are interchangeable: the innermost one ends, whichever
        # object is exited first, as in TensorFlow.
        leave(self._strategy, "A scope of", *error).__exit__(*error)


def enter(owner: object, block: Any) -> None:
    """Note that `owner` opened a scope, whose context manager is `block`."""
    _open_scopes.set((*_open_scopes.get(), (owner, block)))


def leave(owner: object, name: str, error: object = None, *_: object) -> Any:
    """Return what `enter` noted for the innermost scope, which must be one of `owner`.

    Raises:
        ScopeError: The innermost open scope belongs to another owner; it stays open. An `error`
            that ends the block takes precedence, and closes the inner scopes: a signal may have
            kept them from being left.
    """
    scopes = _open_scopes.get()
    if error and any(opened is owner for opened, _ in scopes):
        while scopes[-1][0] is not owner:
            scopes[-1][1].__exit__(None, None, None)
            scopes = scopes[:-1]
    if not scopes or scopes[-1][0] is not owner:
        inner = f"that of {scopes[-1][0]} is open" if scopes else "none is open"
        raise ScopeError(
            f"{name} {owner} is left where {inner}. Leave scopes in the reverse order of entering"
            " them, in the same thread; best with `with`, as in `with strategy.scope():`."
        )
    _open_scopes.set(scopes[:-1])
    return scopes[-1][1]


class ScopeMethod:
    """The method ``scope``, which explains itself in ``with strategy.scope:``.

    Classes get the plain function, for documentation and inspection.
    """

    def __init__(self, function: Any) -> None:
        update_wrapper(self, function)
        self._function = function

    def __call__(self, strategy: Any) -> Any:
        return self._function(strategy)

    def __get__(self, strategy: Any, owner: Any = None) -> Any:
        return self._function if strategy is None else _BoundScope(self._function, strategy)


class _BoundScope(partial[Any]):
    def __enter__(self) -> NoReturn:
        raise TypeError("`with strategy.scope:` lacks a call: write `with strategy.scope():`.")

    def __exit__(self, *error: Any) -> None: ...


_OF_REPLICAS = ("all_gather", "all_reduce", "merge_call", "replica_id_in_sync_group")


def _explain_missing_context(error: Any) -> None:
    """Add a note to the error of ``get_replica_context().all_reduce(...)`` outside of replicas."""
    if isinstance(error, AttributeError) and error.obj is None and error.name in _OF_REPLICAS:
        error.add_note(
            "`rx.distribute.get_replica_context()` is None in cross-replica context, which"
            " `with strategy.scope():` enters. Call it in the function given to `strategy.run`;"
            " here, use `strategy.reduce` or `strategy.gather`."
        )


def _ambient(frame: Frame) -> Any:
    return None if is_default(frame.strategy) else frame.strategy


def require_cross_replica(strategy: object, verb: str) -> None:
    """Raise unless the running code is in the cross-replica context of `strategy`.

    Raises:
        ScopeError: Inside a replica function, or inside another strategy's scope.
    """
    frame = current()
    replica = frame.replica
    if replica is not None and (replica.strategy is strategy or not is_default(replica.strategy)):
        raise ScopeError(
            f"`strategy.{verb}` needs the cross-replica context, but was called inside a replica"
            f" function of {replica.strategy}. Call it outside of `strategy.run`, or inside use"
            " `rx.distribute.get_replica_context()` and its all_reduce, all_gather or merge_call."
        )
    outer = _ambient(frame)
    if outer is not None and outer is not strategy:
        raise ScopeError(
            f"`{verb}` of the strategy {strategy} was called inside a scope of another one,"
            f" {outer}. Leave that scope first."
        )

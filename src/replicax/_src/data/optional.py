"""Iterators with lookahead, and `Optional`, the result of `get_next_as_optional`.

Lookahead exists for compiled functions: while a function is traced, `next` peeks at an element and
returns tracers of its shapes; each call of the compiled function then consumes the elements that it
needs. Higher layers know which code is being traced, and implement `IterationInFunctions` for it.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, OutOfRangeError
from replicax._src.compat.jax import at_rest, surrounding, traced
from replicax._src.data.leaves import leaf_spec, to_leaf
from replicax._src.data.node import PendingFailure
from replicax._src.data.structure import flatten, map_leaves

_MISSING = object()


class Optional:
    """An element or no element, as returned by `get_next_as_optional`.

    Example:
        >>> optional = rx.data.Optional.from_value(np.float32(2))
        >>> bool(optional.has_value()), float(optional.get_value())
        (True, 2.0)
    """

    def __init__(self, value: Any = _MISSING, element_spec: Any = None) -> None:
        self._value = value
        self._spec = element_spec

    @classmethod
    def from_value(cls, value: Any) -> "Optional":
        """Return an optional that holds `value`.

        Args:
            value: Any element.

        Returns:
            The optional.

        Raises:
            InvalidArgumentError: The value has no leaves; None, for example, has none.

        Example:
            >>> bool(rx.data.Optional.from_value(1).has_value())
            True
        """
        if not flatten(value)[1]:
            raise InvalidArgumentError(
                f"Optional.from_value({value!r:.60}): a value needs at least one array. Write"
                " `rx.data.Optional.empty(element_spec)` for no value."
            )
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> "Optional":
        """Return an optional without a value.

        Args:
            element_spec: The spec that a value would have.

        Returns:
            The optional.

        Example:
            >>> bool(rx.data.Optional.empty().has_value())
            False
        """
        return cls(element_spec=element_spec)

    def has_value(self, name: str | None = None) -> np.bool_:
        """Whether there is a value.

        Returns:
            A NumPy bool.

        Example:
            >>> bool(rx.data.Optional.empty().has_value())
            False
        """
        return np.bool_(self._value is not _MISSING)

    def get_value(self, name: str | None = None) -> Any:
        """Return the value.

        Returns:
            The element.

        Raises:
            InvalidArgumentError: There is no value.

        Example:
            >>> rx.data.Optional.from_value(3).get_value()
            3
        """
        if self._value is _MISSING:
            raise InvalidArgumentError(
                "The optional has no value: the dataset has ended. Ask `has_value()` first."
            )
        return self._value

    @property
    def element_spec(self) -> Any:
        """The spec of the value, or the one passed to `empty`.

        Example:
            >>> rx.data.Optional.from_value(np.zeros(2)).element_spec.shape
            (2,)
        """
        if self._value is _MISSING and self._spec is not None:
            return self._spec
        return map_leaves(_spec, self.get_value())


def _spec(leaf: Any) -> Any:
    # Leaves that datasets do not produce themselves, such as per-replica values, have this method.
    describe = getattr(type(leaf), "__rx_spec__", None)
    return leaf_spec(to_leaf(leaf)) if describe is None else describe(leaf)


# Whether the body of an `rx.function` is running eagerly; elements are JAX arrays there.
in_function: ContextVar[bool] = ContextVar("replicax_in_function", default=False)
is_driven = in_function.get
_END = object()
_MOST_ELEMENTS = 1 << 62


class IterationInFunctions(Protocol):
    """Iteration in traced code, and in the body of an `rx.function` that Python runs.

    Functions are a concept of higher layers, which implement this; see `replicax._src.wiring`.
    """

    @abstractmethod
    def take(self, iterator: Any) -> Any:
        """Return the next element of `iterator`."""

    @abstractmethod
    def begin_loop(self) -> None:
        """Prepare for a loop over a dataset or iterator, or raise if there can be none."""


_in_functions: IterationInFunctions


def set_iteration(iteration: IterationInFunctions) -> None:
    """Set how iteration works in functions; called once, by `replicax._src.wiring`."""
    global _in_functions
    _in_functions = iteration


def take_in_function(iterator: Any) -> Any:
    """Return the next element of `iterator`; for code for which `is_plain` is False."""
    return _in_functions.take(iterator)


def begin_loop() -> None:
    """Prepare for a loop over a dataset or iterator, wherever the calling code runs."""
    if not is_plain():
        _in_functions.begin_loop()


def is_plain() -> bool:
    """Whether the calling code is neither being traced nor in the body of an `rx.function`."""
    return surrounding(traced.value) is at_rest and not is_driven()


class Failed(PendingFailure):
    """A placeholder for an element that raised, re-raised when the element is requested.

    Args:
        error: The error.
        is_element: Whether producing the element failed, so iteration continues with the next
            one; False for an error outside of any element.
    """

    def __init__(self, error: Exception, *, is_element: bool = True) -> None:
        PendingFailure.__init__(self, error)
        self.is_element = is_element


def as_state(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def counted(state: Any, *names: str) -> list[int]:
    """Return the element counts called `names` in a saved state.

    Raises:
        InvalidArgumentError: If one is missing or not a non-negative int.
    """
    found: list[Any] = [as_state(state).get(name) for name in names]
    if any(type(n) is not int or not 0 <= n <= _MOST_ELEMENTS for n in found):
        raise InvalidArgumentError(
            f"This is not a state that `save_state()` returned: {state!r:.200}. It must be a dict"
            f" in which {' and '.join(names)} are numbers of elements."
        )
    return found


class Ahead(Iterator[Any]):
    """A thread-safe iterator with lookahead.

    Attributes:
        lock: Held while an element is produced, peeked at or consumed, so each element goes to
            one thread. Callers hold it to peek and consume atomically. It is reentrant because a
            function of the pipeline may use the same iterator, and a `threading.RLock` because
            waiting for one in C still lets signal handlers run. Lock order: acquire it before any
            lock under which user functions must not run, never after.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._position = 0
        self._errors = 0  # failed elements before the position, which does not count them
        self._peeked: deque[Any] = deque()

    def _fetch(self) -> Any:
        """Return the next element or a `Failed`; raise StopIteration at the end.

        Subclasses override this method or `_look`; each is implemented with the other.
        """
        self._look()
        return self._peeked.popleft()

    def _look(self) -> None:
        """Append one more element to the peeked ones; raise StopIteration at the end."""
        self._peeked.append(self._fetch())

    @property
    @abstractmethod
    def origin(self) -> Any:
        """The object iterated over; a function compiled for one pass is reused for others."""

    def admit(self) -> None:
        """Raise if the calling code may not take elements from this iterator."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The spec of the elements."""

    @abstractmethod
    def _end(self) -> str:
        """Return the error message for requesting an element after the end."""

    def get_next(self) -> Any:
        """Return the next element.

        Returns:
            The element.

        Raises:
            OutOfRangeError: The dataset has no further element.

        Example:
            >>> int(iter(rx.data.Dataset.range(3)).get_next())
            0
        """
        element = next(self, _END)
        if element is _END:
            raise OutOfRangeError(self._end())
        return element

    def get_next_as_optional(self) -> Optional:
        """Return the next element as an optional, which is empty at the end.

        Returns:
            An optional; read it with ``has_value()`` and ``get_value()``.

        Example:
            >>> bool(iter(rx.data.Dataset.range(0)).get_next_as_optional().has_value())
            False
        """
        element = next(self, _END)
        return Optional.empty() if element is _END else Optional(element)

    def take(self) -> Any:
        """Return the next element; for code that is not traced."""
        with self.lock:
            element = self._peeked.popleft() if self._peeked else self._fetch()
            if isinstance(element, Failed):
                self._errors += element.is_element
                element.raise_stored()
            self._position += 1
        return element

    def reaches(self, count: int) -> bool:
        """Peek up to `count` elements ahead; whether all exist and none of them failed."""
        peeked = self._peeked
        with self.lock:
            while (seen := len(peeked)) < count and not self._is_failing():
                try:
                    self._look()
                except StopIteration:
                    return False
                except Exception as error:  # stored, and raised when the element is taken
                    if len(peeked) > seen:  # raised by a signal handler after the element arrived
                        raise
                    peeked.append(Failed(error, is_element=False))
            return len(peeked) - self._is_failing() >= count

    def _is_failing(self) -> bool:
        return bool(self._peeked) and isinstance(self._peeked[-1], Failed)

    def peek(self, ahead: int) -> Any:
        """Return the element `ahead` positions ahead, which `reaches` must have peeked at."""
        return self._peeked[ahead]

    def consume(self, count: int) -> None:
        """Consume `count` elements that were peeked at."""
        with self.lock:
            self._position += count
            for _ in range(count):
                self._peeked.popleft()

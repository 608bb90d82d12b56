"""Ahead: iterators whose elements can be looked at before they are taken, and may be missing.

A value that may be missing.

While a function is traced, `next` gives stand-ins for an element that is looked at and not taken;
each call of what was compiled then takes the elements that it needs. Which code is traced is known
to the layers above, which say here how `next` goes there.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from replicax._jax_private import at_rest, surrounding, traced
from replicax.data._errors import InvalidArgumentError, OutOfRangeError
from replicax.data._leaves import leaf_spec, to_leaf
from replicax.data._node import Due
from replicax.data._structure import flatten, map_leaves

_MISSING = object()


class Optional:
    """An element, or nothing: what `get_next_as_optional` returns.

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
        """An optional that holds a value.

        Args:
            value: Any element.

        Returns:
            The optional.

        Raises:
            InvalidArgumentError: The value has no part that is an array, as None has not.

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
        """An optional without a value.

        Args:
            element_spec: What a value would look like.

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
        """The value.

        Returns:
            The element.

        Raises:
            InvalidArgumentError: There is none.

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
        """The spec of the value, or the one that `empty` was given.

        Example:
            >>> rx.data.Optional.from_value(np.zeros(2)).element_spec.shape
            (2,)
        """
        if self._value is _MISSING and self._spec is not None:
            return self._spec
        return map_leaves(_spec, self.get_value())


def _spec(leaf: Any) -> Any:
    known = next((spec for kind, spec in leaf_specs.items() if isinstance(leaf, kind)), None)
    return leaf_spec(to_leaf(leaf)) if known is None else known(leaf)


# The specs of leaves of other classes than datasets make, such as per-replica values.
leaf_specs: dict[type, Callable[[Any], Any]] = {}


# Whether Python drives a function of replicax, in which elements are arrays of JAX.
in_function: ContextVar[bool] = ContextVar("replicax_in_function", default=False)
is_driven = in_function.get
_END = object()
_MOST_ELEMENTS = 1 << 62


class Surroundings:
    """What iterating means where code is traced, or part of a function."""

    take: Callable[[Any], Any]
    loop: Callable[[], None]


around = Surroundings()


def is_plain() -> bool:
    """Whether the code that runs now is neither traced nor part of a function."""
    return surrounding(traced.value) is at_rest and not is_driven()


class Failed(Due):
    """In the place of an element: the error that it raises when its turn comes.

    Args:
        error: The error.
        is_element: Whether an element has failed, and the next one follows; otherwise something
            around the elements has.
    """

    def __init__(self, error: Exception, *, is_element: bool = True) -> None:
        Due.__init__(self, error)
        self.is_element = is_element


def as_state(given: Any) -> Mapping[str, Any]:
    """What was given as a saved state; nothing if it cannot be one."""
    return given if isinstance(given, Mapping) else {}


def counted(state: Any, *names: str) -> list[int]:
    """Numbers of elements in a saved state.

    Raises:
        InvalidArgumentError: If the state is not built as it was saved.
    """
    found: list[Any] = [as_state(state).get(name) for name in names]
    if any(type(n) is not int or not 0 <= n <= _MOST_ELEMENTS for n in found):
        raise InvalidArgumentError(
            f"This is no state that `save_state()` returned: {state!r:.200}. It must be a dict in"
            f" which {' and '.join(names)} are numbers of elements."
        )
    return found


class Ahead(Iterator[Any]):
    """An iterator that can look ahead, and that threads may share.

    Attributes:
        lock: Held while an element is made, looked at or taken, so that each goes to one thread.
            Hold it yourself to look at elements and take them in one step. It is reentrant, as a
            function of the pipeline may come back here, and a thread that waits for it in C still
            runs the handlers of signals. Take it before any lock under which no function of a
            user may run, never after.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._position = 0
        self._errors = 0  # elements that failed before the position
        self._peeked: deque[Any] = deque()

    def _fetch(self) -> Any:
        """The next element, or that it failed; StopIteration at the end."""
        self._look()
        return self._peeked.popleft()

    def _look(self) -> None:
        """Look at one element more; StopIteration at the end. One of the two says how."""
        self._peeked.append(self._fetch())

    @property
    @abstractmethod
    def origin(self) -> Any:
        """What it is a pass over: a function compiled for one pass serves the others too."""

    def admit(self) -> None:
        """Refuse to give elements to the code that runs now, if that makes no sense."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The spec of the elements."""

    @abstractmethod
    def _end(self) -> str:
        """What to say at the end."""

    def get_next(self) -> Any:
        """The next element.

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
        """The next element, or an empty optional at the end.

        Returns:
            An optional; ask it with ``has_value()`` and ``get_value()``.

        Example:
            >>> bool(iter(rx.data.Dataset.range(0)).get_next_as_optional().has_value())
            False
        """
        element = next(self, _END)
        return Optional.empty() if element is _END else Optional(element)

    def take(self) -> Any:
        """The next element, in plain code."""
        with self.lock:
            element = self._peeked.popleft() if self._peeked else self._fetch()
            if isinstance(element, Failed):
                self._errors += element.is_element
                element.settle()
            self._position += 1
        return element

    def reaches(self, count: int) -> bool:
        """Whether ``count`` elements can be looked at, before the end or one that fails."""
        peeked = self._peeked
        with self.lock:
            while (seen := len(peeked)) < count and not self._is_failing():
                try:
                    self._look()
                except StopIteration:
                    return False
                except Exception as error:  # raised when its turn comes
                    if len(peeked) > seen:  # a signal's handler raised it, after the element came
                        raise
                    peeked.append(Failed(error, is_element=False))
            return len(peeked) - self._is_failing() >= count

    def _is_failing(self) -> bool:
        return bool(self._peeked) and isinstance(self._peeked[-1], Failed)

    def peek(self, ahead: int) -> Any:
        """An element that `reaches` saw, by how many come before it."""
        return self._peeked[ahead]

    def consume(self, count: int) -> None:
        """Take elements that were looked at."""
        with self.lock:
            self._position += count
            for _ in range(count):
                self._peeked.popleft()

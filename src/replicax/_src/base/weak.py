"""A set of weak references with the order of insertion."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedWeakSet(Generic[T]):
    """Objects that are in use elsewhere, in the order in which they were added.

    All workers run the same program, so the order is the same on all of them, and a loop over the
    objects may use collectives. The order of a `weakref.WeakSet` depends on addresses. Objects are
    compared by identity.

    Example:
        >>> from replicax._src.base.weak import OrderedWeakSet
        >>> class Thing: ...
        >>> first, second = Thing(), Thing()
        >>> things = OrderedWeakSet()
        >>> things.add(first)
        >>> things.add(second)
        >>> list(things) == [first, second]
        True
        >>> del first
        >>> len(list(things))
        1
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        """Add `item`; an item that is there keeps its place."""
        number = id(item)
        # Bound now, as the names of modules are gone when the interpreter exits. The callback's
        # argument, the reference, is the default of `pop`.
        remove = partial(self._references.pop, number)
        self._references.setdefault(number, weakref.ref(item, remove))

    def __iter__(self) -> Iterator[T]:
        for reference in list(self._references.values()):
            item = reference()
            if item is not None:
                yield item

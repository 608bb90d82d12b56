"""Given: iterators that are arguments of a function, one program for all of them."""

import weakref
from collections.abc import Sequence
from typing import Any, final

from replicax._errors import TracingError
from replicax.data._ahead import Ahead, around, is_plain


@final
class Given(Ahead):
    """An iterator that a function takes as an argument: another one with every call.

    Attributes:
        place: Which of the leaves of the arguments it is.
    """

    def __init__(self, iterator: Ahead, place: int) -> None:
        Ahead.__init__(self)
        self.place = place
        self.bind(iterator)

    def bind(self, iterator: Ahead) -> None:
        """Stand for another iterator, for as long as somebody else holds that."""
        self._iterator = weakref.ref(iterator)

    @property
    def bound(self) -> Ahead:
        """The iterator that it stands for."""
        iterator = self._iterator()
        if iterator is None:
            raise TracingError(
                "An iterator that was the argument of an rx.function was kept, and used after that"
                " call had ended and the iterator was gone. Keep the iterator outside instead."
            )
        return iterator

    def __next__(self) -> Any:
        self.bound.admit()
        return next(self.bound) if is_plain() else around.take(self)

    def __iter__(self) -> Any:
        return iter(self.bound)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bound, name)

    @property
    def origin(self) -> Any:
        """As it says."""
        return self.bound.origin

    @property
    def element_spec(self) -> Any:
        """As it says."""
        return self.bound.element_spec

    def take(self) -> Any:
        """From it."""
        return self.bound.take()

    def reaches(self, count: int) -> bool:
        """As it says."""
        return self.bound.reaches(count)

    def peek(self, ahead: int) -> Any:
        """Of it."""
        return self.bound.peek(ahead)

    def consume(self, count: int) -> None:
        """Of it."""
        self.bound.consume(count)

    def _fetch(self) -> Any:
        return self.bound.take()

    def _end(self) -> str:
        return self.bound._end()  # noqa: SLF001 - it stands for it


def with_givens(leaves: Sequence[Any]) -> list[Any]:
    """Arguments in which iterators are replaced by what stands for those of any call."""
    givens: dict[int, Given] = {}
    return [
        givens.setdefault(id(x), Given(x, i)) if isinstance(x, Ahead) else x
        for i, x in enumerate(leaves)
    ]

"""Context managers that end in time or not at all.

The exception of a signal handler may come between the last statement of a `with` block and the code
that ends it. Then the generator behind a `contextlib.contextmanager` is left suspended, and Python
closes it when the exception is dropped. A notebook keeps the last exception, so that this may be
minutes later, in the middle of another step, whose state the generator would overwrite with the one
that it had found.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_open: set[Any] = set()


class _Block(contextlib.AbstractContextManager[_T], Generic[_T]):
    """A context manager that stays referenced until it ends."""

    __slots__ = ("_manager",)

    def __init__(self, manager: contextlib.AbstractContextManager[_T]) -> None:
        self._manager = manager

    def __enter__(self) -> _T:
        _open.add(self._manager)
        return self._manager.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        result = self._manager.__exit__(kind, error, traceback)
        _open.discard(self._manager)
        return result


def contextmanager(
    function: Callable[_P, Iterator[_T]],
) -> Callable[_P, contextlib.AbstractContextManager[_T]]:
    """Work as `contextlib.contextmanager`, but never run the end of a block late.

    If a signal prevents the end, the generator is kept for good instead of being closed later. Each
    caller restores what matters by other means, see `replicax.context._current.within`.
    """
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return _Block(make(*args, **kwargs))

    return block

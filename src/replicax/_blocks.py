"""Context managers that end in time or not at all.

The exception of a signal handler may come between the last statement of a `with` block and the code
that ends it. Then the generator behind a `contextlib.contextmanager` is left suspended, and Python
closes it when the exception is dropped. A notebook keeps the last exception, so that this may be
minutes later, in the middle of another step, whose state the generator would overwrite with the one
that it had found.
"""

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_open: set[Any] = set()  # the generators of blocks that have begun and not ended


class _Block(contextlib.AbstractContextManager[_T], Generic[_T]):
    """A context manager whose generator stays referenced until it has ended."""

    __slots__ = ("_generator", "_manager")

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._manager: Any = contextlib.contextmanager(lambda: generator)()

    def __enter__(self) -> _T:
        _open.add(self._generator)
        try:
            return self._manager.__enter__()  # type: ignore[no-any-return]
        finally:
            self._forget_ended()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            return self._manager.__exit__(kind, error, traceback)  # type: ignore[no-any-return]
        finally:
            self._forget_ended()

    def _forget_ended(self) -> None:
        if self._generator.gi_frame is None:
            _open.discard(self._generator)


def contextmanager(
    function: Callable[_P, Iterator[_T]],
) -> Callable[_P, contextlib.AbstractContextManager[_T]]:
    """Work as `contextlib.contextmanager`, but never run the end of a block late.

    If a signal prevents the end, the generator is kept for good instead of being closed later. Each
    caller restores what matters by other means, see `replicax.context._current.within`.
    """

    @functools.wraps(function)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return _Block(function(*args, **kwargs))

    return block


@atexit.register
def _close_open() -> None:
    """Close the generators that signals left open, while the modules that they use still exist.

    Otherwise Python closes them after it has cleared all modules, and prints an exception for each.
    """
    while _open:
        # The block may belong to another thread or context, where its end is of no use any more.
        with contextlib.suppress(BaseException):
            _open.pop().close()

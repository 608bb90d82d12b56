"""A variant of `contextlib.contextmanager` that never runs the exit code of a block late.

A signal handler may raise between the last statement of a `with` block and its exit. The generator
of a `contextlib.contextmanager` then stays suspended, and Python closes it when the exception is
garbage-collected. A notebook keeps the last exception alive, so this may happen minutes later, in
the middle of another step, whose state the generator would overwrite with an older one.
"""

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_open: set[Any] = set()  # the generators of entered blocks; the reference prevents a late close


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
    """Return a context manager like `contextlib.contextmanager`, whose exit never runs late.

    If a signal prevents the exit, the generator is kept alive instead of being closed later. Each
    caller restores its state by other means: see `replicax._src.context.current.within`.
    """

    @functools.wraps(function)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return _Block(function(*args, **kwargs))

    return block


@atexit.register
def _close_open() -> None:
    """Close the generators that signals left open while the modules they use still exist.

    Otherwise Python would close them after clearing all modules, and print an exception for each.
    """
    while _open:
        # The exit code may raise: the block may belong to another thread or context.
        with contextlib.suppress(BaseException):
            _open.pop().close()

"""Watch: be told of every program that a function is traced into, before it first runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Called with the function, the arguments taken apart, and the program.
Watcher = Callable[[Any, Any, Any], None]

_watcher: ContextVar[Watcher | None] = ContextVar("replicax_watcher", default=None)


def tell(function: Any, arguments: Any, program: Any) -> None:
    """Tell whoever watches."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(function, arguments, program)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` told of the functions that this thread traces in the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)

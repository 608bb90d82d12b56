"""The exceptions of replicax.

Each is also a subclass of the built-in exception that TensorFlow raises in the same place, so
``except`` clauses written for TensorFlow keep working::

    ReplicaxError
    |-- PlacementError (ValueError)        a device that does not exist, or is named twice
    |-- ScopeError (RuntimeError)          a method called in the wrong context
    |-- ReplicaError (RuntimeError)        replicas that run different collectives
    |-- DivergenceError (ValueError)       replicas that write different values
    |-- PerReplicaError (TypeError, ValueError)  a per-replica value used as one array
    |-- TracingError (TypeError)           Python that cannot be traced
    |-- VariableError (ValueError)         a variable used in a way its declaration forbids
    `-- CheckpointError (AssertionError)   a checkpoint that does not match the objects
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

from replicax._src.base.origin import is_library


class ReplicaxError(Exception):
    """Base class of all exceptions that replicax defines.

    Example:
        >>> issubclass(rx.errors.ScopeError, rx.errors.ReplicaxError)
        True
    """

    __module__ = "replicax.errors"


class PlacementError(ReplicaxError, ValueError):
    """A device that does not exist, is named twice, or does not fit the others.

    Example:
        >>> issubclass(rx.errors.PlacementError, ValueError)
        True
    """

    __module__ = "replicax.errors"


class ScopeError(ReplicaxError, RuntimeError):
    """A method was called in a context where it is not allowed.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> try:
        ...     strategy.run(lambda: strategy.run(lambda: None))
        ... except rx.errors.ScopeError:
        ...     print("run inside run")
        run inside run
    """

    __module__ = "replicax.errors"


class ReplicaError(ReplicaxError, RuntimeError):
    """The replicas do not agree: one waits for a collective that another never calls.

    Example:
        >>> issubclass(rx.errors.ReplicaError, RuntimeError)
        True
    """

    __module__ = "replicax.errors"


class DivergenceError(ReplicaxError, ValueError):
    """Replicas wrote different values to a variable that must be equal on all of them.

    Example:
        >>> issubclass(rx.errors.DivergenceError, ValueError)
        True
    """

    __module__ = "replicax.errors"


class PerReplicaError(ReplicaxError, TypeError, ValueError):
    """A per-replica value was used as one array in cross-replica context.

    Example:
        >>> try:
        ...     rx.distribute.PerReplica([1, 2]) + 1
        ... except ValueError as error:
        ...     print(isinstance(error, TypeError))
        True
    """

    __module__ = "replicax.errors"


class TracingError(ReplicaxError, TypeError):
    """Python code that needs a concrete value where only its shape and dtype are known.

    Example:
        >>> issubclass(rx.errors.TracingError, TypeError)
        True
    """

    __module__ = "replicax.errors"


class VariableError(ReplicaxError, ValueError):
    """A variable is used in a way that its declaration forbids.

    Example:
        >>> issubclass(rx.errors.VariableError, ValueError)
        True
    """

    __module__ = "replicax.errors"


class CheckpointError(ReplicaxError, AssertionError):
    """A checkpoint does not match the objects it is restored into.

    Example:
        >>> issubclass(rx.errors.CheckpointError, AssertionError)
        True
    """

    __module__ = "replicax.errors"


def user_line(frame: FrameType | None) -> str:
    """Return ``file:line`` of the user's code that called ``frame``; empty if there is none."""
    found = user_frame(frame)
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code that called ``frame``."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def warn_user(text: str) -> None:
    """Warn at the user's line that led here; Python shows a warning once per line."""
    where = user_frame(sys._getframe(1))  # noqa: SLF001
    if where is None:
        warnings.warn(text, UserWarning, stacklevel=3)
        return
    seen = where.f_globals.setdefault("__warningregistry__", {})
    file, line = where.f_code.co_filename, where.f_lineno
    warnings.warn_explicit(text, UserWarning, file, line, registry=seen)


def check_parameters(fn: Callable[..., Any], count: int, problem: str) -> None:
    """Raise a TypeError if ``fn`` does not take ``count`` positional arguments.

    Args:
        fn: A function of the user; one without a signature is not checked.
        count: The number of arguments that it will be given.
        problem: What is wrong then, and what to write.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise TypeError(problem) from None


_F = TypeVar("_F", bound=Callable[..., Any])


def requires(name: str, position: int, advice: str) -> Callable[[_F], _F]:
    """Return a decorator that gives advice if the argument ``name`` of a method is missing.

    Args:
        name: The argument.
        position: Its position; ``self`` is 0.
        advice: What to write.
    """

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= position and name not in kwargs:
                place = f"{type(args[0]).__name__}.{method.__name__}"
                raise TypeError(f"{place} needs the argument {name!r}: {advice}")
            return method(*args, **kwargs)

        return cast("_F", checked)

    return decorate

"""What a trace says: the signals that end it, and the words for what it cannot do.

Signals are no `Exception`, so that user code which catches those does not swallow them.
"""

from collections.abc import Iterable
from typing import Any


class HostDriven(BaseException):
    """Python must run the function, as how many elements it takes depends on values."""


class Unfilled(BaseException):
    """An iterator cannot fill this call of a compiled function: Python runs it this time."""


class Reshaped(Unfilled):
    """The elements that come have other shapes than those that the function was traced with."""


class Text(Unfilled):
    """An argument holds strings: no compiled program can take them."""


class Ragged(Unfilled):
    """The replicas' arrays differ in shape: no single program can take them."""


def late_creation(name: str, created: Iterable[Any]) -> str:
    """What to say of variables that are created too late."""
    names = ", ".join(repr(v.name) for v in created)
    return (
        f"{name} creates variables ({names}) on a call that is not its first. A traced function may"
        " create variables on its first call only: create them outside, or keep them and create"
        " them once, `if self.v is None: self.v = rx.Variable(...)`."
    )


def needs_value(name: str, error: Exception) -> str:
    """What to say if Python asks for the value of a traced array."""
    return (
        f"{name} needs the value of an array while it is traced, when only its shape and dtype are"
        " known: a Python `if`, `while`, `int()`, `float()`, `range()`, `.numpy()` or a function of"
        " NumPy depends on an array, or on the replica id. Use `rx.cond(condition, if_true,"
        " if_false)`, `rx.while_loop` or `jnp.where`; pass what is fixed as a Python number; or run"
        " without `rx.function`."
        f"\nJAX says: {str(error).splitlines()[0]}"
    )

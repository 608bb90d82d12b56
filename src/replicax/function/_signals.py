"""Signals between a trace and the function that started it; users never see them.

They are no `Exception`, so that user code which catches those does not swallow them.
"""


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

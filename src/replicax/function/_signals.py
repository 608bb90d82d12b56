"""Signals between a trace and the function that started it; users never see them."""


class HostDriven(Exception):  # noqa: N818 - a signal, not an error
    """The function loops over a dataset: Python runs it, and each run inside is compiled."""


class Unfilled(Exception):  # noqa: N818 - a signal, not an error
    """An iterator cannot fill this call of a compiled function: Python runs it this time."""


class Text(Unfilled):
    """An argument holds strings: no compiled program can take them."""


class Ragged(Unfilled):
    """The replicas' arrays differ in shape: no single program can take them."""

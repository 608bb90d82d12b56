"""Hook: a function of a library that is replaced, and the test that it is still there."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicax._errors import ScopeError
from replicax.context._current import current


@dataclass(frozen=True)
class Hook:
    """A function of a library, the parameters it must have, and what is put in its place.

    Attributes:
        place: The module in the library, and the name in it.
        root: The package of the library.
        again: Modules that may have the function under the same name.
    """

    place: str
    parameters: str
    make: Callable[[Any], Any]
    root: str = "keras.src"
    again: tuple[str, ...] = ("keras.src.backend", "keras.src.backend.jax")

    def owner(self) -> tuple[Any, str]:
        """The module or class that has the function, and its name there."""
        module, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(f"{self.root}.{module}")
        *outer, name = path.split(".")
        return functools.reduce(getattr, outer, owner), name

    def fault(self) -> str:
        """How the library differs from what the hook was written for; empty if it does not."""
        try:
            owner, name = self.owner()
            found = ", ".join(inspect.signature(getattr(owner, name)).parameters)
        except (ImportError, AttributeError):
            return f"has no {self.place}"
        return "" if found == self.parameters else f"has {self.place}({found})"

    def install(self) -> None:
        """Put the new function in the place of the old one."""
        owner, name = self.owner()
        original = getattr(owner, name)
        new: Any = functools.wraps(original)(self.make(original))
        new.__signature__ = inspect.signature(original)  # configurations are read off it
        setattr(owner, name, new)
        for module in map(importlib.import_module, self.again):
            if getattr(module, name, None) is original:
                setattr(module, name, new)


def refused(original: Any, what: str, why: str) -> Any:
    """A constructor of variables that refuses in scopes, where this library cannot be joined."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = current().strategy
        if strategy is not None and strategy.topology is not None:
            raise ScopeError(f"{what} cannot be made in the scope of {strategy}: {why}.")
        original(self, *args, **kwargs)

    return init


def replicas() -> Any:
    """The replica that runs, if there are several of them; else None."""
    replica = current().replica
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None

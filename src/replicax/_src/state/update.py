"""Description of one write to a variable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Combine = Callable[..., Any]
Kind = Literal["replace", "add", "part", "sparse"]


@dataclass(frozen=True, slots=True)
class Update:
    """One kind of write to a variable.

    Attributes:
        name: The method's name; all replicas must call the same method.
        kind: Whether the value is replaced, added to, replaced in part, or updated at some indices.
        combine: Computes the new value from the old value and the caller's arguments.
        part: The key of the part that is replaced; it must be equal on all replicas.
    """

    name: str
    kind: Kind
    combine: Combine
    part: Any = None

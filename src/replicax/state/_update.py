"""Updates: one verb that writes a variable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Combine = Callable[..., Any]
Kind = Literal["replace", "add", "part", "sparse"]


@dataclass(frozen=True, slots=True)
class Update:
    """A verb that writes a variable.

    Attributes:
        name: Its name; all replicas must call the same.
        kind: Whether the value is replaced, added to, replaced in part, or changed at some indices.
        combine: Computes the new value from the old one and the parts that the caller gave.
        part: The key of the part that is replaced; all replicas must name the same.
    """

    name: str
    kind: Kind
    combine: Combine
    part: Any = None

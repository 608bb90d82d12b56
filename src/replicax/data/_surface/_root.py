"""What every part of `Dataset` needs: the graph, and a way to make the next dataset."""

import operator
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from replicax.data._errors import InvalidArgumentError
from replicax.data._node import Node

if TYPE_CHECKING:
    from replicax.data._dataset import Dataset


class Root(ABC):
    """A dataset as the last node of a graph."""

    @property
    @abstractmethod
    def node(self) -> Node:
        """The last node of the graph."""

    @staticmethod
    @abstractmethod
    def _wrap(node: Node) -> "Dataset":
        """The dataset that ends in ``node``."""


def node_of(dataset: Any, verb: str) -> Node:
    """The graph of a dataset that a user handed over."""
    node = getattr(dataset, "node", None)
    if not isinstance(node, Node):
        raise InvalidArgumentError(
            f"{verb}() needs datasets, got {type(dataset).__name__}. Wrap arrays with"
            " `rx.data.Dataset.from_tensor_slices(...)`."
        )
    return node


def to_int(value: Any, verb: str, name: str, *, least: int | None = None) -> int:
    """An int argument, at least ``least``."""
    call = f"{verb}({name}={value!r})"
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(
            f"{call}: {name} must be an int, got {type(value).__name__}."
        ) from None
    if least is not None and number < least:
        raise InvalidArgumentError(f"{call}: {name} must be at least {least}, got {number}.")
    return number

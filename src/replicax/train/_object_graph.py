"""Object graphs: Python objects -> what of them is saved, by name; and back.

A checkpoint holds a graph: objects by number, each with its parts by name, and for those that have
a value the key under which it stands. Restoring walks the saved graph and the live objects side by
side, so that a part is found by the way that leads to it and not by the order of creation: a model
can be restored without its optimizer, on its own, or before all of its parts exist. TensorFlow's
checkpoints hold such a graph too, and are restored by the same walk.
"""

from __future__ import annotations

import dataclasses
import types
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from replicax.variables._held import variable_of

VALUE = "VARIABLE_VALUE"

# What libraries keep about objects that are reached by other ways.
_BOOKKEEPING = {"_tracker", "_inbound_nodes", "_outbound_nodes", "_parent_path", "_obj_type"}
_NO_PARTS = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    type,
    np.ndarray,
    np.generic,
    jax.Array,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


@dataclass
class Node:
    """One saved object.

    Attributes:
        children: Its parts, by name: numbers of other nodes.
        values: The keys of what it saved itself, by the name of the attribute.
        slots: What an optimizer kept for a variable: (variable's node, slot's name) -> node.
    """

    children: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    slots: dict[tuple[int, str], int] = field(default_factory=dict)


class HasState(Protocol):
    """An object that says its own state: an iterator, for example."""

    @abstractmethod
    def save_state(self) -> dict[str, Any]:
        """The state, of plain Python values."""

    @abstractmethod
    def restore_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""


class PythonState:
    """A base for objects whose state, which is no array, is saved with a checkpoint.

    Example:
        >>> import tempfile
        >>> class Name(rx.train.experimental.PythonState):
        ...     def __init__(self, text):
        ...         self.text = text
        ...
        ...     def serialize(self):
        ...         return self.text
        ...
        ...     def deserialize(self, string_value):
        ...         self.text = string_value.decode()
        >>> name = Name("first")
        >>> checkpoint = rx.train.Checkpoint(name=name)
        >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/ckpt")
        >>> name.text = "second"
        >>> _ = checkpoint.restore(path)
        >>> name.text
        'first'
    """

    def serialize(self) -> str | bytes:
        """The state as text or bytes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no serialize(), which gives text.")

    def deserialize(self, string_value: bytes) -> None:
        """Go back to a state, given as bytes; a subclass does it."""
        raise NotImplementedError(f"{type(self).__name__} has no deserialize(bytes).")

    def save_state(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it."""
        told = self.serialize()
        return {"py_state": (told.encode() if isinstance(told, str) else told).decode("latin-1")}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go back to what `save_state` gave."""
        self.deserialize(state["py_state"].encode("latin-1"))


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a variable: ours, or another library's."""
    return variable_of(x) is not None or hasattr(type(x), "__rx_variable__")


def has_state(x: Any) -> bool:
    """Whether ``x`` says its own state."""
    return callable(getattr(type(x), "save_state", None)) and callable(
        getattr(type(x), "restore_state", None)
    )


def parts_of(x: Any) -> Mapping[str, Any]:
    """The parts of an object, by name."""
    if isinstance(x, _NO_PARTS):
        return {}
    if isinstance(x, Mapping):
        return {str(k): v for k, v in x.items() if isinstance(k, str | int)}
    fields = getattr(x, "_fields", None)
    if isinstance(x, tuple) and fields is not None:
        return dict(zip(fields, x, strict=True))
    if isinstance(x, list | tuple):
        return {str(i): v for i, v in enumerate(x)}
    own = getattr(x, "__dict__", None)
    if own is None and dataclasses.is_dataclass(x):
        return {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
    return {k: v for k, v in (own or {}).items() if k not in _BOOKKEEPING}


@dataclass
class Found:
    """The live objects of a checkpoint that have something to save.

    Attributes:
        nodes: The graph.
        objects: What has a value, by its key.
    """

    nodes: list[Node]
    objects: dict[str, Any]


def graph_of(root: Any) -> Found:
    """The graph of ``root``, as far as it leads to values; keys are the shortest ways."""
    ways, parts, leaves = _reached(root)
    useful = _leading(parts, set(leaves)) | {id(root)}
    numbers = {place: i for i, place in enumerate(p for p in ways if p in useful)}
    nodes = [Node() for _ in numbers]
    for place, number in numbers.items():
        nodes[number].children = {
            name: numbers[id(part)]
            for name, part in parts.get(place, {}).items()
            if id(part) in numbers
        }
        if place in leaves:
            nodes[number].values[VALUE] = _key(ways[place])
    return Found(nodes, {_key(ways[place]): x for place, x in leaves.items()})


def _reached(root: Any) -> tuple[dict[int, str], dict[int, Mapping[str, Any]], dict[int, Any]]:
    """The ways to all objects, by their ids; their parts; and those that have a value."""
    ways: dict[int, str] = {id(root): ""}
    all_parts: dict[int, Mapping[str, Any]] = {}
    leaves: dict[int, Any] = {}
    waiting = deque([root])
    while waiting:
        x = waiting.popleft()
        if is_variable(x) or has_state(x):
            leaves[id(x)] = x
            continue
        all_parts[id(x)] = parts = parts_of(x)
        for name, part in parts.items():
            if id(part) not in ways and not isinstance(part, _NO_PARTS):
                ways[id(part)] = f"{ways[id(x)]}/{_escaped(name)}".lstrip("/")
                waiting.append(part)
    return ways, all_parts, leaves


def _key(way: str) -> str:
    return f"{way}/.ATTRIBUTES/{VALUE}"


def _escaped(name: str) -> str:
    return name.replace(".", "..").replace("/", ".S")


def _leading(edges: Mapping[int, Mapping[str, Any]], leaves: set[int]) -> set[int]:
    """The objects from which a leaf can be reached."""
    parents: dict[int, list[int]] = {}
    for place, parts in edges.items():
        for part in parts.values():
            parents.setdefault(id(part), []).append(place)
    useful, waiting = set(leaves), deque(leaves)
    while waiting:
        for parent in parents.get(waiting.popleft(), ()):
            if parent not in useful:
                useful.add(parent)
                waiting.append(parent)
    return useful


@dataclass
class Match:
    """What a saved graph and live objects have in common.

    Attributes:
        pairs: What can be restored: the live object, by the key of its saved value.
        unused: Keys of saved values that no live object asks for.
        missing: Ways to live objects that have no saved value.
    """

    pairs: dict[str, Any]
    unused: list[str]
    missing: list[str]


def matched(nodes: list[Node], root: Any, find: Callable[[Any, str], Any]) -> Match:
    """Walk the saved graph and the live objects side by side.

    Args:
        nodes: The saved graph.
        root: The live object of its first node.
        find: Says which part of a live object a saved name means; None if it has none.
    """
    pairs: dict[str, Any] = {}
    met: dict[int, Any] = {0: root}
    waiting = deque([0])
    while waiting:
        number = waiting.popleft()
        node, live = nodes[number], met[number]
        for key in node.values.values():
            if is_variable(live) or has_state(live):
                pairs.setdefault(key, live)
        for name, child in node.children.items():
            part = find(live, name) if child not in met else None
            if part is not None:
                met[child] = part
                waiting.append(child)
    restored = set(map(id, pairs.values()))
    saved = [key for node in nodes for key in node.values.values()]
    live_leaves = graph_of(root).objects
    return Match(
        pairs,
        [key for key in dict.fromkeys(saved) if key not in pairs],
        [way for way, x in live_leaves.items() if id(x) not in restored],
    )


def part_of(live: Any, name: str) -> Any:
    """The part of an object that has this name; None if it has none."""
    return parts_of(live).get(name)

"""Object graphs: Python objects -> what of them is saved, by name; and back.

A checkpoint holds a graph: objects by number, each with its parts by name, and for those that have
a value the key under which it stands. Restoring walks the saved graph and the live objects side by
side, so that a part is found by the way that leads to it and not by the order of creation: a model
can be restored without its optimizer, on its own, or before all of its parts exist. TensorFlow's
checkpoints hold such a graph too, and are restored by the same walk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from replicax.state._held import variable_of
from replicax.train._contents import Unnamed, contents_of, has_no_parts

VALUE = "VARIABLE_VALUE"
_COPIES = "COPIES"


@dataclass
class ObjectNode:
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


def is_leaf(x: Any) -> bool:
    """Whether ``x`` has a value of its own in a checkpoint."""
    return is_variable(x) or has_state(x)


def parts_of(x: Any) -> Mapping[str, Any]:
    """The parts of an object, by name."""
    return contents_of(x).named


class Names:
    """What the names of a saved graph mean: here those of ours."""

    def part(self, live: Any, parts: Mapping[str, Any], name: str) -> Any:
        """The part of a live object that a saved name means; None if it has none.

        Args:
            live: The object.
            parts: Its parts, by the names that they have here.
            name: The saved name.
        """
        return parts.get(name)

    def slot(self, optimizer: Any, variable: Any, name: str) -> Any:
        """What an optimizer keeps for a variable under a saved name; None if nothing."""
        return None

    def is_saved(self, part: Any) -> bool:
        """Whether parts of this kind are in such a graph at all."""
        return True


OWN = Names()


class TensorFlowNames(Names):
    """The names in TensorFlow's graphs, of models and optimizers of Keras 2 and 3."""

    def part(self, live: Any, parts: Mapping[str, Any], name: str) -> Any:
        """A part by its attribute's name, or as Keras 2 named layers."""
        part = parts.get(name)
        if part is not None:
            return part
        named = getattr(type(live), "__rx_part__", None)
        if named is not None and (part := named(live, name)) is not None:
            return part
        kind, _, number = name.partition("-")
        layers = getattr(live, "layers", None)
        if isinstance(layers, list) and number.isdigit():
            with_weights = [layer for layer in layers if layer.weights]
            named = {"layer": layers, "layer_with_weights": with_weights}.get(kind, [])
            return named[int(number)] if int(number) < len(named) else None
        return getattr(live, name, None) if is_variable(getattr(live, name, None)) else None

    def slot(self, optimizer: Any, variable: Any, name: str) -> Any:
        """A slot of Keras 2, where the optimizer of Keras 3 keeps the same."""
        find = getattr(type(optimizer), "__rx_slot__", None)
        return None if find is None else find(optimizer, variable, name)

    def is_saved(self, part: Any) -> bool:
        """Metrics and seeds of Keras 3 are nothing that TensorFlow tracks."""
        return not any(
            c.__name__ in ("Metric", "SeedGenerator") and c.__module__.startswith("keras.")
            for c in type(part).__mro__
        )


@dataclass
class Found:
    """The live objects of a checkpoint that have something to save.

    Attributes:
        nodes: The graph.
        objects: What has a value, by its key.
        unnamed: What has a value, and can be reached only by a part that has no name.
    """

    nodes: list[ObjectNode]
    objects: dict[str, Any]
    unnamed: list[Unnamed]


def graph_of(root: Any, names: Names = OWN) -> Found:
    """The graph of ``root``, as far as it leads to values; keys are the shortest ways."""
    ways, parts, leaves, unnamed = _reached(root, names)
    useful = _leading(parts, set(leaves)) | {id(root)}
    numbers = {place: i for i, place in enumerate(p for p in ways if p in useful)}
    nodes = [ObjectNode() for _ in numbers]
    for place, number in numbers.items():
        nodes[number].children = {
            name: numbers[id(part)]
            for name, part in parts.get(place, {}).items()
            if id(part) in numbers
        }
        if place in leaves:
            nodes[number].values[VALUE] = _key(ways[place])
    objects = {_key(ways[place]): x for place, x in leaves.items()}
    return Found(nodes, objects, _unnamed(unnamed, ways, names))


def _reached(
    root: Any, names: Names
) -> tuple[dict[int, str], dict[int, Mapping[str, Any]], dict[int, Any], list[Unnamed]]:
    """Return the ways to all objects by their ids, their parts, the leaves, and unnamed parts."""
    ways: dict[int, str] = {id(root): ""}
    all_parts: dict[int, Mapping[str, Any]] = {}
    leaves: dict[int, Any] = {}
    unnamed: list[Unnamed] = []
    waiting = deque([root])
    while waiting:
        x = waiting.popleft()
        if is_leaf(x):
            leaves[id(x)] = x
            continue
        parts, others = contents_of(x)
        all_parts[id(x)] = parts
        way = ways[id(x)]
        unnamed += [u._replace(label=f"{way}{u.label}") for u in others]
        for name, part in parts.items():
            if id(part) in ways or has_no_parts(part):
                continue
            if x is root or names.is_saved(part):  # what was given by name counts
                # An empty name is one too: the way to its part begins with a slash.
                ways[id(part)] = _escaped(name) if x is root else f"{way}/{_escaped(name)}"
                waiting.append(part)
    return ways, all_parts, leaves, unnamed


def _unnamed(parts: list[Unnamed], ways: Mapping[int, str], names: Names) -> list[Unnamed]:
    """Return the leaves that only these parts lead to."""
    leaves: list[Unnamed] = []
    seen: dict[int, Any] = {}
    waiting = deque(parts)
    while waiting:
        label, why, x = waiting.popleft()
        if id(x) in ways or id(x) in seen or has_no_parts(x) or not names.is_saved(x):
            continue
        seen[id(x)] = x  # which keeps it alive, as its id must stay its own
        if is_leaf(x):
            leaves.append(Unnamed(label, why, x))
            continue
        inner, others = contents_of(x)
        waiting.extend(Unnamed(f"{label}/{name}", why, part) for name, part in inner.items())
        waiting.extend(u._replace(label=f"{label}{u.label}") for u in others)
    return leaves


def _key(way: str) -> str:
    return f"{way}/.ATTRIBUTES/{VALUE}"


def copies_key(key: str) -> str:
    """Where the single copies of a value stand that is saved, and read, as one."""
    return f"{key}/{_COPIES}"


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


def matched(nodes: list[ObjectNode], root: Any, names: Names) -> Match:
    """Walk the saved graph and the live objects side by side.

    Args:
        nodes: The saved graph.
        root: The live object of its first node.
        names: What its names mean.
    """
    met = _met(nodes, root, names)
    pairs: dict[str, Any] = {}
    for number, live in met.items():
        if is_leaf(live):
            for key in nodes[number].values.values():
                pairs.setdefault(key, live)
        for (variable, name), slot in nodes[number].slots.items():
            found = names.slot(live, met.get(variable), name)
            if found is not None:
                pairs.update(dict.fromkeys(nodes[slot].values.values(), found))
    restored = set(map(id, pairs.values()))
    saved = dict.fromkeys(key for node in nodes for key in node.values.values())
    live = graph_of(root, names)
    leaves = [*live.objects.items(), *((u.label, u.value) for u in live.unnamed)]
    return Match(
        pairs,
        [key for key in saved if key not in pairs],
        [way for way, x in leaves if id(x) not in restored],
    )


def _met(nodes: list[ObjectNode], root: Any, names: Names) -> dict[int, Any]:
    """The live objects of saved ones, by their numbers."""
    met: dict[int, Any] = {0: root}
    waiting = deque([0])
    while waiting:
        number = waiting.popleft()
        parts = parts_of(met[number])
        for name, child in nodes[number].children.items():
            part = names.part(met[number], parts, name) if child not in met else None
            if part is not None:
                met[child] = part
                waiting.append(child)
    return met

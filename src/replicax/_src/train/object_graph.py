"""Object graphs: which values of a Python object are saved, and matching them on restore.

A checkpoint stores a graph of numbered nodes. A node has named children, and, if the object has a
value, the key of that value. Restoring walks the saved graph and the live objects in parallel, so
an object is identified by its path and not by the order of creation: a model can be restored
without its optimizer, or before all of its variables exist. TensorFlow's checkpoints store such a
graph too, and are restored by the same walk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from replicax._src.state.variable import Variable
from replicax._src.state.variables import variable_of
from replicax._src.train.object_contents import (
    OF_VARIABLES,
    Contents,
    Unnamed,
    contents_of,
    has_no_parts,
    is_of_library,
)

VALUE = "VARIABLE_VALUE"
_COPIES = "COPIES"


@dataclass
class ObjectNode:
    """A saved object.

    Attributes:
        children: The numbers of its children's nodes, by name.
        values: The keys of its own values, by attribute name.
        slots: An optimizer's slot variables: (node of the variable, slot name) -> node.
    """

    children: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    slots: dict[tuple[int, str], int] = field(default_factory=dict)


class Checkpointable(Protocol):
    """An object that serializes its own state into checkpoints, such as a dataset iterator.

    Any object with these two methods is one; it need not derive from this class. Checkpoints save
    it wherever it is an attribute, or an item of a list or dictionary, of a saved object.

    Example:
        >>> import tempfile
        >>> class Curriculum:
        ...     level = 1
        ...
        ...     def save_state(self):
        ...         return {"level": self.level}
        ...
        ...     def restore_state(self, state):
        ...         self.level = state["level"]
        >>> curriculum = Curriculum()
        >>> checkpoint = rx.train.Checkpoint(curriculum=curriculum)
        >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/ckpt")
        >>> curriculum.level = 5
        >>> _ = checkpoint.restore(path)
        >>> curriculum.level
        1
    """

    @abstractmethod
    def save_state(self) -> dict[str, Any]:
        """Return the state as JSON-serializable Python values.

        With several workers every worker calls it; the chief's state is saved, and every worker
        restores that.
        """

    @abstractmethod
    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `save_state` returned."""


class PythonState:
    """A base class for objects that save state other than arrays in a checkpoint.

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
        """Return the state as text or bytes; a subclass must override this."""
        raise NotImplementedError(f"{type(self).__name__} has no serialize(), which gives text.")

    def deserialize(self, string_value: bytes) -> None:
        """Restore the state from bytes; a subclass must override this."""
        raise NotImplementedError(f"{type(self).__name__} has no deserialize(bytes).")

    def save_state(self) -> dict[str, Any]:
        """Return the state in the form that a checkpoint stores."""
        state = self.serialize()
        return {"py_state": (state.encode() if isinstance(state, str) else state).decode("latin-1")}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `save_state` returned."""
        self.deserialize(state["py_state"].encode("latin-1"))


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a variable, replicax's or another library's."""
    return variable_of(x) is not None or hasattr(type(x), "__rx_variable__")


def has_state(x: Any) -> bool:
    """Whether ``x`` implements `Checkpointable`."""
    return callable(getattr(type(x), "save_state", None)) and callable(
        getattr(type(x), "restore_state", None)
    )


def is_leaf(x: Any) -> bool:
    """Whether ``x`` has a value in a checkpoint, so its children are not visited."""
    return is_variable(x) or has_state(x)


def graph_contents(x: Any) -> Contents:
    """Return the children of an object, also of one that has a value itself.

    The value of a library's object is all of its state. Users may attach attributes to an
    `rx.Variable`, and objects with state of their own may have further children.
    """
    return Contents({}, []) if is_leaf(x) and is_bare(x) else contents_of(x)


def is_bare(leaf: Any) -> bool:
    """Whether a leaf has a value, but no children."""
    has_more = isinstance(leaf, Variable) and not vars(leaf).keys() <= OF_VARIABLES
    return is_of_library(type(leaf)) and not has_more


class Names:
    """The mapping from names in a saved graph to live objects, for replicax's checkpoints."""

    def part(self, live: Any, parts: Mapping[str, Any], name: str) -> Any:
        """Return the child of a live object that corresponds to a saved name; None without one.

        Args:
            live: The live object.
            parts: Its named children.
            name: The saved name.
        """
        return parts.get(name)

    def slot(self, optimizer: Any, variable: Any, name: str) -> Any:
        """Return an optimizer's slot variable for ``variable``; None if there is none."""
        return None

    def is_saved(self, part: Any) -> bool:
        """Whether checkpoints with these names contain objects like ``part``."""
        return True


OWN = Names()


class TensorFlowNames(Names):
    """The names in TensorFlow's checkpoints of Keras 2 and Keras 3 models and optimizers."""

    def part(self, live: Any, parts: Mapping[str, Any], name: str) -> Any:
        """Return a child by its attribute name, or by Keras 2's names ``layer-0`` and similar."""
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
        """Return the Keras 3 optimizer's variable that corresponds to a slot of Keras 2."""
        find = getattr(type(optimizer), "__rx_slot__", None)
        return None if find is None else find(optimizer, variable, name)

    def is_saved(self, part: Any) -> bool:
        """Whether TensorFlow tracks the object; it ignores Keras 3 metrics and seed generators."""
        return not any(
            c.__name__ in ("Metric", "SeedGenerator") and c.__module__.startswith("keras.")
            for c in type(part).__mro__
        )


@dataclass
class Found:
    """The object graph of live objects.

    Attributes:
        nodes: The graph.
        objects: The objects with a value, by key.
        unnamed: Objects with a value that are reachable only through children without a name.
    """

    nodes: list[ObjectNode]
    objects: dict[str, Any]
    unnamed: list[Unnamed]


def graph_of(root: Any, names: Names = OWN) -> Found:
    """Return the graph of ``root``, restricted to paths to values; keys are the shortest paths."""
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
    """Walk all objects reachable by name, breadth first, so paths are the shortest.

    Returns:
        The path of each object, by id; the named children, by id; the leaves, by id; and the
        unnamed children.
    """
    ways: dict[int, str] = {id(root): ""}
    all_parts: dict[int, Mapping[str, Any]] = {}
    leaves: dict[int, Any] = {}
    unnamed: list[Unnamed] = []
    waiting = deque([root])
    later: deque[Any] = deque()  # leaves, whose parts have other names first
    while waiting or later:
        is_first = bool(waiting)
        x = waiting.popleft() if is_first else later.popleft()
        if is_first and is_leaf(x):
            leaves[id(x)] = x
            if not is_bare(x):
                later.append(x)
            continue
        parts, others = graph_contents(x)
        all_parts[id(x)] = parts
        way = ways[id(x)]
        unnamed += [u._replace(label=f"{way}{u.label}") for u in others]
        for name, part in parts.items():
            if id(part) in ways or has_no_parts(part):
                continue
            if x is root or names.is_saved(
                part
            ):  # always save objects that the user named explicitly
                # An empty name is valid: the path of its child begins with a slash.
                ways[id(part)] = _escaped(name) if x is root else f"{way}/{_escaped(name)}"
                waiting.append(part)
    return ways, all_parts, leaves, unnamed


def _unnamed(parts: list[Unnamed], ways: Mapping[int, str], names: Names) -> list[Unnamed]:
    """Return the leaves that are reachable only through these children without a name."""
    leaves: list[Unnamed] = []
    seen: dict[int, Any] = {}
    waiting = deque(parts)
    while waiting:
        label, why, x = waiting.popleft()
        if id(x) in ways or id(x) in seen or has_no_parts(x) or not names.is_saved(x):
            continue
        seen[id(x)] = x  # keep it alive: its id must not be reused
        if is_leaf(x):
            leaves.append(Unnamed(label, why, x))
        inner, others = graph_contents(x)
        waiting.extend(Unnamed(f"{label}/{name}", why, part) for name, part in inner.items())
        waiting.extend(u._replace(label=f"{label}{u.label}") for u in others)
    return leaves


def _key(way: str) -> str:
    return f"{way}/.ATTRIBUTES/{VALUE}"


def copies_key(key: str) -> str:
    """Return the key of the per-replica copies of the value saved under ``key``."""
    return f"{key}/{_COPIES}"


def _escaped(name: str) -> str:
    return name.replace(".", "..").replace("/", ".S")


def _leading(edges: Mapping[int, Mapping[str, Any]], leaves: set[int]) -> set[int]:
    """Return the ids of all objects from which a leaf can be reached."""
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
    """The correspondence between a saved graph and live objects.

    Attributes:
        pairs: The live objects that were restored, by the key of the saved value.
        unused: Keys of saved values that no live object received.
        missing: Paths of live objects that received no saved value.
    """

    pairs: dict[str, Any]
    unused: list[str]
    missing: list[str]


def matched(nodes: list[ObjectNode], root: Any, names: Names) -> dict[str, Any]:
    """Match the saved graph with the live objects by walking both in parallel.

    Args:
        nodes: The saved graph.
        root: The live object of its first node.
        names: The meaning of the names in the graph.

    Returns:
        The live objects that can be restored, by the keys of their saved values. An object that
        matches two saved ones gets the value of the first.
    """
    met = _met(nodes, root, names)
    pairs: dict[str, Any] = {}
    taken: set[int] = set()
    for number, live in met.items():
        if is_leaf(live) and id(live) not in taken and nodes[number].values:
            taken.add(id(live))
            pairs |= dict.fromkeys(nodes[number].values.values(), live)
        for (variable, name), slot in nodes[number].slots.items():
            found = names.slot(live, met.get(variable), name)
            if found is not None:
                pairs.update(dict.fromkeys(nodes[slot].values.values(), found))
    return pairs


def compared(nodes: list[ObjectNode], root: Any, names: Names, restored: dict[str, Any]) -> Match:
    """Compare the saved graph and the live objects with the restored objects.

    Args:
        nodes: The saved graph.
        root: The live object of its first node.
        names: What its names mean.
        restored: The objects that were restored, by the keys of their saved values.
    """
    saved = dict.fromkeys(key for node in nodes for key in node.values.values())
    ids = set(map(id, restored.values()))
    live = graph_of(root, names)
    leaves = [*live.objects.items(), *((u.label, u.value) for u in live.unnamed)]
    return Match(
        restored,
        [key for key in saved if key not in restored],
        [way for way, x in leaves if id(x) not in ids],
    )


def _met(nodes: list[ObjectNode], root: Any, names: Names) -> dict[int, Any]:
    """Return the live object of each saved node that has one, by node number."""
    met: dict[int, Any] = {0: root}
    waiting = deque([0])
    while waiting:
        number = waiting.popleft()
        parts = graph_contents(met[number]).named
        for name, child in nodes[number].children.items():
            part = names.part(met[number], parts, name) if child not in met else None
            if part is not None:
                met[child] = part
                waiting.append(child)
    return met

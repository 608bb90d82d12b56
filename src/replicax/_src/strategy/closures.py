"""Closures of replica functions: the arrays that they capture become inputs of the program.

Lists and dictionaries keep their identity: while the function is traced, tracers temporarily
replace the arrays inside them. A function that appends to a captured list therefore appends to that
list, as it would without a strategy.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._src.base.closures import UNSET, captured, content
from replicax._src.base.errors import TracingError
from replicax._src.base.managers import contextmanager
from replicax._src.functions.cache_keys import static_key
from replicax._src.functions.reachable import Edge
from replicax._src.values.per_replica import is_distributed, is_opaque

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_INPUT = "an input"


class Closure(NamedTuple):
    """A function with the values it captures, split into arrays (inputs) and the rest.

    Attributes:
        fn: The function.
        place: Equal for functions defined by the same line of code that capture arrays in the
            same places.
        arrays: The captured arrays, which become inputs.
        statics: All other captured objects.
    """

    fn: Callable[..., Any]
    place: Any
    arrays: list[Any]
    statics: list[Edge]

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Closure:
        """Split `fn` into its code, captured arrays and other captured objects."""
        if isinstance(fn, MethodType):
            statics = [Edge("function", fn.__func__), Edge("self", fn.__self__)]
            return cls(fn, ("method", fn.__func__), [], statics)
        if not isinstance(fn, FunctionType):
            return cls(fn, static_key(fn), [], [Edge("function", fn)])
        found = _CapturedValues()
        outlines = tuple(found.take(name, value) for name, value in captured(fn).items())
        extras = {**(fn.__kwdefaults__ or {}), "__defaults__": fn.__defaults__}
        statics = [*found.statics, *(Edge(name, x) for name, x in extras.items())]
        return cls(fn, (fn.__code__, id(fn.__globals__), outlines), found.arrays, statics)

    def edges(self) -> list[Edge]:
        """Return the references of the function other than its inputs."""
        fn = self.fn
        if not isinstance(fn, FunctionType):
            return self.statics
        # A copy of the function with its code and globals, but an empty closure.
        empty = tuple(CellType(None) for _ in fn.__code__.co_freevars)
        bare = FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, empty)
        return [Edge(fn.__name__, bare), *self.statics]

    @contextmanager
    def filled(self, arrays: list[Any]) -> Iterator[Callable[..., Any]]:
        """Yield the function with `arrays` in place of its captured arrays, within the block.

        Raises:
            TracingError: If the function changed a pytree node of a custom class, of which it only
                has a copy.
        """
        fn = self.fn
        if not arrays or not isinstance(fn, FunctionType):
            yield fn
            return
        put = _InputSubstitution(self.arrays, arrays)
        cells = fn.__closure__ or ()
        try:
            given = [put.into(content(cell)) for cell in cells]
            same = [new is content(cell) for new, cell in zip(given, cells, strict=True)]
            # Cells without arrays are shared with the original function, so `nonlocal` works.
            own = [c if s else CellType(g) for c, g, s in zip(cells, given, same, strict=True)]
            made = FunctionType(
                fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(own)
            )
            made.__kwdefaults__ = fn.__kwdefaults__
            yield made
            for cell, mine, new in zip(cells, own, given, strict=True):
                if mine is not cell and content(mine) is not new:  # assigned through `nonlocal`
                    cell.cell_contents = content(mine)
            put.check(fn.__name__)
        finally:
            put.restore()


def _is_input(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) or is_distributed(x)


def _is_node(x: Any) -> bool:
    """Whether `x` is a pytree node with arrays, other than one of Python's containers."""
    if is_opaque(x) or isinstance(x, (*_SCALARS, list, tuple, dict)):
        return False
    if jax.tree_util.all_leaves([x]):
        return False
    return any(map(_is_input, jax.tree.leaves(x, is_leaf=is_opaque)))


def _items(x: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and items of a Python container; None for any other object."""
    if type(x) in _MAPPINGS:
        return list(x.items())
    if type(x) is list or type(x) is tuple or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return list(enumerate(x))
    return None


class _CapturedValues:
    """Collects the arrays that a closure captures, and its other objects."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.statics: list[Edge] = []
        self._seen: dict[int, int] = {}

    def take(self, name: str, x: Any) -> Any:
        """Add the value of a captured name; return an outline of where arrays are in it."""
        arrays, statics, seen = len(self.arrays), len(self.statics), dict(self._seen)
        outline = self._outline(name, x)
        if len(self.arrays) > arrays or x is UNSET:
            return outline
        del self.statics[statics:]
        self._seen = seen
        self.statics.append(Edge(name, x))
        return None

    def _outline(self, label: str, x: Any) -> Any:
        """Collect the arrays in `x`; return a key of its structure around them."""
        if _is_input(x) or _is_node(x):
            self.arrays.append(x)
            return _INPUT
        if x is UNSET:
            return "no value"
        if isinstance(x, _SCALARS):
            return static_key(x)
        items = _items(x)
        if items is None:
            self.statics.append(Edge(label, x))
            return None
        if id(x) in self._seen:
            return ("again", self._seen[id(x)])
        self._seen[id(x)] = len(self._seen)
        inner = tuple((static_key(k), self._outline(f"{label}[{k!r}]", item)) for k, item in items)
        return (type(x), inner)


class _InputSubstitution:
    """Places inputs where a closure's arrays are, and restores the arrays afterwards."""

    def __init__(self, arrays: list[Any], inputs: list[Any]) -> None:
        self._left = list(zip(arrays, inputs, strict=True))[::-1]
        self._done: dict[int, Any] = {}
        self._replaced: list[tuple[Any, Any, Any]] = []
        self._nodes: list[tuple[Any, Any]] = []

    def into(self, x: Any) -> Any:
        """Return `x` with inputs in place of its arrays; lists and dicts are changed in place."""
        if self._left and self._left[-1][0] is x:
            new = self._left.pop()[1]
            if not _is_input(x):
                self._nodes.append((new, _state(new)))
            return new
        items = _items(x)
        if items is None:
            return x
        if id(x) not in self._done:
            self._done[id(x)] = x
            self._done[id(x)] = self._filled(x, [(k, item, self.into(item)) for k, item in items])
        return self._done[id(x)]

    def _filled(self, x: Any, items: list[tuple[Any, Any, Any]]) -> Any:
        """Return the container `x` with its new items; a tuple is rebuilt."""
        changed = [(k, old, new) for k, old, new in items if old is not new]
        if isinstance(x, tuple):
            parts = [new for _, _, new in items]
            make = getattr(type(x), "_make", type(x))
            return make(parts) if changed else x
        for key, old, new in changed:
            x[key] = new
            self._replaced.append((x, old, new))
        return x

    def restore(self) -> None:
        """Put the arrays back wherever the function left the inputs."""
        for container, old, new in self._replaced:
            for key, item in _items(container) or ():
                if item is new:
                    container[key] = old

    def check(self, name: str) -> None:
        """Refuse changes of rebuilt nodes, which would be lost."""
        for node, before in self._nodes:
            if not _is_same(before, _state(node)):
                raise TracingError(
                    f"{name} changed a {type(node).__name__} that it closes over, which holds"
                    " arrays: the change would be lost, as the function sees a copy whose arrays"
                    " are inputs of the compiled program. Return the new value, or keep state that"
                    " changes in an rx.Variable."
                )


def _state(node: Any) -> tuple[Any, list[Any]]:
    leaves, treedef = jax.tree.flatten(node, is_leaf=is_opaque)
    return treedef, [*leaves, *getattr(node, "__dict__", {}).values()]


def _is_same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    return (
        one[0] == other[0]
        and len(one[1]) == len(other[1])
        and all(a is b for a, b in zip(one[1], other[1], strict=True))
    )

"""A function with the names that it was handed over with.

A pipeline runs its functions long after it was made. Python looks names up when a function runs,
so that `for k in (1, 10): d = d.map(lambda x: x + k)` would add 20. Here the values of closures and
of global names are taken when the function is handed over, for it and for the plain functions that
it calls by name; objects are not copied, so that what changes inside of them is seen.
"""

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_STORES_OF_CELLS = {"STORE_DEREF", "DELETE_DEREF"}
_LOOK_AT_ALL_NAMES = {"globals", "vars", "eval", "exec"}


def bound(function: Any) -> Any:
    """The function with its names as they are now.

    Names that it assigns itself (``global``, ``nonlocal``) are its state, and stay shared; so do
    names that do not exist yet. Callable objects are left as they are.
    """
    if isinstance(function, MethodType):
        return MethodType(bound(function.__func__), function.__self__)
    if type(function) is functools.partial:
        return functools.partial(bound(function.func), *function.args, **function.keywords)
    return _Binding(function).copy(function) if isinstance(function, FunctionType) else function


@dataclass(frozen=True)
class _Names:
    """What a function's code does with names, the code inside of it included."""

    loaded: frozenset[str]
    stored: frozenset[str]
    stored_cells: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> _Names:
    found: dict[str, set[str]] = {"loaded": set(), "stored": set(), "stored_cells": set()}
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.opname in _LOADS:
                found["loaded"].add(step.argval)
            elif step.opname in _STORES:
                found["stored"].add(step.argval)
            elif step.opname in _STORES_OF_CELLS:
                found["stored_cells"].add(step.argval)
    return _Names(**{kind: frozenset(names) for kind, names in found.items()})


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _LiveNames(dict[str, Any]):
    """Names with values of their own; any other is looked up where it always was."""

    def __init__(self, own: dict[str, Any], live: dict[str, Any]) -> None:
        super().__init__(own)
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


class _Binding:
    """A function and the plain functions that it reaches by name, to be copied together."""

    def __init__(self, function: FunctionType) -> None:
        self._copies: dict[int, FunctionType] = {}
        self._reached: dict[int, FunctionType] = {}
        self._stored: set[tuple[int, str]] = set()  # global names that one of them assigns
        self._stored_cells: set[int] = set()
        pending = [function]
        while pending:
            current = pending.pop()
            if id(current) not in self._reached:
                self._reached[id(current)] = current
                pending.extend(self._look_at(current))

    def copy(self, function: FunctionType) -> FunctionType:
        """The function with its names bound, or itself if it has none."""
        if id(function) in self._copies:
            return self._copies[id(function)]
        names = _names(function.__code__).loaded & function.__globals__.keys()
        cells = function.__closure__ or ()
        if not names and not cells:
            return function
        fresh = tuple(cell if self._is_live(cell) else CellType() for cell in cells)
        own: dict[str, Any] = {}
        scope = self._scope(function, own)
        copied = FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, fresh
        )
        self._copies[id(function)] = copied
        for old, new in zip(cells, fresh, strict=True):
            if new is not old:
                new.cell_contents = self._value(old.cell_contents)
        for name in own:
            scope[name] = self._value(own[name])
        functools.update_wrapper(copied, function, updated=())
        copied.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
        copied.__dict__ = function.__dict__  # a count that a function keeps on itself stays one
        return copied

    def _look_at(self, function: FunctionType) -> Iterator[FunctionType]:
        scope, names = function.__globals__, _names(function.__code__)
        self._stored.update((id(scope), name) for name in names.stored)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._stored_cells.update(id(cells[n]) for n in names.stored_cells & cells.keys())
        for cell in cells.values():
            if _is_filled(cell) and isinstance(cell.cell_contents, FunctionType):
                yield cell.cell_contents
        for name in names.loaded & scope.keys():
            value = scope[name]
            if isinstance(value, FunctionType) and value.__globals__ is scope:
                yield value

    def _scope(self, function: FunctionType, own: dict[str, Any]) -> dict[str, Any]:
        """The global names of a copy; ``own`` gets those that have values of their own."""
        scope, names = function.__globals__, _names(function.__code__)
        if names.stored or names.loaded & _LOOK_AT_ALL_NAMES:
            return scope
        kept = {name for name in names.loaded if (id(scope), name) not in self._stored}
        own.update((name, scope[name]) for name in kept & scope.keys())
        fixed = {name: value for name, value in scope.items() if name.startswith("__")}
        builtin: dict[str, Any] = getattr(function, "__builtins__", {})
        if all(name in own or name in fixed or name in builtin for name in names.loaded):
            return fixed
        return _LiveNames(fixed, scope)

    def _value(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and id(value) in self._reached:
            return self.copy(value)
        return value

    def _is_live(self, cell: CellType) -> bool:
        return id(cell) in self._stored_cells or not _is_filled(cell)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True

"""A user's function: kept with the names it was handed over with, and called for each element.

A function with the names that it was handed over with.

A pipeline runs its functions long after it was made. Python looks names up when a function runs,
so that `for k in (1, 10): d = d.map(lambda x: x + k)` would add 20. Here the values of closures and
of global names are taken when the function is handed over, for it and for the plain functions that
it calls by name; objects are not copied, so that what changes inside of them is seen.

A user's function of one element: called once for each, in order.

Only where the user says ``vectorize=True`` it is called for whole blocks.
"""

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from replicax.data._blocks import Block, ColumnBlock, Row, RowBlock
from replicax.data._errors import ArgumentTypeError, InvalidArgumentError, StructureError
from replicax.data._leaves import own, to_leaf
from replicax.data._structure import LEAF, Structure, flatten

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
    for part in all_codes(code):
        for step in dis.get_instructions(part):
            if step.opname in _LOADS:
                found["loaded"].add(step.argval)
            elif step.opname in _STORES:
                found["stored"].add(step.argval)
            elif step.opname in _STORES_OF_CELLS:
                found["stored_cells"].add(step.argval)
    return _Names(**{kind: frozenset(names) for kind, names in found.items()})


def loaded_names(code: CodeType) -> frozenset[str]:
    """The global names that code looks up, the code inside of it included."""
    return _names(code).loaded


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code and all code inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_codes(constant)


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


_references = sys.getrefcount
_SCALARS = frozenset({bytes, *(np.dtype(code).type for code in "?bhilqBHILQefdFD")})
_NUMBERS = frozenset("?bhilqBHILQefdFD")


class ElementFunction:
    """A user's function, with the names that it was given with.

    Args:
        function: What the user handed over.
        name: The transformation, for messages.
        vectorize: Whether it takes whole blocks.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, vectorize: bool = False) -> None:
        if not callable(function):
            raise ArgumentTypeError(
                f"{name}() needs a function, got {function!r} of type {type(function).__name__}."
            )
        self.function = bound(function)
        self.name = name
        self.vectorize = vectorize
        self._structure: Structure | None = None
        self._is_leaf = False
        self._flat_size = -1  # of a tuple of leaves

    def call(self, element: Any, index: int) -> Any:
        """The function of one element; what it raises names the element."""
        try:
            result = self.function(*element) if type(element) is tuple else self.function(element)
        except Exception as error:
            raise self._failed(error, f"element {index}") from error
        return tuple(result) if type(result) is list else result

    def row(self, element: Any, index: int) -> Row:
        """The leaves of the result for one element."""
        rows: list[Row] = []
        self.add_rows(rows, (element,), index)
        return rows[0]

    def add_rows(self, rows: list[Row], elements: Iterable[Any], index: int) -> None:
        """Add the leaves of the result for each element; those before an error are there.

        Args:
            rows: Where to add them.
            elements: What to call the function on.
            index: The number of the first, for messages.
        """
        function, row = self.function, self._row
        for element in elements:
            try:
                result = function(*element) if type(element) is tuple else function(element)
            except Exception as error:
                raise self._failed(error, f"element {index}") from error
            rows.append(row(result, element, index))
            index += 1

    def rows_block(self, rows: Sequence[Row]) -> RowBlock:
        """Rows of `add_rows` as a block."""
        assert self._structure is not None
        return RowBlock(self._structure, rows)

    def block(self, block: Block) -> Block:
        """The function of a whole block, which the user asked for."""
        try:
            columns = block.structure.unflatten(block.columns())
            result = self.function(*columns) if type(columns) is tuple else self.function(columns)
        except Exception as error:
            raise self._failed(error, "a block of elements") from error
        leaves = list(self._row(result, columns, 0))
        assert self._structure is not None
        if any(not isinstance(c, np.ndarray) or len(c) != len(block) for c in leaves):
            shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
            raise InvalidArgumentError(
                f"{self.name}(vectorize=True) gives the function {len(block)} elements at once, so"
                f" each result needs a first axis of that size; got shapes {shapes}."
            )
        return ColumnBlock(self._structure, leaves, len(block))

    def _row(self, result: Any, element: Any, index: int) -> Row:
        # The next call may write into what this one returned, so that it must be copied, unless
        # nobody but the frames here, and the element that was given, refers to it.
        try:
            if self._is_leaf and type(result) is not list:
                return (_unshared(result, ()),)
            if (
                type(result) is tuple
                and len(result) == self._flat_size
                and _references(result) == _TUPLE_REFERENCES
            ):
                is_alone = _references(element) == _ELEMENT_REFERENCES and type(element) is tuple
                return tuple(map(_unshared, result, repeat(element if is_alone else ())))
            return tuple(own(leaf) for leaf in self._leaves(result))
        except StructureError as error:
            raise StructureError(
                f"{self.name}() built element {index} differently from the ones before: {error}."
                " All elements of a dataset need the same nesting of tuples and dicts."
            ) from None

    def _leaves(self, result: Any) -> list[Any]:
        if type(result) is list:
            result = tuple(result)
        structure = self._structure
        if structure is None:
            structure, leaves = flatten(result)
            self._structure = structure
            self._is_leaf = structure.kind == "leaf"
            self._flat_size = structure.num_leaves if structure.is_flat_tuple else -1
        else:
            leaves = structure.leaves_of(result)
        return [to_leaf(leaf) for leaf in leaves]

    def _failed(self, error: Exception, where: str) -> InvalidArgumentError:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return InvalidArgumentError(
            f"The function {name} given to {self.name}() raised {type(error).__name__}: {error},"
            f" on {where} (counted from 0)."
        )


def _unshared(leaf: Any, given: tuple[Any, ...]) -> Any:
    """A leaf that nobody else can write into: itself if nobody can, or a copy.

    It may be one of the parts that the function was given.
    """
    kind = type(leaf)
    if kind in _SCALARS:
        return leaf
    if kind is np.ndarray:
        extra = _references(leaf) - _LEAF_REFERENCES
        is_alone = not extra or (extra == 1 and id(leaf) in map(id, given))
        if is_alone and leaf.flags.owndata and leaf.ndim and leaf.dtype.char in _NUMBERS:
            return leaf
    else:
        LEAF.collect(leaf, [], leaf)  # which raises if it is no leaf
    return own(to_leaf(leaf))


def _notices_other_references() -> bool:
    """Whether the counts of references are right for this Python: what a user keeps is copied."""
    kept = (np.empty(1), np.empty(1))
    given = [(kept[0], kept[1])] * 2
    rows: list[Row] = []
    for function in (
        lambda *_: kept[0],
        lambda *_: kept,
        lambda *_: (kept[0], kept[1]),
        lambda x, y: (y, x),
    ):
        ElementFunction(function, "map").add_rows(rows, given, 0)
    return not any(leaf is one for row in rows for leaf in row for one in kept)


# Here and in the frames of `_row` and `add_rows`; no count at all if this Python counts otherwise.
_LEAF_REFERENCES, _TUPLE_REFERENCES, _ELEMENT_REFERENCES = 4, 3, 4
if not _notices_other_references():
    _LEAF_REFERENCES = _TUPLE_REFERENCES = -2

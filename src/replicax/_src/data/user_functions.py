"""`ElementFunction`: a user's function with its free variables bound, applied to elements.

A pipeline runs its functions long after it was built, and Python resolves names when a function
runs, so `for k in (1, 10): d = d.map(lambda x: x + k)` would add 20. Therefore the values of
closure cells and global names are captured when the function is passed in, for it and for the plain
functions that it references. The captured objects themselves are not copied; mutations stay
visible.

The function is called once per element, in order, and with ``vectorize=True`` once per block.
"""

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from replicax._src.base.closures import UNSET, content
from replicax._src.base.tf_errors import ArgumentTypeError, InvalidArgumentError, StructureError
from replicax._src.data.element_blocks import Block, ColumnBlock, Row, RowBlock
from replicax._src.data.leaves import private_copy, to_leaf
from replicax._src.data.structure import LEAF, Structure, flatten

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_STORES_OF_CELLS = {"STORE_DEREF", "DELETE_DEREF"}
_DYNAMIC_LOOKUPS = {"globals", "vars", "eval", "exec"}  # may access any global name


def bind_names(function: Any) -> Any:
    """Return a copy of `function` whose free variables keep their current values.

    Variables that the function assigns (``global``, ``nonlocal``) are its state and stay shared, as
    do names that are not defined yet. Callable objects are returned unchanged.
    """
    if isinstance(function, MethodType):
        return MethodType(bind_names(function.__func__), function.__self__)
    if type(function) is functools.partial:
        return functools.partial(bind_names(function.func), *function.args, **function.keywords)
    return _Binding(function).copy(function) if isinstance(function, FunctionType) else function


@dataclass(frozen=True)
class _Names:
    """The names that a code object and the code objects nested in it load and store."""

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
    """Return the global names that `code` and code nested in it look up."""
    return _names(code).loaded


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and all code objects nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_codes(constant)


class _LiveNames(dict[str, Any]):
    """A global namespace of captured values that falls back to the live one."""

    def __init__(self, captured: dict[str, Any], live: dict[str, Any]) -> None:
        super().__init__(captured)
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


class _Binding:
    """Copies a function together with the plain functions that it references."""

    def __init__(self, function: FunctionType) -> None:
        self._copies: dict[int, FunctionType] = {}
        self._reached: dict[int, FunctionType] = {}
        # Names that any of the functions assigns: shared state, which must not be captured.
        self._stored: set[tuple[int, str]] = set()
        self._stored_cells: set[int] = set()
        pending = [function]
        while pending:
            current = pending.pop()
            if id(current) not in self._reached:
                self._reached[id(current)] = current
                pending.extend(self._references(current))

    def copy(self, function: FunctionType) -> FunctionType:
        """Return a copy of `function` with its names bound, or itself if it has no names."""
        if id(function) in self._copies:
            return self._copies[id(function)]
        names = _names(function.__code__).loaded & function.__globals__.keys()
        cells = function.__closure__ or ()
        if not names and not cells:
            return function
        fresh = tuple(cell if self._is_live(cell) else CellType() for cell in cells)
        captured: dict[str, Any] = {}
        scope = self._scope(function, captured)
        copied = FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, fresh
        )
        # Register the copy before filling its names: functions may refer to each other.
        self._copies[id(function)] = copied
        for old, new in zip(cells, fresh, strict=True):
            if new is not old:
                new.cell_contents = self._value(old.cell_contents)
        for name in captured:
            scope[name] = self._value(captured[name])
        functools.update_wrapper(copied, function, updated=())
        copied.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
        copied.__dict__ = function.__dict__  # function attributes are state and stay shared
        return copied

    def _references(self, function: FunctionType) -> Iterator[FunctionType]:
        """Record the names that `function` assigns; yield the functions that it references."""
        scope, names = function.__globals__, _names(function.__code__)
        self._stored.update((id(scope), name) for name in names.stored)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._stored_cells.update(id(cells[n]) for n in names.stored_cells & cells.keys())
        for value in map(content, cells.values()):
            if isinstance(value, FunctionType):
                yield value
        for name in names.loaded & scope.keys():
            value = scope[name]
            if isinstance(value, FunctionType) and value.__globals__ is scope:
                yield value

    def _scope(self, function: FunctionType, captured: dict[str, Any]) -> dict[str, Any]:
        """Return the globals for a copy of `function`; add the values to bind to `captured`."""
        scope, names = function.__globals__, _names(function.__code__)
        if names.stored or names.loaded & _DYNAMIC_LOOKUPS:
            return scope
        bindable = {name for name in names.loaded if (id(scope), name) not in self._stored}
        captured.update((name, scope[name]) for name in bindable & scope.keys())
        fixed = {name: value for name, value in scope.items() if name.startswith("__")}
        builtin: dict[str, Any] = getattr(function, "__builtins__", {})
        if all(name in captured or name in fixed or name in builtin for name in names.loaded):
            return fixed
        return _LiveNames(fixed, scope)

    def _value(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and id(value) in self._reached:
            return self.copy(value)
        return value

    def _is_live(self, cell: CellType) -> bool:
        """Whether a closure cell stays shared: it is assigned somewhere, or still empty."""
        return id(cell) in self._stored_cells or content(cell) is UNSET


_refcount = sys.getrefcount
_SCALARS = frozenset({bytes, *(np.dtype(code).type for code in "?bhilqBHILQefdFD")})
_NUMBERS = frozenset("?bhilqBHILQefdFD")


class _Running(threading.local):
    """How many element functions this thread is running, one in the other."""

    depth = 0


_running = _Running()


def in_element_function() -> bool:
    """Whether the calling code runs in a function that a dataset applies to elements."""
    return _running.depth > 0


class ElementFunction:
    """A user's function of elements, with its free variables bound.

    Args:
        function: The user's function.
        name: The name of the transformation, for error messages.
        vectorize: Whether the function takes whole blocks.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, vectorize: bool = False) -> None:
        if not callable(function):
            raise ArgumentTypeError(
                f"{name}() needs a function, got {function!r} of type {type(function).__name__}."
            )
        self.function = bind_names(function)
        self.name = name
        self.vectorize = vectorize
        self._structure: Structure | None = None
        self._is_leaf = False
        self._flat_size = -1  # number of leaves if results are flat tuples

    def call(self, element: Any, index: int) -> Any:
        """Return the function's result for one element.

        Raises:
            InvalidArgumentError: If the function raises; the message names the element.
        """
        _running.depth += 1
        try:
            result = self.function(*element) if type(element) is tuple else self.function(element)
        except Exception as error:
            raise self._failed(error, f"element {index}") from error
        finally:
            _running.depth -= 1
        return tuple(result) if type(result) is list else result

    def row(self, element: Any, index: int) -> Row:
        """Return the leaves of the result for one element."""
        rows: list[Row] = []
        self.add_rows(rows, (element,), index)
        return rows[0]

    def add_rows(self, rows: list[Row], elements: Iterable[Any], index: int) -> None:
        """Append the leaves of the result for each element to `rows`.

        If the function raises, `rows` has the results before the error.

        Args:
            rows: The list to append to.
            elements: The elements to call the function on.
            index: The index of the first element, for error messages.
        """
        function, row = self.function, self._row
        for element in elements:
            _running.depth += 1
            try:
                result = function(*element) if type(element) is tuple else function(element)
            except Exception as error:
                raise self._failed(error, f"element {index}") from error
            finally:
                _running.depth -= 1
            rows.append(row(result, element, index))
            index += 1

    def rows_block(self, rows: Sequence[Row]) -> RowBlock:
        """Return rows from `add_rows` as a block."""
        assert self._structure is not None
        return RowBlock(self._structure, rows)

    def block(self, block: Block) -> Block:
        """Return the function's result for a whole block (``vectorize=True``)."""
        _running.depth += 1
        try:
            columns = block.structure.unflatten(block.columns())
            result = self.function(*columns) if type(columns) is tuple else self.function(columns)
        except Exception as error:
            raise self._failed(error, "a block of elements") from error
        finally:
            _running.depth -= 1
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
        """Return the leaves of one result, copied unless provably unshared.

        Raises:
            StructureError: The structure differs from that of earlier results.
        """
        # A later call may write into an array that this one returned, so arrays are copied unless
        # only the frames here and the argument of the call refer to them.
        try:
            if self._is_leaf and type(result) is not list:
                return (_unshared(result, ()),)
            if (
                type(result) is tuple
                and len(result) == self._flat_size
                and _refcount(result) == _TUPLE_REFERENCES
            ):
                is_unshared = _refcount(element) == _ELEMENT_REFERENCES and type(element) is tuple
                return tuple(map(_unshared, result, repeat(element if is_unshared else ())))
            return tuple(private_copy(leaf) for leaf in self._leaves(result))
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
        """Return the error to raise if the function itself raised."""
        name = getattr(self.function, "__qualname__", repr(self.function))
        is_call = isinstance(error, TypeError) and "positional argument" in str(error)
        advice = " An element that is a tuple is passed as one argument for each part."
        return InvalidArgumentError(
            f"The function {name} given to {self.name}() raised {type(error).__name__}: {error},"
            f" on {where} (counted from 0).{advice * is_call}"
        )


def _unshared(leaf: Any, arguments: tuple[Any, ...]) -> Any:
    """Return `leaf` if no other code refers to its memory, else a copy.

    One reference from `arguments`, the call's arguments, is allowed.
    """
    kind = type(leaf)
    if kind in _SCALARS:
        return leaf
    if kind is np.ndarray:
        extra = _refcount(leaf) - _LEAF_REFERENCES
        is_unshared = not extra or (extra == 1 and id(leaf) in map(id, arguments))
        if is_unshared and leaf.flags.owndata and leaf.ndim and leaf.dtype.char in _NUMBERS:
            return leaf
    else:
        LEAF.collect(leaf, [], leaf)  # raises if `leaf` is not a leaf
    return private_copy(to_leaf(leaf))


def _notices_other_references() -> bool:
    """Whether the expected reference counts hold on this Python, so shared arrays are copied."""
    shared = (np.empty(1), np.empty(1))
    elements = [(shared[0], shared[1])] * 2
    rows: list[Row] = []
    for function in (
        lambda *_: shared[0],
        lambda *_: shared,
        lambda *_: (shared[0], shared[1]),
        lambda x, y: (y, x),
    ):
        ElementFunction(function, "map").add_rows(rows, elements, 0)
    return not any(leaf is array for row in rows for leaf in row for array in shared)


# References from `_unshared`, `_row` and `add_rows` to an otherwise unshared object. If this Python
# counts differently, use values that never match, so that everything is copied.
_LEAF_REFERENCES, _TUPLE_REFERENCES, _ELEMENT_REFERENCES = 4, 3, 4
if not _notices_other_references():
    _LEAF_REFERENCES = _TUPLE_REFERENCES = -2

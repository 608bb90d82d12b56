"""A user's function of one element: called once for each, in order.

Only where the user says ``vectorize=True`` it is called for whole blocks.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from replicax.data._blocks import Block, ColumnBlock, Row, RowBlock
from replicax.data._bound import bound
from replicax.data._errors import InvalidArgumentError, StructureError
from replicax.data._leaves import own, to_leaf
from replicax.data._structure import LEAF, Structure, flatten

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
            raise InvalidArgumentError(
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
        is_alone = not extra or (extra == 1 and any(leaf is part for part in given))
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

"""A user's function of one element, called for whole blocks where that is the same.

The first block decides. The function is called on a few stacked rows and on each of them alone,
for real rows and for made-up ones of many magnitudes; only if structure, dtypes, shapes and every
bit agree is it called on blocks from then on. It falls back to single elements whenever a block
fails.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, ColumnBlock, Row, RowBlock
from replicax.data._dataset_spec import DatasetSpec
from replicax.data._errors import InvalidArgumentError, StructureError
from replicax.data._leaves import Array, is_stackable, own, stack, to_leaf
from replicax.data._structure import Structure, flatten
from replicax.data._watched import MixesRowsError, plain, watch

_PROBE_ROWS = 4
_MADE_UP_ROWS = 8

_Form = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class ElementFunction:
    """A user's function, and what has been learnt about it."""

    def __init__(
        self, function: Callable[..., Any], name: str, *, vectorize: bool | None = None
    ) -> None:
        if not callable(function):
            raise InvalidArgumentError(
                f"{name}() needs a function, got {function!r} of type {type(function).__name__}."
            )
        self.function = function
        self.name = name
        self.vectorize = vectorize
        self._structure: Structure | None = None
        self._reuses: bool | None = None  # whether it returns the same memory again and again
        self._first: list[Any] | None = None
        self._verdicts: dict[_Form, bool] = {}

    @property
    def is_vectorized(self) -> bool:
        """Whether blocks are known to be the same as elements."""
        return self.vectorize is True or any(self._verdicts.values())

    @property
    def is_elementwise(self) -> bool:
        """Whether elements are known to be needed one by one."""
        if self.vectorize is not None:
            return not self.vectorize
        return bool(self._verdicts) and not any(self._verdicts.values())

    def call(self, element: Any, index: int) -> Any:
        """The function of one element; what it raises names the element."""
        try:
            return self._call(element)
        except Exception as error:
            raise self._failed(error, index) from error

    def row(self, element: Any, index: int) -> Row:
        """The leaves of the function's result for one element."""
        try:
            result = self._call(element)
        except Exception as error:
            raise self._failed(error, index) from error
        try:
            leaves = self._leaves(result)
            return tuple(leaves) if self._reuses is False else self._owned(leaves)
        except StructureError as error:
            raise StructureError(
                f"{self.name}() built element {index} differently from the ones before: {error}."
                " All elements of a dataset need the same nesting of tuples and dicts."
            ) from None

    def rows_block(self, rows: Sequence[Row]) -> RowBlock:
        """Results of `row` as a block."""
        assert self._structure is not None
        return RowBlock(self._structure, rows)

    def block(self, block: Block) -> Block | None:
        """The function of a whole block, or None if it must be called for single elements."""
        if self.vectorize is False or isinstance(block, RowBlock) or not block.structure.num_leaves:
            return None
        if self.vectorize:
            return self._trusted(block)
        if len(block) < 2:
            return None
        columns = block.columns()
        form: _Form = tuple([(c.shape[1:], c.dtype) for c in columns])
        verdict = self._verdicts.get(form)
        if verdict is None:
            verdict = self._verdicts[form] = self._probe(block.structure, columns)
        return self._on_columns(block.structure, columns) if verdict else None

    def _call(self, element: Any) -> Any:
        result = self.function(*element) if type(element) is tuple else self.function(element)
        return tuple(result) if type(result) is list else result

    def _leaves(self, result: Any) -> list[Any]:
        structure = self._structure
        if structure is None:
            self._structure, leaves = flatten(result)
        elif structure.is_flat_tuple and type(result) is tuple and _are_arrays(result):
            if len(result) == structure.num_leaves:
                return list(result)
            leaves = structure.leaves_of(result)  # which raises
        else:
            leaves = structure.leaves_of(result)
        return [to_leaf(leaf) for leaf in leaves]

    def _owned(self, leaves: list[Any]) -> Row:
        """Copies, until it is clear that the function does not fill one buffer again and again."""
        copies = tuple(own(leaf) for leaf in leaves)
        first = self._first
        if first is None:
            self._first = leaves
        elif self._reuses is None:
            arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
            before = [leaf for leaf in first if isinstance(leaf, np.ndarray)]
            self._reuses = any(np.may_share_memory(a, b) for a in arrays for b in before)
            self._first = []
        return copies

    def _trusted(self, block: Block) -> Block:
        columns = block.columns()
        try:
            leaves = self._leaves(self._call(block.structure.unflatten(columns)))
        except Exception as error:
            raise self._failed(error, None) from error
        assert self._structure is not None
        if any(not isinstance(c, np.ndarray) or len(c) != len(block) for c in leaves):
            shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
            raise InvalidArgumentError(
                f"{self.name}(vectorize=True) gives the function {len(block)} elements at once, so"
                f" each result needs a first axis of that size; got shapes {shapes}."
            )
        return ColumnBlock(self._structure, leaves, len(block))

    def _on_columns(self, structure: Structure, columns: list[Array]) -> Block | None:
        size = len(columns[0])
        try:
            leaves = self._leaves(self._call(structure.unflatten(columns)))
        except Exception:
            return None  # element by element, the error will name its element
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != size:
                return None
        assert self._structure is not None
        return ColumnBlock(self._structure, leaves, size)

    def _probe(self, structure: Structure, columns: list[Array]) -> bool:
        real = [column[:_PROBE_ROWS].copy() for column in columns]
        try:
            with np.errstate(all="ignore"):
                return self._agrees(structure, real) and self._agrees(structure, _made_up(real))
        except (Exception, MixesRowsError):
            return False

    def _agrees(self, structure: Structure, columns: list[Array]) -> bool:
        watched = [watch(column.copy()) for column in columns]
        together = flatten(self._call(structure.unflatten(watched)))
        rows = zip(*(list(column.copy()) for column in columns), strict=True)
        alone = [flatten(self._call(structure.unflatten(row))) for row in rows]
        if any(nesting != together[0] for nesting, _ in alone):
            return False
        parts = zip(*(leaves for _, leaves in alone), strict=True)
        return all(_same(plain(w), part) for w, part in zip(together[1], parts, strict=True))

    def _failed(self, error: Exception, index: int | None) -> InvalidArgumentError:
        where = "a block of elements" if index is None else f"element {index}"
        name = getattr(self.function, "__qualname__", repr(self.function))
        return InvalidArgumentError(
            f"The function {name} given to {self.name}() raised {type(error).__name__}: {error},"
            f" on {where} (counted from 0)."
        )


def _are_arrays(parts: tuple[Any, ...]) -> bool:
    """Whether `to_leaf` would leave all parts as they are: the usual case, asked first."""
    return all(type(p) is np.ndarray and p.ndim and p.dtype.kind in "fiub" for p in parts)


def _same(together: Any, alone: Sequence[Any]) -> bool:
    leaves = [to_leaf(leaf) for leaf in alone]
    if not isinstance(together, np.ndarray) or not is_stackable(leaves):
        return False
    expected = stack(leaves)
    together = to_leaf(together)
    if together.shape != expected.shape or together.dtype != expected.dtype:
        return False
    return np.array_equal(together, expected, equal_nan=expected.dtype.kind in "fc")


def _made_up(columns: list[Array]) -> list[Array]:
    # Rows of very different magnitude show a function that looks across rows (a maximum, a mean),
    # also where the real rows happen to agree.
    generator = np.random.default_rng(20)
    choice = generator.integers(0, len(columns[0]), _MADE_UP_ROWS)
    return [_made_up_column(column, choice, generator) for column in columns]


def _made_up_column(column: Array, choice: Array, generator: np.random.Generator) -> Array:
    shape = (_MADE_UP_ROWS, *column.shape[1:])
    kind, dtype = column.dtype.kind, column.dtype
    if kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    scales = 10.0 ** generator.permutation(np.arange(_MADE_UP_ROWS) % 6 - 1)
    scales = scales.reshape(-1, *[1] * (column.ndim - 1))
    if kind == "f":
        return (generator.standard_normal(shape) * scales).astype(dtype)
    if kind in "iu":
        info = np.iinfo(dtype)
        low, high = max(info.min, -(10**5)), min(info.max, 10**5)
        values = np.floor(generator.uniform(low, high + 1, shape) / (scales * 10))
        return np.clip(values, low, high).astype(dtype)
    return column[choice]


def zeros_for(spec: Any) -> tuple[Structure, list[Any]]:
    """An element that fits a spec, for datasets that have none."""
    structure, specs = flatten(spec)
    leaves: list[Any] = []
    for part in specs:
        if isinstance(part, DatasetSpec) and (empty := part.empty()) is not None:
            leaves.append(empty)
            continue
        if not isinstance(part, TensorSpec):
            raise InvalidArgumentError(f"Cannot make up an element for {part}.")
        shape = tuple(1 if size is None else size for size in part.shape or ())
        array = np.full(shape, b"" if part.dtype == object else 0, part.dtype)
        leaves.append(array if shape else array[()])
    return structure, leaves

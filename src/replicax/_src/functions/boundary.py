"""Inputs and outputs of a traced function other than plain array arguments.

- Distributed values that the code closes over. A replica function sees its replica's component, as
  if the value had been an argument. In traced code the value becomes an input, not a constant: its
  arrays are on other devices than constants are, and may be large.
- `IteratorArgument`: iterators as arguments; one program serves all iterators of a dataset.
- `Outputs`: the structure that the function returned, to rebuild it from arrays on every call.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import TracingError
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current
from replicax._src.data.optional import Ahead, is_plain, take_in_function
from replicax._src.functions.cache_keys import static_key
from replicax._src.functions.modes import HostDriven
from replicax._src.functions.reachable import Edge, ReachableObjects
from replicax._src.state.cell import NO_COPIES, Cell
from replicax._src.state.variable import Variable
from replicax._src.state.variables import value_of
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import (
    Distributed,
    Form,
    InBody,
    Joined,
    Pieces,
    Stacked,
    as_single_array,
    belongs_to_trace,
    is_result_leaf,
    is_text,
    num_components,
)
from replicax._src.values.placement import WHOLE, check_count, first, is_array, is_traced, on_device
from replicax._src.values.replica_functions import local_piece, stacked_array
from replicax._src.values.structures import (
    dict_orders,
    expand_dataclasses,
    has_dataclasses,
    in_order,
    rebuild_dataclasses,
    record_type,
)


def _form(value: Distributed) -> Form:
    """Return the components of `value` in the form that the running code sees."""
    frame, stored = current(), value.stored
    level = frame.level
    if level is None or getattr(level, "is_eager", True):  # JAX traces, and no function of ours
        return stored
    inside = frame.replica or frame.body
    if inside is not None and inside.num_replicas_in_sync == 1:
        return stored
    cell = _cell(value, inside)
    if cell is None:
        return stored
    seen = level.read(cell)
    if inside is not None and cell.per_replica:
        assert cell.topology is not None
        return InBody(seen, cell.topology, inside.across)
    if isinstance(seen, Distributed):
        return seen.stored
    assert cell.topology is not None
    return Joined(seen, cell.topology)


def _cell(value: Distributed, inside: Any) -> Cell | None:
    """Return the cell that makes `value` an input; None if it can only be a constant.

    Raises:
        HostDriven: If no single program can take it.
    """
    stored = value.stored
    if value.captured is None and isinstance(stored, Stacked):
        value.captured = Captured(stored.array, stored.array.shape[1:], stored.topology)
    elif value.captured is None and isinstance(stored, Joined):
        value.captured = Captured(stored.array, stored.array.shape, stored.topology, mirrored=True)
    elif value.captured is None and isinstance(stored, Pieces):
        value.captured = _of_pieces(stored, inside)
    cell: Cell | None = value.captured
    return cell


def _of_pieces(stored: Pieces, inside: Any) -> Cell | None:
    """Return a cell for arrays of one shape and dtype; None for other components."""
    values, strategy = stored.values, current().strategy
    if not all(is_array(v) or isinstance(v, np.ndarray) for v in values):
        return None
    if any(map(is_text, values)) or any(one != stored.all_specs[0] for one in stored.all_specs):
        if inside is not None and inside.position is not None:  # compiled for one replica only
            return None
        raise HostDriven
    place = stored.topology or (strategy.topology if strategy is not None else None)
    if place is None:
        return None
    check_count(len(values), place)
    return Captured(values, values[0].shape, place)


@final
class Captured(Cell):
    """A constant value, as the cell from which compiled functions read it."""

    __slots__ = ()

    def __init__(
        self, value: Any, shape: tuple[int, ...], topology: Topology, *, mirrored: bool = False
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = jnp.result_type(value[0] if isinstance(value, tuple) else value)
        self.topology = topology
        self.per_replica = not mirrored
        self.sharded = self.offloaded = False
        self.spec = WHOLE
        self.name = "a value that the function closes over"
        self.owned = False
        self.guards = None
        self.copies = NO_COPIES
        self.value = value


def _component(value: Distributed) -> Any:
    """Return the component of `value` for the running replica."""
    replica = current().replica
    if replica is None:
        return as_single_array(value)
    form = value.form
    if isinstance(form, InBody):
        return form.piece
    topology, at = replica.strategy.topology, replica.position
    if topology is not None:
        check_count(num_components(value), topology)
    if at is None:
        return local_piece(value)
    if belongs_to_trace(form):
        return form.values[at]
    with concrete():  # JAX may be tracing a part of the replica's function
        own = form.values[at]
        if topology is None or topology.cores > 1 or not is_array(own):
            return own
        return on_device(own, topology.primary_devices[at])


def replica_value(x: Any) -> Any:
    """Return one replica's own value of its result: its component, or an assigned value."""
    if isinstance(x, Variable) and x.is_written:
        return x.read_value()
    return x.component if isinstance(x, Distributed) else x


class RunningCode:
    """Implements `Execution`: distributed values as the running replica or trace sees them."""

    form = staticmethod(_form)
    component = staticmethod(_component)

    @staticmethod
    def in_replica() -> bool:
        """Whether a replica function is running, not counting cross-replica code inside it."""
        return current().replica is not None


@final
class IteratorArgument(Ahead):
    """A placeholder for an iterator argument, bound to a different iterator on each call.

    Attributes:
        place: The iterator's index among the leaves of the arguments.
    """

    def __init__(self, iterator: Ahead, place: int) -> None:
        Ahead.__init__(self)
        self.place = place
        self.bind(iterator)

    def bind(self, iterator: Ahead) -> None:
        """Bind to another iterator, with a weak reference."""
        # Weak: a cached program must not keep the iterator, and its dataset, alive.
        self._iterator = weakref.ref(iterator)
        self.lock = iterator.lock

    @property
    def bound(self) -> Ahead:
        """The iterator that it is bound to."""
        iterator = self._iterator()
        if iterator is None:
            raise TracingError(
                "An iterator that was the argument of an rx.function was kept, and used after that"
                " call had ended and the iterator was gone. Keep the iterator outside instead."
            )
        return iterator

    def __next__(self) -> Any:
        self.bound.admit()
        return next(self.bound) if is_plain() else take_in_function(self)

    def __iter__(self) -> Any:
        return iter(self.bound)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bound, name)

    @property
    def origin(self) -> Any:
        """The source of the bound iterator's elements."""
        return self.bound.origin

    @property
    def element_spec(self) -> Any:
        """The spec of the bound iterator's elements."""
        return self.bound.element_spec

    def take(self) -> Any:
        """Take the next element of the bound iterator."""
        return self.bound.take()

    def reaches(self, count: int) -> bool:
        """Whether the bound iterator has at least `count` more elements."""
        return self.bound.reaches(count)

    def peek(self, ahead: int) -> Any:
        """Return an upcoming element of the bound iterator without taking it."""
        return self.bound.peek(ahead)

    def consume(self, count: int) -> None:
        """Take and discard `count` elements of the bound iterator."""
        self.bound.consume(count)

    def _fetch(self) -> Any:
        return self.bound.take()

    def _end(self) -> str:
        return self.bound._end()  # noqa: SLF001 - delegates to the bound iterator


def with_iterator_arguments(leaves: Sequence[Any]) -> list[Any]:
    """Return the arguments with each iterator replaced by a placeholder.

    A program that was traced with the placeholders serves calls with other iterators.
    """
    placeholders: dict[int, IteratorArgument] = {}
    return [
        placeholders.setdefault(id(x), IteratorArgument(x, i)) if isinstance(x, Ahead) else x
        for i, x in enumerate(leaves)
    ]


_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)
_Field = tuple[Any, ...]  # the class of an object, and the path from it to a leaf


class Fields:
    """The Python numbers in objects among a function's arguments, such as a model's sizes.

    As in TensorFlow, a number returned in a tuple, list or dictionary becomes an array. In an
    object of another class it is a field, which the object's methods may need as a Python number,
    and stays one. The exception is a field whose argument had another value: it is a counter, and
    as a Python number it would make every step a new program.
    """

    def __init__(self, treedef: Any, leaves: Sequence[Any]) -> None:
        self._argument_values: dict[_Field, set[Any]] = {}
        for field_, x in zip(_fields(treedef), leaves, strict=True):
            if field_ is not None and type(x) in (int, float, complex):
                self._argument_values.setdefault(field_, set()).add(static_key(x))

    def keep(self, field_: _Field | None, x: Any) -> bool:
        """Whether the number `x` returned in `field_` stays a Python number."""
        if field_ is None or isinstance(x, np.generic | np.ndarray):
            return False
        given = self._argument_values.get(field_)
        return given is None or isinstance(x, bool) or static_key(x) in given


def _fields(treedef: Any, owner: _Field | None = None) -> list[_Field | None]:
    """Return the field that each leaf belongs to; None for leaves outside of objects."""
    node = treedef.node_data()
    if node is None:
        return [owner] * treedef.num_leaves
    kind, data = node
    if not issubclass(kind, tuple | list | dict):
        owner = record_type(kind, data), ()
    found: list[_Field | None] = []
    for i, child in enumerate(treedef.children()):
        found += _fields(child, owner if owner is None else (*owner, i))
    return found


@dataclass
class Outputs:
    """The structure that a traced function returned, without its arrays."""

    treedef: Any = None
    parts: list[Any] = field(default_factory=list)
    stacked: list[bool] = field(default_factory=list)
    has_dataclasses: bool = False
    orders: list[tuple[Any, ...]] = field(default_factory=list)

    def take(
        self, result: Any, topology: Callable[[], Topology | None], given: Fields
    ) -> list[Any]:
        """Record the structure of `result`, and return its arrays."""
        tree = expand_dataclasses(result)
        self.has_dataclasses, self.orders = has_dataclasses(tree), dict_orders(tree, is_result_leaf)
        paths, self.treedef = jax.tree.flatten_with_path(tree, is_leaf=is_result_leaf)
        arrays: list[Any] = []
        for (path, x), field_ in zip(paths, _fields(self.treedef), strict=True):
            part, array, is_stacked = _part(x, topology, partial(given.keep, field_))
            if isinstance(part, _Static):
                _refuse_traced(part.value, path)
            self.parts.append(part)
            if array is not None:
                arrays.append(array)
                self.stacked.append(is_stacked)
        return arrays

    def rebuild(self, arrays: Sequence[Any], *, local: bool) -> Any:
        """Return the structure with `arrays` as its arrays.

        Args:
            arrays: The results of a call.
            local: Whether plain results are replicated over all devices, and only the first copy
                is wanted.
        """
        rest = iter(arrays)
        leaves = [part(next(rest), local) if callable(part) else part.value for part in self.parts]
        made = jax.tree.unflatten(self.treedef, leaves)
        if self.orders:
            made = in_order(made, self.orders, leaves)
        return rebuild_dataclasses(made) if self.has_dataclasses else made


@dataclass(frozen=True)
class _Static:
    value: Any


def _refuse_traced(x: Any, path: Any) -> None:
    """Refuse an object that would carry tracers out of the trace."""
    where = f"result{jax.tree_util.keystr(path)}"
    if x is not None and (found := ReachableObjects(Edge(where, x), everything=True).traced):
        raise TypeError(
            f"A traced function returned an object of type {type(x).__name__!r} that holds an array"
            f" in `{found[0]}`, which exists only while the function is traced. Return the array"
            " itself, or a structure that JAX knows: a tuple, a list, a dictionary, a dataclass, or"
            " a class given to `jax.tree_util.register_pytree_node`."
        )


def _plain(x: Any, local: Any) -> Any:
    return first(x) if local else x


def _part(
    x: Any, topology: Callable[[], Topology | None], is_kept: Callable[[Any], bool]
) -> tuple[Any, Any, bool]:
    """Return how to rebuild one leaf, its array (or None), and whether the array is stacked."""
    x = value_of(x)  # a variable is returned as a snapshot of its value
    if is_array(x):
        return _plain, x, False
    if isinstance(x, Distributed):
        return _distributed(x, topology)
    if isinstance(x, _NUMBERS) and not is_kept(x):
        return _plain, jnp.asarray(x), False
    return _Static(x), None, False


def _distributed(x: Distributed, topology: Callable[[], Topology | None]) -> tuple[Any, Any, bool]:
    """Like `_part`, for a distributed value."""
    form = x.form
    kind = type(x)
    if isinstance(form, Joined):
        where = form.topology
        return lambda a, _: kind.of(Joined(a, where)), form.array, False
    if isinstance(form, Stacked):
        place: Topology | None = form.topology
    elif any(map(is_traced, form.values)):
        place = topology()
    else:
        return _Static(x), None, False
    if place is None or place.num_replicas != len(x.values):
        raise TracingError(
            f"A traced function returned a per-replica value of {len(x.values)} components without"
            " using a strategy that has as many replicas."
        )
    return lambda a, _: kind.of(Stacked(a, place)), stacked_array(x, place), True  # type: ignore[arg-type]
